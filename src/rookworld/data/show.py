"""`rookworld data show`: a few rows as text, what a source consists of, a position as a picture."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import chess
import chess.svg

from rookworld.data.rows import is_mate_row, row_text, task_name
from rookworld.data.sources import load_rows
from rookworld.runtime.atomic_files import write_text
from rookworld.runtime.errors import ConfigError
from rookworld.tasks.notation import is_move_text
from rookworld.tasks.position import parse_position
from rookworld.tasks.registry import task_of
from rookworld.tasks.task import Letter, Row, Style


@dataclass(frozen=True, kw_only=True)
class ShowSettings:
    """Look at rows."""

    source: str = "embedded"
    """File, folder, hub id, or embedded, embedded:train, :validation, :test, :mate."""

    task: Letter | Literal["mate"] | None = None
    """Rows of this task only."""

    first: int = 0
    """Number of the first row to print."""

    rows: int = 5
    """How many rows to print."""

    style: Style = "padded"
    """padded as public rows, or compact."""

    svg: Path | None = None
    """File for a picture of the first printed row's position."""

    def __post_init__(self) -> None:
        """Refuse what would count from the end."""
        for name in ("first", "rows"):
            if getattr(self, name) < 0:
                raise ConfigError(f"--{name} {getattr(self, name)}: give 0 or more")


@dataclass(frozen=True, kw_only=True)
class Shown:
    """What there is to see."""

    texts: list[str]
    """The chosen rows."""

    counts: dict[str, int]
    """Rows by task, class and side to move, over the whole source, such as A/mate or P/white."""


def show(settings: ShowSettings) -> Shown:
    """Read the source, describe it, and draw a position if asked."""
    rows = [row for row in load_rows(settings.source) if settings.task in (None, task_name(row))]
    chosen = rows[settings.first : settings.first + settings.rows]
    if not chosen:
        raise ConfigError(
            f"--first: {settings.first} with --rows {settings.rows} shows nothing of the"
            f" {len(rows)} rows of {settings.source}"
        )
    if settings.svg is not None:
        write_text(settings.svg, position_svg(chosen[0]))
    return Shown(texts=[shown_text(row, settings.style) for row in chosen], counts=counts(rows))


def shown_text(row: Row, style: Style) -> str:
    """A row as it is printed; mates have no document and are named by their moves."""
    if is_mate_row(row):
        return f"{row.fen} mates: {' '.join(row.mates)}"
    return row_text(row, style)


def counts(rows: Iterable[Row]) -> dict[str, int]:
    """Rows by task, by class within it, and by side to move, sorted by name."""
    found: Counter[str] = Counter()
    for row in rows:
        task = task_name(row)
        side = "white" if row.fen.split()[1] == "w" else "black"
        found.update((task, f"{task}/{side}", f"{task}/{row_class(row)}"))
    return dict(sorted(found.items()))


def row_class(row: Row) -> str:
    """Its task's class; of mates how many there are."""
    return f"{len(row.mates)}_moves" if is_mate_row(row) else str(task_of(row).row_class(row))


def position_svg(row: Row, size: int = 400) -> str:
    """The position, seen from the side to move, with an arrow for each move of the row."""
    board = parse_position(row.fen)
    moves = row_moves(row)
    arrows = [
        chess.svg.Arrow(move.from_square, move.to_square, color="green" if first else "blue")
        for first, move in zip([True] + [False] * len(moves), moves, strict=False)
    ]
    check = board.king(board.turn) if board.is_check() else None
    return chess.svg.board(board, arrows=arrows, orientation=board.turn, check=check, size=size)


def row_moves(row: Row) -> list[chess.Move]:
    """The moves of a row that can be drawn, the best first."""
    texts = row.mates if is_mate_row(row) else task_of(row).moves(row)
    return [chess.Move.from_uci(text) for text in texts if is_move_text(text)]
