"""P rows: positions of varied games, each labelled with the engine's best five moves.

A game begins with random plies, goes on with moves sampled from the engine's five at a temperature
of its own, and has mistakes sprinkled in: a model meets positions that good play never reaches.
Play is cheap (`play_nodes`); only every few plies a position is kept and searched with all `nodes`.
Given games (PGN or move lists) replace the engine's play, a quarter of their positions after one
random move.

The law: the rows of a chunk depend on the settings and the chunk's number alone, so the hash is
cleared at the start of each game and every draw comes from the chunk's own generator.

Left out on purpose: tablebases, opening books, and any filter on how balanced a position is.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import chess

from rookworld.tasks.engine import Engine, Line

Record = dict[str, Any]

TEMPERATURES_CP = (5.0, 20.0, 60.0, 150.0)
"""Centipawns by which a move may be worse at a likelihood of 1/e; one of them for each game."""

MAX_PLIES = 240
DECIDED_CP = 1_500
STOP_DECIDED = 0.08
"""Chance per ply that a decided game ends there: won endings are seen, but do not fill the rows."""


class AnalysisSettings(Protocol):
    """What this module reads of the settings of a generation."""

    @property
    def nodes(self) -> int: ...
    @property
    def play_nodes(self) -> int: ...
    @property
    def every(self) -> int: ...
    @property
    def random_plies(self) -> int: ...
    @property
    def mistakes(self) -> float: ...
    @property
    def clear_hash(self) -> bool: ...


def engine_game_rows(
    engine: Engine, rng: random.Random, settings: AnalysisSettings
) -> Iterator[Record]:
    """The kept positions of one game that the engine plays against itself."""
    engine.new_game()
    board = chess.Board()
    for _ in range(rng.randint(0, settings.random_plies)):
        if not (legal := list(board.legal_moves)):
            return
        board.push(rng.choice(legal))
    temperature = rng.choice(TEMPERATURES_CP)
    mistakes = rng.uniform(0.0, settings.mistakes)
    last_ply = board.ply() + rng.randint(settings.every, MAX_PLIES)
    wait = plies_to_next(settings.every, rng)
    while board.ply() < last_ply and not board.is_game_over():
        fen, wait = board.fen(), wait - 1
        if wait == 0:
            wait = plies_to_next(settings.every, rng)
            lines = label(engine, fen, settings)
            yield analysis_record(fen, lines)
        else:
            lines = engine.search(fen, settings.play_nodes)
        if abs(lines[0].cp) > DECIDED_CP and rng.random() < STOP_DECIDED:
            return
        if rng.random() < mistakes:
            board.push(rng.choice(list(board.legal_moves)))
        else:
            board.push_uci(sampled_move(lines, temperature, rng))


def given_game_rows(
    engine: Engine, rng: random.Random, settings: AnalysisSettings, moves: Sequence[str]
) -> Iterator[Record]:
    """The kept positions of one given game."""
    engine.new_game()
    board = chess.Board()
    wait = plies_to_next(settings.every, rng)
    for move in moves:
        board.push_uci(move)
        wait -= 1
        if wait or board.is_game_over():
            continue
        wait = plies_to_next(settings.every, rng)
        aside = board.copy(stack=False)
        if rng.random() < 0.25:
            aside.push(rng.choice(list(aside.legal_moves)))
        if not aside.is_game_over():
            yield analysis_record(aside.fen(), label(engine, aside.fen(), settings))


def plies_to_next(every: int, rng: random.Random) -> int:
    """Plies until the next kept position: `every` on average, never neighbours if it is large."""
    return rng.randint(every - every // 2, every + every // 2)


def label(engine: Engine, fen: str, settings: AnalysisSettings) -> list[Line]:
    """The engine's lines for a kept position."""
    if settings.clear_hash:
        engine.new_game()
    return engine.search(fen, settings.nodes)


def analysis_record(fen: str, lines: Sequence[Line]) -> Record:
    """A P row as the columns of a file."""
    return {
        "fen": fen,
        "moves": [line.move for line in lines],
        "cp": [line.cp for line in lines],
        "depth": lines[0].depth,
    }


def sampled_move(lines: Sequence[Line], temperature_cp: float, rng: random.Random) -> str:
    """One of the moves, a worse one exponentially less often."""
    best = lines[0].cp
    weights = [math.exp((line.cp - best) / temperature_cp) for line in lines]
    return rng.choices([line.move for line in lines], weights)[0]
