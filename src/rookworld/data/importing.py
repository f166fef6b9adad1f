"""`rookworld data import`: rows of any source to files of ours.

The law: every row of the source is in an output, a repetition, or in the side file, and the counts
say so.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from rookworld.data.intake import Intake
from rookworld.data.rows import row_key, row_text, task_name, task_rows
from rookworld.data.sources import read_source, write_rows
from rookworld.data.splits import split_rows
from rookworld.runtime.atomic_files import write_text
from rookworld.runtime.errors import ConfigError, DataError
from rookworld.tasks.task import Row, Style


@dataclass(frozen=True, kw_only=True)
class ImportSettings:
    """Convert rows, repair the known faults of public ones, leave out repetitions."""

    sources: tuple[str, ...]
    """Files (.parquet, .jsonl, .txt), folders of them, hub ids (owner/name, owner/name:part), or
    embedded."""

    out: Path
    """File to write: .parquet, .jsonl or .txt. Rows of several tasks and parts get a file each,
    with -P, -A, -train … before the ending."""

    split: str | None = None
    """Shares of train/validation/test, such as 90/5/5, disjoint by position; else no split."""

    seed: int = 0
    """Of the split."""

    style: Style = "padded"
    """Of rows written as text."""

    def __post_init__(self) -> None:
        """Refuse what cannot work."""
        if self.out.suffix not in (".parquet", ".jsonl", ".txt"):
            raise ConfigError(f"--out: {self.out} does not end in .parquet, .jsonl or .txt")
        _ = self.shares

    @property
    def shares(self) -> dict[str, float] | None:
        """Part → share, None without a split."""
        if self.split is None:
            return None
        try:
            numbers = [float(number) for number in self.split.split("/")]
        except ValueError:
            numbers = []
        if len(numbers) != 3 or min(numbers) < 0 or not 0 < sum(numbers) < float("inf"):
            raise ConfigError(f"--split: {self.split!r} is not like 90/5/5 (train/validation/test)")
        return dict(zip(("train", "validation", "test"), numbers, strict=True))


@dataclass(frozen=True, kw_only=True)
class Imported:
    """What an import did."""

    files: dict[str, int]
    """Path → rows written."""

    repeated: int
    """Rows left out because an earlier one has the same position (A: and move)."""

    malformed: int
    """Rows left out because they could not be read; they are in `side_file`."""

    side_file: str | None
    """Where the malformed rows are, one JSON object a line; None if there are none."""

    notes: tuple[str, ...]
    """What was repaired and left out, in words."""


def import_rows(settings: ImportSettings, progress: Callable[[int], None]) -> Imported:
    """Read all sources, write the rows; `progress` is told the rows read so far."""
    intake, rows, repeated = Intake(), dict[str, Row](), 0
    for source in settings.sources:
        for row in read_source(source, intake):
            key = f"{task_name(row)} {row_key(row)}"
            repeated += key in rows
            rows.setdefault(key, row)
            if intake.rows % 1000 == 0:
                progress(intake.rows)
    progress(intake.rows)
    if not rows:
        raise DataError(f"{', '.join(settings.sources)}: no row could be read")
    files = _write_parts(settings, list(rows.values()))
    side_file = _write_side_file(settings.out, intake)
    notes = list(intake.notes())
    if side_file is not None:
        notes.append(f"malformed rows are in {side_file}")
    if repeated:
        notes.append(f"{repeated:,} repetitions left out")
    return Imported(
        files=files,
        repeated=repeated,
        malformed=len(intake.malformed),
        side_file=side_file,
        notes=tuple(notes),
    )


def _write_parts(settings: ImportSettings, rows: list[Row]) -> dict[str, int]:
    shares = settings.shares
    parts = {"": rows} if shares is None else split_rows(rows, settings.seed, shares)
    tasks = sorted({task_name(row) for row in rows})
    files: dict[str, int] = {}
    for part, of_part in parts.items():
        for task in tasks if settings.out.suffix == ".parquet" else [""]:
            found = [row for row in of_part if task in ("", task_name(row))]
            names = (settings.out.stem, task if len(tasks) > 1 else "", part)
            path = settings.out.with_stem("-".join(name for name in names if name))
            if found:
                _write(path, found, settings.style)
                files[str(path)] = len(found)
    return files


def _write(path: Path, rows: list[Row], style: Style) -> None:
    if path.suffix != ".txt":
        write_rows(path, rows)
        return
    texts = [row_text(row, style) for row in task_rows(rows)]
    if len(texts) < len(rows):
        raise DataError(f"{path}: mates have no text form; write them to .parquet or .jsonl")
    write_text(path, "".join(text + "\n" for text in texts))


def _write_side_file(out: Path, intake: Intake) -> str | None:
    if not intake.malformed:
        return None
    path = out.with_name(f"{out.stem}.malformed.jsonl")
    write_text(path, "".join(json.dumps(asdict(bad)) + "\n" for bad in intake.malformed))
    return str(path)
