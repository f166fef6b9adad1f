"""Positions and moves from outside: what the rules of chess allow of them, and nothing else.

The law: a FEN that comes through here is spelled by `notation`, is safe to send to an engine, and
has a king of each side; a move is one only in its one spelling. Left out on purpose: whether a
position can come about in a game (too many checkers, lost castling rights): that harms nobody.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import chess

from rookworld.runtime.errors import DataError
from rookworld.tasks.notation import read_fen

# A re-written FEN has these put right; any other fault can crash an engine.
_HARMLESS: Final = (
    chess.STATUS_BAD_CASTLING_RIGHTS
    | chess.STATUS_INVALID_EP_SQUARE
    | chess.STATUS_TOO_MANY_CHECKERS
    | chess.STATUS_IMPOSSIBLE_CHECK
)


def parse_position(fen: str) -> chess.Board:
    """The position of a FEN that is safe to send to an engine, or a `DataError`."""
    if not fen.isprintable():
        raise DataError(f"FEN with control characters refused: {fen!r}")
    try:
        board = chess.Board(fen)
    except ValueError as error:
        raise DataError(f"not a FEN: {fen!r} ({error})") from error
    if board.status() & ~_HARMLESS:
        raise DataError(f"not a legal position: {fen!r}")
    return board


def row_position(fen: str) -> chess.Board:
    """The position of a row from outside, whose FEN stays as it is written; or a `DataError`."""
    if read_fen(fen) != fen:
        raise DataError(f"not a FEN: {fen[:100]!r}")
    return parse_position(fen)


def legal_move(board: chess.Board, text: str) -> chess.Move | None:
    """The legal move spelled exactly so: python-chess alone would take `e1h1` for castling."""
    try:
        move = chess.Move.from_uci(text)
    except ValueError:
        return None
    return move if board.is_legal(move) and board.uci(move) == text else None


def check_moves(board: chess.Board, moves: Sequence[str]) -> None:
    """Raise a `DataError` unless the moves are legal ones, each once."""
    for move in moves:
        if legal_move(board, move) is None:
            raise DataError(f"illegal move {move[:12]!r}: {board.fen()}")
    if len(set(moves)) != len(moves):
        raise DataError(f"a move twice: {' '.join(moves)}")


def position_asked(prompt: str) -> str:
    """The FEN of an analysis prompt."""
    return prompt.removeprefix("P: ").partition(" M:")[0].strip()
