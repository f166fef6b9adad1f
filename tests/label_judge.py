"""A judge that knows a row's labels and nothing else: a real one for tests, without an engine."""

from __future__ import annotations

from collections.abc import Sequence

from rookworld.tasks.task import Analysis, PolicyRow


class LabelJudge:
    def analyse(self, row: PolicyRow) -> Analysis:
        return Analysis(row.moves, row.cp)

    def move_cp(self, row: PolicyRow, move: str) -> int | None:
        return row.cp[row.moves.index(move)] if move in row.moves else None

    def prefetch(self, rows: Sequence[PolicyRow], *, every_move: bool = False) -> None:
        """Nothing to warm up."""
