"""Rows from outside: read, checked, repaired where the fault is known, counted where it is not.

Public RookWorld rows have two known faults. Some lack the `A: ` prefix; and whenever Black is to
move, B names the worst of the five moves, not the best. Evaluations are right, so the order of
moves, and with it B, is taken from them. Labels of A rows are replaced by what the rules say.

The law: nothing is dropped in silence. What cannot be read is kept with its place and the reason.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from rookworld.data.rows import Row, record_row, text_row
from rookworld.runtime.errors import DataError
from rookworld.tasks.environment import transition
from rookworld.tasks.policy import POLICY
from rookworld.tasks.task import EnvironmentRow, PolicyRow


@dataclass(frozen=True, slots=True)
class Malformed:
    """Something that is no row: where it was, why it is none, and what it was."""

    place: str
    reason: str
    content: str


@dataclass
class Intake:
    """Takes texts and records, gives rows, and remembers what it had to do for that."""

    rows: int = 0
    unprefixed: int = 0
    """A rows that lacked their prefix."""
    repaired_white: int = 0
    """P rows with White to move whose B was not the move with the highest evaluation."""
    repaired_black: int = 0
    """The same with Black to move."""
    relabelled: int = 0
    """A rows whose labels were not what the rules say."""
    malformed: list[Malformed] = field(default_factory=list)

    def text(self, text: str, place: str) -> Row | None:
        """The row of a document; None, and one malformed more, if it is none."""
        row = text_row(text)
        if row is None:
            self._reject(place, "neither a P nor an A row", text)
            return None
        if isinstance(row, PolicyRow):
            self._count_repair(row, text)
            return self._accept(row)
        self.unprefixed += not text.lstrip().startswith("A:")
        if not row.history or row.history[-1] != row.move:
            self._reject(place, "the history does not end with the move", text)
            return None
        return self._accept(self._by_rule(row))

    def record(self, record: Mapping[str, Any], place: str) -> Row | None:
        """The row of a record, which holds columns of ours or one column `text`."""
        if isinstance(record.get("text"), str):
            return self.text(record["text"], place)
        try:
            return self._accept(record_row(record))
        except DataError as error:
            self._reject(place, str(error), json.dumps(record, default=str))
            return None

    def line(self, line: str, place: str) -> Row | None:
        """The row of a line of JSON."""
        try:
            record = json.loads(line)
        except ValueError as error:
            self._reject(place, f"not JSON: {error}", line)
            return None
        if not isinstance(record, dict):
            self._reject(place, "not a JSON object", line)
            return None
        return self.record(record, place)

    def notes(self) -> Iterator[str]:
        """What was repaired and what was malformed, one line each."""
        if repaired := self.repaired_white + self.repaired_black:
            yield (
                f"{repaired:,} P rows named another move than their best as B (White to move:"
                f" {self.repaired_white:,}, Black: {self.repaired_black:,}): B is now the move with"
                " the highest evaluation"
            )
        if self.unprefixed:
            yield f"{self.unprefixed:,} rows without a prefix were taken as A rows"
        if self.relabelled:
            yield f"{self.relabelled:,} A rows had labels against the rules: they now follow them"
        if self.malformed:
            first = self.malformed[0]
            yield (
                f"{len(self.malformed):,} malformed rows left out, the first at {first.place}:"
                f" {first.reason[:120]}"
            )

    def _accept(self, row: Row) -> Row:
        self.rows += 1
        return row

    def _reject(self, place: str, reason: str, content: str) -> None:
        self.malformed.append(Malformed(place, reason, content))

    def _count_repair(self, row: PolicyRow, text: str) -> None:
        said = POLICY.parse(text.partition("M:")[2].strip())
        if dict(zip(row.moves, row.cp, strict=True))[said.best] < row.cp[0]:
            if row.fen.split()[1] == "w":
                self.repaired_white += 1
            else:
                self.repaired_black += 1

    def _by_rule(self, row: EnvironmentRow) -> EnvironmentRow:
        true = transition(row.fen, row.move, row.history[:-1])
        self.relabelled += true != row
        return true
