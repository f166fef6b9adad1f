"""What a task is: rows in, prompts out, answers read and judged.

The law: whatever text a model writes, `parse` returns a record and `verify` a `Verdict`; neither
raises. A bad answer is data. A row is truth and is trusted; it was checked where it was made.
Left out on purpose: the tasks themselves (`policy`, `environment`) and the judges, which import
this module, and tokens: a task sees text only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Final, Literal, NamedTuple, Protocol, TypeVar

import chess

if TYPE_CHECKING:
    from rookworld.tasks.reward import RewardRules

Style = Literal["padded", "compact"]
"""padded: GPT-2 BPE columns with raw evaluations; compact: one space, evaluations on the grid."""

END: Final = "<|endoftext|>"
"""Text of the end token; it precedes every training document and ends every completion."""


@dataclass(frozen=True, slots=True)
class PolicyRow:
    """A position and its best moves (at most five), best first; `cp` is the side to move's."""

    fen: str
    moves: tuple[str, ...]
    cp: tuple[int, ...]
    depth: int = 0


@dataclass(frozen=True, slots=True)
class EnvironmentRow:
    """A move played in a position and what became of it; `history` ends with that move."""

    fen: str
    move: str
    history: tuple[str, ...]
    next_fen: str
    reward: float
    terminated: bool
    truncated: bool
    kind: str


class Verdict(NamedTuple):
    """What an answer is worth, the part scores (each 0 … 1) that made it so, and why, in words.

    All verdicts of a task have the same parts. A tuple, as thousands cross between processes.
    """

    total: float
    parts: dict[str, float]
    reason: str


@dataclass(frozen=True, slots=True)
class Analysis:
    """A judge's view of a position: its best moves (at most five), best first, and their cp."""

    moves: tuple[str, ...]
    cp: tuple[int, ...]


class Judge(Protocol):
    """Who says how good a move is."""

    def analyse(self, row: PolicyRow) -> Analysis:
        """The best moves of the row's position, best first."""
        ...

    def move_cp(self, row: PolicyRow, move: str) -> int | None:
        """Evaluation of a legal move outside the analysed five; None if nobody knows."""
        ...

    def prefetch(self, rows: Sequence[PolicyRow], *, every_move: bool = False) -> None:
        """Warm up for these rows (`every_move`: for each legal move), in parallel if that helps."""
        ...


class Answer(Protocol):
    """What a parser returns: fields of the answer, or a fault that says why there are none."""

    @property
    def fault(self) -> str | None:
        """Why the text is malformed; None if it is not."""
        ...


Row = TypeVar("Row")


class Task(Protocol[Row]):
    """One kind of question; `prompt(row) + answer(row)` is a training document."""

    @property
    def letter(self) -> str:
        """First character of every prompt."""
        ...

    def prompt(self, row: Row, style: Style) -> str:
        """The text a model is given."""
        ...

    def answer(self, row: Row, style: Style) -> str:
        """The text that follows the prompt in the gold document, without the end token."""
        ...

    def parse(self, text: str) -> Answer:
        """Read a completion; accepts any text, never raises."""
        ...

    def truth(self, row: Row, judge: Judge | None = None) -> object:
        """What a perfect answer says."""
        ...

    def verify(
        self,
        row: Row,
        completion: str,
        rules: RewardRules,
        judge: Judge | None = None,
        progress: float = 1.0,
        *,
        finished: bool = True,
    ) -> Verdict:
        """Judge a completion; `judge` None means the row's own labels."""
        ...

    def metrics(
        self, row: Row, completion: str, judge: Judge | None = None, *, finished: bool = True
    ) -> dict[str, float | None]:
        """Chess metrics of one completion; None where a metric does not apply."""
        ...

    def row_from_text(self, text: str) -> Row | None:
        """Read a gold document, padded or compact; None if it is not one."""
        ...


def strip_end(text: str) -> str:
    """The text without end tokens around it; one in the middle stays, and is a fault."""
    text = text.strip(" ")
    while text.endswith(END):
        text = text[: -len(END)].rstrip(" ")
    while text.startswith(END):
        text = text[len(END) :].lstrip(" ")
    return text


@lru_cache(maxsize=65_536)
def legal_moves(fen: str) -> frozenset[str]:
    """Legal moves of a position as UCI text.

    Text, because python-chess also takes `e1h1` for castling and `0000` for a move: comparing
    spellings refuses both.
    """
    return frozenset(move.uci() for move in chess.Board(fen).legal_moves)


def legal_in_each(fens: Sequence[str]) -> list[frozenset[str]]:
    """Legal moves of each position."""
    return [legal_moves(fen) for fen in fens]
