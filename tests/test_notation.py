"""Notation: the fixed lists, the evaluation grid, and the symmetries of a position."""

from __future__ import annotations

import random

import chess
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rookworld.tasks import notation as n

KIWIPETE = "r3k2r/p1ppqpb1/bn2pnp1/3PN3/1p2P3/2N2Q1p/PPPBBPPP/R3K2R w KQkq - 0 1"


def walk(seed: int, plies: int) -> chess.Board:
    """A position some random plies into a game."""
    rng, board = random.Random(seed), chess.Board()
    for _ in range(plies):
        moves = list(board.legal_moves)
        if not moves:
            break
        board.push(rng.choice(moves))
    return board


def test_the_fixed_lists_have_their_known_sizes() -> None:
    assert len(n.MOVES) == len(set(n.MOVES)) == 1968
    assert len(n.EVALS) == len(set(n.EVALS)) == 129
    assert len(set(n.CASTLING)) == 16 and n.CASTLING[0] == "-" and n.CASTLING[-1] == "KQkq"
    assert len(set(n.EN_PASSANT)) == 16 and {"e3", "e6"} <= set(n.EN_PASSANT)


@pytest.mark.parametrize("seed", range(8))
def test_every_legal_move_is_in_the_list(seed: int) -> None:
    known = set(n.MOVES)
    for plies in range(0, 120, 7):
        assert {move.uci() for move in walk(seed, plies).legal_moves} <= known


@pytest.mark.parametrize(
    ("cp", "text"),
    [
        (0, "0.0"),
        (5, "0.0"),
        (6, "0.1"),
        (-6, "-0.1"),
        (212, "2.0"),
        (213, "2.25"),
        (1040, "10.0"),
        (4000, "30.0"),
        (4001, "50.0"),
        (12_000, "50.0"),
        (99_999, "999.99"),
        (99_950, "999.9"),
        (-99_999, "-999.99"),
        (-99_000, "-999.9"),
    ],
)
def test_grid_text(cp: int, text: str) -> None:
    assert n.grid_text(cp) == text


def grid_cp(cp: int) -> int:
    """The nearest grid value in centipawns."""
    return n.GRID_CP[n.grid_index(cp)]


@given(st.integers(-n.MATE + 1, n.MATE - 1))
def test_numbers_survive_writing_and_rounding_is_symmetric(cp: int) -> None:
    assert n.text_cp(n.cp_text(cp)) == cp
    assert n.grid_text(grid_cp(cp)) == n.grid_text(cp) in n.EVALS
    assert grid_cp(-cp) == -grid_cp(cp)


@given(st.integers(-5000, 5000))
def test_the_grid_value_is_the_nearest(cp: int) -> None:
    assert abs(grid_cp(cp) - cp) == min(abs(value - cp) for value in n.GRID_CP)


@pytest.mark.parametrize(
    "text",
    [
        *("", "nan", "NaN", "inf", "-inf", "1e3", "+0.3", ".3", "3.", "0.001", "--1.0", "٣.0"),
        *("0.3\n", "1000.01", "99999", "0,3", "0x1", "1_0", "- 1.0", " 0.3"),
    ],
)
def test_what_is_not_a_number_is_none(text: str) -> None:
    assert n.text_cp(text) is None


@given(st.text(max_size=12))
def test_no_text_makes_a_reader_raise(text: str) -> None:
    cp = n.text_cp(text)
    assert cp is None or abs(cp) <= n.MATE
    assert n.is_move_text(text) in (True, False)
    n.read_fen(text)
    n.squares(text)


@pytest.mark.parametrize(
    "text", ["e4", "0000", "E2E4", "e2e4k", "e2-e4", "e2e4\n", "i1a1", "e7e8Q"]
)
def test_what_is_not_spelled_like_a_move(text: str) -> None:
    assert not n.is_move_text(text)


@pytest.mark.parametrize(
    "fen",
    [
        "rnbqkbnr/pppppppp/8/8/8/8/PPPPPPPP w KQkq - 0 1",
        "rnbqkbnr/pppppppp/8/8/8/8/PPPPPPPP/RNBQKBN w KQkq - 0 1",
        "rnbqkbnr/pppppppp/44/8/8/8/PPPPPPPP/RNBQKBNR w KQkq - 0 1",
        "rnbqkbnr/pppppppp/......../8/8/8/PPPPPPPP/RNBQKBNR w KQkq - 0 1",
        "rnbqkbnr/pppppppp/8/8/8/8/PPPPPPPP/RNBQKBNR x KQkq - 0 1",
        "rnbqkbnr/pppppppp/8/8/8/8/PPPPPPPP/RNBQKBNR w QK - 0 1",
        "rnbqkbnr/pppppppp/8/8/8/8/PPPPPPPP/RNBQKBNR w KQkq e4 0 1",
        "rnbqkbnr/pppppppp/8/8/8/8/PPPPPPPP/RNBQKBNR w KQkq - 00 1",
        "rnbqkbnr/pppppppp/8/8/8/8/PPPPPPPP/RNBQKBNR w KQkq - 0",
    ],
)
def test_read_fen_is_strict(fen: str) -> None:
    assert n.read_fen(fen) is None


def test_read_fen_accepts_runs_of_spaces() -> None:
    assert n.read_fen("  " + KIWIPETE.replace(" ", "   ") + " ") == KIWIPETE


@given(st.integers(0, 500), st.integers(0, 80))
def test_colour_flip_keeps_the_legal_moves_and_undoes_itself(seed: int, plies: int) -> None:
    board = walk(seed, plies)
    flipped = chess.Board(n.flip_fen(board.fen()))
    assert flipped == board.mirror()
    assert n.flip_fen(n.flip_fen(board.fen())) == board.fen()
    assert {m.uci() for m in flipped.legal_moves} == {
        n.flip_move(m.uci()) for m in board.legal_moves
    }


@given(st.integers(0, 500), st.integers(20, 80))
def test_mirror_keeps_the_legal_moves(seed: int, plies: int) -> None:
    board = walk(seed, plies)
    board.castling_rights = 0
    mirrored = chess.Board(n.mirror_fen(board.fen()))
    assert {m.uci() for m in mirrored.legal_moves} == {
        n.mirror_move(m.uci()) for m in board.legal_moves
    }


def test_a_mirror_with_castling_rights_is_refused() -> None:
    with pytest.raises(ValueError, match="KQkq"):
        n.mirror_fen(KIWIPETE)


def test_position_key_forgets_the_counters() -> None:
    assert n.position_key(KIWIPETE) == KIWIPETE.rsplit(" ", 2)[0]
