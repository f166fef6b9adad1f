"""Which move an A row is about: of a sort drawn by shares, since most moves teach nothing new.

The law: every sort of move has its share wherever a position has one of that sort; elsewhere any
legal move takes its place. What the move does is `transition`'s affair.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Literal

import chess

from rookworld.data.mates import checking_moves
from rookworld.data.transitions import illegal_moves, unparsable_move

Moves = Literal["all", "ends"]

SHARES: dict[Moves, dict[str, float]] = {
    "all": {
        "listed": 0.25,
        "any": 0.13,
        "tense": 0.22,
        "check": 0.12,
        "special": 0.11,
        "drawing": 0.05,
        "illegal": 0.09,
        "unparsable": 0.03,
    },
    "ends": {"listed": 0.3, "check": 0.3, "drawing": 0.2, "tense": 0.1, "any": 0.1},
}
"""A: how a row's move is drawn; any legal one where a position has none of the sort.

`ends` is for positions with a mate or few men: whether a game is over is the hardest to learn.
"""

FEW_MEN = 9
"""A: with more men than this a move hardly ever draws, and looking costs time."""


def chosen_move(
    board: chess.Board, listed: Sequence[str], rng: random.Random, moves: Moves = "all"
) -> str:
    """A move of a sort drawn by `SHARES`.

    Lists hold good moves: alone they would teach that every check mates and every move is legal.
    """
    shares = SHARES[moves]
    sort = rng.choices(list(shares), list(shares.values()))[0]
    match sort:
        case "unparsable":
            return unparsable_move(board, rng)
        case "illegal":
            while not (illegal := illegal_moves(board, rng)):
                pass
            return rng.choice(illegal)
        case "listed" if listed:
            return rng.choice(listed)
    return rng.choice(_moves_of(sort, board, rng) or list(board.legal_moves)).uci()


def _moves_of(sort: str, board: chess.Board, rng: random.Random) -> list[chess.Move]:
    match sort:
        case "tense":
            return tense_moves(board, forbidden=rng.random() < 0.5)
        case "check":
            return [move for move in checking_moves(board) if board.gives_check(move)]
        case "special":
            return special_moves(board)
        case "drawing":
            return drawing_moves(board)
    return []


def tense_moves(board: chess.Board, *, forbidden: bool) -> list[chess.Move]:
    """Moves that the own king's safety allows or forbids.

    Allowed: his own, those of pinned men, and those out of check. Forbidden: those that would
    leave him in check, as hard to tell from legal ones as anything in the rules.
    """
    legal = list(board.legal_moves)
    if forbidden:
        return sorted(set(board.pseudo_legal_moves) - set(legal), key=chess.Move.uci)
    if board.is_check():
        return legal
    pinned = chess.SquareSet(board.kings & board.occupied_co[board.turn])
    men = chess.SquareSet(board.occupied_co[board.turn])
    pinned |= chess.SquareSet(man for man in men if board.is_pinned(board.turn, man))
    return [move for move in legal if move.from_square in pinned]


def drawing_moves(board: chess.Board) -> list[chess.Move]:
    """Moves of an ending that stalemate, or leave too little to mate with."""
    if chess.popcount(board.occupied) > FEW_MEN:
        return []
    found = []
    for move in list(board.legal_moves):
        board.push(move)
        if board.is_stalemate() or board.is_insufficient_material():
            found.append(move)
        board.pop()
    return found


def special_moves(board: chess.Board) -> list[chess.Move]:
    """The legal castlings, en passant captures and promotions."""
    last_step = chess.BB_RANK_7 if board.turn else chess.BB_RANK_2
    promoting = board.pawns & board.occupied_co[board.turn] & last_step
    moves = list(board.generate_legal_moves(promoting)) if promoting else []
    if board.ep_square is not None:
        moves += board.generate_legal_ep()
    if board.castling_rights:
        moves += board.generate_castling_moves()
    return moves
