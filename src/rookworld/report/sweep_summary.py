"""What a sweep found, from its `sweep.json`: survival by factor, causes, and what mattered.

Laws: pure functions of the file, neither Optuna nor torch; a trial that is not over counts for
nothing. Left out on purpose: interactions between settings, which a few dozen trials cannot show.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from rookworld.report.run_reader import SWEEP_FILE, Record, Values, number
from rookworld.runtime.errors import RookworldError
from rookworld.runtime.run_folder import read_json

MOST_BINS = 4
"""A continuous setting is cut into this many parts of equal count."""


@dataclass(frozen=True)
class Level:
    """The trials that share one value (or range) of a setting."""

    label: str
    trials: int
    survived: int
    """Finished or pruned, not failed."""
    mean: float | None
    """Of the metric over the finished ones."""


@dataclass(frozen=True)
class Factor:
    """A setting of the space: its levels, and the share of the variance that it explains alone."""

    name: str
    levels: tuple[Level, ...]
    importance: float | None


@dataclass(frozen=True)
class SweepSummary:
    """A whole sweep."""

    name: str
    metric: str
    direction: str
    planned: int
    states: dict[str, int]
    causes: dict[str, int]
    """Failures by cause."""
    factors: tuple[Factor, ...]
    best: tuple[Record, ...]
    """The best finished trials, best first."""

    @property
    def survival(self) -> float | None:
        """Share of the ended trials that did not fail."""
        ended = sum(count for state, count in self.states.items() if state != "running")
        return 1 - self.states.get("failed", 0) / ended if ended else None


def read_sweep(folder: Path) -> Record:
    """A sweep's file, or one line that says what is wrong with it."""
    record = read_json(folder / SWEEP_FILE)
    if not isinstance(record, dict) or not isinstance(record.get("trials"), list):
        raise RookworldError(f"{folder / SWEEP_FILE}: not a sweep's file")
    return record


def summarize(record: Record, best: int = 5) -> SweepSummary:
    """Everything the terminal and the page say about a sweep."""
    trials = [one for one in record["trials"] if isinstance(one.get("params"), dict)]
    ended = [one for one in trials if one.get("state") != "running"]
    finished = [one for one in ended if one["state"] == "done" and _value(one) is not None]
    sign = -1 if record.get("direction") == "minimize" else 1
    finished.sort(key=lambda one: -sign * number(one["value"]))
    names = list(dict.fromkeys(name for one in trials for name in one["params"]))
    return SweepSummary(
        name=str(record.get("name", "sweep")),
        metric=str(record.get("metric", "value")),
        direction=str(record.get("direction", "maximize")),
        planned=int(record.get("planned", len(trials))),
        states=dict(Counter(str(one.get("state")) for one in trials)),
        causes=dict(Counter(str(one.get("cause")) for one in ended if one["state"] == "failed")),
        factors=tuple(sorted((_factor(name, ended) for name in names), key=_by_importance)),
        best=tuple(finished[:best]),
    )


def _by_importance(factor: Factor) -> float:
    return -1.0 if factor.importance is None else -2.0 - factor.importance


def _value(trial: Record) -> float | None:
    value = number(trial.get("value"))
    return value if math.isfinite(value) else None


def _factor(name: str, trials: Sequence[Record]) -> Factor:
    given = [one for one in trials if name in one["params"]]
    labels = level_labels([one["params"][name] for one in given])
    groups: dict[str, list[Record]] = {}
    for label, one in zip(labels, given, strict=True):
        groups.setdefault(label, []).append(one)
    levels = tuple(_level(label, groups[label]) for label in dict.fromkeys(sorted_labels(labels)))
    scored = [(label, _value(one)) for label, one in zip(labels, given, strict=True)]
    known = [(label, value) for label, value in scored if value is not None]
    values = np.array([value for _, value in known], dtype=np.float64)
    return Factor(name, levels, explained_share([label for label, _ in known], values))


def _level(label: str, trials: Sequence[Record]) -> Level:
    values = [value for one in trials if (value := _value(one)) is not None]
    survived = sum(one["state"] != "failed" for one in trials)
    return Level(label, len(trials), survived, float(np.mean(values)) if values else None)


def level_labels(values: Sequence[Any]) -> list[str]:
    """A label for each value: the value itself, or the range of numbers that it falls into."""
    texts = [label_text(value) for value in values]
    if len(set(texts)) <= 2 * MOST_BINS or not all(isinstance(v, int | float) for v in values):
        return texts
    numbers = np.array(values, dtype=np.float64)
    edges = np.quantile(numbers, np.linspace(0, 1, MOST_BINS + 1))
    places = np.clip(np.searchsorted(edges, numbers, side="right") - 1, 0, MOST_BINS - 1)
    return [f"{edges[place]:.3g} … {edges[place + 1]:.3g}" for place in places]


def label_text(value: Any) -> str:
    if isinstance(value, list | tuple):
        return " × ".join(map(label_text, value))
    return f"{value:g}" if isinstance(value, float) else str(value)


def sorted_labels(labels: Sequence[str]) -> list[str]:
    """By number where they begin with one, otherwise as they came."""

    def start(label: str) -> float:
        try:
            return float(label.split(" ")[0])
        except ValueError:
            return math.inf

    return sorted(labels, key=start)


def explained_share(labels: Sequence[str], values: Values) -> float | None:
    """Share of the variance between the levels beyond chance (ε²); None if it cannot be told.

    In a full grid this is a setting's main effect, free of all others.
    """
    n, levels = len(values), sorted(set(labels))
    if len(levels) < 2 or n <= len(levels) or float(np.ptp(values)) == 0:
        return None
    group = np.array([levels.index(label) for label in labels])
    means = np.array([values[group == place].mean() for place in range(len(levels))])
    within = float(((values - means[group]) ** 2).sum())
    total = float(((values - values.mean()) ** 2).sum())
    chance = (len(levels) - 1) * within / (n - len(levels))
    return max(0.0, (total - within - chance) / total)
