"""Looking at rows."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

import chess
import pytest

from rookworld.data.rows import MateRow
from rookworld.data.show import ShowSettings, counts, position_svg, show
from rookworld.data.sources import write_rows
from rookworld.runtime.errors import ConfigError
from rookworld.tasks.environment import transition
from rookworld.tasks.task import PolicyRow, Row

MATE = MateRow("7k/R7/8/8/8/8/8/1R5K w - - 3 9", ("b1b8",))
OTHERS = ("a7a6", "a7a5", "a7a4", "a7a3")
ROWS: list[Row] = [
    PolicyRow("k7/8/8/8/8/8/7r/K7 w - - 0 1", ("a1b1",), (-999,)),
    PolicyRow(MATE.fen, ("b1b8", *OTHERS), (99_999, 40, 30, 20, 10)),
    transition(chess.STARTING_FEN, "e2e4"),
    transition(chess.STARTING_FEN, "Nf3"),
    MATE,
]


def test_counts_by_task_class_and_side() -> None:
    assert counts(ROWS) == {
        "A": 2,
        "A/illegal": 1,
        "A/quiet": 1,
        "A/white": 2,
        "P": 2,
        "P/1_moves": 1,
        "P/mate_in_sight": 1,
        "P/white": 2,
        "mate": 1,
        "mate/1_moves": 1,
        "mate/white": 1,
    }


def test_show_prints_the_chosen_rows_and_draws_the_first(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    write_rows(path, ROWS)
    svg = tmp_path / "board.svg"
    shown = show(ShowSettings(source=str(path), first=1, rows=2, style="compact", svg=svg))
    listed = f"M: b1b8 {' '.join(OTHERS)} E: 999.99 0.4 0.3 0.2 0.1 B: b1b8"
    assert shown.texts[0] == f"P: {MATE.fen} {listed}"
    assert shown.texts[1].startswith("A: ") and len(shown.texts) == 2
    assert ElementTree.parse(svg).getroot().tag.endswith("svg")
    mates = show(ShowSettings(source=str(path), task="mate"))
    assert mates.texts == [f"{MATE.fen} mates: b1b8"] and set(mates.counts) >= {"mate"}
    with pytest.raises(ConfigError, match="shows nothing of the 5 rows"):
        show(ShowSettings(source=str(path), first=9))


def test_a_picture_has_an_arrow_for_each_move_that_is_one() -> None:
    arrows = [position_svg(row).count('class="arrow"') for row in ROWS]
    assert arrows == [2, 10, 2, 0, 2]  # a line and a head each
