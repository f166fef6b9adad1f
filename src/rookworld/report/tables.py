"""Analyses as tables for the terminal: one run in detail, several side by side; never printed here.

Results are returned as rich renderables; the surface decides where they go.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from rookworld.report.analysis import WINDOW, Analysis, Trend
from rookworld.report.run_reader import number
from rookworld.report.sweep_summary import SweepSummary, label_text
from rookworld.report.verdict import clear, minus, told_of
from rookworld.runtime.wording import noun
from rookworld.tasks.registry import metric_info

MANY_RUNS = 6
"""Beyond this many runs only the first warning of each is shown."""
_ARROWS = {"rising": "↑", "falling": "↓", "level": "→"}


def render(analyses: Sequence[Analysis]) -> RenderableType:
    """One run in detail, or a line for each of several; then what deserves a look."""
    parts: list[RenderableType] = []
    if len(analyses) == 1:
        parts += _details(analyses[0])
    elif analyses:
        parts.append(_comparison(analyses))
    for one in analyses:
        for style, lines in (("yellow", one.warnings), ("dim", one.notes)):
            shown = lines if len(analyses) <= MANY_RUNS else _first(lines)
            parts += [Text(f"{one.name}: {line}", style=style) for line in shown]
    return Group(*parts)


def _first(lines: Sequence[str]) -> Sequence[str]:
    return lines if len(lines) < 2 else (f"{lines[0]} (and {len(lines) - 1} more)",)


def _details(one: Analysis) -> list[RenderableType]:
    of = "" if one.planned is None else f" of {one.planned}"
    parts: list[RenderableType] = [
        Text(f"{one.name}: {one.state}, {one.steps}{of} {noun(one.planned or one.steps, 'step')}")
    ]
    if one.before:
        parts.append(changes_table(one))
    parts += [Text(line) for line in (one.start, one.verdict, one.match) if line]
    if one.trends:
        parts.append(_trend_table(one.trends))
    if known := facts(one):
        table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
        for label, value in known.items():
            table.add_row(Text(label, style="dim"), value)
        parts.append(table)
    return parts


def _table(title: str) -> Table:
    return Table(
        title=title,
        title_justify="left",
        title_style="bold",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
    )


def changes_table(one: Analysis, *, headlines: bool = False) -> Table:
    """The same held-out rows before and after; `headlines`: the few that matter, and classes."""
    table = _table("Held-out" + (", differences paired row by row" if one.paired else ""))
    table.add_column("metric", no_wrap=True)
    table.add_column(f"step {one.before['step']}", justify="right", no_wrap=True)
    if one.after:
        table.add_column(f"step {one.after['step']}", justify="right", no_wrap=True)
        table.add_column("difference, 95 % interval", justify="right", no_wrap=True)
    table.add_column("rows", justify="right", no_wrap=True)
    for name in told_of(one.paired) if headlines else one.before:
        if isinstance(before := one.before.get(name), Mapping):
            table.add_row(*_change_cells(one, name, before))
    return table


def _change_cells(one: Analysis, name: str, before: Mapping[str, Any]) -> list[str]:
    metric, after = metric_info(name), one.after.get(name)
    cells = [metric.label, metric.text(number(before.get("value")))]
    if one.after and after is None:
        cells += ["", ""]
    elif after is not None:
        change = change_of(before, after, one.paired.get(name))
        told = metric.number(number(change["difference"]), "+")
        if "low" in change:
            bounds = (metric.number(number(change[key]), "+") for key in ("low", "high"))
            told += rf" \[{', '.join(bounds)}]"  # an escaped bracket: rich would take it for markup
        mark = " *" if change["clear"] else "  "
        cells += [metric.text(number(after.get("value"))), minus(told) + mark]
    return [*cells, str(before.get("n", ""))]


def change_of(
    before: Mapping[str, Any], after: Mapping[str, Any], paired: Mapping[str, Any] | None
) -> dict[str, Any]:
    """A difference, its interval if it was paired, and whether it is clear.

    Without pairs it is clear only where the two intervals do not meet, which is far stricter.
    """
    if paired is not None:
        ends = {key: number(paired.get(key)) for key in ("difference", "low", "high")}
        return ends | {"clear": clear(paired)}
    difference = number(after.get("value")) - number(before.get("value"))
    return {"difference": difference, "clear": apart(before, after)}


def apart(before: Mapping[str, Any], after: Mapping[str, Any]) -> bool:
    """Whether two 95 % intervals do not meet: a careful sign of a real difference."""
    low, high = (number(after.get(key)) for key in ("low", "high"))
    return low > number(before.get("high")) or high < number(before.get("low"))


def _trend_table(trends: Mapping[str, Trend]) -> Table:
    table = _table("Training")
    table.add_column("metric", no_wrap=True)
    table.add_column(f"last {WINDOW} steps", justify="right", no_wrap=True)
    table.add_column("per 100 steps", justify="right", no_wrap=True)
    table.add_column("")
    for name, found in trends.items():
        slope = f"{found.slope:+.2g} [{found.low:+.2g} … {found.high:+.2g}]"
        table.add_row(name, f"{found.last:.4g}", slope, _ARROWS[found.direction])
    return table


def facts(one: Analysis) -> dict[str, str]:
    """Short statements about a run, by label."""
    found: dict[str, str] = {}
    if one.best_step is not None:
        found["best held-out"] = f"step {one.best_step}: {one.held_out} {one.best_reward:.4g}"
    if one.best_train_step is not None:
        found["best training"] = f"step {one.best_train_step}, by the {WINDOW}-step mean"
    if one.validity:
        shares = (f"{task} {share:.1%}" for task, share in one.validity.items())
        found["readable answers"] = ", ".join(shares)
    if one.kl_share is not None:
        found["KL share of loss"] = f"{one.kl_share:.0%}"
    if one.clipped is not None and one.ratio_max is not None:
        found["clipped tokens"] = f"{one.clipped:.2%}, largest ratio {one.ratio_max:.3g}"
    if one.events:
        found["guard"] = ", ".join(f"{name} × {count}" for name, count in one.events.items())
    if one.time_s:
        found["time a step"] = time_text(one.time_s)
    if one.memory_mb is not None:
        found["peak memory"] = f"{one.memory_mb:,.0f} MB"
    return found


def time_text(time_s: Mapping[str, float]) -> str:
    """`1.19 s: sample 45 %, score 2 %, update 53 %`."""
    whole = time_s.get("step", math.nan)
    parts = {phase: seconds for phase, seconds in time_s.items() if phase != "step"}
    shares = ", ".join(f"{phase} {seconds / whole:.0%}" for phase, seconds in parts.items())
    return f"{whole:.3g} s: {shares}" if whole > 0 else shares


def _comparison(analyses: Sequence[Analysis]) -> Table:
    table = _table(f"Last {WINDOW} steps; held-out before → after")
    table.add_column("run", no_wrap=True)
    for name in ("state", "steps", "reward", "per 100", "held-out", "KL", "entropy", "guard"):
        table.add_column(name, justify="right", no_wrap=True)
    for one in analyses:
        reward = one.trends.get("reward/mean")
        held_out = [_value(record, one.held_out) for record in (one.before, one.after) if record]
        table.add_row(
            one.name,
            one.state,
            str(one.steps),
            _final(one, "reward/mean", ".3f"),
            f"{reward.slope:+.3f} {_ARROWS[reward.direction]}" if reward else "",
            " → ".join(held_out),
            _final(one, "kl/exact", ".3f"),
            _final(one, "policy/entropy", ".2f"),
            str(sum(one.events.values())),
        )
    return table


def _value(record: Mapping[str, Any], metric: str | None) -> str:
    found = record.get(metric) if metric else None
    return f"{number(found.get('value')):.3f}" if isinstance(found, Mapping) else "–"


def _final(one: Analysis, metric: str, form: str) -> str:
    value = one.final.get(metric)
    return "" if value is None else format(value, form)


def render_sweep(summary: SweepSummary) -> RenderableType:
    """Survival by factor, causes of the rest, and the best trials."""
    counts = ", ".join(f"{count} {state}" for state, count in summary.states.items())
    survival = "" if summary.survival is None else f"; {summary.survival:.1%} survived"
    parts: list[RenderableType] = [
        Text(f"{summary.name}: {summary.planned} trials planned, {counts or 'none yet'}{survival}")
    ]
    parts += [
        Text(f"failed, {cause}: {count}", style="yellow") for cause, count in summary.causes.items()
    ]
    if summary.factors:
        parts.append(_factor_table(summary))
    if summary.best:
        parts.append(_best_table(summary))
    return Group(*parts)


def _factor_table(summary: SweepSummary) -> Table:
    table = _table("By setting, the most telling first")
    table.add_column("setting", no_wrap=True)
    table.add_column("value", no_wrap=True)
    for name in ("trials", "survived", f"mean {summary.metric}", "explains"):
        table.add_column(name, justify="right", no_wrap=True)
    for factor in summary.factors:
        told = "" if factor.importance is None else f"{factor.importance:.1%}"
        for place, level in enumerate(factor.levels):
            table.add_row(
                "" if place else factor.name,
                level.label,
                str(level.trials),
                f"{level.survived / level.trials:.1%}",
                "" if level.mean is None else f"{level.mean:.4f}",
                "" if place else told,
            )
    return table


def _best_table(summary: SweepSummary) -> Table:
    table = _table("Best trials")
    table.add_column("trial", justify="right")
    table.add_column(summary.metric, justify="right")
    table.add_column("settings")
    for one in summary.best:
        params = ", ".join(f"{name} {label_text(value)}" for name, value in one["params"].items())
        table.add_row(str(one["number"]), f"{number(one['value']):.4f}", params)
    return table
