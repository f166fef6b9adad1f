"""The table of metrics: what the docs explain and nothing else, and no second table."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from rookworld.runtime.metric_info import UNITS
from rookworld.tasks.registry import all_metrics, headline_metrics, metric_info

ROOT = Path(__file__).parents[1]
NAME = re.compile(r"`((?:[a-zA-Z0-9_]+/)+(?:[a-zA-Z0-9_]+|<[a-z]+>)|lr|passk/k)`")


def explained() -> set[str]:
    """Names in the first cell of the docs' tables, and of the suites told in prose."""
    found = {"reward/greedy", "reward/sampled", "passk/k", "puzzles/rating", "puzzles/solved"}
    for page in ("metrics.md", "evaluation.md"):
        text = (ROOT / "docs" / page).read_text(encoding="utf-8")
        tables = (table.split("\n\n")[0] for table in re.split(r"\| (?:name|metric) \|", text)[1:])
        cells = (line.split("|")[1] for table in tables for line in table.splitlines()[2:])
        found |= {name for cell in cells for name in NAME.findall(cell)}
    return found


def test_what_the_docs_explain_is_known_and_the_reverse() -> None:
    families = {name for name in explained() if name.endswith(">") or name == "passk/k"}
    stems = {name[: name.rindex("/") + 1] for name in families} | {"puzzles/solved/"}
    assert explained() - families | stems == set(all_metrics())


def test_every_unit_is_known() -> None:
    assert {one.unit for one in all_metrics().values()} == set(UNITS)


def test_no_two_metrics_share_a_label() -> None:
    labels = [one.label for one in all_metrics().values()]
    assert sorted(set(labels)) == sorted(labels)


def test_numbers_are_written_in_their_unit() -> None:
    assert metric_info("P/best").text(0.4567) == "45.7 %"
    assert metric_info("P/best").number(0.05, "+") == "+5.0"
    assert metric_info("A/reward_error").text(0.01) == "0.0100"
    assert metric_info("time/step_s").text(1.5) == "1.50 s"


def test_a_metric_of_a_family_or_of_nobody() -> None:
    castle = metric_info("A/by_kind/en_passant")
    assert (castle.label, castle.is_share) == ("Exact transitions, en passant", True)
    assert metric_info("X/near_miss").label == "X/near miss"
    assert not metric_info("P/win_loss").is_share


@pytest.mark.parametrize("room", ["report", "sweep", "cli", "trl", "rl"])
def test_no_reader_has_a_table_of_its_own(room: str) -> None:
    """Three headline metrics in one module are the beginning of one."""
    for path in (ROOT / "src" / "rookworld" / room).glob("*.py"):
        text = path.read_text(encoding="utf-8")
        named = [name for name in headline_metrics() if f'"{name}"' in text]
        assert len(named) < 3, f"{path.name} names {named}"
