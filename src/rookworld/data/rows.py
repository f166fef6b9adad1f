"""Rows as text and as columns, both ways; the tasks spell the text, this module finds the task.

The law: a row that goes to columns and back is the same row; one that goes to padded text and back
is the same but for the depth, which text does not hold (compact text rounds evaluations too).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from rookworld.runtime.errors import DataError
from rookworld.tasks.environment import ENVIRONMENT
from rookworld.tasks.notation import position_key
from rookworld.tasks.policy import POLICY
from rookworld.tasks.task import EnvironmentRow, PolicyRow, Style

Record = dict[str, Any]


@dataclass(frozen=True, slots=True)
class MateRow:
    """A position with a forced mate; `mates` are all first moves that force it."""

    fen: str
    mates: tuple[str, ...]


TextRow = PolicyRow | EnvironmentRow
Row = PolicyRow | EnvironmentRow | MateRow


def task_name(row: Row) -> str:
    """P, A or mate."""
    if isinstance(row, PolicyRow):
        return "P"
    return "A" if isinstance(row, EnvironmentRow) else "mate"


def row_text(row: TextRow, style: Style = "padded") -> str:
    """A row as a document, prompt and answer, without the end token."""
    if isinstance(row, PolicyRow):
        return POLICY.prompt(row, style) + POLICY.answer(row, style)
    return ENVIRONMENT.prompt(row, style) + ENVIRONMENT.answer(row, style)


def text_row(text: str) -> TextRow | None:
    """The row of a document, None if it is malformed; without a prefix it is an A row."""
    if text.lstrip().startswith("P:"):
        return POLICY.row_from_text(text)
    return ENVIRONMENT.row_from_text(text)


def row_record(row: Row) -> Record:
    """A row as columns of a file."""
    return {
        name: list(value) if isinstance(value, tuple) else value
        for name, value in asdict(row).items()
    }


def record_row(record: Mapping[str, Any]) -> Row:
    """The row of a file's columns, or a `DataError` that says what is wrong with them."""
    try:
        if "mates" in record:
            return MateRow(record["fen"], tuple(record["mates"]))
        if "next_fen" in record:
            fields = {name: record[name] for name in EnvironmentRow.__slots__}
            return EnvironmentRow(**{**fields, "history": tuple(record["history"])})
        moves, cp = tuple(record["moves"]), tuple(record["cp"])
    except KeyError as error:
        raise DataError(f"no column {error} among {sorted(record)}") from error
    except TypeError as error:
        raise DataError(f"a column is empty or of the wrong type: {dict(record)}") from error
    if not moves or len(moves) != len(cp):
        raise DataError(f"{len(moves)} moves with {len(cp)} evaluations: {record['fen']}")
    return PolicyRow(record["fen"], moves, cp, record.get("depth") or 0)


def row_key(row: Row) -> str:
    """What makes two rows repetitions of each other: the position, for A with the move."""
    key = position_key(row.fen)
    return f"{key} {row.move}" if isinstance(row, EnvironmentRow) else key
