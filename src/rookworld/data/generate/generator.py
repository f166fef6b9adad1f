"""`rookworld data generate`: rows of our own making, the same for the same settings, always.

The law: the rows are a function of the settings. Neither the number of workers, nor a kill at any
moment followed by the same command, changes them; no position occurs twice (A rows: no position
with the same move). See `chunks.py` for how.

Left out on purpose: rows of several tasks in one file, and any network.
"""

from __future__ import annotations

import itertools
import math
import os
import random
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

from rookworld.data.files import file_digest, file_origin, read_fens, write_records
from rookworld.data.generate.analyses import engine_game_rows, given_game_rows
from rookworld.data.generate.chunks import ChunkFolder, chunks_in_order
from rookworld.data.generate.games import kept_games, read_games
from rookworld.data.generate.mates import mate_records, varied_mate
from rookworld.data.generate.moves import SHARES, game_records
from rookworld.data.generate.positions import (
    POSITIONS_PER_CHUNK,
    count_positions,
    kept_positions,
    labelled_records,
    played_record,
    positions_of,
)
from rookworld.data.generate.settings import GenerateSettings
from rookworld.data.generate.transitions import transition_records
from rookworld.data.rows import MATE, columns_of
from rookworld.data.sources import source_files
from rookworld.runtime.atomic_files import remove_unfinished
from rookworld.runtime.errors import ConfigError
from rookworld.tasks.engine import Engine, EngineLost, find_engine
from rookworld.tasks.environment import ENVIRONMENT
from rookworld.tasks.notation import position_key
from rookworld.tasks.policy import POLICY

Record = dict[str, Any]

GAMES_PER_CHUNK = {POLICY.letter: 4, ENVIRONMENT.letter: 50, MATE: 0}
A_ROWS_PER_CHUNK = 250
GAME_ROWS_PER_CHUNK = 1_000
MATES_PER_CHUNK = 100
ATTEMPTS = 3
"""Times that a chunk is begun before a dying engine is the user's problem."""


@dataclass(frozen=True, kw_only=True)
class Generated:
    """What a generation made."""

    rows: int
    """Rows in the file."""

    repeated: int
    """Rows left out because an earlier one has the same position (A: and move)."""

    excluded: int
    """Rows left out because their position is in an excluded file."""

    asked: int
    """Rows asked for; more than `rows` only if the given games or positions were not enough."""


def generate(settings: GenerateSettings, progress: Callable[[int, int], None]) -> Generated:
    """Write the file of rows; `progress` is told rows done and rows in all.

    Run again after an interruption it goes on; run again after the end it changes nothing.
    """
    origin = chunk_origin(settings)
    excluded_files = [path for source in settings.exclude for path in source_files(source)]
    result = {**origin, "rows": settings.wanted, "exclude": contents(excluded_files)}
    folder = ChunkFolder(settings.out.with_name(settings.out.name + ".parts"))
    if settings.out.exists():
        done = file_origin(settings.out) or {}
        if any(done.get(name) != value for name, value in result.items()):
            raise ConfigError(
                f"--out: {settings.out} holds rows of other settings: give another name, or delete"
                " it"
            )
        folder.remove()
        return Generated(**done["made"])
    excluded = {position_key(fen) for path in excluded_files for fen in read_fens(path)}
    with folder.opened(origin):
        store, given = kept_source(folder.path, settings)
        make = partial(make_chunk, settings, store)
        workers = settings.workers or len(os.sched_getaffinity(0))
        chunks = chunks_in_order(folder, chunk_numbers(settings, given), make, workers)
        merged = Merge(settings.task, settings.target(given), excluded)
        progress(0, merged.target)
        for records in chunks:
            merged.add(records)
            progress(len(merged.records), merged.target)
            if merged.full:
                chunks.close()
                break
        made = merged.summary()
        note = {**result, "made": asdict(made)}
        write_records(settings.out, merged.records, columns_of(settings.task), origin=note)
        remove_unfinished(settings.out)
        folder.remove()
    return made


def contents(files: Iterable[Path]) -> list[list[str]]:
    """Name and digest of each file: one that has changed excludes other positions."""
    return [[path.name, file_digest(path)] for path in files]


class Merge:
    """Rows in chunk order, each position once, up to the number asked for."""

    def __init__(self, task: str, target: int, excluded: set[str]) -> None:
        self.target = target
        self.with_move = task == ENVIRONMENT.letter
        self.records: list[Record] = []
        self.repeated = 0
        self.excluded = 0
        self._seen: set[str] = set()
        self._excluded = excluded

    @property
    def full(self) -> bool:
        """Whether there are as many rows as asked for."""
        return len(self.records) == self.target

    def add(self, records: list[Record]) -> None:
        """Take the rows of the next chunk."""
        for record in records:
            if self.full:
                return
            key = position = position_key(record["fen"])
            if self.with_move:
                key = f"{position} {record['move']}"
            if position in self._excluded:
                self.excluded += 1
            elif key in self._seen:
                self.repeated += 1
            else:
                self._seen.add(key)
                self.records.append(record)

    def summary(self) -> Generated:
        """The counts."""
        return Generated(
            rows=len(self.records),
            repeated=self.repeated,
            excluded=self.excluded,
            asked=self.target,
        )


def chunk_origin(settings: GenerateSettings) -> dict[str, Any]:
    """The settings on which the rows of a chunk depend, as JSON has them."""
    played = () if settings.positions else ("play_nodes", "every", "random_plies", "mistakes")
    names: dict[str, tuple[str, ...]] = {
        POLICY.letter: ("nodes", *played, "clear_hash"),
        ENVIRONMENT.letter: (),
        MATE: ("mate_in",),
    }
    origin = {name: getattr(settings, name) for name in ("task", "seed", *names[settings.task])}
    origin["shard"] = list(settings.part)
    if settings.task == POLICY.letter:
        with Engine(find_engine(settings.engine)) as engine:
            origin["engine"] = engine.name
    if settings.task == ENVIRONMENT.letter and not settings.played_moves:
        origin["proportions"] = asdict(settings.proportions)
    if settings.games:
        origin["games"] = [path.name for path in settings.games]
        origin["games_share"] = settings.games_share
    if settings.positions:
        origin["positions"] = [path.name for path in settings.positions]
    if settings.task == ENVIRONMENT.letter and settings.played_moves:
        origin["shares"] = SHARES[settings.played_moves]
    if settings.plies:
        origin["plies"] = settings.plies
    return origin


def kept_source(folder: Path, settings: GenerateSettings) -> tuple[Path | None, int]:
    """The file in `folder` with the given games or positions, and how many there are."""
    if (positions := kept_positions(folder, settings.positions)) is not None:
        return positions, count_positions(positions)
    games = kept_games(folder, settings.games)
    return games, len(read_games(games)) if games else 0


def chunk_numbers(settings: GenerateSettings, given: int) -> Iterator[int]:
    """The chunk numbers of this shard: without end, or until what is given is used up."""
    number, count = settings.part
    if settings.positions:
        size = POSITIONS_PER_CHUNK[settings.task]
    elif settings.each_game_once:
        size = GAMES_PER_CHUNK[settings.task]
    else:
        return itertools.count(number, count)
    return iter(range(number, math.ceil(given / size), count))


def make_chunk(settings: GenerateSettings, store: Path | None, number: int) -> list[Record]:
    """The rows of one chunk: a pure function of settings, what is given, and number."""
    if settings.task == ENVIRONMENT.letter:
        return environment_records(settings, store, number)
    if settings.task == MATE:
        return mates_of_chunk(settings, store, number)
    for _ in range(ATTEMPTS - 1):
        try:
            return analysis_records(settings, store, number)
        except EngineLost:
            continue
    return analysis_records(settings, store, number)


def chunk_rng(settings: GenerateSettings, number: int) -> random.Random:
    """The chunk's own source of chance."""
    return random.Random(f"{settings.task}/{settings.seed}/{number}")


def given_games(settings: GenerateSettings, path: Path | None, number: int) -> list[list[str]]:
    """The given games of a chunk; none if it is one of those that are played."""
    if path is None:
        return []
    share = settings.games_share
    before, after = int(number * share), int((number + 1) * share)
    if before == after:
        return []
    games, count = read_games(path), GAMES_PER_CHUNK[settings.task]
    numbers = range(before * count, (before + 1) * count)
    if settings.each_game_once:
        numbers = range(numbers.start, min(numbers.stop, len(games)))
    return [games[number % len(games)].split() for number in numbers]


def given_positions(
    settings: GenerateSettings, store: Path, number: int
) -> Iterator[tuple[str, list[str]]]:
    """The given positions of a chunk, each with its listed moves."""
    size = POSITIONS_PER_CHUNK[settings.task]
    return positions_of(store, range(number * size, (number + 1) * size))


def environment_records(
    settings: GenerateSettings, store: Path | None, number: int
) -> list[Record]:
    """The A rows of one chunk."""
    rng, moves = chunk_rng(settings, number), settings.played_moves
    if settings.positions and store and moves:
        given = given_positions(settings, store, number)
        rows = (played_record(fen, listed, rng, moves, settings.plies) for fen, listed in given)
        return [row for row in rows if row is not None]
    games = given_games(settings, store, number)
    if moves:
        return game_records(rng, moves, GAME_ROWS_PER_CHUNK, games)
    return transition_records(rng, settings.proportions, A_ROWS_PER_CHUNK, games)


def mates_of_chunk(settings: GenerateSettings, store: Path | None, number: int) -> list[Record]:
    """The mates of one chunk."""
    rng = chunk_rng(settings, number)
    if settings.positions and store:
        given = given_positions(settings, store, number)
        varied = (varied_mate(fen, settings.mate_in, rng) for fen, _ in given)
        return [record for record in varied if record is not None]
    return mate_records(rng, settings.mate_in, MATES_PER_CHUNK)


def analysis_records(settings: GenerateSettings, store: Path | None, number: int) -> list[Record]:
    """The P rows of one chunk."""
    rng, engine = chunk_rng(settings, number), kept_engine(find_engine(settings.engine))
    if settings.positions and store:
        fens = (fen for fen, _ in given_positions(settings, store, number))
        return list(labelled_records(engine, settings, fens))
    if given := given_games(settings, store, number):
        games = [given_game_rows(engine, rng, settings, moves) for moves in given]
    else:
        games = [
            engine_game_rows(engine, rng, settings) for _ in range(GAMES_PER_CHUNK[POLICY.letter])
        ]
    return [record for game in games for record in game]


@cache
def kept_engine(path: Path) -> Engine:
    """This process's engine, for all its chunks: starting one takes as long as playing a chunk."""
    return Engine(path)
