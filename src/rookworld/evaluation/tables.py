"""An evaluation as a table for the terminal; returned, never printed."""

from __future__ import annotations

from pathlib import PurePath

from rich import box
from rich.table import Table

from rookworld.evaluation.statistics import Estimate, PairedDifference
from rookworld.evaluation.suites import EvalResult
from rookworld.tasks.registry import metric_info

_CAPTION = "95 % intervals in brackets; in per cent: all but rewards, plies, Elo, ratings, errors"


def render_tables(result: EvalResult) -> list[Table]:
    """One table; of three or more models one for each that is compared with the first.

    No terminal has room for more than two models side by side.
    """
    if len(result.models) < 3:
        return [render_table(result)]
    first, (_, *models), (_, *found) = result.models[0], result.models, result.evaluations
    return [
        render_table(EvalResult((first, model), (result.evaluations[0], one), (difference,)))
        for model, one, difference in zip(models, found, result.differences, strict=True)
    ]


def render_table(result: EvalResult) -> Table:
    """Metric, value with its 95 % interval and n for each model, then paired differences."""
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), caption=_CAPTION)
    table.caption_justify = "left"
    table.add_column("metric", no_wrap=True)
    for model in result.models:
        table.add_column(_short(model), justify="right", overflow="fold")
    table.add_column("n", justify="right")
    for model in result.models[1:]:
        table.add_column(f"{_short(model)} less {_short(result.models[0])}", justify="right")
        table.add_column("p", justify="right")
    # two models and their difference fit 80 columns only with intervals on a line of their own
    gap = " " if len(result.models) == 1 else "\n"
    for name in dict.fromkeys(name for one in result.evaluations for name in one.estimates):
        found = [one.estimates.get(name) for one in result.evaluations]
        size = next(str(one.n) for one in found if one is not None)
        compared = [_difference_cells(name, one.get(name), gap) for one in result.differences]
        cells = [text for pair in compared for text in pair]
        table.add_row(name, *(_estimate_text(name, one, gap) for one in found), size, *cells)
    return table


def _short(model: str) -> str:
    """Enough of a path to know a model by."""
    return "/".join(PurePath(model).parts[-2:]) or model


def _bounds(name: str, low: float, high: float, sign: str = "") -> str:
    # an escaped bracket: rich would take [12.3] for markup
    return rf"\[{metric_info(name).number(low, sign)}, {metric_info(name).number(high, sign)}]"


def _estimate_text(name: str, one: Estimate | None, gap: str) -> str:
    if one is None:
        return ""
    return f"{metric_info(name).number(one.value)}{gap}{_bounds(name, one.low, one.high)}"


def _difference_cells(name: str, one: PairedDifference | None, gap: str) -> tuple[str, str]:
    if one is None:
        return "", ""
    value = metric_info(name).number(one.difference, "+")
    return (
        f"{value}{gap}{_bounds(name, one.low, one.high, '+')}",
        "<.001" if one.p < 0.001 else f"{one.p:.3f}",
    )
