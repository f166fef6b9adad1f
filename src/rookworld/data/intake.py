"""Rows from outside: read, checked, repaired where the fault is known, counted where it is not.

Which faults public RookWorld rows are known for, and what is done about them, each task says
(`repair`).

Laws: texts and columns meet the same checks, and what passes them cannot raise later. Nothing is
dropped in silence: what cannot be read is kept with its place and the reason.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from rookworld.data.files import read_object
from rookworld.data.rows import record_row, repair_row, row_record, text_row
from rookworld.runtime.errors import DataError
from rookworld.runtime.wording import noun
from rookworld.tasks.registry import TASKS
from rookworld.tasks.task import Row


@dataclass(frozen=True, slots=True)
class Malformed:
    """Something that is no row: where it was, why it is none, and what it was."""

    place: str
    reason: str
    content: str


def with_spaces(text: str) -> str:
    """`M: e2e4,d2d4 E: 0.3,0.2 B: e2e4`, as it is written in prose, the way rows are written.

    Only of rows from outside: an answer in that form is malformed.
    """
    return re.sub(r"[,\s]+", " ", text)


@dataclass
class Intake:
    """Takes texts and records, gives rows, and remembers what it had to do for that."""

    rows: int = 0
    repairs: Counter[str] = field(default_factory=Counter)
    """Rows by what was wrong with them and was put right, in words."""
    malformed: list[Malformed] = field(default_factory=list)

    def text(self, text: str, place: str) -> Row | None:
        """The row of a document; None, and one malformed more, if it is none."""
        row = text_row(text)
        if row is None and (row := text_row(spaced := with_spaces(text))) is not None:
            text = spaced
            self.repairs["rows with commas or line breaks between their parts, read as spaces"] += 1
        if row is None:
            self._reject(place, f"no {' nor '.join(TASKS)} row", text)
            return None
        return self._take(row, place, text)

    def record(self, record: Mapping[str, Any], place: str) -> Row | None:
        """The row of a record, which holds columns of ours or one column `text`."""
        if isinstance(record.get("text"), str):
            return self.text(record["text"], place)
        try:
            row = record_row(record)
        except DataError as error:
            self._reject(place, str(error), json.dumps(record, default=str))
            return None
        return self._take(row, place)

    def own(self, record: Mapping[str, Any], place: str) -> Row:
        """The row of a record that was checked where it was made, which takes twenty times less."""
        self.rows += 1
        return record_row(record)

    def line(self, line: str, place: str) -> Row | None:
        """The row of a line of JSON."""
        try:
            record = read_object(line)
        except DataError as error:
            self._reject(place, str(error), line)
            return None
        return self.record(record, place)

    def notes(self) -> Iterator[str]:
        """What was repaired and what was malformed, one line each."""
        for what, count in self.repairs.items():
            yield f"{count:,} {what}"
        if self.malformed:
            first, count = self.malformed[0], len(self.malformed)
            yield (
                f"{count:,} malformed {noun(count, 'row')} left out, the first at {first.place}:"
                f" {first.reason[:120]}"
            )

    def _take(self, row: Row, place: str, text: str = "") -> Row | None:
        try:
            repaired, repairs = repair_row(row, text)
        except DataError as error:
            self._reject(place, str(error), text or json.dumps(row_record(row)))
            return None
        self.repairs.update(repairs)
        self.rows += 1
        return repaired

    def _reject(self, place: str, reason: str, content: str) -> None:
        self.malformed.append(Malformed(place, reason, content))
