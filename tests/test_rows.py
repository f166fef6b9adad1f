"""Rows to text and to columns, and back."""

from __future__ import annotations

import random

import chess
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rookworld.data.generate.transitions import illegal_moves, unparsable_move
from rookworld.data.rows import (
    MateRow,
    record_row,
    repair_row,
    row_key,
    row_record,
    row_text,
    task_name,
    text_row,
)
from rookworld.runtime.errors import DataError
from rookworld.tasks.environment import transition
from rookworld.tasks.notation import GRID_CP, grid_index
from rookworld.tasks.task import EnvironmentRow, PolicyRow


def random_board(seed: int, plies: int) -> chess.Board:
    rng, board = random.Random(seed), chess.Board()
    for _ in range(plies):
        if board.is_game_over():
            board.reset()
        board.push(rng.choice(list(board.legal_moves)))
    if board.is_game_over():
        board.pop()
    return board


boards = st.builds(random_board, st.integers(0, 10**6), st.integers(0, 120))
centipawns = st.one_of(
    st.integers(-3000, 3000), st.integers(99_950, 99_999), st.integers(-99_999, -99_950)
)


@st.composite
def policy_rows(draw: st.DrawFn) -> PolicyRow:
    board = draw(boards)
    legal = draw(st.permutations([move.uci() for move in board.legal_moves]))[:5]
    cp = draw(st.lists(centipawns, min_size=len(legal), max_size=len(legal)))
    return PolicyRow(board.fen(), tuple(legal), tuple(sorted(cp, reverse=True)), draw(st.just(7)))


@st.composite
def environment_rows(draw: st.DrawFn) -> EnvironmentRow:
    board, rng = draw(boards), random.Random(draw(st.integers(0, 10**6)))
    sorts = [
        [move.uci() for move in board.legal_moves],
        illegal_moves(board, rng) or ["a1a1"],
        [unparsable_move(board, rng)],
    ]
    history = [move.uci() for move in board.move_stack[-9:]]
    return transition(board.fen(), rng.choice(draw(st.sampled_from(sorts))), history)


@settings(deadline=None, max_examples=60)
@given(policy_rows())
def test_policy_row_survives_text(row: PolicyRow) -> None:
    assert text_row(row_text(row, "padded")) == PolicyRow(row.fen, row.moves, row.cp)
    compact = text_row(row_text(row, "compact"))
    assert isinstance(compact, PolicyRow) and compact.moves[0] == row.moves[0]
    assert compact.cp == tuple(GRID_CP[grid_index(cp)] for cp in row.cp)


@settings(deadline=None, max_examples=60)
@given(environment_rows())
def test_environment_row_survives_text(row: EnvironmentRow) -> None:
    text = row_text(row)
    assert text_row(text) == text_row(text.removeprefix("A: ")) == row
    assert text == row_text(row, "compact")


@settings(deadline=None, max_examples=30)
@given(st.one_of(policy_rows(), environment_rows()))
def test_row_survives_columns(row: PolicyRow | EnvironmentRow) -> None:
    assert record_row(row_record(row)) == row


def test_the_text_is_that_of_public_rows() -> None:
    row = PolicyRow(
        chess.STARTING_FEN, ("e2e4", "d2d4", "g1f3", "c2c4", "g2g3"), (30, 25, 20, 1, 0)
    )
    moves, evals = "e2e4 d2d4 g1f3 c2c4 g2g3", "0.3 0.25 0.2 0.01 0.0"
    assert row_text(row) == f"P: {chess.STARTING_FEN:90}M: {moves:30}E: {evals:40}B: e2e4"
    assert row_text(transition(chess.STARTING_FEN, "e2e4")) == (
        f"A: {chess.STARTING_FEN}+e2e4+e2e4+"
        "rnbqkbnr/pppppppp/8/8/4P3/8/PPPP1PPP/RNBQKBNR b KQkq - 0 1+0.001+0+0"
    )


@pytest.mark.parametrize("text", ["", "P:", "P: x M: y", "A: +++++++", "e2e4", "P: M: E: B:"])
def test_malformed_text_is_no_row(text: str) -> None:
    assert text_row(text) is None


def test_mates_and_keys() -> None:
    mate = MateRow("7k/R7/8/8/8/8/8/1R5K w - - 3 9", ("b1b8",))
    assert record_row(row_record(mate)) == mate and task_name(mate) == "mate"
    assert row_key(mate) == "7k/R7/8/8/8/8/8/1R5K w - -"
    assert row_key(transition(chess.STARTING_FEN, "e2e4")).endswith("KQkq - e2e4")


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"fen": chess.STARTING_FEN}, "no column 'moves'"),
        ({"fen": chess.STARTING_FEN, "moves": ["e2e4"], "cp": []}, "1 moves with 0 evaluations"),
        ({"fen": chess.STARTING_FEN, "moves": ["e2e4"], "cp": [9]}, "1 moves listed where 5 exist"),
        ({"fen": chess.STARTING_FEN, "moves": None, "cp": [1]}, "empty or of the wrong type"),
        ({"fen": chess.STARTING_FEN, "next_fen": "x"}, "no column 'move'"),
    ],
)
def test_faulty_columns_are_named(record: dict[str, object], message: str) -> None:
    with pytest.raises(DataError, match=message):
        repair_row(record_row(record))
