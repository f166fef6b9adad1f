"""Work in small chunks that survive a kill: each is made once, whole, and never half-written.

A chunk is a pure function of its number. It is written to a temporary name, synced and renamed, so
a file that is there is complete; a run that was killed at any moment goes on with the first chunk
that is missing. Rows are taken from the chunks in the order of their numbers, whichever worker
finished first, until there are enough: the result does not depend on the number of workers.

Left out on purpose: a queue between machines. Shards own disjoint chunk numbers and share nothing.
"""

from __future__ import annotations

import json
import multiprocessing
import shutil
import time
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rookworld.runtime.atomic_files import write_text
from rookworld.runtime.errors import DataError
from rookworld.runtime.processes import end_with_parent, interrupts_held
from rookworld.runtime.run_lock import locked

Record = dict[str, Any]
MakeChunk = Callable[[int], list[Record]]

GRACE_S = 0.5
"""How long an interrupt may take to arrive after it has ended a worker."""


class ChunkFolder:
    """The finished chunks of one generation, and a note of the settings that made them."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @contextmanager
    def opened(self, origin: dict[str, Any]) -> Iterator[None]:
        """Hold the folder for this process; refuse one that other settings have begun."""
        with locked(self.path / "lock", "generating"):
            self._check_origin(origin)
            yield

    def _check_origin(self, origin: dict[str, Any]) -> None:
        note = self.path / "origin.json"
        if not note.exists():
            write_text(note, json.dumps(origin, indent=1))
            return
        begun = json.loads(note.read_text())
        for name in origin:
            if begun.get(name) != origin[name]:
                raise DataError(
                    f"{self.path} was begun with {name} {begun.get(name)!r}, now it is"
                    f" {origin[name]!r}: give the same settings, another --out, or delete it"
                )

    def file(self, number: int) -> Path:
        """Where a chunk is, once it is finished."""
        return self.path / f"chunk-{number:07d}.jsonl"

    def has(self, number: int) -> bool:
        """Whether a chunk is finished."""
        return self.file(number).exists()

    def write(self, number: int, records: list[Record]) -> None:
        """Put a finished chunk in place."""
        lines = "".join(json.dumps(record) + "\n" for record in records)
        write_text(self.file(number), lines)

    def read(self, number: int) -> list[Record]:
        """The rows of a finished chunk."""
        with self.file(number).open() as lines:
            return [json.loads(line) for line in lines]

    def remove(self) -> None:
        """Delete the folder, if it is there, after its rows have been merged."""
        if self.path.exists():
            shutil.rmtree(self.path)


def chunks_in_order(
    folder: ChunkFolder, numbers: Iterator[int], make: MakeChunk, workers: int
) -> Generator[list[Record], None, None]:
    """The chunks of these numbers, in order, made by `workers` processes where missing.

    `make` must be picklable. The caller stops by closing the iterator, which waits for the chunks
    that are being made.
    """
    if workers == 1:
        for number in numbers:
            if not folder.has(number):
                folder.write(number, make(number))
            yield folder.read(number)
        return
    yield from _chunks_by_pool(folder, numbers, make, workers)


def _chunks_by_pool(
    folder: ChunkFolder, numbers: Iterator[int], make: MakeChunk, workers: int
) -> Generator[list[Record], None, None]:
    ahead: list[tuple[int, Future[None] | None]] = []
    # Not `fork`: the caller may have threads (a progress bar), and the lock must not be inherited.
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(workers, mp_context=context, initializer=end_with_parent)
    try:
        while True:
            running = {future for _, future in ahead if future and not future.done()}
            while len(running) < workers and (number := next(numbers, None)) is not None:
                with interrupts_held():  # a submit may start a worker, which inherits the mask
                    future = None if folder.has(number) else pool.submit(_put, folder, number, make)
                ahead.append((number, future))
                running |= {future} if future else set()
            if not ahead:
                return
            number, first = ahead[0]
            if first is not None and not first.done():
                wait(running, return_when=FIRST_COMPLETED)
                continue
            if first is not None:
                first.result()
            ahead.pop(0)
            yield folder.read(number)
    except BrokenProcessPool as error:
        broken = error
    finally:
        pool.shutdown(cancel_futures=True)
    # Ctrl-C ends the workers too, and their end may be seen first: then ours is on its way.
    time.sleep(GRACE_S)
    raise DataError(
        "a worker process died (out of memory?): run the same command again to go on,"
        f" with fewer --workers than {workers}"
    ) from broken


def _put(folder: ChunkFolder, number: int, make: MakeChunk) -> None:
    folder.write(number, make(number))
