"""Rows at a size that memory does not hold: converted once, mapped into memory, read when drawn.

A file of rows becomes a folder of Arrow files in the cache, with three columns: `row` (a text, or
columns as JSON), `task` (its place among the letters in `index.json`) and `position` (the hash by
which held-out positions are found). All processes of a machine share them.

Laws: which row stands at a place is a function of the files; what is converted is whole, so a
killed conversion goes on where it stopped; what looks like no row is in a side file and counted.
Nothing is parsed before it is drawn: then it is repaired as any row from outside, and where it
turns out to be none, the next one stands for it. Left out: repetitions, and removing old folders.
"""

from __future__ import annotations

import json
import logging
import os
import re
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from hashlib import sha256
from itertools import islice
from mmap import ACCESS_READ, MADV_DONTNEED, mmap
from pathlib import Path
from typing import Any, overload

import numpy as np
from numpy.typing import NDArray

from rookworld.data.files import (
    iterate_parquet,
    open_lines,
    parquet_columns,
    parquet_rows,
    read_object,
)
from rookworld.data.intake import Intake
from rookworld.data.rows import Record, is_mate_row, record_row, row_record, task_name
from rookworld.data.splits import position_hash
from rookworld.runtime.atomic_files import atomic_file, remove_unfinished, write_json, write_text
from rookworld.runtime.errors import DataError
from rookworld.runtime.run_lock import Lock
from rookworld.runtime.wording import noun
from rookworld.tasks.registry import TASKS, task_of_text
from rookworld.tasks.task import Row

log = logging.getLogger(__name__)

PART = 100_000
"""Rows of an Arrow file: as many are converted again after a kill."""
READS = 256
"""Reads after which no page is held."""
VERSION = 1
"""Of what is in the folder; another one is another folder."""
WAIT_S = 1.0
CACHE = "ROOKWORLD_CACHE"
"""Environment variable for where converted rows lie."""
LETTERS = tuple(TASKS)
_SPACES = re.compile("  +")

Progress = Callable[[int, int], None]
Raw = str | Record
"""A document, or columns."""


def cache_folder() -> Path:
    """Where converted rows lie: $ROOKWORLD_CACHE, or rookworld/ in the user's cache."""
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(os.environ.get(CACHE) or Path(home) / "rookworld")


def folder_of(path: Path) -> Path:
    """The folder of a file's converted rows: another one when the file has changed."""
    real = path.resolve()
    found = real.stat()
    mark = f"{VERSION} {PART} {real} {found.st_size} {found.st_mtime_ns}"
    return cache_folder() / "rows" / f"{path.stem}-{sha256(mark.encode()).hexdigest()[:16]}"


def estimated_rows(path: Path) -> int:
    """About how many rows a file has, without reading it."""
    if path.suffix == ".parquet":
        return parquet_rows(path)
    with open_lines(path) as lines:
        first = [len(line) for line in islice(lines, 200)]
    packed = 6 if path.suffix == ".xz" else 1
    return packed * path.stat().st_size * len(first) // max(1, sum(first))


# --- conversion ---------------------------------------------------------------------------------


def converted(path: Path, progress: Progress = lambda done, total: None) -> Path:
    """The folder of a file's rows, converted now if they were not; others wait for the first."""
    folder = folder_of(path)
    if (folder / "index.json").is_file():
        return folder
    while (lock := Lock.take(folder / "lock")) is None:
        time.sleep(WAIT_S)
    try:
        if not (folder / "index.json").is_file():
            convert(path, folder, progress)
    finally:
        lock.release()
    return folder


def convert(path: Path, folder: Path, progress: Progress) -> None:
    """Write the parts that are missing, and then that all are there."""
    total, done = estimated_rows(path), 0
    counts = Counter[str]()
    chunks = in_parts(raw_rows(path))
    for number, chunk in enumerate(chunks):
        part = folder / f"part-{number:05d}.arrow"
        note = part.with_suffix(".json")
        if not note.is_file():
            remove_unfinished(part)
            write_json(note, write_part(part, chunk, f"{path}", number * PART))
        counts.update(json.loads(note.read_text(encoding="utf-8")))
        done += len(chunk)
        progress(done, max(total, done))
    progress(done, done)
    write_json(folder / "index.json", {"source": str(path), "rows": done, "counts": counts})


def in_parts(raw: Iterator[Raw]) -> Iterator[list[Raw]]:
    while chunk := list(islice(raw, PART)):
        yield chunk


def raw_rows(path: Path) -> Iterator[Raw]:
    """What a file holds, unread: texts, or columns."""
    if path.suffix == ".parquet":
        names = ["text"] if "text" in parquet_columns(path) else None
        for record in iterate_parquet(path, names):
            text = record.get("text")
            yield text if text and isinstance(text, str) else record
        return
    with open_lines(path) as lines:
        yield from (text for line in lines if (text := line.rstrip("\n")).strip())


def write_part(part: Path, chunk: Sequence[Raw], source: str, before: int) -> dict[str, int]:
    """Write one Arrow file and its side file; how many rows of each sort there were."""
    import pyarrow as pa

    counts = Counter[str]()
    entries, malformed = [], []
    for number, raw in enumerate(chunk, before + 1):
        try:
            entry = entry_of(raw)
        except DataError as error:
            counts["malformed"] += 1
            bad = {"place": f"{source}, row {number}", "reason": str(error), "content": raw}
            malformed.append(json.dumps(bad, default=str) + "\n")
            continue
        counts[LETTERS[entry[1]] if entry else "mate"] += 1
        if entry:
            entries.append(entry)
    if malformed:
        write_text(part.with_suffix(".malformed.jsonl"), "".join(malformed))
    kinds = {"row": pa.string(), "task": pa.uint8(), "position": pa.uint64()}
    rows, tasks, positions = zip(*entries, strict=True) if entries else ((), (), ())
    columns = zip((rows, tasks, positions), kinds.values(), strict=True)
    arrays = [pa.array(values, kind) for values, kind in columns]
    batch = pa.record_batch(arrays, schema=pa.schema(list(kinds.items())))
    with atomic_file(part) as temporary, pa.ipc.new_file(str(temporary), batch.schema) as file:
        file.write_batch(batch)
    return counts


def entry_of(raw: Raw) -> tuple[str, int, int] | None:
    """What is kept of a row: text, place of its task, hash of its position; None for a mate."""
    if isinstance(raw, str) and raw.lstrip()[:1] == "{":
        raw = read_object(raw)
    if isinstance(raw, dict) and isinstance(raw.get("text"), str):
        raw = str(raw["text"])
    if isinstance(raw, dict):
        row = record_row(raw)
        if is_mate_row(row):
            return None
        kept = json.dumps(row_record(row), separators=(",", ":"))
        return kept, LETTERS.index(task_name(row)), position_hash(row.fen)
    task = task_of_text(raw)
    fen = task.fen_in_text(raw)
    if fen is None:
        raise DataError(f"no {' nor '.join(TASKS)} row")
    # readers take any run of spaces for one
    return _SPACES.sub(" ", raw), LETTERS.index(task.letter), position_hash(fen)


# --- reading ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Part:
    """One Arrow file in memory that the kernel fills when it is read."""

    pages: mmap
    rows: Any
    """pyarrow's strings."""
    tasks: NDArray[np.uint8]
    positions: NDArray[np.uint64]


class Store:
    """The converted rows of several files, one after the other."""

    def __init__(self, folders: Sequence[Path]) -> None:
        self.parts = [part for folder in folders for part in parts_of(folder)]
        lengths = [len(part.tasks) for part in self.parts]
        self.ends = np.cumsum(lengths, dtype=np.int64)
        self.tasks = np.concatenate([part.tasks for part in self.parts] or [np.zeros(0, np.uint8)])
        self.intake = Intake()
        self.reads = 0

    def give_back(self) -> None:
        """Hold no pages: a row makes the kernel map half a megabyte around it, which would count.

        They stay in its page cache, as long as there is room.
        """
        for part in self.parts:
            part.pages.madvise(MADV_DONTNEED)

    def read(self, place: int) -> Row | None:
        """The row at a place, repaired; None if it is none. Each sort of fault is told once."""
        self.reads += 1
        if self.reads % READS == 0:
            self.give_back()
        number = int(np.searchsorted(self.ends, place, side="right"))
        part = self.parts[number]
        text = part.rows[place - int(self.ends[number]) + len(part.tasks)].as_py()
        known, bad = len(self.intake.repairs), len(self.intake.malformed)
        take = self.intake.line if text[:1] == "{" else self.intake.text
        row = take(text, f"row {place + 1}")
        for what in list(self.intake.repairs)[known:]:
            log.warning("rows are repaired as they are drawn: %s", what)
        if bad == 0 and self.intake.malformed:
            found = self.intake.malformed[0]
            log.warning("malformed rows are passed over: %s: %s", found.place, found.reason[:120])
        return row


def parts_of(folder: Path) -> Iterator[Part]:
    import pyarrow as pa

    for path in sorted(folder.glob("part-*.arrow")):
        try:
            with path.open("rb") as file:
                pages = mmap(file.fileno(), 0, access=ACCESS_READ)
            batch = pa.ipc.open_file(pa.py_buffer(pages)).get_batch(0)
        except (OSError, ValueError) as error:  # Arrow's own error is one of value
            raise DataError(f"{path}: cannot be read ({error}); delete {folder}") from error
        yield Part(
            pages,
            batch.column("row"),
            batch.column("task").to_numpy(),
            batch.column("position").to_numpy(),
        )


class CachedRows(Sequence[Row]):
    """Some places of a store as rows, which are parsed each time they are asked for."""

    def __init__(self, store: Store, places: NDArray[np.int64] | None = None) -> None:
        self.store = store
        self.places = np.arange(len(store.tasks)) if places is None else places

    def __len__(self) -> int:
        return len(self.places)

    @overload
    def __getitem__(self, number: int) -> Row: ...
    @overload
    def __getitem__(self, number: slice) -> list[Row]: ...
    def __getitem__(self, number: int | slice) -> Row | list[Row]:
        if isinstance(number, slice):
            return [self[one] for one in range(*number.indices(len(self)))]
        if not -len(self) <= number < len(self):
            raise IndexError(number)
        for step in range(len(self)):
            row = self.store.read(int(self.places[(number + step) % len(self)]))
            if row is not None:
                return row
        raise DataError("none of the rows could be read")

    def of_task(self, letter: str) -> CachedRows:
        """The rows of one task."""
        of_task = self.store.tasks[self.places] == LETTERS.index(letter)
        return CachedRows(self.store, self.places[of_task])

    def positions_among(self, hashes: Collection[int]) -> list[int]:
        """Those of the position hashes that are in the store."""
        asked = np.fromiter(hashes, np.uint64)
        found: set[int] = set()
        for part in self.store.parts:
            found.update(part.positions[np.isin(part.positions, asked)].tolist())
        self.store.give_back()
        return sorted(found)


def cached_rows(paths: Sequence[Path], progress: Progress) -> CachedRows:
    """The rows of files, from the cache, where they are put if they are not there."""
    folders = [converted(path, progress) for path in paths]
    for path, folder in zip(paths, folders, strict=True):
        counts = json.loads((folder / "index.json").read_text(encoding="utf-8"))["counts"]
        if bad := counts.get("malformed"):
            count = f"{bad:,} malformed {noun(bad, 'row')}"
            log.warning("%s: %s left out, listed in %s", path, count, folder)
    rows = CachedRows(Store(folders))
    if not rows:
        raise DataError(f"{', '.join(map(str, paths))}: no rows in it")
    return rows
