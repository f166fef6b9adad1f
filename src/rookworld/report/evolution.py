"""The rounds of `rookworld evolve` as a table, from their `rounds.jsonl`; never torch."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich import box
from rich.table import Table

from rookworld.report.run_reader import Record, number
from rookworld.runtime.run_folder import ROUNDS, read_lines


def read_rounds(folder: Path) -> list[Record]:
    """The rounds that are over."""
    return list(read_lines(folder / ROUNDS))


def rounds_table(folder: Path) -> Table:
    """A line a round: what was played, what it changed, and whether it was kept."""
    found = read_rounds(folder)
    metric = str(found[-1].get("select_by", "")) if found else ""
    table = Table(title=f"{folder.name}: rounds", title_justify="left", box=box.SIMPLE_HEAD)
    for name in ("round", "games", "won", "rows", metric or "metric", "difference, 95 % interval"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("")
    for record in found:
        table.add_row(*_cells(record, metric))
    return table


def _cells(record: Record, metric: str) -> list[str]:
    played = _object(record.get("played"))
    rows = ", ".join(f"{count} {name}" for name, count in _object(played.get("rows")).items())
    before, after = (number(_object(record.get(name)).get("value")) for name in ("before", "after"))
    value = f"{before:.4f} → {after:.4f}" if after == after else f"{before:.4f}"
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
