"""`rookworld match` and `rookworld selfplay`: two players, pairs of games, a verdict.

The law: the games are those of `games`, two from each opening with colours exchanged, and a match
that is stopped early ends between pairs. With equal settings and a player without chance it is the
same match again; how many games run side by side changes nothing but when a test is looked at.

Importing this module loads no torch: its settings are part of `--help`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from rookworld.data.openings import openings
from rookworld.evaluation.games import (
    STRONGEST,
    Game,
    ModelPlayer,
    Played,
    Player,
    match_estimates,
    new_game,
    pair_scores,
    play_out,
    selfplay,
    write_pgn,
)
from rookworld.evaluation.opinion import Thinking
from rookworld.evaluation.pairs import SequentialTest, pair_counts, superiority
from rookworld.evaluation.players import (
    Loading,
    OpinionPlayer,
    Referee,
    model_answerer,
    model_player,
    open_player,
)
from rookworld.evaluation.statistics import Estimate, Values, share
from rookworld.runtime.config import require
from rookworld.tasks.engine import Engine, find_engine

Count = Callable[[int, int], None]
"""Called with the games that are over, and how many there are to be."""


@dataclass(frozen=True, kw_only=True)
class MatchSettings:
    """Two players from paired openings, until the games are played or a test has decided.

    A and B are models, runs, `stockfish`, or UCI engines by path. The score is A's.
    """

    games: int = 100
    """Games at most; two from each opening, colours exchanged."""
    sprt: tuple[float, float] | None = None
    """Stop as soon as one of two Elo differences is accepted, such as 0 10."""
    alpha: float = 0.05
    """How often the sequential test may accept the higher difference wrongly."""
    beta: float = 0.05
    """How often it may accept the lower one wrongly."""
    sides: bool = False
    """A averages its first move over the position and its images: stronger, and slower."""
    opponent_sides: bool = False
    """B does, if it is a model."""
    strict: bool = False
    """A model whose best move is not legal, or cannot be read, loses the game; without it another
    legal move of its list is played."""
    temperature: float = 0.0
    """Temperature of what models say; 0 is greedy."""
    top_p: float = 1.0
    """Models draw from the most probable tokens that reach this mass; 1 is all of them."""
    nodes: int = 1_000
    """Nodes of an engine's move."""
    skill: int = STRONGEST
    """Stockfish's skill level, 0 to 20."""
    referee: bool = False
    """Stockfish ends games that are decided: 10 pawns for 6 plies, or level for 16."""
    referee_nodes: int = 5_000
    """Nodes of the referee's look at each ply."""
    max_plies: int = 300
    """Plies after which a game is given up as drawn."""
    at_once: int = 32
    """Games side by side, an even number; a sequential test is looked at after each lot."""
    engine: str | None = None
    """Stockfish binary; default: STOCKFISH_PATH, PATH, /usr/games."""
    pgn: Path | None = None
    """Write the games to this file."""
    device: str = "auto"
    """auto, cpu, cuda or cuda:N."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Precision of the weights."""
    seed: int = 0
    """Seed of sampled moves and of the openings' order."""
    json: bool = False
    """Print one JSON object instead of a table."""

    def __post_init__(self) -> None:
        for name in ("games", "at_once"):
            value = getattr(self, name)
            require(value >= 2 and value % 2 == 0, f"{name} is {value}: give an even number")
        for name in ("nodes", "referee_nodes", "max_plies"):
            require(getattr(self, name) >= 1, f"{name} is {getattr(self, name)}: give 1 or more")
        require(0 <= self.skill <= STRONGEST, f"skill is {self.skill}: give 0 to {STRONGEST}")
        self.test()
        self.thinking(sides=False)

    def test(self) -> SequentialTest | None:
        """The sequential test that is asked for."""
        return SequentialTest(*self.sprt, self.alpha, self.beta) if self.sprt else None

    def thinking(self, *, sides: bool) -> Thinking:
        """How a model is asked."""
        return Thinking(temperature=self.temperature, top_p=self.top_p, sides=sides)

    def loading(self) -> Loading:
        """What players are made with."""
        return Loading(
            engine=self.engine,
            strict=self.strict,
            nodes=self.nodes,
            skill=self.skill,
            device=self.device,
            dtype=self.dtype,
            batch_size=self.at_once,
            seed=self.seed,
        )


@dataclass(frozen=True)
class MatchResult:
    """What a match amounts to."""

    players: tuple[str, str]
    estimates: dict[str, Estimate]
    counts: tuple[int, ...]
    """Pairs in which the first player scored 0, ½, 1, 1½ and 2 points."""
    results: tuple[int, int, int]
    """Games won, drawn and lost by the first player."""
    superiority: float
    ratio: float | None
    """Log-likelihood ratio of the sequential test."""
    accepted: float | None
    """The Elo difference that the sequential test accepts."""

    def to_json(self) -> dict[str, Any]:
        """One object."""
        return {
            "players": self.players,
            **{name: one.to_json() for name, one in self.estimates.items()},
            "pentanomial": self.counts,
            "won_drawn_lost": self.results,
            "los": self.superiority,
            "llr": self.ratio,
            "accepted": self.accepted,
        }


def run_match(
    first: str, second: str, settings: MatchSettings, progress: Count | None = None
) -> MatchResult:
    """Play a match; nothing is printed."""
    loading = settings.loading()
    with ExitStack() as stack:
        a, b = (
            stack.enter_context(open_player(name, loading, settings.thinking(sides=sides)))
            for name, sides in ((first, settings.sides), (second, settings.opponent_sides))
        )
        referee = None
        if settings.referee:
            engine = stack.enter_context(Engine(find_engine(settings.engine)))
            referee = Referee(engine, settings.referee_nodes)
        games: list[Game] = []
        for games in lots(a, b, settings, referee):
            if settings.pgn is not None:
                write_pgn(settings.pgn, [(f"{a.name} - {b.name}", game) for game in games])
            if progress is not None:
                progress(len(games), settings.games)
            if _accepted(settings.test(), pair_scores(a, games)) is not None:
                break
    return match_result(a, b, games, settings.test())


def lots(
    a: Player, b: Player, settings: MatchSettings, referee: Referee | None = None
) -> Iterator[list[Game]]:
    """The games so far, after every lot that was played side by side."""
    games: list[Game] = []
    starts = openings(settings.games // 2, settings.seed)
    for begin in range(0, len(starts), settings.at_once // 2):
        lot = []
        for pair, start in enumerate(starts[begin:][: settings.at_once // 2], begin):
            lot += [new_game(2 * pair, a, b, start), new_game(2 * pair + 1, b, a, start)]
        judge = referee.judge if referee is not None else None
        play_out(lot, max_plies=settings.max_plies, claim_draw=True, referee=judge)
        games += lot
        yield games


def _accepted(test: SequentialTest | None, pairs: Values) -> float | None:
    return None if test is None else test.accepted(pair_counts(pairs))


def match_result(
    a: Player, b: Player, games: Sequence[Game], test: SequentialTest | None
) -> MatchResult:
    """What the games of a match amount to, for its first player."""
    pairs = pair_scores(a, games)
    counts: NDArray[np.int64] = pair_counts(pairs)
    estimates = match_estimates(a, games)
    if isinstance(a, OpinionPlayer):
        estimates["match/replaced"] = share(a.replaced, max(a.moves, 1))
    points = [game.points(a) for game in games]
    return MatchResult(
        players=(a.name, b.name),
        estimates=estimates,
        counts=tuple(counts.tolist()),
        results=(points.count(1.0), points.count(0.5), points.count(0.0)),
        superiority=superiority(pairs),
        ratio=None if test is None else float(test.ratio(counts)),
        accepted=_accepted(test, pairs),
    )


@dataclass(frozen=True, kw_only=True)
class SelfplaySettings:
    """Games of a model against itself: how long they stay legal, and how they end."""

    games: int = 50
    """Games."""
    temperature: float = 0.6
    """Temperature; with 0 games start from openings, to be different."""
    top_k: int = 5
    """Most probable tokens to draw from; 0 for all. Not with --sides."""
    sides: bool = False
    """Average the first move over the position and its images; then every move is legal."""
    max_plies: int = 600
    """Plies after which a game is given up as drawn."""
    pgn: Path | None = None
    """Write the games to this file."""
    device: str = "auto"
    """auto, cpu, cuda or cuda:N."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Precision of the weights."""
    seed: int = 0
    """Seed of sampled moves and of the openings' order."""
    json: bool = False
    """Print one JSON object instead of a table."""

    def __post_init__(self) -> None:
        for name in ("games", "max_plies"):
            require(getattr(self, name) >= 1, f"{name} is {getattr(self, name)}: give 1 or more")
        require(self.top_k >= 0, f"top_k is {self.top_k}: give 0 (all tokens) or more")


def run_selfplay(model: str, settings: SelfplaySettings, progress: Count | None = None) -> Played:
    """Play a model against itself; nothing is printed."""
    loading = Loading(device=settings.device, dtype=settings.dtype, seed=settings.seed)
    thinking = Thinking(temperature=settings.temperature, sides=settings.sides)
    player: Player
    if settings.sides:
        player = model_player(model, loading, thinking)
    else:
        answerer = model_answerer(model, loading)
        player = ModelPlayer(answerer.sampling(settings.temperature, top_k=settings.top_k), model)
    starts = [] if settings.temperature else openings(settings.games, settings.seed)
    over = count(1)
    played = selfplay(
        player,
        settings.games,
        starts=starts,
        max_plies=settings.max_plies,
        ended=lambda _: progress(next(over), settings.games) if progress else None,
    )
    if settings.pgn is not None:
        write_pgn(settings.pgn, [(f"selfplay {model}", game) for game in played.games])
    return played
