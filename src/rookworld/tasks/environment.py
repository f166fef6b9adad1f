"""A: what happens after a move. The model plays the rules of chess; python-chess is the truth.

The law: `transition` is the only place that says what a move does, for every class of move, legal
or not; parsers never raise; a copy of the input earns nothing unless the move was illegal and the
answer says so. Left out on purpose: draws that must be claimed, and fivefold repetition, which a
FEN and ten plies cannot show.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import chess

from rookworld.runtime.errors import DataError
from rookworld.tasks.notation import read_fen, squares
from rookworld.tasks.reward import A_WEIGHTS, RewardRules, board_similarity, combine
from rookworld.tasks.task import EnvironmentRow, Judge, Style, Verdict, strip_end

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

_REWARD = re.compile(r"-?[0-9]{1,3}\.[0-9]{1,3}")
_PARTS = ("format", "board", "flags", "reward", "whole")


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
    plies = (*history, move)[-HISTORY_PLIES:]
    played = _legal(board, move)
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


def _legal(board: chess.Board, text: str) -> chess.Move | None:
    """The legal move spelled exactly so: python-chess alone would take `e1h1` for castling."""
    return next((move for move in board.legal_moves if move.uci() == text), None)


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


class EnvironmentTask:
    """Ask for the new FEN, the reward and the two flags."""

    letter: Final = "A"

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

    def verify(
        self,
        row: EnvironmentRow,
        completion: str,
        rules: RewardRules,
        judge: Judge | None = None,
        progress: float = 1.0,
        *,
        finished: bool = True,
    ) -> Verdict:
        """Judge a completion against the row; no judge is asked, the rules of chess suffice."""
        said = self.parse(completion)
        fault = said.fault if finished else "no end token"
        if fault is not None:
            return Verdict(rules.a_malformed, dict.fromkeys(_PARTS, 0.0), f"malformed: {fault}")
        flags = ((said.terminated == row.terminated) + (said.truncated == row.truncated)) / 2
        reward = float(abs(said.reward - row.reward) < _TOLERANCE)
        board = board_score(row, said, rules)
        whole = board if flags == 1.0 and reward == 1.0 else 0.0
        parts = dict(zip(_PARTS, (1.0, board, flags, reward, whole), strict=True))
        right = 1 + (flags == 1.0) + (reward == 1.0) if board >= RIGHT_BOARD else 0
        total = combine(parts, A_WEIGHTS, rules.reward_shaping, right=right, progress=progress)
        wrong = [name for name in ("board", "flags", "reward") if parts[name] < 1.0]
        return Verdict(total, parts, f"wrong: {', '.join(wrong)}" if wrong else "exact")

    def metrics(
        self,
        row: EnvironmentRow,
        completion: str,
        judge: Judge | None = None,
        *,
        finished: bool = True,
    ) -> dict[str, float | None]:
        """Format, exactness and each field, 0 or 1; similarity is the share of right squares."""
        said = self.parse(completion)
        if said.fault is not None or not finished:
            names = ("format", "exact", "board", "similarity", "reward", "terminated", "truncated")
            return {**dict.fromkeys(names, 0.0), "reward_error": None}
        error = abs(said.reward - row.reward)
        fields = {
            "board": said.fen == row.next_fen,
            "reward": error < _TOLERANCE,
            "terminated": said.terminated == row.terminated,
            "truncated": said.truncated == row.truncated,
        }
        return {
            "format": 1.0,
            "exact": float(all(fields.values())),
            **{name: float(right) for name, right in fields.items()},
            "similarity": 1 - _differing(said.fen, row.next_fen) / 64,
            "reward_error": error,
        }

    def row_from_text(self, text: str) -> EnvironmentRow | None:
        """Read a gold document, with or without `A: `; labels as written, the class by rule."""
        head, *fields = strip_end(text.strip()).removeprefix("A:").split("+")
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
