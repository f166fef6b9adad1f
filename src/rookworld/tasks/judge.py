"""Who says how good a move is: the labels that came with a row, or Stockfish.

The law: a judge's answer depends on the position alone. Stockfish searches a fixed number of nodes
on one thread with a cleared hash (a shared one changes nearly every answer), so rewards do not
depend on the order of a batch, on the machine or on yesterday's run, and may be kept for ever.
A judge that cannot answer raises an `EngineError`: a dead engine that scores 0 would teach that
good moves are bad.

Left out on purpose: limits in seconds, tablebases, and labels for moves nobody has searched.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property, lru_cache
from pathlib import Path

from rookworld.tasks.engine import Line, Query
from rookworld.tasks.engine_cache import EngineCache
from rookworld.tasks.engine_pool import EnginePool
from rookworld.tasks.position import parse_position
from rookworld.tasks.task import Analysis, PolicyRow, legal_moves

NODES = 20_000
MULTIPV = 5
HASH_MB = 16


class StockfishJudge:
    """An engine's view of a row's position; the row's labels are not looked at.

    Safe to call from several threads; `processes` of them are served at the same time.
    """

    def __init__(
        self,
        engine: Path | str,
        *,
        nodes: int = NODES,
        multipv: int = MULTIPV,
        processes: int | None = None,
        cache: Path | None = None,
        timeout_s: float | None = None,
    ) -> None:
        """`processes` None: one per core. `cache` None: answers are kept in memory only."""
        self.nodes = nodes
        self.multipv = multipv
        self._pool = EnginePool(engine, processes, hash_mb=HASH_MB, timeout_s=timeout_s)
        self._cache = EngineCache(cache)

    def __enter__(self) -> StockfishJudge:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the engines and give the cache file back."""
        self._pool.close()
        self._cache.close()

    @property
    def starts(self) -> int:
        """Engine processes started so far; more than `processes` means that some were lost."""
        return self._pool.starts

    @cached_property
    def version(self) -> str:
        """The part of the cache key that says who answered, e.g. `Stockfish 15.1 hash 16`."""
        path = self._pool.path
        name = self._cache.engine_name(path)
        if name is None:
            name = self._pool.name()
            self._cache.put_engine_name(path, name)
        return f"{name} hash {HASH_MB}"

    def analyse(self, row: PolicyRow) -> Analysis:
        """The best moves of the row's position, best first."""
        lines = self._lines(self._query(row))
        return Analysis(tuple(line.move for line in lines), tuple(line.cp for line in lines))

    def move_cp(self, row: PolicyRow, move: str) -> int | None:
        """The evaluation of any legal move: a search of its own if it is not among the best."""
        best = self.analyse(row)
        known = _lookup(best.moves, best.cp, move)
        fen = _engine_fen(row.fen)
        if known is not None or move not in legal_moves(fen):
            return known
        return self._lines(self._of_move(row, move))[0].cp

    def prefetch(self, rows: Sequence[PolicyRow], *, every_move: bool = False) -> None:
        """Search what the cache lacks of these rows, on all processes."""
        self._pool.spread(self._lines, dict.fromkeys(self._query(row) for row in rows))
        if every_move:
            others = (self._of_move(row, move) for row in rows for move in self._outside(row))
            self._pool.spread(self._lines, dict.fromkeys(others))

    def _outside(self, row: PolicyRow) -> list[str]:
        """Legal moves that are not among the best."""
        return sorted(legal_moves(_engine_fen(row.fen)) - set(self.analyse(row).moves))

    def _query(self, row: PolicyRow) -> Query:
        return Query(_engine_fen(row.fen), self.nodes, self.multipv)

    def _of_move(self, row: PolicyRow, move: str) -> Query:
        return Query(_engine_fen(row.fen), self.nodes, 1, (move,))

    def _lines(self, query: Query) -> list[Line]:
        lines = self._cache.get(self.version, query)
        if lines is None:
            lines = self._pool.search(query)
            self._cache.put(self.version, [(query, lines)])
        return lines


@lru_cache(maxsize=65_536)
def _engine_fen(fen: str) -> str:
    """The FEN as python-chess writes it: one spelling per position, and safe to send."""
    return parse_position(fen).fen()


def _lookup(moves: Sequence[str], cp: Sequence[int], move: str) -> int | None:
    return cp[moves.index(move)] if move in moves else None
