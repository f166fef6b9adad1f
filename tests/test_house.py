"""The house: every module in a room, every room on a rung, the docs with the same ladder."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "rookworld"
FLAT = {"__init__", "__main__", "uci"}
"""The only modules without a room."""


def rungs_of_contract() -> list[list[str]]:
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    contracts = tomllib.loads(text)["tool"]["importlinter"]["contracts"]
    ladder = next(one for one in contracts if one["type"] == "layers")
    assert ladder["exhaustive"]
    return [re.findall(r"\w+", layer) for layer in ladder["layers"]]


def rungs_of_docs() -> list[list[str]]:
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    ladder = page.split("## The ladder", 1)[1].split("```")[1]
    lines = [re.split(r"  +", line.strip())[1] for line in ladder.strip().splitlines()]
    return [re.findall(r"\w+", line) for line in lines]


def modules_of(folder: Path) -> set[str]:
    rooms = {path.name for path in folder.iterdir() if any(path.glob("*.py"))}
    return rooms | {path.stem for path in folder.glob("*.py")}


def test_nothing_stands_flat() -> None:
    assert {path.stem for path in SOURCE.glob("*.py")} == FLAT


def test_every_module_is_on_a_rung() -> None:
    rungs = {name for rung in rungs_of_contract() for name in rung}
    assert modules_of(SOURCE) - {"__init__"} == rungs


def test_a_module_on_no_rung_is_seen(tmp_path: Path) -> None:
    (tmp_path / "attic").mkdir()
    (tmp_path / "attic" / "box.py").touch()
    assert modules_of(tmp_path) == {"attic"}


def test_the_docs_draw_the_contract() -> None:
    assert rungs_of_docs() == [
        [name for name in rung if name != "__main__"]
        for rung in rungs_of_contract()
        if rung != ["__main__"]
    ]
