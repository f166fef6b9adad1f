"""A: what happens after a move. The model plays the rules of chess; python-chess is the truth.

The law: `transition` is the only place that says what a move does, for every class of move, legal
or not; parsers never raise; a copy of the input earns nothing unless the move was illegal and the
answer says so. Left out on purpose: draws that must be claimed, and fivefold repetition, which a
FEN and ten plies cannot show.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any, ClassVar, Final, Literal

import chess

from rookworld.runtime.errors import DataError
from rookworld.runtime.metric_info import Metric
from rookworld.tasks.notation import is_move_text, read_fen, squares
from rookworld.tasks.position import legal_move, row_position
from rookworld.tasks.reward import A_WEIGHTS, RewardRules, board_similarity, combine
from rookworld.tasks.task import (
    Drawing,
    EnvironmentRow,
    Judge,
    Style,
    Task,
    Verdict,
    strip_end,
)

KINDS: Final = (
    "illegal",
    "mate",
    "draw",
    "promotion",
    "en_passant",
    "castle",
    "capture",
    "quiet",
)
"""Classes of a transition; a row is of the first that fits."""

HISTORY_PLIES: Final = 10
"""Plies that a prompt shows, the move being played included."""

ONGOING, WON, DRAWN, ILLEGAL = 0.001, 1.0, 0.5, -1.0
_REWARDS: Final = {ONGOING: "0.001", WON: "1.0", DRAWN: "0.5", ILLEGAL: "-1.0"}
_TOLERANCE = 1e-4  # rewards may have been stored in single precision

RIGHT_BOARD: Final = 0.35
"""Similarity from which a new FEN counts as right in the graduated levels: one field behind the
board may be wrong."""

_PLAYED = re.compile(r"[!-*,-~]{1,8}")
"""What can stand where a move belongs: algebraic notation is the longest, `+` ends the field."""

_REWARD = re.compile(r"-?[0-9]{1,3}\.[0-9]{1,3}")


@dataclass(frozen=True, slots=True)
class EnvironmentAnswer:
    """A completion as read; with a fault the other fields mean nothing."""

    fen: str = ""
    reward: float = 0.0
    terminated: bool = False
    truncated: bool = False
    fault: str | None = None


def transition(fen: str, move: str, history: Sequence[str] = ()) -> EnvironmentRow:
    """What `move`, any text, does in a position; `history` is the plies *before* it, oldest first.

    An illegal or unreadable move leaves the position as it is, to the letter.
    """
    try:
        board = chess.Board(fen)
    except ValueError as error:
        raise DataError(f"not a position: {fen!r} ({error}); give a FEN") from error
    return _played(board, fen, move, history)


def _played(board: chess.Board, fen: str, move: str, history: Sequence[str]) -> EnvironmentRow:
    """`transition` of the board that `fen` spells, which is changed."""
    plies = (*history, move)[-HISTORY_PLIES:]
    played = legal_move(board, move)
    if played is None:
        return EnvironmentRow(fen, move, plies, fen, ILLEGAL, False, True, "illegal")
    kind = _kind(board, played)
    board.push(played)
    outcome = board.outcome()
    if outcome is None:
        return EnvironmentRow(fen, move, plies, board.fen(), ONGOING, False, False, kind)
    won = outcome.winner is not None
    reward, kind = (WON, "mate") if won else (DRAWN, "draw")
    return EnvironmentRow(fen, move, plies, board.fen(), reward, True, False, kind)


def _kind(board: chess.Board, move: chess.Move) -> str:
    """Class of a legal move, before it is known whether it ends the game."""
    if move.promotion:
        return "promotion"
    if board.is_en_passant(move):
        return "en_passant"
    if board.is_castling(move):
        return "castle"
    return "capture" if board.is_capture(move) else "quiet"


def _differing(a: str, b: str) -> int:
    """Squares on which the boards of two FENs differ."""
    here, there = squares(a.split(" ", 1)[0]), squares(b.split(" ", 1)[0])
    if here is None or there is None:
        return 64
    return sum(x != y for x, y in zip(here, there, strict=True))


class EnvironmentTask(Task[EnvironmentRow, EnvironmentAnswer]):
    """Ask for the new FEN, the reward and the two flags."""

    letter: ClassVar[Literal["A"]] = "A"
    title = "Environment"
    truth_title = "Rules"
    row_type = EnvironmentRow
    columns: ClassVar = {
        "fen": "string",
        "move": "string",
        "history": "list<string>",
        "next_fen": "string",
        "reward": "double",
        "terminated": "bool",
        "truncated": "bool",
        "kind": "string",
    }
    key_column = "next_fen"
    parts = ("format", "board", "flags", "reward", "whole")
    shown_metrics: ClassVar = {
        "format": Metric(label="Readable transitions"),
        "exact": Metric(label="Exact transitions", headline=True),
        "board": Metric(label="Next position right"),
        "similarity": Metric(label="Similarity of the next position"),
        "squares": Metric(label="Squares right"),
        "by_kind/": Metric(label="Exact transitions,"),
        "baseline/": Metric(label="Most common", better="none"),
        "reward": Metric(label="Reward named right"),
        "reward_error": Metric(
            label="Error of the named reward", unit="reward error", better="down"
        ),
        "terminated": Metric(label="Terminated right"),
        "truncated": Metric(label="Truncated right"),
    }
    new_tokens: ClassVar = {"compact": 90, "padded": 96}
    open_ended = False
    by_class = True

    def prompt(self, row: EnvironmentRow, style: Style) -> str:
        """Everything up to the `+` behind the history; both styles write the same."""
        return f"A: {row.fen}+{row.move}+{' '.join(row.history)}+"

    def answer(self, row: EnvironmentRow, style: Style) -> str:
        """New FEN, reward, terminated, truncated; both styles write the same."""
        return f"{row.next_fen}+{_reward_text(row)}+{row.terminated:d}+{row.truncated:d}"

    def truth(self, row: EnvironmentRow, judge: Judge | None = None) -> EnvironmentRow:
        """The row as the rules of chess have it, whatever its labels say."""
        return transition(row.fen, row.move, row.history[:-1])

    def parse(self, text: str) -> EnvironmentAnswer:
        """Read a completion; accepts any text, never raises."""
        fields = [field.strip(" ") for field in strip_end(text).split("+")]
        if len(fields) != 4:
            return EnvironmentAnswer(fault=f"{len(fields)} fields where 4 belong")
        fen = read_fen(fields[0])
        if fen is None:
            return EnvironmentAnswer(fault="the first field is not a FEN")
        if not _REWARD.fullmatch(fields[1]):
            return EnvironmentAnswer(fault="the reward is not a decimal number")
        if fields[2] not in ("0", "1") or fields[3] not in ("0", "1"):
            return EnvironmentAnswer(fault="a flag is neither 0 nor 1, or text follows the answer")
        return EnvironmentAnswer(fen, float(fields[1]), fields[2] == "1", fields[3] == "1")

    def score(
        self,
        row: EnvironmentRow,
        said: EnvironmentAnswer,
        rules: RewardRules,
        judge: Judge | None,
        progress: float,
    ) -> Verdict:
        """The verdict on an answer that can be read; no judge is asked, the rules suffice."""
        flags = ((said.terminated == row.terminated) + (said.truncated == row.truncated)) / 2
        reward = float(abs(said.reward - row.reward) < _TOLERANCE)
        board = board_score(row, said, rules)
        whole = board if flags == 1.0 and reward == 1.0 else 0.0
        parts = dict(zip(self.parts, (1.0, board, flags, reward, whole), strict=True))
        right = 1 + (flags == 1.0) + (reward == 1.0) if board >= RIGHT_BOARD else 0
        total = combine(parts, A_WEIGHTS, rules.reward_shaping, right=right, progress=progress)
        wrong = [name for name in ("board", "flags", "reward") if parts[name] < 1.0]
        return Verdict(total, parts, f"wrong: {', '.join(wrong)}" if wrong else "exact")

    def measure(
        self, row: EnvironmentRow, said: EnvironmentAnswer | None, judge: Judge | None
    ) -> dict[str, float | None]:
        """Format, exactness and each field, 0 or 1, and how near the new FEN comes.

        `squares` is the share of right squares, `similarity` that of the text, by edits.
        """
        right = dict.fromkeys(("board", "reward", "terminated", "truncated"), False)
        if said is not None:
            right = {
                "board": said.fen == row.next_fen,
                "reward": abs(said.reward - row.reward) < _TOLERANCE,
                "terminated": said.terminated == row.terminated,
                "truncated": said.truncated == row.truncated,
            }
        fen = "" if said is None else said.fen
        exact = float(all(right.values()))
        return {
            "format": float(said is not None),
            "exact": exact,
            **{name: float(value) for name, value in right.items()},
            "similarity": text_similarity(fen, row.next_fen),
            "reward_error": None if said is None else abs(said.reward - row.reward),
            "squares": 1 - _differing(fen, row.next_fen) / 64,
            **{f"by_kind/{kind}": exact if row.kind == kind else None for kind in KINDS},
        }

    def row_from_text(self, text: str) -> EnvironmentRow | None:
        """Read a gold document, with or without `A: `; labels as written, the class by rule."""
        head, *fields = strip_end(text.strip()).removeprefix(f"{self.letter}:").split("+")
        fen = read_fen(head)
        if len(fields) != 6 or fen is None:
            return None
        move, history = fields[0].strip(" "), tuple(fields[1].split())
        said = self.parse("+".join(fields[2:]))
        if said.fault is not None or not move or " " in move:
            return None
        try:
            by_rule = transition(fen, move, history[:-1])
        except DataError:
            return None
        return EnvironmentRow(
            fen=fen,
            move=move,
            history=history,
            next_fen=said.fen,
            reward=said.reward,
            terminated=said.terminated,
            truncated=said.truncated,
            kind=by_rule.kind,
        )

    def fen_in_text(self, text: str) -> str | None:
        """The FEN, if as many fields follow as should."""
        head, *fields = strip_end(text.strip()).removeprefix(f"{self.letter}:").split("+")
        return read_fen(head) if len(fields) == 6 else None

    def answer_at(self, text: str) -> int:
        """Behind the `+` that follows the history."""
        prompt, fields = text.split("+", 3)[:3], text.count("+")
        return sum(map(len, prompt)) + 3 if fields >= 3 else 0

    def malformed(self, rules: RewardRules) -> float:
        """Reward of an answer that cannot be read."""
        return rules.a_malformed

    def is_right(self, verdict: Verdict) -> bool:
        """Whether every field is right."""
        return verdict.parts["whole"] == 1.0

    def key(self, row: EnvironmentRow) -> str:
        """The position and the move."""
        return f"{super().key(row)} {row.move}"

    def row_class(self, row: EnvironmentRow) -> str:
        """The kind of transition."""
        return row.kind

    def moves(self, row: EnvironmentRow) -> tuple[str, ...]:
        """The one that is played."""
        return (row.move,)

    def repair(self, row: EnvironmentRow, text: str) -> tuple[EnvironmentRow, tuple[str, ...]]:
        """Some public rows lack their letter; labels are replaced by what the rules say."""
        board = row_position(row.fen)
        if not row.history or row.history[-1] != row.move:
            raise DataError("the history does not end with the move")
        if _PLAYED.fullmatch(row.move) is None:
            raise DataError(f"no text of a move: {row.move[:12]!r}")
        stray = next((ply for ply in row.history[:-1] if not is_move_text(ply)), None)
        if stray is not None:
            raise DataError(f"no move in the history: {stray[:12]!r}")
        true = _played(board, row.fen, row.move, row.history[:-1])
        prefixed = not text or text.lstrip().startswith(f"{self.letter}:")
        repairs = [] if prefixed else ["rows without a prefix were taken as A rows"]
        if true != row:
            repairs.append("A rows had labels against the rules: they now follow them")
        return true, tuple(repairs)

    def public_text(self, row: EnvironmentRow, style: Style, random: Random) -> str | None:
        """Illegal moves are not labelled."""
        return None if row.truncated else super().public_text(row, style, random)

    def draw_truth(self, truth: Mapping[str, Any]) -> Drawing:
        """The board behind the move."""
        move, kind = str(truth.get("move", "")), str(truth.get("kind", "")).replace("_", " ")
        legal = legal_move(chess.Board(truth["fen"]), move)
        san = chess.Board(truth["fen"]).san(legal) if legal else move
        return Drawing(
            board=str(truth.get("next_fen", truth["fen"])),
            caption=f"after {san}" + (f" ({kind})" if kind else ""),
            played=move,
        )

    def draw_answer(self, truth: Mapping[str, Any], text: str) -> Drawing:
        """The board that the answer describes."""
        said = self.parse(text)
        return Drawing(board="" if said.fault else said.fen)


def text_similarity(a: str, b: str) -> float:
    """1 - Levenshtein distance / length of the longer text; 1 for equal texts."""
    if a == b:
        return 1.0
    previous = list(range(len(b) + 1))
    for i, x in enumerate(a, 1):
        current = [i]
        for j, y in enumerate(b, 1):
            current.append(min(previous[j] + 1, current[-1] + 1, previous[j - 1] + (x != y)))
        previous = current
    return 1 - previous[-1] / max(len(a), len(b))


def _reward_text(row: EnvironmentRow) -> str:
    """The reward as data spell it, also after a trip through single precision."""
    nearest = min(_REWARDS, key=lambda value: abs(value - row.reward))
    return _REWARDS[nearest] if abs(nearest - row.reward) < _TOLERANCE else str(row.reward)


def board_score(row: EnvironmentRow, said: EnvironmentAnswer, rules: RewardRules) -> float:
    """Similarity of the new FEN; for an illegal move it counts only if the answer says illegal."""
    if row.truncated and not said.truncated:
        return 0.0
    behind = zip(said.fen.split(" ")[1:], row.next_fen.split(" ")[1:], strict=False)
    return board_similarity(
        wrong=_differing(said.fen, row.next_fen),
        copied=_differing(row.fen, row.next_fen),
        fields_wrong=sum(a != b for a, b in behind),
        shaping=rules.reward_shaping,
    )


ENVIRONMENT: Final = EnvironmentTask()
