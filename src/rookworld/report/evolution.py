"""The rounds of `rookworld evolve`, from their `rounds.jsonl`: a table, and what the page draws.

Laws: never torch; what a line lacks is left out, and none is an error.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich import box
from rich.table import Table

from rookworld.report.run_reader import Record, number, read_object
from rookworld.runtime.run_folder import ROUNDS, read_lines


def read_rounds(folder: Path) -> list[Record]:
    """The rounds that are over."""
    return list(read_lines(folder / ROUNDS))


def evolution_data(folder: Path, notes: list[str]) -> Record:
    """An evolution as the page draws it; numbers that are not there are null."""
    rounds: list[Record] = []
    kept: float | None = None
    for record in read_rounds(folder):
        rounds.append(_round_data(record) | {"from": kept})
        kept = rounds[-1]["number"] if rounds[-1]["kept"] else kept
    planned = number(read_object(folder / "config.json", notes).get("rounds"))
    return {"name": folder.resolve().name, "planned": _known(planned), "rounds": rounds}


def _round_data(record: Record) -> Record:
    """A round: the metric before and after, its paired difference, and what became of it."""
    metric, played = str(record.get("select_by", "")), _object(record.get("played"))
    found = _object(_object(record.get("paired")).get(metric))
    return {
        "number": _known(number(record.get("round"))),
        "metric": metric,
        "before": _known(_value(record, "before")),
        "after": _known(_value(record, "after")),
        "change": _interval(found),
        "kept": record.get("kept") is True,
        "why": str(record.get("why", "")),
        "games": _known(number(played.get("games"))),
        "won": _known(number(played.get("won"))),
        "rows": {name: _known(number(n)) for name, n in _object(played.get("rows")).items()},
    }


def _interval(found: Mapping[str, Any]) -> Record | None:
    """A paired difference that can be drawn."""
    values = {name: number(found.get(name)) for name in ("difference", "low", "high")}
    return values if all(map(math.isfinite, values.values())) else None


def _value(record: Record, name: str) -> float:
    return number(_object(record.get(name)).get("value"))


def _known(value: float) -> float | None:
    return value if math.isfinite(value) else None


def rounds_table(folder: Path) -> Table:
    """A line a round: what was played, what it changed, and whether it was kept."""
    found = read_rounds(folder)
    metrics = {str(record.get("select_by", "")) for record in found}
    metric = metrics.pop() if len(metrics) == 1 else ""
    table = Table(title=f"{folder.name}: rounds", title_justify="left", box=box.SIMPLE_HEAD)
    for name in ("round", "games", "won", "rows", metric or "metric", "difference, 95 % interval"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("")
    for record in found:
        table.add_row(*_cells(record, named=not metric))
    return table


def _cells(record: Record, *, named: bool) -> list[str]:
    """A round's cells; its metric is named where rounds went by different ones."""
    metric, played = str(record.get("select_by", "")), _object(record.get("played"))
    rows = ", ".join(f"{count} {name}" for name, count in _object(played.get("rows")).items())
    before, after = (_value(record, name) for name in ("before", "after"))
    value = f"{before:.4f} → {after:.4f}" if after == after else f"{before:.4f}"
    value = f"{metric} {value}" if named else value
    found = _object(_object(record.get("paired")).get(metric))
    change = ""
    if found:
        mean, low, high = (number(found.get(name)) for name in ("difference", "low", "high"))
        change = f"{mean:+.4f} ({low:+.4f} … {high:+.4f})"
    end = "kept" if record.get("kept") else f"refused: {record.get('why', '')}"
    counts = (str(played.get(name, "")) for name in ("games", "won"))
    return [str(record.get("round", "")), *counts, rows or "none", value, change, end]


def _object(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}
