"""Who can sit at the board: a model, Stockfish, or any UCI engine; and who ends decided games.

The law: a player made here never plays an illegal move on purpose. A model plays what its opinion
comes to, and what was not its own choice is counted; a `strict` one plays its own best move, legal
or not. Engines are limited by nodes.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import chess

from rookworld.evaluation.games import STRONGEST, EnginePlayer, Game, Player
from rookworld.evaluation.generator import ModelAnswerer, load_answerer
from rookworld.evaluation.opinion import Thinker, Thinking
from rookworld.runtime.checkpoint_names import model_of_run
from rookworld.tasks.engine import Engine, find_engine

STOCKFISH = "stockfish"


class OpinionPlayer:
    """A model that plays what its opinion comes to."""

    def __init__(self, thinker: Thinker, name: str, *, strict: bool = False) -> None:
        self.thinker = thinker
        self.name = name
        self.strict = strict
        self.moves = 0
        self.replaced = 0
        """Moves that stood for something that could not be played."""

    def choose(self, boards: Sequence[chess.Board], games: Sequence[int]) -> list[str]:
        """A legal move for each position, or with `strict` whatever was answered."""
        found = self.thinker.opinions(boards, games)
        self.moves += len(found)
        self.replaced += sum(bool(one.note) for one in found)
        return [one.best if self.strict and one.note else one.move for one in found]


@dataclass(frozen=True, kw_only=True)
class Loading:
    """What it takes to make players."""

    engine: str | None = None
    strict: bool = False
    nodes: int = 1_000
    skill: int = STRONGEST
    device: str = "auto"
    dtype: str = "float32"
    batch_size: int = 64
    seed: int = 0


@contextmanager
def open_player(source: str, loading: Loading, thinking: Thinking) -> Iterator[Player]:
    """The player of a name: `stockfish`, an executable file, or a model or run."""
    if source != STOCKFISH and not _is_engine(source):
        yield model_player(source, loading, thinking)
        return
    ours = source == STOCKFISH
    path = find_engine(loading.engine if ours else source)
    skill = loading.skill if ours else STRONGEST
    with EnginePlayer(path, nodes=loading.nodes, skill=skill) as player:
        yield player


def _is_engine(source: str) -> bool:
    return Path(source).is_file() and shutil.which(source) is not None


def model_player(source: str, loading: Loading, thinking: Thinking) -> OpinionPlayer:
    """A model, or the last checkpoint of a run."""
    return OpinionPlayer(
        Thinker(model_answerer(source, loading), thinking),
        _name(source, thinking),
        strict=loading.strict,
    )


def model_answerer(source: str, loading: Loading) -> ModelAnswerer:
    """The greedy answerer of a model, or of a run's last checkpoint."""
    return load_answerer(
        model_of_run(source),
        device=loading.device,
        dtype=loading.dtype,
        batch_size=loading.batch_size,
        seed=loading.seed,
    )


def _name(source: str, thinking: Thinking) -> str:
    """The model and how it is asked: two ways of asking one model are two players."""
    marks = []
    if thinking.sides:
        marks.append("all sides")
    if thinking.legal_only:
        marks.append("legal only")
    if thinking.temperature:
        marks.append(f"temperature {thinking.temperature:g}")
    return f"{source} ({', '.join(marks)})" if marks else source


RESIGN_CP, RESIGN_PLIES = 1_000, 6
"""A side that has been lost by so much for so many plies has resigned."""
DRAW_CP, DRAW_PLIES, DRAW_FROM_PLY = 10, 16, 80
"""A game that has been level for so many plies, and so long, is drawn."""


@dataclass(eq=False)
class Referee:
    """An engine that ends games which are decided: lost, or level for long."""

    engine: Engine
    nodes: int
    seen: dict[int, list[int]] = field(default_factory=dict)
    """By game the evaluations of its last plies, for White."""

    def judge(self, game: Game) -> None:
        """End the game if it is decided."""
        (line,) = self.engine.search(game.board.fen(), self.nodes, multipv=1)
        history = self.seen.setdefault(game.number, [])
        history.append(line.cp if game.board.turn else -line.cp)
        result = decided(history, game.board.ply())
        if result:
            game.end, game.result = "adjudicated", result


def decided(history: Sequence[int], ply: int) -> str:
    """The result of a game with these evaluations for White; empty while it is open."""
    last = history[-RESIGN_PLIES:]
    if len(last) == RESIGN_PLIES and min(last) >= RESIGN_CP:
        return "1-0"
    if len(last) == RESIGN_PLIES and max(last) <= -RESIGN_CP:
        return "0-1"
    last = history[-DRAW_PLIES:]
    level = len(last) == DRAW_PLIES and max(map(abs, last)) <= DRAW_CP
    return "1/2-1/2" if level and ply >= DRAW_FROM_PLY else ""
