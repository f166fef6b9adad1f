"""What a training changed, in one sentence: better, worse, not measurably changed.

Laws: a change is told as one only if its paired 95 % interval leaves 0 out; what did not change is
named too. Of thirty metrics one or two leave 0 out by chance, so few are told.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from math import isfinite
from typing import Any

from rookworld.report.run_reader import number
from rookworld.runtime.metric_info import UNITS, Metric
from rookworld.tasks.registry import headline_metrics, metric_info

CLASS_GAIN = 0.1
"""A single class of rows is told of when it changed by this share."""
MOST_CLASSES = 3

_HYPHEN = re.compile(r"(?<![\w])-(?=\d)")

Found = Mapping[str, Mapping[str, Any]]


def verdict_of(before: Found, after: Found, paired: Found) -> str:
    """The sentence; empty where nothing was paired."""
    better: list[str] = []
    worse: list[str] = []
    same: list[str] = []
    for name in told_of(paired):
        if name not in before or name not in after:
            continue
        metric = metric_info(name)
        start, end = (number(one[name].get("value")) for one in (before, after))
        if not clear(paired[name]):
            same.append(spoken(metric))
        else:
            up = number(paired[name].get("difference")) > 0
            improved = up == (metric.better != "down")
            (better if improved else worse).append(change_text(metric, start, end, paired[name]))
    parts = (("Better", better), ("Worse", worse), ("Not measurably changed", same))
    return " ".join(f"{title}: {', '.join(found)}." for title, found in parts if found)


def told_of(paired: Found) -> list[str]:
    """Headline metrics, chess before rewards, then the classes of rows that changed most."""
    heads = [name for name in headline_metrics() if name in paired]
    heads.sort(key=lambda name: name.startswith("reward/"))
    sizes = {
        name: abs(number(one.get("difference")))
        for name, one in paired.items()
        if "/by_" in name and clear(one)
    }
    most = sorted((name for name in sizes if sizes[name] >= CLASS_GAIN), key=lambda n: -sizes[n])
    return heads + most[:MOST_CLASSES]


def clear(difference: Mapping[str, Any]) -> bool:
    """Whether the interval of a paired difference leaves 0 out."""
    return number(difference.get("low")) > 0 or number(difference.get("high")) < 0


def change_text(metric: Metric, before: float, after: float, paired: Mapping[str, Any]) -> str:
    """`legal moves 72 → 94 % [+18, +26]`."""
    scale = 100 if metric.in_percent else 1
    unit = UNITS[metric.unit]
    places = 0 if metric.in_percent and abs(after - before) >= 0.05 else unit.places
    ends = " → ".join(f"{scale * value:.{places}f}" for value in (before, after))
    bounds = (f"{scale * number(paired.get(key)):+.{places}f}" for key in ("low", "high"))
    return minus(f"{spoken(metric)} {ends}{unit.suffix} [{', '.join(bounds)}]")


def spoken(metric: Metric) -> str:
    """A label inside a sentence."""
    return metric.label[:1].lower() + metric.label[1:]


def minus(text: str) -> str:
    """A minus sign, not a hyphen, before numbers."""
    return _HYPHEN.sub("−", text)


def match_sentence(found: Mapping[str, Any]) -> str:
    """What games against the model before say; empty where none were played."""
    score, elo = (found.get(f"match/{name}") for name in ("score", "elo"))
    if not isinstance(score, Mapping) or not isinstance(elo, Mapping):
        return ""
    games = number(score.get("n"))
    share, low, high = (100 * number(score.get(key)) for key in ("value", "low", "high"))
    rating = ", ".join(f"{number(elo.get(key)):+.0f}" for key in ("low", "high"))
    if not all(map(isfinite, (games, share, low, high))):
        return ""
    return minus(
        f"In {games:.0f} games against the model before: {share:.0f} % of the points "
        f"[{low:.0f}, {high:.0f}], {number(elo.get('value')):+.0f} Elo [{rating}]"
        f"{by_illegal_moves(found)}."
    )


def by_illegal_moves(found: Mapping[str, Any]) -> str:
    """How many of the games the model before lost by a move that is not legal, if it did."""
    illegal, own = (found.get(f"match/{name}") for name in ("ends/illegal", "forfeits"))
    if not isinstance(illegal, Mapping) or not isinstance(own, Mapping):
        return ""
    share = number(illegal.get("value")) - number(own.get("value"))
    return f", {100 * share:.0f} % of them by its illegal moves" if share > 0 else ""
