"""Rows as the documents that a language model is pre-trained on, both ways.

Laws: `read_documents` changes nothing in a text: no parsing, no repair, no relabelling; rows given
as columns are written out. `export_rows` is a function of rows and seed, and holds few rows at a
time. Left out: shuffling (pretrain/documents.py does it) and repetitions (`data import`).
"""

from __future__ import annotations

import lzma
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from random import Random
from typing import Literal

from rookworld.data.files import format_of, iterate_parquet, open_lines, read_object
from rookworld.data.intake import Intake
from rookworld.data.rows import Record, is_mate_row, record_row, repair_row, row_text, task_name
from rookworld.data.sources import read_source, source_files
from rookworld.runtime.atomic_files import atomic_file
from rookworld.runtime.errors import ConfigError, DataError
from rookworld.tasks.registry import task_of
from rookworld.tasks.task import Row, Style

BATCH = 10_000
"""Texts written to a Parquet file at a time, and rows between two lines of progress."""


def read_documents(source: str | Path, style: Style) -> Iterator[str]:
    """The texts of a source, as they are; rows given as columns are written in `style`."""
    for path in source_files(source):
        yield from _documents_of(path, style)


def _documents_of(path: Path, style: Style) -> Iterator[str]:
    if path.suffix == ".parquet":
        for number, record in enumerate(iterate_parquet(path)):
            yield _record_text(record, style, f"{path}, row {number}")
        return
    with open_lines(path) as lines:
        for number, line in enumerate(lines, 1):
            text = line.rstrip("\r\n")
            if not text.strip():
                continue
            if format_of(path) == ".jsonl":
                text = _record_text(_json(text, f"{path}:{number}"), style, f"{path}:{number}")
            yield text


def _json(line: str, place: str) -> Record:
    try:
        return read_object(line)
    except DataError as error:
        raise DataError(f"{place}: {error}") from error


def _record_text(record: Record, style: Style, place: str) -> str:
    if isinstance(record.get("text"), str):
        return str(record["text"])
    try:
        row, _ = repair_row(record_row(record))
    except DataError as error:
        raise DataError(f"{place}: {error}") from error
    if is_mate_row(row):
        raise DataError(f"{place}: a mate has no text form")
    return row_text(row, style)


@dataclass(frozen=True, kw_only=True)
class ExportSettings:
    """Write rows as the documents of a language model, one a line or in a column `text`."""

    sources: tuple[str, ...]
    """Rows: files, folders of them, hub ids (owner/name, owner/name:part), or embedded."""

    out: Path
    """File to write: .txt or .txt.xz, a row a line, or .parquet with one column `text`."""

    style: Literal["public", "compact"] = "public"
    """`public`: padded, as the public rows are and GPT-2's byte pairs want them; `compact`: for the
    chess tokenizer."""

    defects: bool = False
    """With the defects of the public rows: moves in any order, the worst of them as B whenever
    Black is to move, no illegal moves."""

    seed: int = 0
    """Of the order of the moves."""

    def __post_init__(self) -> None:
        """Refuse what cannot work."""
        if format_of(self.out) != ".txt" and self.out.suffix != ".parquet":
            raise ConfigError(f"--out: {self.out} does not end in .txt, .txt.xz or .parquet")

    @property
    def row_style(self) -> Style:
        return "padded" if self.style == "public" else "compact"


@dataclass(frozen=True, kw_only=True)
class Exported:
    """What an export did."""

    written: dict[str, int]
    """Task → rows written."""

    left_out: dict[str, int]
    """Task → rows left out: mates, which have no text form, and what public rows lack."""

    notes: tuple[str, ...]
    """What had to be repaired or left out in reading, in words."""


def export_rows(settings: ExportSettings, progress: Callable[[int], None]) -> Exported:
    """Read all sources, write their texts; `progress` is told the rows read so far."""
    intake, random = Intake(), Random(settings.seed)
    written, left_out = Counter[str](), Counter[str]()

    def texts() -> Iterator[str]:
        for row in (row for source in settings.sources for row in read_source(source, intake)):
            if intake.rows % BATCH == 0:
                progress(intake.rows)
            text = None if is_mate_row(row) else document(row, settings, random)
            if text is not None:
                yield text
            (left_out if text is None else written)[task_name(row)] += 1

    with atomic_file(settings.out) as temporary:
        write_texts(temporary, settings.out, texts())
        if not written:
            raise DataError(f"{', '.join(settings.sources)}: no row to write")
    progress(intake.rows)
    return Exported(written=written, left_out=left_out, notes=tuple(intake.notes()))


def document(row: Row, settings: ExportSettings, random: Random) -> str | None:
    """A row as text; None where public rows have none like it and it is to be like them."""
    if not settings.defects:
        return row_text(row, settings.row_style)
    text: str | None = task_of(row).public_text(row, settings.row_style, random)
    return text


def write_texts(path: Path, named: Path, texts: Iterable[str]) -> None:
    """Write texts to `path`, in the format that the name `named` says."""
    if named.suffix == ".parquet":
        _write_column(path, texts)
        return
    with _writer(path, packed=named.suffix == ".xz") as write:
        for text in texts:
            write(text + "\n")


@contextmanager
def _writer(path: Path, *, packed: bool) -> Iterator[Callable[[str], int]]:
    # a low preset: rows repeat what stands a few hundred bytes before, and time counts
    if packed:
        with lzma.open(path, "wt", encoding="utf-8", preset=2) as file:
            yield file.write
    else:
        with path.open("w", encoding="utf-8") as file:
            yield file.write


def _write_column(path: Path, texts: Iterable[str]) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    schema = pa.schema([("text", pa.string())])
    with pq.ParquetWriter(path, schema, compression="zstd") as writer:
        pending = iter(texts)
        while group := list(islice(pending, BATCH)):
            writer.write_table(pa.table({"text": group}, schema=schema))
