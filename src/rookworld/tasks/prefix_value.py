"""The value of a completion's prefix: its expected reward while it is being written.

A token cannot change what stands before it, so it should not be paid for it: the second move is
judged by what it adds to the first, an evaluation by what it adds to the moves. What is to come is
taken to be of the quality that the run's answers have been of. As a baseline (`fields`) the guess
changes the noise of the gradient and not its mean; paid out in its place (`outlook`) it takes the
noise of what is to come away as well, and the aim is as good as the guess.

Where a move is listed the truth knows even more: the value after every other move (`choices`).

The law: a prefix value depends on nothing behind the place from which it holds, and the value of a
move is the prefix value that naming it would have given. Left out on purpose: single squares of a
board, which are worth something only together; choices of evaluations; words that are no move,
which are taken for illegal ones.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import takewhile
from typing import NamedTuple

from rookworld.tasks.environment import RIGHT_BOARD, EnvironmentAnswer, board_score
from rookworld.tasks.notation import is_move_text, read_fen
from rookworld.tasks.policy import MOST_MOVES, POLICY, content_parts, fields_right, win_loss
from rookworld.tasks.reward import A_WEIGHTS, RewardRules, combine, move_quality
from rookworld.tasks.task import (
    Analysis,
    EnvironmentRow,
    Judge,
    PolicyRow,
    Row,
    Verdict,
    legal_moves,
    strip_end,
)


class Usual(NamedTuple):
    """Of which quality the rest of an answer is taken to be."""

    hits: float = 0.5
    """How often a listed move is a true one."""
    accuracy: float = 0.5
    """Accuracy of the evaluation of a true move."""


NEUTRAL = Usual()


class Tally(NamedTuple):
    """What analyses listed whose content was paid; adds up over answers, positions and ranks."""

    moves: float = 0.0
    """Places for true moves."""
    hits: float = 0.0
    """True moves in them."""
    accuracy: float = 0.0
    """Sum of the accuracies of their evaluations."""

    def plus(self, other: Tally) -> Tally:
        return Tally(*(a + b for a, b in zip(self, other, strict=True)))


NOTHING_LISTED = Tally()


def tally(row: PolicyRow, text: str, verdict: Verdict, truth: Analysis) -> Tally:
    """What one answer lists; nothing where its content was not paid or listing shows nothing."""
    said, count = POLICY.parse(text), len(truth.moves)
    paid = verdict.parts["legal"] == 1.0 and said.best in said.moves
    if not paid or len(said.moves) >= len(legal_moves(row.fen)):
        return NOTHING_LISTED
    hits = sum(move in truth.moves for move in said.moves)
    return Tally(min(len(said.moves), count), hits, verdict.parts["evaluations"] * count)


class RunningUsual:
    """The usual quality of a run's answers: moving means over steps, neutral at the start."""

    def __init__(self, momentum: float = 0.9) -> None:
        self.momentum = momentum
        self.now = NEUTRAL

    def update(self, found: Tally) -> None:
        """Take in what a step's answers (of all ranks) listed."""
        hits, accuracy = self.now
        if found.moves:
            hits += (1 - self.momentum) * (found.hits / found.moves - hits)
        if found.hits:
            accuracy += (1 - self.momentum) * (found.accuracy / found.hits - accuracy)
        self.now = Usual(hits, accuracy)

    def state_dict(self) -> dict[str, float]:
        return self.now._asdict()

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        self.now = Usual(**state)


class PrefixValue(NamedTuple):
    """Expected reward from some token on; a tuple, as thousands cross between processes."""

    stage: int
    """How far the answer has come; answers to one prompt are compared stage by stage."""
    sign: str
    nth: int
    """It holds from the nth token on that has this sign in it."""
    value: float


SIGNS = (" ", ".")
"""A space begins the next move; a point is in evaluations and rewards, in no move and no board."""
STAGES = 1 + MOST_MOVES
"""The whole answer, and at most one prefix value after each move."""


def prefix_values(
    row: Row,
    text: str,
    rules: RewardRules,
    judge: Judge | None = None,
    progress: float = 1.0,
    usual: Usual = NEUTRAL,
) -> tuple[PrefixValue, ...]:
    """The prefix values of a completion, in the order of the places from which they hold."""
    if isinstance(row, EnvironmentRow):
        return (PrefixValue(1, ".", 1, _with_board(row, text, rules, progress)),)
    moves, echoed, tidy = _listed(text)
    if not moves or not isinstance(row, PolicyRow):
        return ()
    list_value = _ListValue(row, rules, POLICY.truth(row, judge), judge, progress, usual)
    after_moves = [
        PrefixValue(n, " ", n + 1 + echoed, list_value.with_moves(moves[:n]))
        for n in range(1, min(len(moves), MOST_MOVES, tidy + 1))
    ]
    return (
        *after_moves,
        PrefixValue(MOST_MOVES, ".", 1, list_value.with_moves(moves, listed=True)),
    )


class MoveValues(NamedTuple):
    """The value of each word wherever an answer listed a move or ended its list."""

    words: tuple[str, ...]
    """Every legal move, and the end of the list."""
    echoed: bool
    """Whether the answer repeats the prompt's "M:" before its first move."""
    places: int
    """How many: those of its first moves up to one that spoils the list, or of its end."""
    values: array[float]
    """[places x words] above the value of an illegal move there."""


END_OF_LIST = "E:"


def move_values(
    row: Row,
    texts: Sequence[str],
    rules: RewardRules,
    judge: Judge | None = None,
    progress: float = 1.0,
    usual: Usual = NEUTRAL,
) -> tuple[MoveValues, ...]:
    """The values of all moves wherever each completion listed one; none of other tasks."""
    if not isinstance(row, PolicyRow):
        return ()
    legal = sorted(legal_moves(row.fen))
    list_value = _ListValue(row, rules, POLICY.truth(row, judge), judge, progress, usual)
    of_each = cache(partial(list_value.of_each, legal))  # answers to one prompt begin alike
    found = []
    for text in texts:
        listed, echoed, tidy = _listed(text)
        values, named = array("d"), tuple[str, ...]()
        for move in (*listed[:tidy], END_OF_LIST)[: min(MOST_MOVES, len(legal)) + 1]:
            values.extend(of_each(named))
            if move not in legal or move in named:
                break
            named = (*named, move)
        words = (*legal, END_OF_LIST)
        found.append(MoveValues(words, echoed, len(values) // len(words), values))
    return tuple(found)


def _listed(text: str) -> tuple[list[str], bool, int]:
    """The words where moves are listed, whether "M:" stands before them, how many follow tidily.

    Behind a doubled space the number of spaces no longer says where a move stands.
    """
    words = strip_end(text).split(" ")
    words = words[words[0] == "" :]
    echoed = words[:1] == ["M:"]
    words = words[echoed:]
    moves = [word for word in takewhile(lambda word: word not in ("E:", "B:"), words) if word]
    return moves, echoed, len(list(takewhile(bool, words)))


@dataclass(frozen=True)
class _ListValue:
    """Expected reward of analyses of one position that begin with given moves."""

    row: PolicyRow
    rules: RewardRules
    truth: Analysis
    judge: Judge | None
    progress: float
    usual: Usual

    def of_each(self, legal: Sequence[str], named: tuple[str, ...]) -> list[float]:
        """Value of each legal move behind these, and of ending the list, above an illegal one's."""
        malformed = self.rules.p_malformed
        full = len(named) == MOST_MOVES
        illegal = malformed if full else self.gated(1 / min(MOST_MOVES, len(legal)))
        table = dict.fromkeys(legal, malformed)
        if not full:
            fresh = [move for move in legal if move not in named]
            hits = [move for move in fresh if move in self.truth.moves]
            misses = [move for move in fresh if move not in self.truth.moves]
            # behind the first move all hits are worth the same, and so are all misses; a first one
            # may be B, and a miss is then worth what a judge says, if there is one
            if named:
                together = [hits, misses]
            elif self.judge is None:
                together = [*([hit] for hit in hits), misses]
            else:
                together = [[move] for move in fresh]
            for alike in filter(None, together):
                table |= dict.fromkeys(alike, self.with_moves((*named, alike[0])))
        ended = self.with_moves(named, listed=True) if named else malformed
        return [table[move] - illegal for move in legal] + [ended - illegal]

    def with_moves(self, moves: Sequence[str], *, listed: bool = False) -> float:
        """Value of an analysis that begins with these moves; `listed`: they are all of them."""
        repeats = len(set(moves)) < len(moves)
        if repeats or len(moves) > MOST_MOVES or not all(map(is_move_text, moves)):
            return self.rules.p_malformed
        legal, true = legal_moves(self.row.fen), self.truth.moves
        most = min(MOST_MOVES, len(legal))
        illegal = sum(move not in legal for move in moves)
        if illegal or (listed and len(moves) < min(most, len(true))):
            return self.gated(illegal / most)
        loss = win_loss(self.row, moves[0], self.truth, self.judge)
        best = move_quality(loss, self.rules) if loss is not None else 0.0
        length = len(moves) if listed else most
        found = sum(move in true for move in moves)
        hits = found + self.usual.hits * min(length - len(moves), len(true) - found)
        accuracy = self.usual.accuracy * hits / len(true)
        content = content_parts(best, accuracy, hits, length, len(true), len(legal))
        return self.combined(legal=1.0, **content)

    def gated(self, illegal: float) -> float:
        """Value of an analysis of whose moves this share is illegal, or too few are there."""
        return self.combined(legal=1 - illegal)

    def combined(self, **known: float) -> float:
        rules = self.rules
        parts = {**dict.fromkeys(rules.part_weights, 0.0), "format": 1.0, **known}
        right = fields_right(parts)
        shaping = rules.reward_shaping
        return combine(parts, rules.part_weights, shaping, right=right, progress=self.progress)


def _with_board(row: EnvironmentRow, text: str, rules: RewardRules, progress: float) -> float:
    """Value of an environment answer that begins with this board, if the rest is right."""
    fen = read_fen(text.split("+")[0].strip(" "))
    if fen is None:
        return rules.a_malformed
    board = board_score(row, EnvironmentAnswer(fen, 0.0, False, row.truncated), rules)
    parts = {**dict.fromkeys(A_WEIGHTS, 1.0), "board": board, "whole": board}
    right = 3 if board >= RIGHT_BOARD else 0
    return combine(parts, A_WEIGHTS, rules.reward_shaping, right=right, progress=progress)
