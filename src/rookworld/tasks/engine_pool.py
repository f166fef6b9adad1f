"""Several engine processes behind one door, which outlive any one of them.

The law: every position is searched with a cleared hash, so an answer depends on nothing but the
query; neither on the process that gave it nor on what was searched before.
"""

from __future__ import annotations

import os
import queue
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from rookworld.runtime.errors import EngineError
from rookworld.tasks.engine import START_TIMEOUT_S, Engine, EngineLost, Line, Query

Answer = TypeVar("Answer")


def usable_cores() -> int:
    """Cores this process may use: in a container often fewer than the machine has."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


class EnginePool:
    """`size` engine processes, for several threads; each is started when first needed."""

    def __init__(
        self,
        path: Path | str,
        size: int | None = None,
        *,
        hash_mb: int = 16,
        retries: int = 2,
        timeout_s: float | None = None,
    ) -> None:
        self.path = Path(path)
        self.size = size or usable_cores()
        self.retries = retries
        self.timeout_s = timeout_s
        self._engines = [Engine(path, hash_mb=hash_mb) for _ in range(self.size)]
        # Last in, first out: calls from one thread share one warm process.
        self._idle: queue.LifoQueue[Engine] = queue.LifoQueue()
        for engine in self._engines:
            self._idle.put(engine)

    def __enter__(self) -> EnginePool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def starts(self) -> int:
        """Processes started so far; more than `size` means that some were lost."""
        return sum(engine.starts for engine in self._engines)

    def close(self) -> None:
        """End all processes. A later call would start them again."""
        for engine in self._engines:
            engine.close()

    def name(self) -> str:
        """What the engine calls itself; starts one if none has run yet."""
        with self._borrow() as engine:
            if not engine.name:
                engine.start()
            return engine.name

    def search(self, query: Query) -> list[Line]:
        """Answer one query, on a new process if the first is lost, a bounded number of times."""
        with self._borrow() as engine:
            for attempt in range(self.retries + 1):
                try:
                    engine.new_game(self.timeout_s or START_TIMEOUT_S)
                    return engine.search(*query, timeout_s=self.timeout_s)
                except EngineLost as lost:
                    if attempt == self.retries:
                        raise EngineError(
                            f"gave up on {query.fen} after {attempt + 1} attempts: {lost}"
                        ) from lost
        raise AssertionError("unreachable")

    def spread(self, function: Callable[[Query], Answer], queries: Iterable[Query]) -> list[Answer]:
        """A function of each query, called in as many threads as there are engines."""
        with ThreadPoolExecutor(self.size, thread_name_prefix="engine") as threads:
            return list(threads.map(function, queries))

    @contextmanager
    def _borrow(self) -> Iterator[Engine]:
        engine = self._idle.get()
        try:
            yield engine
        finally:
            self._idle.put(engine)
