"""Where rows come from: embedded in the package, files, or a hub id.

The law: `embedded` alone means its train part, so that nobody trains on test rows by accident.
Files are Parquet or JSONL (columns of ours, or one column `text`) or text, one row a line; files of
lines may be packed by xz. A hub id is a dataset repository whose Parquet files are read;
`owner/name:part` reads the files with `part` in their name.

Rows to train on are lists in memory up to `IN_MEMORY` rows, and beyond that lie in a cache on disk
(`row_cache`). Everything else that reads rows holds them in memory.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache
from importlib.resources import as_file, files
from importlib.util import find_spec
from itertools import islice
from pathlib import Path

from rookworld.data.files import (
    format_of,
    iterate_parquet,
    open_lines,
    read_fens,
    write_records,
)
from rookworld.data.intake import Intake
from rookworld.data.row_cache import Progress, cached_rows, estimated_rows
from rookworld.data.rows import columns_of, row_record, task_name, task_rows
from rookworld.runtime.errors import DataError
from rookworld.tasks.task import Row

log = logging.getLogger(__name__)

EMBEDDED = {
    "train": ("P-train", "A-train"),
    "rare": ("A-rare",),
    "validation": ("P-validation", "A-validation"),
    "test": ("P-test", "A-test"),
    "mate": ("mate",),
}
"""Part → files in the package."""

_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+(:[\w.-]+)?")
SUFFIXES = (".parquet", ".jsonl", ".txt")
"""Files of rows; the last two also with `.xz` behind them."""


IN_MEMORY = 100_000
"""Rows, about, from which on they are not held in memory: ten seconds to check, 0.1 GB."""

TOLD_EVERY = 1000
"""Rows between two words of progress."""


def training_rows(
    sources: Sequence[str], progress: Progress = lambda done, total: None
) -> Sequence[Row]:
    """Prompt rows of every source; mates without an analysis have no reward and are left out.

    `progress` is told of rows read; many are converted first, and parsed when they are drawn.
    """
    paths = [path for source in sources for path in source_files(source)]
    total = sum(map(estimated_rows, paths)) if find_spec("pyarrow") is not None else 0
    if total > IN_MEMORY:
        return cached_rows(paths, progress)
    rows: list[Row] = []

    def told(count: int) -> None:
        progress(len(rows) + count, max(total, len(rows) + count))

    for source in sources:
        rows += load_rows(source, told=told)
    return task_rows(rows)


def load_rows(
    source: str | Path, limit: int | None = None, told: Callable[[int], None] = lambda count: None
) -> list[Row]:
    """The rows of a source, at most `limit`; what had to be repaired or left out is logged."""
    intake = Intake()
    rows: list[Row] = []
    for row in islice(read_source(source, intake), limit):
        rows.append(row)
        if len(rows) % TOLD_EVERY == 0:
            told(len(rows))
    for note in intake.notes():
        log.warning("%s: %s", source, note)
    if not rows:
        raise DataError(f"{source}: no rows in it")
    return rows


def read_source(source: str | Path, intake: Intake) -> Iterator[Row]:
    """The rows of a source, one by one; `intake` keeps the account."""
    for path in source_files(source):
        yield from read_file(path, intake)


@lru_cache(maxsize=1)
def load_positions(sources: tuple[str, ...]) -> tuple[str, ...]:
    """The positions of rows of any task, each once, in the order of the sources."""
    found = (fen for source in sources for path in source_files(source) for fen in read_fens(path))
    positions = tuple(dict.fromkeys(found))
    if sources and not positions:
        raise DataError(f"{' '.join(sources)}: no positions in it")
    return positions


def source_files(source: str | Path) -> list[Path]:
    """The files of a source, fetched from the hub if need be."""
    name, _, part = str(source).partition(":")
    if name == "embedded":
        return embedded_files(part or "train")
    path = Path(source)
    if path.is_dir():
        found = sorted(file for file in path.iterdir() if format_of(file) in SUFFIXES)
        if not found:
            raise DataError(f"{source}: no {', '.join(SUFFIXES)} file in this folder")
        return found
    if path.is_file():
        return [path]
    if _HUB_ID.fullmatch(str(source)) and format_of(path) not in SUFFIXES:
        return hub_files(name, part)
    raise DataError(f"{source}: no such file, nor 'embedded', nor a hub id such as owner/name")


def embedded_files(part: str) -> list[Path]:
    """The files of one part of the rows in the package."""
    if part not in EMBEDDED:
        raise DataError(f"embedded:{part}: no such part; there are {', '.join(EMBEDDED)}")
    return [package_folder() / f"{name}.parquet" for name in EMBEDDED[part]]


@lru_cache(maxsize=1)
def package_folder() -> Path:
    """Where the package's rows lie."""
    with as_file(files("rookworld") / "assets" / "data") as path:
        return path


def hub_files(repository: str, part: str = "") -> list[Path]:
    """The Parquet files of a dataset on the hub, from the cache if there is no network."""
    from huggingface_hub import snapshot_download

    # The second is the base error of the HTTP library, which is another for each hub client.
    from huggingface_hub.errors import HFValidationError, HTTPError  # type: ignore[attr-defined]

    try:
        folder = snapshot_download(repository, repo_type="dataset", allow_patterns="*.parquet")
    except (OSError, HTTPError, HFValidationError) as error:
        raise DataError(
            f"{repository}: not a file here, and the hub did not give it"
            f" ({type(error).__name__}): check the name and the network, or give a local file"
        ) from error
    found = sorted(p for p in Path(folder).rglob("*.parquet") if part in p.name)
    if not found:
        raise DataError(f"{repository}: no Parquet file{f' with {part!r}' if part else ''} in it")
    return found


def read_file(path: Path, intake: Intake) -> Iterator[Row]:
    """The rows of one file."""
    if path.suffix == ".parquet":
        # the package's own rows were checked when it was made (tests/test_sources.py)
        take = intake.own if path.parent == package_folder() else intake.record
        for number, record in enumerate(iterate_parquet(path)):
            if (row := take(record, f"{path}, row {number}")) is not None:
                yield row
        return
    read = intake.line if format_of(path) == ".jsonl" else intake.text
    with open_lines(path) as lines:
        for number, line in enumerate(lines, 1):
            text = line.rstrip("\n")
            if text.strip() and (row := read(text, f"{path}:{number}")) is not None:
                yield row


def write_rows(path: Path, rows: Iterable[Row]) -> None:
    """Write rows of one task to .parquet, or of any to .jsonl."""
    kept = list(rows)
    tasks = {task_name(row) for row in kept}
    if not kept or (len(tasks) > 1 and path.suffix == ".parquet"):
        held = " and ".join(sorted(tasks)) or "no"
        raise DataError(f"{path}: {held} rows cannot go into one Parquet file")
    write_records(path, [row_record(row) for row in kept], columns_of(tasks.pop()))
