"""An evaluation as a table for the terminal; returned, never printed."""

from __future__ import annotations

from rich.table import Table

from rookworld.estimates import Estimate, PairedDifference
from rookworld.suites import EvalResult

_PLAIN = {
    "P/eval_mae": 2,
    "A/reward_error": 4,
    "selfplay/legal_plies": 1,
    "world/plies": 1,
    "match/elo": 0,
    "puzzles/rating": 0,
    "reward/greedy": 3,
    "reward/sampled": 3,
}
"""Metrics that are not shares, and their decimals; everything else is shown in per cent."""


def render_table(result: EvalResult) -> Table:
    """Metric, value with its 95 % interval and n for each model, then paired differences."""
    table = Table(title="95 % intervals in brackets", title_justify="left")
    table.add_column("metric", no_wrap=True)
    for model in result.models:
        table.add_column(model, justify="right")
    table.add_column("n", justify="right")
    for model in result.models[1:]:
        table.add_column(f"{model} - {result.models[0]}", justify="right")
    for name in dict.fromkeys(name for one in result.evaluations for name in one.estimates):
        found = [one.estimates.get(name) for one in result.evaluations]
        size = next(str(one.n) for one in found if one is not None)
        differences = [one.get(name) for one in result.differences]
        table.add_row(
            name,
            *(_estimate_text(name, one) for one in found),
            size,
            *(_difference_text(name, one) for one in differences),
        )
    return table


def _number(name: str, value: float, sign: str = "") -> str:
    if name in _PLAIN:
        return f"{value:{sign}.{_PLAIN[name]}f}"
    return f"{100 * value:{sign}.1f} %"


def _bounds(name: str, low: float, high: float, sign: str = "") -> str:
    return f"[{_number(name, low, sign)} … {_number(name, high, sign)}]".replace(" %", "")


def _estimate_text(name: str, one: Estimate | None) -> str:
    return "" if one is None else f"{_number(name, one.value)} {_bounds(name, one.low, one.high)}"


def _difference_text(name: str, one: PairedDifference | None) -> str:
    if one is None:
        return ""
    p = "p < 0.001" if one.p < 0.001 else f"p = {one.p:.3f}"
    bounds = _bounds(name, one.low, one.high, "+")
    return f"{_number(name, one.difference, '+')} {bounds} {p}"
