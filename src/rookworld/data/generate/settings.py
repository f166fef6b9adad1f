"""What `rookworld data generate` is asked for."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from rookworld.data.generate.moves import Moves
from rookworld.data.generate.positions import POSITIONS_PER_CHUNK
from rookworld.data.generate.transitions import Proportions
from rookworld.runtime.bounds import MOST
from rookworld.runtime.errors import ConfigError
from rookworld.tasks.environment import ENVIRONMENT
from rookworld.tasks.policy import POLICY
from rookworld.tasks.task import Letter

DEFAULT_ROWS = 6_000


MOST_WORKERS = 1024


@dataclass(frozen=True, kw_only=True)
class GenerateSettings:
    """Make rows."""

    out: Path
    """Parquet file to write."""

    task: Letter | Literal["mate"] = POLICY.letter
    """P: positions analysed by the engine. A: moves and what they lead to. mate: positions with a
    mate to find."""

    rows: int | None = None
    """Rows to make, over all shards; 6000 if not given, with --positions as many as there are."""

    seed: int = 0
    """Same seed, same rows."""

    workers: int = 0
    """Processes; 0 = one per core. Does not change the rows."""

    shard: str = "0/1"
    """Part i of n, counted from 0 (n/n means 0/n): makes rows/n rows from games of its own."""

    nodes: int = 5_000
    """P: nodes of the search that labels a kept position."""

    play_nodes: int = 2_000
    """P: nodes of the search for a move between kept positions."""

    every: int = 6
    """P: one position in so many plies is kept, on average."""

    random_plies: int = 24
    """P: most random plies at the start of a game."""

    mistakes: float = 0.2
    """P: largest share of random moves in a game."""

    clear_hash: bool = False
    """P: clear the engine's hash before each label, as the Stockfish judge does."""

    engine: str | None = None
    """P: the engine's path; without it STOCKFISH_PATH, PATH and /usr/games are searched."""

    games: tuple[Path, ...] = ()
    """P, A: games to take positions from: PGN files, or text files with one game of UCI moves a
    line."""

    positions: tuple[Path, ...] = ()
    """Rows whose positions are used (Parquet, JSONL, folders of them, embedded:PART, hub ids): P
    labels each of them, A plays one move in each, mate changes a man or two and keeps those that
    still have a mate."""

    moves: Moves | None = None
    """A: moves of every sort; `ends`: mostly listed ones and checks, and draws where few men are
    left; `edge`: those that nearly end the game or are nearly legal. One in each of --positions
    (`all` if not given) or in every position of games, in place of rows by class."""

    plies: int = 0
    """A with --positions: at most so many random plies are played before the row's move and shown
    in its history."""

    games_share: float = 1.0
    """P, A: share of the rows that come from the given games; the rest is played."""

    mate_in: Literal[1, 2] = 1
    """mate: moves to the mate."""

    proportions: Proportions = field(default_factory=Proportions)
    """A: weights of the classes, unless --positions or --moves are given."""

    exclude: tuple[Path, ...] = ()
    """Rows whose positions are left out: files, folders, embedded:PART, hub ids."""

    def __post_init__(self) -> None:
        """Refuse what cannot work, naming the value and the remedy."""
        at_least = {"rows": 1, "workers": 0, "nodes": 1, "play_nodes": 1, "every": 1}
        for name, least in {**at_least, "random_plies": 0, "plies": 0}.items():
            value = getattr(self, name)
            if value is not None and value < least:
                raise ConfigError(f"--{name}: {value} is less than {least}")
            most = MOST_WORKERS if name == "workers" else MOST
            if value is not None and value > most:
                raise ConfigError(f"--{name}: {value} is more than {most}")
        for name in ("mistakes", "games_share"):
            if not 0.0 <= getattr(self, name) <= 1.0:
                raise ConfigError(f"--{name}: {getattr(self, name)} is not between 0 and 1")
        if self.out.suffix != ".parquet":
            raise ConfigError(f"--out: {self.out} does not end in .parquet")
        if self.moves is not None and self.task != ENVIRONMENT.letter:
            raise ConfigError(f"--moves {self.moves} needs --task A")
        if self.plies and not (self.task == ENVIRONMENT.letter and self.positions):
            raise ConfigError(f"--plies {self.plies} needs --task A and --positions")
        if self.positions and self.games:
            raise ConfigError("--positions and --games: rows are made from one of them, not both")
        _ = self.part

    @property
    def part(self) -> tuple[int, int]:
        """The shard as (number, of how many)."""
        number, slash, count = self.shard.partition("/")
        if slash and number.isdecimal() and count.isdecimal() and int(count) >= max(1, int(number)):
            return int(number) % int(count), int(count)
        raise ConfigError(f"--shard: {self.shard!r} is not i/n with i from 0 to n-1, such as 0/4")

    @property
    def played_moves(self) -> Moves | None:
        """A: how moves are drawn; None: rows are looked for by class."""
        return self.moves or ("all" if self.positions else None)

    @property
    def each_game_once(self) -> bool:
        """Whether rows end with the given games: no class is looked for until it is found."""
        alone = bool(self.games) and self.games_share == 1.0
        return alone and (self.task == POLICY.letter or self.moves is not None)

    @property
    def wanted(self) -> int | None:
        """Rows over all shards, None for one of each given position."""
        return DEFAULT_ROWS if self.rows is None and not self.positions else self.rows

    def target(self, given: int) -> int:
        """Rows of this shard, at most, if so many games or positions are given."""
        number, count = self.part
        if self.wanted is None:
            size = POSITIONS_PER_CHUNK[self.task]
            chunks = range(number, math.ceil(given / size), count)
            return sum(min(size, given - chunk * size) for chunk in chunks)
        return self.wanted // count + (number < self.wanted % count)
