"""Run folders as crashes, disks and other hands leave them: a report is made of each."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from made_runs import made_run
from rookworld.cli.dispatch import main
from rookworld.runtime.run_folder import STREAMS

ODD: list[Any] = [
    None, 5, -1, 10**400, 1e308, float("nan"), True, "", "x", "<script>", "\ud800", [], [[]], {},
    {"a": 1}, [None], ["e2e4", 5], "8/8/8/8/8/8/8/8 w - - 0 1", {"fen": 5, "moves": 5}, "é" * 999,
]  # fmt: skip


def spoilt(value: Any, rng: random.Random) -> Any:
    """The same but for one thing in it, at any depth."""
    if isinstance(value, dict) and value and rng.random() < 0.8:
        key = rng.choice(list(value))
        return {**value, key: spoilt(value[key], rng)}
    if isinstance(value, list) and value and rng.random() < 0.8:
        at = rng.randrange(len(value))
        return [*value[:at], spoilt(value[at], rng), *value[at + 1 :]]
    return rng.choice(ODD)


@pytest.mark.parametrize("seed", range(20))
def test_a_report_never_fails_on_odd_content(
    seed: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rng, run = random.Random(seed), tmp_path / "run"
    made_run(run, steps=6)
    for name in STREAMS:
        if (run / name).exists():
            lines = (run / name).read_text().splitlines()
            odd = [json.dumps(spoilt(json.loads(rng.choice(lines)), rng)) for _ in range(6)]
            mixed = [*lines, *odd, "[" * 9999, odd[0] + "}", rng.choice(lines)[:50]]
            rng.shuffle(mixed)
            (run / name).write_text("\n".join(mixed))
    for name in ("config.json", "origin.json", "paired.json"):
        if (run / name).exists():
            (run / name).write_text(json.dumps(spoilt(json.loads((run / name).read_text()), rng)))
    (run / "checkpoints" / "step-abc").mkdir()
    assert main(["report", str(run)]) == 0
    assert main(["analyze", str(run)]) == 0
    assert main(["analyze", str(run), "--json"]) == 0
    assert "Traceback" not in capsys.readouterr().err
