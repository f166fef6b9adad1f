"""`rookworld eval`: which suites to run on which models, and the table of what came out.

The law: every suite of an evaluation sees the same rows, positions and seeds for every model, so
that models can be compared row by row; the numbers come from `evaluate`, `play` and `worlds`, and
nothing is computed here.

Importing this module loads no torch: its settings are part of `--help`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from rookworld.data.openings import openings
from rookworld.data.puzzles import Puzzle, read_puzzles
from rookworld.evaluation.evaluate import (
    Evaluation,
    HeldOut,
    evaluate,
    held_out_from,
    majority_baseline,
    paired,
    passk_columns,
    solve,
)
from rookworld.evaluation.games import (
    STRONGEST,
    EnginePlayer,
    Game,
    ModelPlayer,
    Played,
    Player,
    match,
    selfplay,
    write_pgn,
)
from rookworld.evaluation.generator import ModelAnswerer, Progress, load_answerer
from rookworld.evaluation.statistics import PairedDifference, Values, estimates, known, rating
from rookworld.evaluation.world_model import walk_worlds, world_estimates
from rookworld.runtime.bounds import MOST
from rookworld.runtime.config import require
from rookworld.tasks.engine import find_engine
from rookworld.tasks.environment import ENVIRONMENT
from rookworld.tasks.judge import StockfishJudge
from rookworld.tasks.policy import POLICY
from rookworld.tasks.registry import task_of
from rookworld.tasks.task import Judge

Suite = Literal["policy", "arbiter", "mate", "puzzles", "selfplay", "world", "match", "passk"]

BANDS = (0, 1_000, 1_500, 2_000, 2_500)
"""Where the rating bands of puzzles begin."""


@dataclass(frozen=True, kw_only=True)
class EvalSettings:
    """Chess metrics of one or more models; see docs/evaluation.md."""

    suite: tuple[Suite, ...] = ("policy", "arbiter", "mate")
    """What to measure: any of policy, arbiter, mate, puzzles, selfplay, world, match, passk."""
    data: str = "embedded:test"
    """Rows of policy, arbiter and passk: embedded:PART, a file, or a hub id."""
    mates: str = "embedded:mate"
    """Mates in one: embedded:mate, BIG-bench task.json, Lichess puzzle .csv, or a file of ours."""
    puzzles: Path | None = None
    """Lichess puzzle .csv for the suite puzzles."""
    n_policy: int = 500
    """Analysis rows at most."""
    n_environment: int = 240
    """Environment rows at most."""
    n_mates: int = 400
    """Mates in one at most."""
    n_puzzles: int = 1_000
    """Puzzles at most."""
    judge: Literal["labels", "stockfish"] = "labels"
    """Who says what is best: the rows' labels, or Stockfish, asked live."""
    engine: str | None = None
    """Stockfish (default: STOCKFISH_PATH, then PATH)."""
    nodes: int = 200_000
    """Nodes of a live judgement."""
    temperature: float = 0.0
    """Temperature of the answers to rows, mates, puzzles and in matches; 0 is greedy."""
    sampled: bool = True
    """Answer the rows once more at temperature 1, for reward/sampled."""
    samples: int = 16
    """Answers per row of passk, at temperature 1."""
    games: int = 50
    """Games of selfplay, world and match; a match plays two from each opening."""
    max_plies: int = 600
    """Plies after which a game is given up as drawn."""
    play_temperature: float = 0.6
    """Temperature of selfplay and world; with 0 games start from openings, to be different."""
    play_top_k: int = 5
    """Most probable tokens that selfplay and world draw from; 0 for all."""
    opponent: str = "stockfish"
    """Opponent in a match: stockfish, or a model."""
    opponent_nodes: int = 1_000
    """Nodes of Stockfish's moves in a match."""
    skill: int = 0
    """Stockfish's skill level in a match, 0 to 20."""
    pgn: Path | None = None
    """Write the games of selfplay and match to this file."""
    batch_size: int = 64
    """Prompts answered at once; no number depends on it."""
    device: str = "auto"
    """auto, cpu, cuda or cuda:N."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Precision of the weights."""
    seed: int = 0
    """Seed of sampled answers and of the openings' order."""
    json: bool = False
    """Print one JSON object instead of a table."""

    def __post_init__(self) -> None:
        for name in ("n_policy", "n_environment", "n_mates", "n_puzzles", "samples", "batch_size"):
            value = getattr(self, name)
            require(value >= 1, f"{name} is {value}: give 1 or more")
            require(value <= MOST, f"{name} is {value}: give {MOST} or less")
        require(self.batch_size <= 2**20, f"batch_size is {self.batch_size}: give {2**20} or less")
        require(self.games >= 2, f"games is {self.games}: give 2 or more")
        require(self.max_plies >= 1, f"max_plies is {self.max_plies}: give 1 or more")
        require(0 <= self.skill <= STRONGEST, f"skill is {self.skill}: give 0 to {STRONGEST}")
        require(bool(self.suite), "suite is empty: name at least one")
        require(
            "puzzles" not in self.suite or self.puzzles is not None,
            "suite puzzles needs --puzzles FILE, a Lichess puzzle .csv",
        )


@dataclass(frozen=True)
class EvalResult:
    """What came out for each model, and each later model's difference from the first."""

    models: tuple[str, ...]
    evaluations: tuple[Evaluation, ...]
    differences: tuple[dict[str, PairedDifference], ...]

    def to_json(self) -> dict[str, Any]:
        """One object for one model; for more, a list of those and their paired differences."""
        found = [
            {"model": model, **evaluation.to_json()}
            for model, evaluation in zip(self.models, self.evaluations, strict=True)
        ]
        if len(found) == 1:
            return found[0]
        compared = [
            {"model": model, "minus": self.models[0]}
            | {name: difference.to_json() for name, difference in differences.items()}
            for model, differences in zip(self.models[1:], self.differences, strict=True)
        ]
        return {"models": found, "paired": compared}


@dataclass(frozen=True)
class Material:
    """What all models of an evaluation are asked, read once."""

    settings: EvalSettings
    held_out: HeldOut
    puzzles: Sequence[Puzzle] = ()
    judge: Judge | None = None
    opponent: Player | None = None
    games: list[tuple[str, Game]] = field(default_factory=list)


def run_eval(
    models: Sequence[str], settings: EvalSettings, progress: Progress | None = None
) -> EvalResult:
    """Run the suites on every model; nothing is printed."""
    require(bool(models), "no model to evaluate: name an embedded model, a folder or a hub id")

    from rookworld.model.weights import resolve_folder

    def load(model: str) -> ModelAnswerer:
        return load_answerer(
            model,
            device=settings.device,
            dtype=settings.dtype,
            batch_size=settings.batch_size,
            seed=settings.seed,
            progress=progress,
        )

    for model in models:
        resolve_folder(model)  # before hours go into the first of them
    with _material(settings, load) as material:
        evaluations = tuple(_evaluate_model(model, load(model), material) for model in models)
        if settings.pgn is not None:
            write_pgn(settings.pgn, material.games)
    differences = tuple(paired(evaluations[0], other) for other in evaluations[1:])
    return EvalResult(tuple(models), evaluations, differences)


@contextmanager
def _material(settings: EvalSettings, load: Callable[[str], ModelAnswerer]) -> Iterator[Material]:
    """Everything the suites need, engines included; those are ended with it."""
    wanted = set(settings.suite)
    with ExitStack() as stack:
        judge = opponent = None
        rows = held_out_from(
            settings.data,
            {
                POLICY.letter: settings.n_policy if wanted & {"policy", "passk"} else 0,
                ENVIRONMENT.letter: settings.n_environment if "arbiter" in wanted else 0,
            },
            mates=settings.mates,
            n_mates=settings.n_mates if "mate" in wanted else 0,
        )
        puzzles = _puzzles(settings) if "puzzles" in wanted else []
        if settings.judge == "stockfish" and "policy" in wanted:
            engine = find_engine(settings.engine)
            judge = stack.enter_context(StockfishJudge(engine, nodes=settings.nodes))
        if "match" in wanted:
            opponent = stack.enter_context(open_player(settings, load))
        yield Material(settings, rows, puzzles, judge, opponent)


def _puzzles(settings: EvalSettings) -> list[Puzzle]:
    assert settings.puzzles is not None
    return read_puzzles(settings.puzzles, settings.n_puzzles)


@contextmanager
def open_player(settings: EvalSettings, load: Callable[[str], ModelAnswerer]) -> Iterator[Player]:
    """The opponent that the settings name, ready to play."""
    if settings.opponent != "stockfish":
        answerer = load(settings.opponent).sampling(settings.temperature)
        yield ModelPlayer(answerer, settings.opponent, fallback=True)
        return
    path = find_engine(settings.engine)
    with EnginePlayer(path, nodes=settings.opponent_nodes, skill=settings.skill) as player:
        yield player


def _evaluate_model(name: str, model: ModelAnswerer, material: Material) -> Evaluation:
    settings = material.settings
    found = Evaluation()
    if {"policy", "arbiter", "mate"} & set(settings.suite):
        found |= _rows_suite(model, material)
    if "passk" in settings.suite:
        many = model.sampling(1.0, samples=settings.samples)
        ks = [2**power for power in range(settings.samples.bit_length())]
        found |= Evaluation.of(passk_columns(many, POLICY.select(material.held_out.rows), ks))
    if "puzzles" in settings.suite:
        found |= _puzzle_suite(model, material)
    if "selfplay" in settings.suite:
        found |= _keep(f"selfplay {name}", _selfplay_suite(name, model, settings), material)
    if "world" in settings.suite:
        found |= Evaluation(_world_suite(model, settings))
    if "match" in settings.suite:
        found |= _keep(f"match {name}", _match_suite(name, model, material), material)
    return found


def _rows_suite(model: ModelAnswerer, material: Material) -> Evaluation:
    """policy, arbiter and mate, as the training loop measures them."""
    settings, rows = material.settings, material.held_out
    if "policy" not in settings.suite:
        rows = HeldOut([row for row in rows.rows if task_of(row) is not POLICY], rows.mates)
    if settings.temperature:
        found = evaluate(model.sampling(settings.temperature), rows, judge=material.judge)
        values = found.rows
        values["reward/sampled"] = values.pop("reward/greedy")
        found = Evaluation.of(values)
    else:
        again = model.sampling(1.0) if settings.sampled else None
        found = evaluate(model, rows, sampled=again, judge=material.judge)
    return found | Evaluation(majority_baseline(ENVIRONMENT.select(rows.rows)))


def _puzzle_suite(model: ModelAnswerer, material: Material) -> Evaluation:
    solved = solve(model.sampling(material.settings.temperature), material.puzzles)
    ratings = known(puzzle.rating for puzzle in material.puzzles)
    columns = {"puzzles/solved": solved, **_bands(ratings, solved)}
    return Evaluation(
        estimates(columns) | {"puzzles/rating": rating(ratings, solved)},
        columns,
    )


def _bands(ratings: Values, solved: Values) -> dict[str, Values]:
    columns = {}
    for low, high in zip(BANDS, (*BANDS[1:], 10_000), strict=True):
        inside = (ratings >= low) & (ratings < high)
        name = f"puzzles/solved/{low}+" if high == 10_000 else f"puzzles/solved/{low}-{high - 1}"
        columns[name] = known(
            value if there else None for value, there in zip(solved, inside, strict=True)
        )
    return columns


def _starts(settings: EvalSettings) -> list[tuple[str, ...]]:
    """Openings for games without chance, which would otherwise all be the same game."""
    return [] if settings.play_temperature else openings(settings.games, settings.seed)


def _player(model: ModelAnswerer, settings: EvalSettings) -> ModelAnswerer:
    return model.sampling(settings.play_temperature, top_k=settings.play_top_k)


def _selfplay_suite(name: str, model: ModelAnswerer, settings: EvalSettings) -> Played:
    player = ModelPlayer(_player(model, settings), name)
    starts = _starts(settings)
    return selfplay(player, settings.games, starts=starts, max_plies=settings.max_plies)


def _world_suite(model: ModelAnswerer, settings: EvalSettings) -> dict[str, Any]:
    answerer, starts = _player(model, settings), _starts(settings)
    walks = walk_worlds(answerer, settings.games, starts=starts, max_plies=settings.max_plies)
    return dict(world_estimates(walks))


def _match_suite(name: str, model: ModelAnswerer, material: Material) -> Played:
    settings = material.settings
    assert material.opponent is not None
    player = ModelPlayer(model.sampling(settings.temperature), name, fallback=True)
    starts = openings(settings.games // 2, settings.seed)
    return match(player, material.opponent, starts, max_plies=settings.max_plies)


def _keep(event: str, played: Played, material: Material) -> Evaluation:
    material.games.extend((event, game) for game in played.games)
    return Evaluation(played.estimates)
