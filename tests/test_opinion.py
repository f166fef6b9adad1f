"""What is played follows from what the model says, and is legal whatever it says."""

from __future__ import annotations

import chess

from rookworld.evaluation.opinion import Opinion, opinion
from rookworld.tasks.policy import POLICY
from rookworld.tasks.task import legal_moves

START = chess.STARTING_FEN


def thought(text: str, fen: str = START) -> Opinion:
    return opinion(fen, POLICY.parse(text))


def test_the_best_move_is_played_if_it_is_legal() -> None:
    found = thought(" e2e4 d2d4 E: 0.3 0.4 B: e2e4")
    assert (found.move, found.note) == ("e2e4", "")
    assert [one.move for one in found.ranked] == ["e2e4", "d2d4"]


def test_else_the_best_legal_move_of_the_list() -> None:
    found = thought(" e2e5 g1f3 d2d4 E: 0.5 0.1 0.3 B: e2e5")
    assert found.move == "d2d4"
    assert "e2e5 is not legal" in found.note
    assert [one.legal for one in found.candidates] == [False, True, True]


def test_else_any_legal_move() -> None:
    found = thought("nonsense")
    assert found.move in legal_moves(START)
    assert found.note and found.candidates == ()


def test_no_move_where_the_game_is_over() -> None:
    mated = "rnb1kbnr/pppp1ppp/8/4p3/6Pq/5P2/PPPPP2P/RNBQKBNR w KQkq - 1 3"
    assert thought(" e2e4 E: 0.3 B: e2e4", mated).move == ""
