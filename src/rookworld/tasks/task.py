"""What a task is: rows in, prompts out, answers read and judged.

The law: whatever text a model writes, `parse` returns a record and `verify` a `Verdict`; neither
raises. A bad answer is data. A row is truth and is trusted; it was checked where it was made.
A task is one subclass of `Task` in one file, named in `registry`.
Left out on purpose: the tasks themselves (`policy`, `environment`) and the judges, which import
this module, and tokens: a task sees text only.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from random import Random
from typing import Any, ClassVar, Final, Generic, Literal, NamedTuple, Protocol, TypeVar

import chess

from rookworld.runtime.metric_info import Metric
from rookworld.tasks.notation import position_key
from rookworld.tasks.position import row_position
from rookworld.tasks.reward import RewardRules

Style = Literal["padded", "compact"]
"""padded: GPT-2 BPE columns with raw evaluations; compact: one space, evaluations on the grid."""

Letter = Literal["P", "A"]
"""Tasks whose rows the package can make."""

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
    warm: float | None = None
    """The total once rewards have warmed up; None: that is `total`."""

    @property
    def at_full_weight(self) -> float:
        return self.total if self.warm is None else self.warm


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


class Row(Protocol):
    """A position, and what is true of it; its type says which task it is of."""

    @property
    def fen(self) -> str: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawing:
    """What a report draws of a row, or of an answer to it."""

    board: str = ""
    """FEN, or piece placement alone; empty: no board can be read."""
    caption: str = ""
    moves: tuple[str, ...] = ()
    """Drawn as arrows, the first the strongest."""
    scored: tuple[tuple[str, int], ...] = ()
    """Listed beside the board: moves with their evaluations in centipawns."""
    best: str = ""
    """The one of them that is chosen."""
    played: str = ""
    """The move that led to the board."""


RowT = TypeVar("RowT", bound=Row)
AnswerT = TypeVar("AnswerT", bound=Answer)


class Task(ABC, Generic[RowT, AnswerT]):
    """One kind of question; `prompt(row) + answer(row)` is a training document."""

    letter: ClassVar[str]
    """First character of every prompt, and the task's name in files, flags and metrics."""
    title: ClassVar[str]
    """What a reader calls it."""
    truth_title: ClassVar[str] = "Truth"
    """Who knows the truth, over its board in a report."""
    row_type: type[RowT]
    columns: ClassVar[Mapping[str, str]]
    """Column -> type in a Parquet file; the fields of a row."""
    key_column: ClassVar[str]
    """The column by which its records are known; no earlier task of the registry has it."""
    parts: ClassVar[tuple[str, ...]]
    """Parts of every verdict."""
    shown_metrics: ClassVar[Mapping[str, Metric]]
    """Metrics that have a label, by name; others are shown under their name, as shares."""
    new_tokens: ClassVar[Mapping[Style, int]]
    """Longest answer in tokens, by the style of the tokenizer."""
    open_ended: ClassVar[bool] = True
    """Whether several answers are right, so that a policy without entropy has collapsed."""
    by_class: ClassVar[bool] = False
    """Whether rare classes of its prompts are drawn more often where prompts are guided."""

    @abstractmethod
    def prompt(self, row: RowT, style: Style) -> str:
        """The text a model is given."""

    @abstractmethod
    def answer(self, row: RowT, style: Style) -> str:
        """The text that follows the prompt in the gold document, without the end token."""

    @abstractmethod
    def parse(self, text: str) -> AnswerT:
        """Read a completion; accepts any text, never raises."""

    @abstractmethod
    def row_from_text(self, text: str) -> RowT | None:
        """Read a gold document, padded or compact; None if it is not one."""

    @abstractmethod
    def score(
        self, row: RowT, said: AnswerT, rules: RewardRules, judge: Judge | None, progress: float
    ) -> Verdict:
        """The verdict on an answer that can be read."""

    @abstractmethod
    def measure(
        self, row: RowT, said: AnswerT | None, judge: Judge | None
    ) -> dict[str, float | None]:
        """Metrics of an answer, `said` None if it cannot be read; None where one does not apply."""

    def verify(
        self,
        row: RowT,
        completion: str,
        rules: RewardRules,
        judge: Judge | None = None,
        progress: float = 1.0,
        *,
        finished: bool = True,
    ) -> Verdict:
        """Judge a completion; `judge` None means the row's own labels."""
        said = self.parse(completion)
        fault = said.fault if finished else "no end token"
        if fault is None:
            verdict = self.score(row, said, rules, judge, progress)
            if progress >= 1:
                return verdict
            return verdict._replace(warm=self.score(row, said, rules, judge, 1.0).total)
        return Verdict(self.malformed(rules), dict.fromkeys(self.parts, 0.0), f"malformed: {fault}")

    def metrics(
        self, row: RowT, completion: str, judge: Judge | None = None, *, finished: bool = True
    ) -> dict[str, float | None]:
        """Chess metrics of one completion."""
        said = self.parse(completion)
        return self.measure(row, said if finished and said.fault is None else None, judge)

    def malformed(self, rules: RewardRules) -> float:
        """Reward of an answer that cannot be read."""
        return rules.p_malformed

    def is_right(self, verdict: Verdict) -> bool:
        """Whether an answer needs no guide."""
        return verdict.total >= 1.0

    def select(self, rows: Iterable[Row]) -> list[RowT]:
        """The rows of this task."""
        return [row for row in rows if isinstance(row, self.row_type)]

    def row_from_record(self, record: Mapping[str, Any]) -> RowT:
        """The row of a file's columns; a KeyError or TypeError where they are not a row's."""
        return self.row_type(
            **{name: typed(record[name], kind) for name, kind in self.columns.items()}
        )

    # What follows has a default that suits most tasks.

    def key(self, row: RowT) -> str:
        """What makes two rows repetitions of each other."""
        return position_key(row.fen)

    def fen_in_text(self, text: str) -> str | None:
        """The position of a document, None if it does not look like one of this task.

        Faster than reading all of it where millions are gone through; it may be malformed yet.
        """
        row = self.row_from_text(text)
        return None if row is None else row.fen

    def answer_at(self, text: str) -> int:
        """Where in a document the answer begins; whatever the text, 0 where nothing says so."""
        return 0

    def row_class(self, row: RowT) -> str:
        """The class under which a row is counted."""
        return "positions"

    def moves(self, row: RowT) -> tuple[str, ...]:
        """The moves of a row, the best first."""
        return ()

    def repair(self, row: RowT, text: str) -> tuple[RowT, tuple[str, ...]]:
        """A row from outside without its known faults, and what these were, in words.

        Raises a DataError for a row that cannot be repaired: what is returned raises nowhere.
        `text` is what it was read from, empty if that was columns.
        """
        row_position(row.fen)
        return row, ()

    def public_text(self, row: RowT, style: Style, random: Random) -> str | None:
        """A document with the known faults of public rows; None where they have none like it."""
        return self.prompt(row, style) + self.answer(row, style)

    def draw_truth(self, truth: Mapping[str, Any]) -> Drawing:
        """What a report draws of a row, by its record, which may lack columns."""
        side = "White" if str(truth["fen"]).split(" ")[1:2] == ["w"] else "Black"
        return Drawing(board=str(truth["fen"]), caption=f"{side} to move")

    def draw_answer(self, truth: Mapping[str, Any], text: str) -> Drawing:
        """What a report draws of an answer."""
        return Drawing(board=str(truth["fen"]))


AnyTask = Task[Any, Any]

_INT = re.compile(r"int([0-9]+)")


def typed(value: Any, kind: str) -> Any:
    """A value of a column as its type has it (lists as tuples); a TypeError if it is of another."""
    if kind.startswith("list<"):
        if not isinstance(value, list | tuple):
            raise TypeError(kind)
        return tuple(typed(one, kind[5:-1]) for one in value)
    if kind == "string" and isinstance(value, str):
        return value
    if kind == "bool" and value in (0, 1) and isinstance(value, bool | int):
        return bool(value)
    if isinstance(value, int | float) and not isinstance(value, bool):
        if kind == "double" and not abs(value) >= 1e300:  # NaN passes: whose it is says what of it
            return float(value)
        bits = _INT.fullmatch(kind)
        if bits and value == value // 1 and abs(value) < 2 ** (int(bits[1]) - 1):
            return int(value)
    raise TypeError(kind)


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
