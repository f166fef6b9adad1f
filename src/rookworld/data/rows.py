"""Rows as text and as columns, both ways; the tasks spell the text, this module finds the task.

The law: a row that goes to columns and back is the same row; one that goes to padded text and back
is the same but for the depth, which text does not hold (compact text rounds evaluations too).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeGuard

from rookworld.runtime.errors import DataError
from rookworld.tasks.notation import position_key
from rookworld.tasks.policy import POLICY
from rookworld.tasks.position import check_moves, row_position
from rookworld.tasks.registry import TASKS, task_of, task_of_record, task_of_text
from rookworld.tasks.task import Row, Style, typed

Record = dict[str, Any]


@dataclass(frozen=True, slots=True)
class MateRow:
    """A position with a forced mate; `mates` are all first moves that force it."""

    fen: str
    mates: tuple[str, ...]


MATE = "mate"
"""What mates are called where rows are called by their task's letter."""
SHOWN = 300
"""Characters of a record in a message."""
MATE_COLUMNS = {"fen": "string", "mates": "list<string>"}


def is_mate_row(row: Row) -> TypeGuard[MateRow]:
    """Whether a row is of no task: nobody is asked to write out all mates."""
    return isinstance(row, MateRow)


def task_rows(rows: Iterable[Row]) -> list[Row]:
    """The rows that belong to a task."""
    return [row for row in rows if not is_mate_row(row)]


def task_name(row: Row) -> str:
    """The letter of the row's task, or mate."""
    return MATE if is_mate_row(row) else task_of(row).letter


def columns_of(name: str) -> Mapping[str, str]:
    """Column name → type of a Parquet file, by what `task_name` says."""
    return MATE_COLUMNS if name == MATE else TASKS[name].columns


def row_text(row: Row, style: Style = "padded") -> str:
    """A row as a document, prompt and answer, without the end token."""
    task = task_of(row)
    return task.prompt(row, style) + task.answer(row, style)


def text_row(text: str) -> Row | None:
    """The row of a document, None if it is malformed; without a prefix it is an A row."""
    row: Row | None = task_of_text(text).row_from_text(text)
    return row


def row_record(row: Row) -> Record:
    """A row as columns of a file."""
    values = {name: getattr(row, name) for name in columns_of(task_name(row))}
    return {
        name: list(value) if isinstance(value, tuple) else value for name, value in values.items()
    }


def record_row(record: Mapping[str, Any]) -> Row:
    """The row of a file's columns, or a `DataError` that says what is wrong with them."""
    try:
        if "mates" in record:
            return MateRow(
                **{name: typed(record[name], MATE_COLUMNS[name]) for name in MATE_COLUMNS}
            )
        row: Row = (task_of_record(record) or POLICY).row_from_record(record)
    except KeyError as error:
        raise DataError(f"no column {error} among {sorted(record)}") from error
    except TypeError as error:
        shown = f"{dict(record)}"[:SHOWN]
        raise DataError(f"a column is empty or of the wrong type: {shown}") from error
    return row


def repair_row(row: Row, text: str = "") -> tuple[Row, tuple[str, ...]]:
    """A row from outside, checked and repaired, and what was wrong with it; or a `DataError`.

    `text` is what it was read from, if that was no columns.
    """
    if not is_mate_row(row):
        repaired: tuple[Row, tuple[str, ...]] = task_of(row).repair(row, text)
        return repaired
    check_moves(row_position(row.fen), row.mates)
    if not row.mates:
        raise DataError(f"no mate in it: {row.fen}")
    return row, ()


def row_key(row: Row) -> str:
    """What makes two rows repetitions of each other: the position, for A with the move."""
    return position_key(row.fen) if is_mate_row(row) else str(task_of(row).key(row))
