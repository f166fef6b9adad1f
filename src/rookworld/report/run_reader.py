"""Run and sweep folders as read: the records, and a line for everything that is wrong with them.

Laws: no torch, nothing written; what is missing, cut off or from another version becomes one line
in `notes` and the rest is still read; only a folder that is not there is an error.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rookworld import __version__
from rookworld.runtime.errors import RookworldError
from rookworld.runtime.run_folder import MATCH, PAIRED, ROUNDS, STREAMS, read_json, read_lines

Values = NDArray[np.float64]
Record = dict[str, Any]

_MARKS = ("config.json", "origin.json", "train.log", *STREAMS)
LARGEST = 1e100
SWEEP_FILE = "sweep.json"
"""What makes a folder a sweep: its space and every trial so far."""


@dataclass(frozen=True)
class RunRecord:
    """A run folder as read."""

    folder: Path
    config: Record
    origin: Record
    metrics: list[Record]
    events: list[Record]
    evals: list[Record]
    rollouts: list[Record]
    probes: list[Record]
    paired: Record
    """Metric -> paired difference of the last evaluation to the first; empty if not of these."""
    match: Record
    """Metric -> value of games against the model before; empty if none were played."""
    done: bool
    notes: tuple[str, ...]
    """One line for everything that was missing, broken or foreign."""

    @property
    def name(self) -> str:
        return self.folder.name

    @property
    def steps(self) -> Values:
        return np.array([record["step"] for record in self.metrics], dtype=np.float64)

    def series(self, metric: str) -> Values:
        """A metric's value at each of `steps`, NaN where it is absent or not finite."""
        return np.array([number(record.get(metric)) for record in self.metrics], dtype=np.float64)

    @property
    def metric_names(self) -> list[str]:
        """Every logged metric, in the order in which they first appear."""
        names = dict.fromkeys(name for record in self.metrics for name in record)
        return [name for name in names if name != "step"]

    @property
    def state(self) -> str:
        """`done`, `diverged`, `unfinished` (still running, or interrupted) or `empty`."""
        if self.done:
            return "done"
        if any(event.get("kind") == "stop" for event in self.events[-3:]):
            return "diverged"
        return "unfinished" if self.metrics else "empty"


def number(value: object) -> float:
    """A logged value as a float; NaN unless it is a number that can be squared and summed."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return math.nan
    return float(value) if -LARGEST < value < LARGEST else math.nan


def is_run(folder: Path) -> bool:
    return any((folder / mark).exists() for mark in _MARKS)


def is_sweep(folder: Path) -> bool:
    return (folder / SWEEP_FILE).exists()


def is_evolution(folder: Path) -> bool:
    """Whether rounds were played here, or the first one is being played."""
    begun = (folder / "rounds").is_dir() and (folder / "config.json").exists()
    return begun or (folder / ROUNDS).exists()


def find_runs(paths: Iterable[Path]) -> list[Path]:
    """The run folders meant: each path itself, or the runs in it; an empty folder is a run."""
    found: list[Path] = []
    for path in paths:
        if not path.is_dir():
            raise RookworldError(f"{path}: no such run folder")
        home = home_of_runs(path)
        inner = sorted(one for one in home.glob("*/") if is_run(one))
        alone = is_run(path) and not is_evolution(path)
        found += [path] if alone or (home == path and not inner) else inner
    return list(dict.fromkeys(found))


def home_of_runs(path: Path) -> Path:
    """Where the runs of a folder are: a sweep and an evolution have a place for them."""
    if is_sweep(path):
        return path / "trials"
    return path / "rounds" if is_evolution(path) else path


def read_run(folder: Path) -> RunRecord:
    """A run folder, however whole it is; only a folder that is not there is an error."""
    if not folder.is_dir():
        raise RookworldError(f"{folder}: no such run folder")
    notes: list[str] = []
    streams = {name: _read_stream(folder / name, notes) for name in STREAMS}
    config = read_object(folder / "config.json", notes)
    origin = read_object(folder / "origin.json", notes)
    if not any((config, origin, *streams.values())):
        notes = ["the run is empty: nothing has been logged yet"]
    elif not streams["metrics.jsonl"]:
        notes.append("no steps have been logged yet")
    written, here = origin.get("version"), __version__
    if origin and written != here:
        notes.append(f"written by version {written}, read by {here}: what it lacks is left out")
    return RunRecord(
        folder.resolve(),
        config,
        origin,
        streams["metrics.jsonl"],
        streams["events.jsonl"],
        streams["eval.jsonl"],
        streams["rollouts.jsonl"],
        streams["probes.jsonl"],
        _read_paired(folder / PAIRED, streams["eval.jsonl"], notes),
        read_object(folder / MATCH, notes) if (folder / MATCH).exists() else {},
        (folder / "DONE").exists(),
        tuple(notes),
    )


def _read_stream(path: Path, notes: list[str]) -> list[Record]:
    if not path.exists():
        return []
    records = [r for r in read_lines(path) if math.isfinite(number(r.get("step")))]
    with path.open(encoding="utf-8", errors="replace") as file:
        lines = sum(1 for line in file if line.strip())
    if lines > len(records):
        broken = lines - len(records)
        notes.append(f"{path.name}: {broken} of {lines} lines cut off or broken, left out")
    return sorted(records, key=lambda record: float(record["step"]))


def _read_paired(path: Path, evals: list[Record], notes: list[str]) -> Record:
    """The differences, if they are those of the evaluations that are there."""
    if not path.exists() or len(evals) < 2:
        return {}
    found = read_object(path, notes)
    same = [found.get("before"), found.get("after")] == [evals[0]["step"], evals[-1]["step"]]
    metrics = found.get("metrics")
    if not same or not isinstance(metrics, dict):
        return {}
    return {name: one for name, one in metrics.items() if isinstance(one, dict)}


def read_object(path: Path, notes: list[str]) -> Record:
    try:
        value = read_json(path)
    except RookworldError as error:
        notes.append(str(error).replace(str(path), path.name))
        return {}
    if not isinstance(value, dict):
        notes.append(f"{path.name}: not an object, left out")
        return {}
    return value
