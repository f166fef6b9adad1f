"""The model as a UCI engine, so that any chess program can play against it or analyse with it.

The law: whatever is sent, the loop lives on and `go` is always answered with a legal move if there
is one: the model's B, else the first legal move of its list, else the first legal move by name,
with an `info string` that says so. Its own evaluations are shown as `info … score`.

Lines come in and lines go out; whoever calls prints them. Left out on purpose: search, clocks,
pondering, options. The model thinks for as long as one answer takes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import chess

from rookworld.evaluation.generator import Answerer, analyses
from rookworld.tasks.notation import MATE, is_mate
from rookworld.tasks.policy import PolicyAnswer
from rookworld.tasks.task import legal_moves


def serve(answerer: Answerer, name: str, lines: Iterable[str]) -> Iterator[str]:
    """Answers to UCI commands, line by line, until `quit` or the end of the input."""
    board = chess.Board()
    for line in lines:
        command, *words = line.split() or [""]
        if command == "quit":
            return
        if command == "uci":
            yield from (f"id name RookWorld {name}", "id author RookWorld", "uciok")
        elif command == "isready":
            yield "readyok"
        elif command == "ucinewgame":
            board = chess.Board()
        elif command == "position":
            try:
                board = position(words)
            except ValueError as error:
                yield f"info string position refused, the one before stays: {error}"
        elif command == "go":
            yield from think(answerer, board)


def position(words: Sequence[str]) -> chess.Board:
    """The board of a `position` command; a `ValueError` if it is none, or a move is illegal."""
    cut = words.index("moves") if "moves" in words else len(words)
    kind, *fen = words[:cut] or [""]
    if kind not in ("startpos", "fen"):
        raise ValueError("expected startpos or fen")
    board = chess.Board(" ".join(fen)) if kind == "fen" else chess.Board()
    if not board.is_valid():
        raise ValueError("not a legal position")
    for move in words[cut + 1 :]:
        board.push_uci(move)
    return board


def think(answerer: Answerer, board: chess.Board) -> Iterator[str]:
    """What the model says of a position, and the move it comes to."""
    legal = legal_moves(board.fen())
    if not legal:
        yield "bestmove (none)"
        return
    said = analyses(answerer, [board.fen()])[0]
    yield from _lines(said, legal)
    choices = [move for move in (said.best, *said.moves) if move in legal]
    if said.best not in legal:
        yield f"info string no legal best move: {said.fault or said.best}"
    yield f"bestmove {choices[0] if choices else min(legal)}"


def _lines(said: PolicyAnswer, legal: frozenset[str]) -> Iterator[str]:
    listed = [pair for pair in zip(said.moves, said.cp, strict=True) if pair[0] in legal]
    for rank, (move, cp) in enumerate(listed, 1):
        yield f"info depth 1 multipv {rank} score {_score(cp)} pv {move}"


def _score(cp: int) -> str:
    if not is_mate(cp):
        return f"cp {cp}"
    return f"mate {MATE - cp if cp > 0 else -MATE - cp}"
