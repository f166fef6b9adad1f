"""Positions with a forced mate, found in random games by python-chess alone.

`mates` lists every first move that forces it. A position with a mate in one is never listed as a
mate in two. Candidates for a mate in two are the positions one move before a mate in one: looking
everywhere would cost a full search per ply. Given positions with a mate are changed by a man or
two and kept if there still is one: ten times as many a second as games give, and a model that has
seen both sides of such a change cannot answer from memory.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import chess

from rookworld.data.generate.playouts import ENDING, HUNT, PAWNS, RANDOM, walk

Record = dict[str, Any]

WALKS = (RANDOM, RANDOM, RANDOM, PAWNS, HUNT, ENDING)
PER_GAME = 3
"""Most positions of one game; neighbours are too alike to teach more."""
MOST_CHANGES = 3
"""Men by which a given position is changed, at most."""


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


def varied_mate(fen: str, mate_in: int, rng: random.Random) -> Record | None:
    """The position with a man or two taken off, put on or moved, if it then has a mate."""
    board = chess.Board(fen)
    for _ in range(rng.randint(1, MOST_CHANGES)):
        change_a_man(board, rng)
    board.ep_square = None
    board.castling_rights = board.clean_castling_rights()
    if not board.is_valid():
        return None
    mates = mates_in_one(board)
    if mate_in == 2:
        mates = [] if mates else mates_in_two(board)
    return {"fen": board.fen(), "mates": mates} if mates else None


def change_a_man(board: chess.Board, rng: random.Random) -> None:
    """Take a man off, put one on, or do both; kings stay where they are."""
    men = list(chess.scan_forward(board.occupied & ~board.kings))
    change = rng.choice(("off", "on", "move"))
    man = chess.Piece(rng.choice(chess.PIECE_TYPES[:5]), rng.random() < 0.5)
    if change != "on" and men:
        man = board.remove_piece_at(rng.choice(men)) or man
    if change != "off":
        free = chess.SquareSet(~board.occupied)
        if man.piece_type == chess.PAWN:
            free &= ~chess.BB_BACKRANKS
        board.set_piece_at(rng.choice(list(free)), man)


def mates_in_one(board: chess.Board) -> list[str]:
    """The moves that give mate, sorted."""
    return sorted({move.uci() for move in checking_moves(board) if is_mating(board, move)})


def checking_moves(board: chess.Board) -> list[chess.Move]:
    """All legal moves that give check, some of them twice, and a few that do not.

    Most moves are never listed, which is most of the time of a search for mates.
    """
    king = board.king(not board.turn)
    assert king is not None
    own, pawns = board.occupied_co[board.turn], board.pawns & board.occupied_co[board.turn]
    straight, diagonal = _seen_from(board, king)
    # Squares from which a man other than the king may attack the king's.
    targets = straight | diagonal | chess.BB_KNIGHT_ATTACKS[king]
    targets |= chess.BB_PAWN_ATTACKS[not board.turn][king]
    moves = list(board.generate_legal_moves(own & ~board.kings, targets))
    # Men whose move may open a line to the king, and pawns that become another man.
    sliders = own & (board.bishops | board.rooks | board.queens)
    opening = pawns & (chess.BB_RANK_7 if board.turn else chess.BB_RANK_2)
    for square in chess.scan_forward((straight | diagonal) & own):
        if chess.BB_RAYS[king][square] & sliders & ~chess.BB_SQUARES[square]:
            opening |= chess.BB_SQUARES[square]
    if opening:
        moves += board.generate_legal_moves(opening)
    if board.ep_square is not None:
        moves += board.generate_legal_ep()
    if board.castling_rights:
        moves += board.generate_castling_moves()
    return moves


def _seen_from(board: chess.Board, square: chess.Square) -> tuple[chess.Bitboard, chess.Bitboard]:
    """The squares that a rook and a bishop there would attack."""
    on_rank = chess.BB_RANK_MASKS[square] & board.occupied
    on_file = chess.BB_FILE_MASKS[square] & board.occupied
    straight = chess.BB_RANK_ATTACKS[square][on_rank] | chess.BB_FILE_ATTACKS[square][on_file]
    on_diagonals = chess.BB_DIAG_MASKS[square] & board.occupied
    return straight, chess.BB_DIAG_ATTACKS[square][on_diagonals]


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
    diagonals = chess.BB_DIAG_ATTACKS[king][0]
    others = board.occupied_co[board.turn] & ~chess.BB_SQUARES[origin]
    kind = board.bishops if diagonals & chess.BB_SQUARES[origin] else board.rooks
    if move.promotion or chess.BB_RAYS[king][origin] & others & (kind | board.queens):
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
        case chess.BISHOP:
            return bool(diagonals & chess.BB_SQUARES[target])
        case chess.ROOK if diagonals & chess.BB_SQUARES[target]:
            return False
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
            is_mating(board, answer) for answer in checking_moves(board)
        )
        board.pop()
        if not forced:
            break
    board.pop()
    return forced
