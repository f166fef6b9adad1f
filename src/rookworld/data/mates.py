"""Positions with a forced mate, found in random games by python-chess alone.

`mates` lists every first move that forces it. A position with a mate in one is never listed as a
mate in two. Candidates for a mate in two are the positions one move before a mate in one: looking
everywhere would cost a full search per ply.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import chess

from rookworld.data.playouts import ENDING, HUNT, PAWNS, RANDOM, walk

Record = dict[str, Any]

WALKS = (RANDOM, RANDOM, RANDOM, PAWNS, HUNT, ENDING)
PER_GAME = 3
"""Most positions of one game; neighbours are too alike to teach more."""


def mate_records(rng: random.Random, mate_in: int, count: int) -> list[Record]:
    """`count` positions from random games."""
    records: list[Record] = []
    while len(records) < count:
        found = list(mates_of_game(rng, mate_in))
        records += rng.sample(found, min(PER_GAME, len(found), count - len(records)))
    return records


def mates_of_game(rng: random.Random, mate_in: int) -> Iterator[Record]:
    """The positions of one game with a mate in so many moves."""
    boards = walk(rng, rng.choice(WALKS))
    for board in boards:
        if not (mates := mates_in_one(board)):
            continue
        if mate_in == 1:
            yield {"fen": board.fen(), "mates": mates}
        elif len(board.move_stack) >= 2:
            before = board.copy(stack=2)
            before.pop()
            before.pop()
            if not mates_in_one(before) and (keys := mates_in_two(before)):
                yield {"fen": before.fen(), "mates": keys}


def mates_in_one(board: chess.Board) -> list[str]:
    """The moves that give mate, sorted."""
    return sorted(move.uci() for move in board.legal_moves if is_mating(board, move))


def is_mating(board: chess.Board, move: chess.Move) -> bool:
    """Whether a legal move gives mate."""
    if not may_check(board, move):
        return False
    board.push(move)
    mate = board.is_checkmate()
    board.pop()
    return mate


def may_check(board: chess.Board, move: chess.Move) -> bool:
    """False only if a legal move gives no check: pieces in the way are not looked at.

    Nine moves of ten are ruled out without being played, which is most of the time of a search.
    """
    king = board.king(not board.turn)
    assert king is not None
    origin, target = move.from_square, move.to_square
    own = board.occupied_co[board.turn]
    sliders = own & (board.bishops | board.rooks | board.queens) & ~chess.BB_SQUARES[origin]
    if move.promotion or chess.BB_RAYS[king][origin] & sliders:
        return True
    match board.piece_type_at(origin):
        case chess.PAWN:
            return bool(
                chess.BB_PAWN_ATTACKS[board.turn][target] & chess.BB_SQUARES[king]
                or board.is_en_passant(move)
            )
        case chess.KNIGHT:
            return bool(chess.BB_KNIGHT_ATTACKS[target] & chess.BB_SQUARES[king])
        case chess.KING:
            return board.is_castling(move)
    return bool(chess.BB_RAYS[king][target])


def mates_in_two(board: chess.Board) -> list[str]:
    """The moves after which every reply allows a mate in one, sorted; mates in one not looked for.

    A move that stalemates, or draws otherwise, forces nothing.
    """
    return sorted(move.uci() for move in list(board.legal_moves) if _forces(board, move))


def _forces(board: chess.Board, move: chess.Move) -> bool:
    board.push(move)
    replies = list(board.legal_moves)
    forced = bool(replies) and not board.is_game_over()
    for reply in replies if forced else ():
        board.push(reply)
        forced = not board.is_game_over() and any(
            is_mating(board, answer) for answer in board.legal_moves
        )
        board.pop()
        if not forced:
            break
    board.pop()
    return forced
