"""Random and half-random games by python-chess: where A rows and mates come from.

A walk is a sequence of positions, each with the moves that led to it. What a walk prefers (its
`Walk` weights) decides which rare events it meets: capturing empties the board, shuffling drives
the half-move clock to 150, endings make promotions, stalemates and mates.

The law: every position is legal and every counter is the one the moves give. Endings that are set
up on an empty board are valid positions with a plausible move number and no castling rights.

Left out on purpose: an engine. Nothing here needs one.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import chess

HISTORY_PLIES = 10
MAX_FULLMOVE = 199
"""Counters beyond have no token of their own, and no game needs them."""


@dataclass(frozen=True, kw_only=True)
class Walk:
    """What a half-random player prefers: weights relative to a plain move, which has 1."""

    name: str
    capture: float = 1.0
    pawn: float = 1.0
    double_push: float = 1.0
    castle: float = 1.0
    promotion: float = 1.0
    ending: bool = False
    """Begin with a few men on an empty board instead of the initial position."""
    free_plies: int = 0
    """Most plies at the beginning that follow no preference."""
    max_plies: int = 240

    @property
    def uniform(self) -> bool:
        """Whether all moves are alike, so that none needs to be looked at."""
        weights = (self.capture, self.pawn, self.double_push, self.castle, self.promotion)
        return set(weights) == {1.0}


RANDOM = Walk(name="random")
DEVELOP = Walk(name="develop", castle=8.0, capture=0.3, max_plies=50)
PAWNS = Walk(name="pawns", pawn=4.0, double_push=6.0, max_plies=80)
HUNT = Walk(name="hunt", capture=8.0, pawn=2.0)
SHUFFLE = Walk(name="shuffle", capture=0.002, pawn=0.002, free_plies=60)
ENDING = Walk(name="ending", ending=True, capture=2.0, pawn=2.0, promotion=3.0, max_plies=80)
ENDING_SHUFFLE = Walk(
    name="ending-shuffle", ending=True, capture=0.02, pawn=0.01, promotion=0.1, max_plies=200
)
WALKS = (RANDOM, DEVELOP, PAWNS, HUNT, SHUFFLE, ENDING, ENDING_SHUFFLE)


def walk(rng: random.Random, style: Walk) -> Iterator[chess.Board]:
    """The positions of one half-random game, the last one before it ends included.

    The same board object each time, with its move stack; a reader must copy what it keeps.
    """
    board = ending(rng) if style.ending else chess.Board()
    free = rng.randint(0, style.free_plies)
    for ply in range(style.max_plies):
        if board.fullmove_number >= MAX_FULLMOVE or board.is_game_over():
            return
        yield board
        board.push(preferred_move(board, RANDOM if ply < free else style, rng))


def replay(moves: Sequence[str]) -> Iterator[chess.Board]:
    """The positions of a given game, before each of its moves."""
    board = chess.Board()
    for move in moves:
        if board.fullmove_number >= MAX_FULLMOVE or board.is_game_over():
            return
        yield board
        board.push_uci(move)


def recent(board: chess.Board) -> tuple[str, ...]:
    """The last plies that led to a position, so many that one more makes a full history."""
    return tuple(move.uci() for move in board.move_stack[-(HISTORY_PLIES - 1) :])


def preferred_move(board: chess.Board, style: Walk, rng: random.Random) -> chess.Move:
    """A random move, by the weights of the style."""
    legal = list(board.legal_moves)
    if style.uniform:
        return rng.choice(legal)
    return rng.choices(legal, [_weight(board, move, style) for move in legal])[0]


def _weight(board: chess.Board, move: chess.Move, style: Walk) -> float:
    if move.promotion:
        return style.promotion
    if board.is_capture(move):
        return style.capture
    piece = board.piece_type_at(move.from_square)
    if piece == chess.PAWN:
        double = abs(move.to_square - move.from_square) == 16
        return style.pawn * style.double_push if double else style.pawn
    if piece == chess.KING and board.is_castling(move):
        return style.castle
    return 1.0


def ending(rng: random.Random) -> chess.Board:
    """A valid position with two kings and one to six other men, the game going on."""
    while True:
        board = chess.Board(None)
        squares = rng.sample(range(64), 8)
        board.set_piece_at(squares[0], chess.Piece(chess.KING, chess.WHITE))
        board.set_piece_at(squares[1], chess.Piece(chess.KING, chess.BLACK))
        for square in squares[2 : rng.randint(3, 8)]:
            kinds = [chess.QUEEN, chess.ROOK, chess.BISHOP, chess.KNIGHT]
            if 0 < chess.square_rank(square) < 7:
                kinds += [chess.PAWN] * 4
            board.set_piece_at(square, chess.Piece(rng.choice(kinds), rng.random() < 0.5))
        board.turn = rng.random() < 0.5
        board.fullmove_number = rng.randint(30, MAX_FULLMOVE - 1)
        if board.is_valid() and not board.is_game_over():
            return board
