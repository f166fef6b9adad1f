"""P: analysis of a position. The model names good moves, evaluates them, and chooses one.

The law: an answer is compared by move, never by place, so the order of M does not matter; any
illegal, missing or stray move closes the gate and leaves only what reading the answer is worth.
Public rows name the worst move as B for Black: `row_from_text` goes by the evaluations instead,
and `repair` says so. Left out on purpose: how a move came by its evaluation (a judge's affair).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from random import Random
from typing import Any, ClassVar, Final, Literal

from rookworld.runtime.errors import DataError
from rookworld.runtime.metric_info import Metric
from rookworld.tasks.notation import (
    MATE,
    cp_text,
    grid_text,
    is_mate,
    is_move_text,
    read_fen,
    text_cp,
)
from rookworld.tasks.position import check_moves, row_position
from rookworld.tasks.reward import (
    FORCED_BEST,
    RewardRules,
    beyond_flat,
    combine,
    evaluation_accuracy,
    move_quality,
    win_percent,
)
from rookworld.tasks.task import (
    Analysis,
    Drawing,
    Judge,
    PolicyRow,
    Style,
    Task,
    Verdict,
    legal_moves,
    strip_end,
)

MOST_MOVES: Final = 5
"""Moves that an answer lists, or as many as are legal."""

_FEN_WIDTH, _MOVES_WIDTH, _EVALS_WIDTH = 90, 30, 40
_MAE_LIMIT_CP = 1000  # beyond ±10 pawns, and for mates, a difference in pawns says nothing
_ROW = re.compile(r"P: *([^:]*?) *M:(.*)")


@dataclass(frozen=True, slots=True)
class PolicyAnswer:
    """A completion as read; with a fault the other fields are empty."""

    moves: tuple[str, ...] = ()
    cp: tuple[int, ...] = ()
    best: str = ""
    fault: str | None = None


def _sections(tokens: list[str]) -> tuple[list[str], list[str], list[str]] | None:
    """Tokens between `M:` (which the prompt may already hold), `E:` and `B:`; None if amiss."""
    start = 1 if tokens and tokens[0] == "M:" else 0
    if tokens.count("E:") != 1 or tokens.count("B:") != 1:
        return None
    evals, best = tokens.index("E:"), tokens.index("B:")
    if not start <= evals < best:
        return None
    return tokens[start:evals], tokens[evals + 1 : best], tokens[best + 1 :]


def _fault(moves: list[str], evals: list[str], best: list[str]) -> str | None:
    """What is wrong with the fields of an answer, legality aside."""
    if len(best) != 1:
        return "text follows the answer" if best else "B: is empty"
    stray = next((text for text in (*moves, *best) if not is_move_text(text)), None)
    if stray is not None:
        return f"not a move: {stray[:12]!r}"
    if not 1 <= len(moves) <= MOST_MOVES or len(moves) != len(evals):
        return f"{len(moves)} moves with {len(evals)} evaluations"
    if len(set(moves)) != len(moves):
        return "a move is listed twice"
    return None


class PolicyTask(Task[PolicyRow, PolicyAnswer]):
    """Ask for five moves, their evaluations, and the best of them."""

    letter: ClassVar[Literal["P"]] = "P"
    title = "Analysis"
    truth_title = "Engine"
    row_type = PolicyRow
    columns: ClassVar = {
        "fen": "string",
        "moves": "list<string>",
        "cp": "list<int32>",
        "depth": "int16",
    }
    key_column = "moves"
    parts = ("format", "legal", "best", "candidates", "evaluations", "whole")
    shown_metrics: ClassVar = {
        "format": Metric(label="Readable analyses", headline=True),
        "legal": Metric(label="Legal moves", headline=True),
        "best": Metric(label="Best moves", headline=True),
        "best_white": Metric(label="Best moves, White to move"),
        "best_black": Metric(label="Best moves, Black to move"),
        "best_opening": Metric(label="Best moves, opening"),
        "best_middlegame": Metric(label="Best moves, middlegame"),
        "best_endgame": Metric(label="Best moves, endgame"),
        "best_or_equal": Metric(label="Best moves or as good"),
        "top5": Metric(label="Top five found", headline=True),
        "eval_mae": Metric(label="Evaluation error (pawns)", unit="pawns", better="down"),
        "win_loss": Metric(
            label="Win probability lost a move",
            unit="win probability",
            better="down",
            headline=True,
        ),
    }
    new_tokens: ClassVar = {"compact": 16, "padded": 144}

    def prompt(self, row: PolicyRow, style: Style) -> str:
        """Everything up to and including `M:`."""
        return f"P: {row.fen.ljust(_FEN_WIDTH)}M:" if style == "padded" else f"P: {row.fen} M:"

    def answer(self, row: PolicyRow, style: Style) -> str:
        """Moves best first, their evaluations, and the first move again as B."""
        moves, best = " ".join(row.moves), row.moves[0]
        if style == "compact":
            return f" {moves} E: {' '.join(map(grid_text, row.cp))} B: {best}"
        evals = " ".join(map(cp_text, row.cp))
        return f" {moves.ljust(_MOVES_WIDTH)}E: {evals.ljust(_EVALS_WIDTH)}B: {best}"

    def truth(self, row: PolicyRow, judge: Judge | None = None) -> Analysis:
        """The best moves by the judge, or by the row's own labels."""
        return Analysis(row.moves, row.cp) if judge is None else judge.analyse(row)

    def parse(self, text: str) -> PolicyAnswer:
        """Read a completion; accepts any text, never raises."""
        # Only spaces separate fields: a line break or another blank is text like any other.
        found = _sections([token for token in strip_end(text).split(" ") if token])
        if found is None:
            return PolicyAnswer(fault="the fields M, E:, B: are not all there, once and in order")
        moves, evals, best = found
        fault = _fault(moves, evals, best)
        if fault is not None:
            return PolicyAnswer(fault=fault)
        cp = [value for value in map(text_cp, evals) if value is not None]
        if len(cp) != len(evals):
            return PolicyAnswer(fault="an evaluation is not a number in pawns")
        return PolicyAnswer(tuple(moves), tuple(cp), best[0])

    def score(
        self,
        row: PolicyRow,
        said: PolicyAnswer,
        rules: RewardRules,
        judge: Judge | None,
        progress: float,
    ) -> Verdict:
        """The verdict on an answer that can be read."""
        legal = legal_moves(row.fen)
        truth = self.truth(row, judge)
        most = min(MOST_MOVES, len(legal))
        least = min(most, len(truth.moves))
        share = sum(move in legal for move in said.moves) / max(least, len(said.moves))
        parts = {**dict.fromkeys(self.parts, 0.0), "format": 1.0, "legal": share}
        reason = _gate(said, legal, least, most)
        right = 0
        if reason is None:
            loss = win_loss(row, said.best, truth, judge)
            _content(parts, said, truth, loss, len(legal), rules)
            right = fields_right(parts)
            reason = _reason(parts, loss)
        shaping = rules.reward_shaping
        total = combine(parts, rules.part_weights, shaping, right=right, progress=progress)
        return Verdict(total, parts, reason)

    def measure(
        self, row: PolicyRow, said: PolicyAnswer | None, judge: Judge | None
    ) -> dict[str, float | None]:
        """Chess metrics of one answer.

        `best` asks for the very first move of the truth, `best_or_equal` lets a move that is just
        as good pass. `legal` speaks of B, `top5` is the share of the true best moves that M lists,
        `eval_mae` is in pawns over the moves in common, both sides held within ±10, and `win_loss`
        is the win probability that B gives away: an unreadable or illegal B forfeits all there was;
        a legal one that nobody evaluated loses at least what the last known move does, and is
        charged that.
        """
        truth = self.truth(row, judge)
        known = dict(zip(truth.moves, truth.cp, strict=True))
        chosen = said.best if said is not None else ""
        legal = chosen in legal_moves(row.fen)
        highest = max(truth.cp)
        loss = win_loss(row, chosen, truth, judge) if legal else win_percent(highest) / 100
        if loss is None:
            loss = (win_percent(highest) - win_percent(min(truth.cp))) / 100
        best = float(chosen == truth.moves[0])
        white = row.fen.split(" ")[1] == "w"
        pairs = [] if said is None else list(zip(said.moves, said.cp, strict=True))
        errors = [abs(_held(cp) - _held(known[move])) / 100 for move, cp in pairs if move in known]
        stage = phase(row.fen)
        return {
            "format": float(said is not None),
            "legal": float(legal),
            "best": best,
            "best_white": best if white else None,
            "best_black": None if white else best,
            "top5": len(errors) / len(known),
            "eval_mae": sum(errors) / len(errors) if errors else None,
            "win_loss": loss,
            "best_or_equal": float(legal and known.get(chosen) == highest),
            **{f"best_{name}": best if stage == name else None for name in PHASES},
        }

    def row_from_text(self, text: str) -> PolicyRow | None:
        """Read a gold document, padded or compact, in any order of M; the row is best first.

        B only breaks ties: in public rows it is wrong for Black. Moves that are not legal, or
        fewer than there should be, make the text no gold document.
        """
        match = _ROW.fullmatch(strip_end(text.strip()))
        if match is None:
            return None
        fen, said = read_fen(match[1]), self.parse(match[2])
        if fen is None:
            return None
        legal = legal_moves(fen)
        expected = min(MOST_MOVES, len(legal))
        if said.fault is not None or _gate(said, legal, expected, expected) is not None:
            return None
        pairs = zip(said.moves, said.cp, strict=True)
        ranked = sorted(pairs, key=lambda pair: (-pair[1], pair[0] != said.best))
        return PolicyRow(fen, tuple(move for move, _ in ranked), tuple(cp for _, cp in ranked))

    def fen_in_text(self, text: str) -> str | None:
        """The FEN, if all fields are named behind it."""
        head, named, answer = strip_end(text.strip()).partition("M:")
        if not (named and "E:" in answer and "B:" in answer):
            return None
        return read_fen(head.removeprefix(f"{self.letter}:"))

    def answer_at(self, text: str) -> int:
        """Behind `M:`."""
        return text.find("M:") + 2 if "M:" in text else 0

    def row_from_record(self, record: Mapping[str, Any]) -> PolicyRow:
        """The row of a file's columns; a file may lack the depth."""
        depth = record.get("depth")
        return super().row_from_record({**record, "depth": 0 if depth is None else depth})

    def is_right(self, verdict: Verdict) -> bool:
        """Whether the best move was chosen."""
        return verdict.parts["best"] == 1.0

    def row_class(self, row: PolicyRow) -> str:
        """How many moves are listed, or that a mate is in sight."""
        return "mate_in_sight" if is_mate(row.cp[0]) else f"{len(row.moves)}_moves"

    def moves(self, row: PolicyRow) -> tuple[str, ...]:
        """Those of the analysis."""
        return row.moves

    def repair(self, row: PolicyRow, text: str) -> tuple[PolicyRow, tuple[str, ...]]:
        """Public rows with Black to move name the worst of the five moves as B, not the best.

        Evaluations are right, so the row of a text, which is best first, is right already.
        """
        row, repairs = _sound(row)
        if not text:
            return row, repairs
        said = self.parse(text.partition("M:")[2].strip())
        if dict(zip(row.moves, row.cp, strict=True))[said.best] == row.cp[0]:
            return row, ()
        side = "White" if row.fen.split()[1] == "w" else "Black"
        return row, (
            f"P rows with {side} to move named another move than their best as B: B is now the"
            " move with the highest evaluation",
        )

    def public_text(self, row: PolicyRow, style: Style, random: Random) -> str:
        """M in any order, E in the same, and B the worst of them whenever Black is to move."""
        pairs = list(zip(row.moves, row.cp, strict=True))
        random.shuffle(pairs)
        moves, cp = zip(*pairs, strict=True)
        mixed = replace(row, moves=moves, cp=cp)
        best = row.moves[0] if row.fen.split(" ")[1] == "w" else row.moves[-1]
        head, marker, _ = self.answer(mixed, style).rpartition("B: ")
        return f"{self.prompt(row, style)}{head}{marker}{best}"

    def draw_truth(self, truth: Mapping[str, Any]) -> Drawing:
        """The analysed moves as arrows, with their evaluations; what is neither is left out."""
        lists = (truth.get("moves"), truth.get("cp"))
        moves, cp = (found if isinstance(found, list) else [] for found in lists)
        named = tuple(map(str, moves))
        scored = tuple(
            (move, int(value))
            for move, value in zip(named, cp, strict=False)
            if isinstance(value, int | float) and abs(value) < 1e6
        )
        return replace(super().draw_truth(truth), moves=named, scored=scored)

    def draw_answer(self, truth: Mapping[str, Any], text: str) -> Drawing:
        """The moves of the answer, B before all others."""
        said = self.parse(text)
        others = tuple(move for move in said.moves if move != said.best)
        return Drawing(
            board=str(truth["fen"]),
            moves=(said.best, *others) if said.best else (),
            scored=tuple(zip(said.moves, said.cp, strict=True)),
            best=said.best,
        )


_RIGHT: Final = {"best": 0.75, "candidates": 0.6, "evaluations": 0.5}
"""Part scores from which a field counts as right in the graduated levels."""


def fields_right(parts: Mapping[str, float]) -> int:
    """How many of the three content fields count as right."""
    return sum(parts[name] >= least for name, least in _RIGHT.items())


PHASES: Final = ("opening", "middlegame", "endgame")


def phase(fen: str) -> str:
    """opening, middlegame or endgame.

    Endgame: at most six pieces besides kings and pawns are left, both sides together. Opening:
    more than ten, and not after move 12. Middlegame: everything else.
    """
    placement, *_, move_number = fen.split()
    pieces = sum(letter in "nbrqNBRQ" for letter in placement)
    if pieces <= 6:
        return "endgame"
    return "opening" if pieces > 10 and int(move_number) <= 12 else "middlegame"


def _held(cp: int) -> int:
    return min(max(cp, -_MAE_LIMIT_CP), _MAE_LIMIT_CP)


def _gate(said: PolicyAnswer, legal: frozenset[str], least: int, most: int) -> str | None:
    """Why a readable answer earns nothing for its content; None if it may.

    `least` is below `most` where a truth knows fewer moves than it should: both counts will do.
    """
    illegal = next((move for move in (*said.moves, said.best) if move not in legal), None)
    if illegal is not None:
        return f"illegal move {illegal}"
    if not least <= len(said.moves) <= most:
        return f"{len(said.moves)} moves listed where {most} exist"
    if said.best not in said.moves:
        return f"B {said.best} is not among the moves"
    return None


def win_loss(row: PolicyRow, move: str, truth: Analysis, judge: Judge | None) -> float | None:
    """Win probability that a legal move gives away; None if nobody knows."""
    if move in truth.moves:
        cp: int | None = truth.cp[truth.moves.index(move)]
    else:
        cp = judge.move_cp(row, move) if judge is not None else None
    if cp is None:
        return None
    return max(0.0, win_percent(max(truth.cp)) - win_percent(cp)) / 100


def _sound(row: PolicyRow) -> tuple[PolicyRow, tuple[str, ...]]:
    """A row with its moves best first, and whether that took doing; a `DataError` if it is none."""
    board = row_position(row.fen)
    check_moves(board, row.moves)
    if len(row.moves) != len(row.cp):
        raise DataError(f"{len(row.moves)} moves with {len(row.cp)} evaluations: {row.fen}")
    most = len(row.moves)
    if most != MOST_MOVES:  # counting all legal moves costs as much as everything else here
        most = min(MOST_MOVES, board.legal_moves.count())
    if not most:
        raise DataError(f"no legal move: {row.fen}")
    if len(row.moves) != most:
        raise DataError(f"{len(row.moves)} moves listed where {most} exist: {row.fen}")
    beyond = next((cp for cp in row.cp if abs(cp) > MATE), None)
    if beyond is not None:
        raise DataError(f"an evaluation beyond mate, {beyond}: {row.fen}")
    if all(first >= second for first, second in pairwise(row.cp)):
        return row, ()
    ranked = sorted(zip(row.moves, row.cp, strict=True), key=lambda pair: -pair[1])
    moves, cp = zip(*ranked, strict=True)
    return replace(row, moves=moves, cp=cp), ("P rows had moves not best first: now they have",)


def _content(
    parts: dict[str, float],
    said: PolicyAnswer,
    truth: Analysis,
    loss: float | None,
    legal: int,
    rules: RewardRules,
) -> None:
    """Score the content parts of an answer that passed the gate."""
    best = move_quality(loss, rules) if loss is not None else 0.0
    spoken = dict(zip(said.moves, said.cp, strict=True))
    pairs = [(spoken[m], cp) for m, cp in zip(truth.moves, truth.cp, strict=True) if m in spoken]
    count = len(truth.moves)
    accuracy = sum(evaluation_accuracy(*pair) for pair in pairs) / count
    if len(said.moves) >= legal:
        accuracy = beyond_flat(accuracy, truth.cp)
    parts |= content_parts(best, accuracy, len(pairs), len(said.moves), count, legal)


def content_parts(
    best: float, accuracy: float, hits: float, listed: int, count: int, legal: int
) -> dict[str, float]:
    """The content parts of a list of `listed` moves, `hits` of them among `count` true ones.

    `candidates` is 0 for what as many random legal moves would hit. Where every legal move has to
    be listed the list shows nothing and B little, so all is paid by the evaluations; `accuracy` is
    then what they show beyond one evaluation for all.
    """
    whole = best * accuracy
    if listed >= legal:
        shown = FORCED_BEST * best + (1 - FORCED_BEST) * whole
        return {"best": shown, "candidates": whole, "evaluations": whole, "whole": whole}
    chance = listed * count / legal
    found = max(0.0, (hits - chance) / (count - chance))
    return {"best": best, "candidates": found, "evaluations": accuracy, "whole": whole}


def _reason(parts: dict[str, float], loss: float | None) -> str:
    """The verdict on a legal, complete answer, in words."""
    if all(value == 1.0 for value in parts.values()):
        return "exact"
    choice = "B is not evaluated" if loss is None else f"B loses {loss:.1%} win probability"
    return f"{choice}; candidates {parts['candidates']:.2f}, evaluations {parts['evaluations']:.2f}"


POLICY: Final = PolicyTask()
