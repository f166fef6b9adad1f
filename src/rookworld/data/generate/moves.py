"""Which move an A row is about: of a sort drawn by shares, since most moves teach nothing new.

The law: every sort of move has its share wherever a position has one of that sort; elsewhere any
legal move takes its place. What the move does is `transition`'s affair.

`game_records` asks about every position of a game: ten times as many rows a second as `transitions`
looks for by class, of which rare classes are as rare as the shares leave them.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import islice
from typing import Any, Literal

import chess

from rookworld.data.generate.mates import checking_moves
from rookworld.data.generate.playouts import WALKS, recent, replay, walk
from rookworld.data.generate.transitions import illegal_moves, unparsable_move
from rookworld.data.rows import row_record
from rookworld.tasks.environment import transition

Record = dict[str, Any]

Moves = Literal["all", "ends", "edge"]

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
    "edge": {
        "cornering": 0.35,
        "tense": 0.25,
        "blocked": 0.15,
        "check": 0.1,
        "illegal": 0.05,
        "special": 0.05,
        "any": 0.05,
    },
}
"""A: how a row's move is drawn; any legal one where a position has none of the sort.

`ends` is for positions with a mate or few men: whether a game is over is the hardest to learn.
`edge` is for any: moves that nearly end a game, are nearly legal, or are just so.
"""

FEW_MEN = 9
"""A: with more men than this a move hardly ever draws, and looking costs time."""

FEW_REPLIES = 2
"""A: a side with no more moves than this left is cornered."""


def game_records(
    rng: random.Random, moves: Moves, count: int, given: Sequence[Sequence[str]]
) -> list[Record]:
    """A row of every position of the given games, or of `count` or more of half-random ones."""
    records = [
        _record(board, [played], rng, moves)
        for game in given
        for board, played in zip(replay(game), game, strict=False)
    ]
    while not given and len(records) < count:
        records += [_record(board, [], rng, moves) for board in walk(rng, rng.choice(WALKS))]
    return records


def _record(board: chess.Board, listed: list[str], rng: random.Random, moves: Moves) -> Record:
    move = chosen_move(board, listed, rng, moves)
    return row_record(transition(board.fen(), move, recent(board)))


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
        case "cornering":
            return cornering_moves(board)
        case "blocked":
            return blocked_moves(board)
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


def cornering_moves(board: chess.Board) -> list[chess.Move]:
    """Checks, and with few men any moves, that leave the opponent hardly a reply, or none."""
    few = chess.popcount(board.occupied) <= FEW_MEN
    found = []
    for move in list(board.legal_moves) if few else checking_moves(board):
        board.push(move)
        if (few or board.is_check()) and _is_cornered(board):
            found.append(move)
        board.pop()
    return found


def _is_cornered(board: chess.Board) -> bool:
    return len(list(islice(board.legal_moves, FEW_REPLIES + 1))) <= FEW_REPLIES


def blocked_moves(board: chess.Board) -> list[chess.Move]:
    """Moves of bishops, rooks, queens and pawns that only the other men on the board forbid."""
    own, found = board.occupied_co[board.turn], []
    for square in chess.scan_forward(own & (board.queens | board.rooks | board.bishops)):
        reach = 0
        if chess.BB_SQUARES[square] & (board.queens | board.rooks):
            reach |= chess.BB_RANK_ATTACKS[square][0] | chess.BB_FILE_ATTACKS[square][0]
        if chess.BB_SQUARES[square] & (board.queens | board.bishops):
            reach |= chess.BB_DIAG_ATTACKS[square][0]
        blocked = reach & ~(board.attacks_mask(square) & ~own)
        found += [chess.Move(square, target) for target in chess.scan_forward(blocked)]
    last_step = chess.BB_RANK_7 if board.turn else chess.BB_RANK_2
    for square in chess.scan_forward(own & board.pawns & ~last_step):
        ahead = square + (8 if board.turn else -8)
        targets = chess.BB_SQUARES[ahead] & board.occupied
        targets |= chess.BB_PAWN_ATTACKS[board.turn][square] & ~board.occupied_co[not board.turn]
        found += [chess.Move(square, target) for target in chess.scan_forward(targets)]
    return [move for move in found if not board.is_en_passant(move)]


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
