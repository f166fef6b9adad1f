"""Positions and games for the page: python-chess says what is legal, the page only draws.

Laws: every position that leaves here could be sent to an engine; text of the page is a move, a FEN
or a PGN, or it is refused with a reason. Left out on purpose: variations and comments of a PGN,
draws that need the whole game (a position is all that the page sends).
"""

from __future__ import annotations

from typing import Any

import chess

from rookworld.runtime.errors import DataError
from rookworld.tasks.pgn import read_pgn
from rookworld.tasks.position import parse_position

MOST_PLIES = 1_200
LONGEST_FEN = 120
LONGEST_MOVE = 12

Record = dict[str, Any]


class NotUnderstood(DataError):
    """What somebody typed is no move here, or nothing that can be loaded: an answer, no failure."""


def described(board: chess.Board, played: chess.Move | None = None, san: str = "") -> Record:
    """A position, the move that led to it, and the moves from it."""
    outcome = board.outcome()
    return {
        "fen": board.fen(),
        "turn": "white" if board.turn else "black",
        "check": board.is_check(),
        "moves": {move.uci(): board.san(move) for move in board.legal_moves},
        "played": played.uci() if played else "",
        "san": san,
        "over": outcome.termination.name.lower().replace("_", " ") if outcome else "",
        "result": outcome.result() if outcome else "",
    }


def after_move(fen: str, text: str) -> Record:
    """The position after a move in SAN or UCI."""
    board = parse_position(fen)
    return _pushed(board, read_move(board, text))


def read_move(board: chess.Board, text: str) -> chess.Move:
    """A legal move as somebody types it: `e4`, `Nf3`, `O-O`, `e2e4`."""
    wanted = text.strip()
    legal = {move.uci(): move for move in board.legal_moves}
    if found := legal.get(wanted.lower()):
        return found
    try:
        move = board.parse_san(wanted)
    except chess.AmbiguousMoveError:
        raise NotUnderstood(f"{wanted!r} could be several moves: say which piece") from None
    except ValueError:
        move = chess.Move.null()
    if move not in legal.values():  # `--` is a null move to python-chess
        raise NotUnderstood(f"{wanted!r} is not a legal move here")
    return move


def read_game(text: str) -> Record:
    """Every position of a FEN or of the first game of a PGN, and who played it."""
    try:
        return _read_game(text.strip())
    except DataError as error:
        raise NotUnderstood(str(error)) from None


def _read_game(wanted: str) -> Record:
    if wanted.split(" ")[0].count("/") == 7 and "\n" not in wanted:
        return {"title": "Position", "positions": [described(parse_position(wanted))]}
    try:
        game = read_pgn(wanted)
    except DataError as error:
        raise DataError(f"neither a FEN nor a PGN that can be read: {error}") from None
    moves = list(game.mainline_moves())
    if len(moves) > MOST_PLIES:
        raise DataError(f"a game of {len(moves)} plies: at most {MOST_PLIES} are shown")
    board = game.board()
    positions = [described(board), *(_pushed(board, move) for move in moves)]
    players = [game.headers.get(side, "?") for side in ("White", "Black")]
    title = "Game" if players == ["?", "?"] else " – ".join(players)
    return {"title": title, "positions": positions}


def _pushed(board: chess.Board, move: chess.Move) -> Record:
    san = board.san(move)
    board.push(move)
    return described(board, move, san)
