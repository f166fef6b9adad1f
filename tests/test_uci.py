"""The model speaks UCI, and survives whatever is said to it."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from rookworld.evaluation.generator import Answer
from rookworld.tasks.task import Style
from rookworld.uci import serve


class Says:
    style: Style = "compact"
    samples = 1

    def __init__(self, text: str) -> None:
        self.text = text

    def answer(self, prompts: Sequence[str], salts: Sequence[int] = ()) -> list[Answer]:
        return [Answer(self.text) for _ in prompts]


def spoken(text: str, *commands: str) -> list[str]:
    return list(serve(Says(text), "nano", commands))


def test_a_short_conversation() -> None:
    assert spoken("", "uci", "isready", "", "setoption name Hash value 1", "quit", "uci") == [
        "id name RookWorld nano",
        "id author RookWorld",
        "uciok",
        "readyok",
    ]


def test_evaluations_and_mates_are_shown() -> None:
    text = " e7e5 c7c5 d8h4 g7g5 E: 0.3 -999.99 999.98 -0.1 B: e7e5"
    assert spoken(text, "position startpos moves e2e4", "go movetime 100") == [
        "info depth 1 multipv 1 score cp 30 pv e7e5",
        "info depth 1 multipv 2 score mate -1 pv c7c5",
        "info depth 1 multipv 3 score cp -10 pv g7g5",
        "bestmove e7e5",
    ]


@pytest.mark.parametrize(
    ("text", "move"),
    [
        (" e2e4 d2d4 E: 0.1 0.2 B: d2d4", "d2d4"),
        (" e2e5 d2d4 E: 0.1 0.2 B: e2e5", "d2d4"),
        (" e2e5 E: 0.1 B: e2e5", "a2a3"),
        ("nonsense", "a2a3"),
    ],
)
def test_a_legal_move_is_always_played(text: str, move: str) -> None:
    assert spoken(text, "go")[-1] == f"bestmove {move}"


def test_no_move_in_a_finished_game() -> None:
    mated = "position startpos moves f2f3 e7e5 g2g4 d8h4"
    assert spoken("", mated, "go") == ["bestmove (none)"]


@pytest.mark.parametrize(
    "bad",
    [
        "position",
        "position fen",
        "position fen 8/8/8/8/8/8/8/8 w - - 0 1",
        "position startpos moves e2e5",
        "position startpos moves \x00",
        "position somewhere",
    ],
)
def test_a_bad_position_is_refused_and_the_old_one_stays(bad: str) -> None:
    good = "position startpos moves e2e4"
    said = spoken(" e7e5 E: 0.0 B: e7e5", good, bad, "go")
    assert said[0].startswith("info string position refused, the one before stays: ")
    assert said[-1] == "bestmove e7e5"
