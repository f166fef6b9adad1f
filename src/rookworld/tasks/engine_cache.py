"""Answers of an engine on disk: a position is searched once, whoever asks, in whatever run.

The key is everything an answer depends on: engine version, FEN with its counters, nodes, MultiPV
and the moves searched. One SQLite file in WAL mode serves several processes and threads at once;
without a path it lives in memory. The engine's version is remembered by its file, so that a warm
cache answers without starting an engine at all.

Left out on purpose: expiry (a million positions are some 200 MB, and the file may be deleted
whenever nothing runs), and use of one object on both sides of a fork.
"""

from __future__ import annotations

import os
import sqlite3
import threading
import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from rookworld.runtime.errors import EngineError
from rookworld.tasks.engine import Line, Query

BUSY_TIMEOUT_S = 60.0

_SCHEMA = """
CREATE TABLE IF NOT EXISTS engines (
    path TEXT, size INTEGER, mtime_ns INTEGER, name TEXT, PRIMARY KEY (path, size, mtime_ns)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS answers (
    engine TEXT, fen TEXT, nodes INTEGER, multipv INTEGER, moves TEXT, lines TEXT,
    PRIMARY KEY (fen, engine, nodes, multipv, moves)
) WITHOUT ROWID;
"""


def default_cache_path() -> Path:
    """The cache in the user's cache folder (`XDG_CACHE_HOME`, else `~/.cache`)."""
    root = os.environ.get("XDG_CACHE_HOME")
    folder = Path(root) if root else Path.home() / ".cache"
    return folder / "rookworld" / "engine.sqlite"


class EngineCache:
    """Lines by (engine version, query); `None` as path keeps them in memory only."""

    def __init__(self, path: Path | None = None) -> None:
        self.path = path
        self._lock = threading.Lock()
        with self._reported():
            if path is not None:
                path.parent.mkdir(parents=True, exist_ok=True)
            self._db = sqlite3.connect(
                path or ":memory:", timeout=BUSY_TIMEOUT_S, check_same_thread=False
            )
            weakref.finalize(self, self._db.close)
            # A lost last answer is searched again: no reason to wait for the disk at each one.
            self._db.executescript(f"PRAGMA journal_mode=WAL; PRAGMA synchronous=NORMAL; {_SCHEMA}")

    def get(self, engine: str, query: Query) -> list[Line] | None:
        """The stored answer, or None."""
        with self._reported():
            row = self._db.execute(
                "SELECT lines FROM answers"
                " WHERE engine=? AND fen=? AND nodes=? AND multipv=? AND moves=?",
                (engine, *_columns(query)),
            ).fetchone()
        return None if row is None else _decode(row[0])

    def put(self, engine: str, answers: Iterable[tuple[Query, Sequence[Line]]]) -> None:
        """Store answers in one transaction."""
        rows = [(engine, *_columns(query), _encode(lines)) for query, lines in answers]
        with self._reported(), self._db:
            self._db.executemany("INSERT OR REPLACE INTO answers VALUES (?,?,?,?,?,?)", rows)

    def engine_name(self, path: Path) -> str | None:
        """The version of the engine in this very file, if it was ever asked for it."""
        with self._reported():
            row = self._db.execute(
                "SELECT name FROM engines WHERE path=? AND size=? AND mtime_ns=?", _identity(path)
            ).fetchone()
        return None if row is None else str(row[0])

    def put_engine_name(self, path: Path, name: str) -> None:
        """Remember which version the file holds."""
        with self._reported(), self._db:
            self._db.execute(
                "INSERT OR REPLACE INTO engines VALUES (?,?,?,?)", (*_identity(path), name)
            )

    def close(self) -> None:
        """Give the file back."""
        with self._reported():
            self._db.close()

    @contextmanager
    def _reported(self) -> Iterator[None]:
        """One thread at a time; a full disk or a damaged file is the machine's fault."""
        try:
            with self._lock:
                yield
        except (sqlite3.Error, OSError) as error:
            raise EngineError(
                f"engine cache {self.path}: {error}; delete it or choose another place"
            ) from error


def _columns(query: Query) -> tuple[str, int, int, str]:
    moves = "*" if query.moves is None else " ".join(query.moves)
    return query.fen, query.nodes, query.multipv, moves


def _identity(path: Path) -> tuple[str, int, int]:
    file = path.resolve()
    stat = file.stat()
    return str(file), stat.st_size, stat.st_mtime_ns


def _encode(lines: Sequence[Line]) -> str:
    return " ".join(f"{line.move},{line.cp},{line.depth}" for line in lines)


def _decode(text: str) -> list[Line]:
    fields = (item.split(",") for item in text.split())
    return [Line(move, int(cp), int(depth)) for move, cp, depth in fields]
