"""A sweep's TOML file: which settings are tried, in which values, and how a trial is judged.

Laws: a file is checked whole before anything runs (every value of the space makes valid training
settings); for `grid` and `random` the settings of trial n are a function of the file and n alone,
so every process, and every restart, means the same by it. A name such as "batch_size,k_samples"
ties settings together: each choice is a list with a value for each. Held-out rows cannot be swept:
trials would be compared on different questions.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import tomllib
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np

from rookworld.rl.presets import TRAIN_PRESETS
from rookworld.rl.settings import TrainSettings
from rookworld.runtime.config import override, read_toml, require, short_hash, suggestion
from rookworld.runtime.errors import ConfigError

Sampler = Literal["grid", "random", "tpe"]
Params = dict[str, Any]

NOT_SWEPT = frozenset(
    {"out", "resume", "dry_run", "log_dir", "held_out"}
    | {"eval_policy_rows", "eval_environment_rows", "eval_mates", "eval_every"}
)


@dataclass(frozen=True)
class Choices:
    """A setting that takes one of some values (lists, where several settings are tied)."""

    values: tuple[Any, ...]

    def draw(self, rng: np.random.Generator) -> Any:
        return self.values[int(rng.integers(len(self.values)))]

    def plain(self) -> dict[str, Any]:
        return {"choices": list(self.values)}

    @property
    def corners(self) -> tuple[Any, ...]:
        """Values that must be valid for all to be."""
        return self.values

    def __str__(self) -> str:
        return "{" + ", ".join(map(str, self.values)) + "}"


@dataclass(frozen=True)
class Range:
    """A setting that takes any value between two bounds, whole numbers if both bounds are."""

    low: float
    high: float
    log: bool = False

    @property
    def whole(self) -> bool:
        return isinstance(self.low, int) and isinstance(self.high, int)

    def draw(self, rng: np.random.Generator) -> float | int:
        low, high = (math.log(self.low), math.log(self.high)) if self.log else (self.low, self.high)
        value = float(rng.uniform(low, high))
        value = min(max(math.exp(value) if self.log else value, self.low), self.high)
        # four digits say as much as a search can learn, and can be typed again
        return round(value) if self.whole else float(f"{value:.4g}")

    def plain(self) -> dict[str, Any]:
        return {"low": self.low, "high": self.high, "log": self.log}

    @property
    def corners(self) -> tuple[Any, ...]:
        return (self.low, self.high)

    def __str__(self) -> str:
        return f"{self.low:g}…{self.high:g}{' (log)' if self.log else ''}"


@dataclass(frozen=True, kw_only=True)
class SweepFile:
    """A sweep as its file says."""

    name: str
    """The file's name without its ending."""
    sampler: Sampler = "grid"
    """Every combination, independent draws, or draws that learn from earlier trials (TPE)."""
    trials: int = 0
    """How many; a grid has as many as there are combinations."""
    metric: str = "reward/greedy"
    """Held-out metric (of eval.jsonl) by which the trained model is judged."""
    direction: Literal["maximize", "minimize"] = "maximize"
    """Whether more or less of it is better."""
    prune: bool = False
    """Stop trials whose held-out metric is worse than the median of earlier ones at that step."""
    prune_after: int = 5
    """Trials that must have ended before any is pruned."""
    seed: int = 0
    """Seed of the draws."""
    preset: str = "plain"
    """Training preset that [train] and [space] are laid over."""
    train: dict[str, Any] = field(default_factory=dict)
    """Settings that all trials share."""
    space: dict[str, Choices | Range] = field(default_factory=dict)
    """Settings that differ, by name, or by names tied with commas."""

    @property
    def planned(self) -> int:
        """How many trials there will be."""
        return self.trials or math.prod(
            len(one.values) for one in self.space.values() if isinstance(one, Choices)
        )

    def params(self, number: int) -> Params:
        """What trial `number` tries (grid and random)."""
        if self.sampler == "grid":
            values = (one.corners for one in self.space.values())
            chosen = next(itertools.islice(itertools.product(*values), number, None))
            return dict(zip(self.space, chosen, strict=True))
        rng = np.random.default_rng((self.seed, number))
        return {name: one.draw(rng) for name, one in self.space.items()}

    def settings(self, params: Mapping[str, Any]) -> dict[str, Any]:
        """The training settings of a trial: what all share, then its own."""
        return {**self.train, **untied(params)}

    def plain(self) -> dict[str, Any]:
        """As JSON holds it."""
        shown = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        return shown | {"space": {name: one.plain() for name, one in self.space.items()}}

    @property
    def fingerprint(self) -> str:
        """Equal for files that mean the same trials."""
        return short_hash(self, ignore=("name", "trials", "prune", "prune_after"))


def untied(params: Mapping[str, Any]) -> dict[str, Any]:
    """Tied settings one by one."""
    found: dict[str, Any] = {}
    for name, value in params.items():
        names = split(name)
        found |= dict(zip(names, value, strict=True)) if len(names) > 1 else {name: value}
    return found


def split(name: str) -> list[str]:
    return [part.strip().replace("-", "_") for part in name.split(",")]


# --- reading ------------------------------------------------------------------------------------


def sweep_path(file: Path) -> Path:
    """A file, or a built-in sweep by its name, in a clone and in an installed package alike."""
    if file.exists():
        return file
    built_in = built_in_sweeps()
    if file.stem in built_in and file.suffix in ("", ".toml"):
        return built_in[file.stem]
    raise ConfigError(
        f"{file}: no such file, nor a built-in sweep ({', '.join(built_in)})"
        f"{suggestion(file.stem, built_in)}"
    )


def built_in_sweeps() -> dict[str, Path]:
    """Name -> file of the sweeps that come with the program."""
    package = Path(__file__).parents[1]
    folders = (package / "assets" / "configs" / "sweeps", package.parents[1] / "configs" / "sweeps")
    return {path.stem: path for folder in folders for path in sorted(folder.glob("*.toml"))}


def read_sweep_file(
    path: Path, changes: tuple[str, ...] = (), trials: int | None = None
) -> SweepFile:
    """The sweep in a TOML file, `changes` (KEY=VALUE) laid over its [train]; checked whole."""
    raw = read_toml(path)
    train = {**_table(raw, "train", path), **_changes(changes)}
    space = {k: _dimension(k, v, path) for k, v in _table(raw, "space", path).items()}
    rest = {key: value for key, value in raw.items() if key not in ("train", "space")}
    if trials is not None:
        rest["trials"] = trials
    require("name" not in rest, f"{path}: unknown key 'name': a sweep is called as its file")
    sweep = override(SweepFile(name=path.stem), rest, str(path))
    train = {key.replace("-", "_"): value for key, value in train.items()}
    sweep = dataclasses.replace(sweep, train=train, space=space)
    _check(sweep, str(path))
    return sweep


def _table(raw: Mapping[str, Any], name: str, path: Path) -> dict[str, Any]:
    found = raw.get(name, {})
    if not isinstance(found, dict):
        raise ConfigError(f"{path}: [{name}] must be a table")
    return found


def _changes(changes: tuple[str, ...]) -> dict[str, Any]:
    """KEY=VALUE as TOML would read the value, or as text."""
    found: dict[str, Any] = {}
    for change in changes:
        key, equals, value = change.partition("=")
        require(bool(equals), f"--set {change!r}: write KEY=VALUE, such as steps=20")
        found[key] = value
        with suppress(tomllib.TOMLDecodeError):
            found[key] = tomllib.loads(f"value = {value}")["value"]
    return found


def _dimension(name: str, value: Any, path: Path) -> Choices | Range:
    if isinstance(value, list) and value:
        return Choices(tuple(value))
    if isinstance(value, dict) and {"low", "high"} <= set(value) <= {"low", "high", "log"}:
        found = Range(value["low"], value["high"], bool(value.get("log", False)))
        require(found.low < found.high, f"{path}: space.{name}: low must be below high")
        require(found.low > 0 or not found.log, f"{path}: space.{name}: log needs low above 0")
        return found
    raise ConfigError(
        f"{path}: space.{name}: give a list of values or {{ low = …, high = …, log = true }}"
    )


def _check(sweep: SweepFile, where: str) -> None:
    require(bool(sweep.space), f"{where}: [space] is empty; there is nothing to try")
    require(sweep.sampler in get_args(Sampler), f"{where}: unknown sampler {sweep.sampler!r}")
    for name, one in sweep.space.items():
        names = split(name)
        for part in names:
            require(part not in NOT_SWEPT, f"{where}: space.{name}: {part} cannot be swept")
            require(part not in sweep.train, f"{where}: {part} is both in [train] and in [space]")
        if len(names) > 1:
            right = isinstance(one, Choices) and all(
                isinstance(value, list) and len(value) == len(names) for value in one.corners
            )
            require(right, f"{where}: space.{name}: each choice needs {len(names)} values")
    _check_trials(sweep, where)
    base = override(TrainSettings(), _preset(sweep, where), where)
    base = override(base, sweep.train, f"{where}: [train]")
    for name, one in sweep.space.items():
        for value in one.corners:
            override(base, untied({name: value}), f"{where}: [space]")
    if sweep.sampler == "grid":
        for number in range(sweep.planned):
            override(base, untied(sweep.params(number)), f"{where}: trial {number}")


def _preset(sweep: SweepFile, where: str) -> dict[str, Any]:
    if sweep.preset not in TRAIN_PRESETS:
        hint = suggestion(sweep.preset, TRAIN_PRESETS)
        raise ConfigError(f"{where}: unknown preset {sweep.preset!r}{hint}")
    return TRAIN_PRESETS[sweep.preset]


def _check_trials(sweep: SweepFile, where: str) -> None:
    if sweep.sampler != "grid":
        require(sweep.trials > 0, f"{where}: say how many `trials` a {sweep.sampler} search has")
        return
    ranges = [name for name, one in sweep.space.items() if isinstance(one, Range)]
    require(not ranges, f"{where}: a grid needs lists of values; {', '.join(ranges)} is a range")
    require(sweep.trials == 0, f"{where}: a grid has as many trials as combinations; drop `trials`")


def flags(settings: Mapping[str, Any]) -> list[str]:
    """Settings as the flags of `rookworld train`."""
    found: list[str] = []
    for name, value in settings.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            found.append(f"--{flag}" if value else f"--no-{flag}")
        elif isinstance(value, list | tuple):
            found += [f"--{flag}", *map(str, value)]
        else:
            found += [f"--{flag}", str(value)]
    return found
