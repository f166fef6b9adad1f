"""Numbers by hand, warnings one by one, and folders in every state of disrepair."""

from __future__ import annotations

import io
import json
import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from made_runs import made_run, step_metrics
from rookworld.evaluation.statistics import moving_mean, slope
from rookworld.report.analysis import analyze, kl_share, trend
from rookworld.report.run_reader import find_runs, read_run
from rookworld.report.tables import render
from rookworld.runtime.atomic_files import write_json
from rookworld.runtime.errors import RookworldError
from rookworld.runtime.run_folder import read_json


def shown(folders: list[Path], width: int = 100) -> str:
    console = Console(width=width, file=io.StringIO())
    with console.capture() as captured:
        console.print(render([analyze(read_run(folder)) for folder in folders]))
    return captured.get()


def with_metrics(folder: Path, **changes: float) -> Path:
    """A run of 40 steps whose metrics are overridden (`kl__exact` means kl/exact)."""
    made_run(folder)
    lines = []
    for step in range(1, 41):
        record = step_metrics(step, step / 40)
        record |= {name.replace("__", "/"): value for name, value in changes.items()}
        lines.append(json.dumps(record))
    (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    return folder


# --- numbers ---


def test_moving_average_by_hand() -> None:
    values = np.array([1.0, 3.0, math.nan, 5.0])
    assert moving_mean(values, 2).tolist() == [1.0, 2.0, 3.0, 5.0]


def test_slope_by_hand() -> None:
    assert slope(np.arange(3.0), np.array([0.0, 2.0, 4.0])) == 2
    assert slope(np.arange(1.0), np.array([5.0])) == 0
    assert slope(np.arange(4.0), np.full(4, 0.3)) == 0


def test_trend_of_a_line_is_the_line() -> None:
    steps = np.arange(50.0)
    found = trend(steps, 0.5 + 0.01 * steps)
    assert found is not None
    assert found.slope == pytest.approx(1.0)
    assert found.low == pytest.approx(1.0)
    assert found.direction == "rising"


def test_trend_interval_holds_the_truth_about_95_times_in_100() -> None:
    rng = np.random.default_rng(0)
    steps = np.arange(100.0)
    inside = 0
    for _ in range(300):
        noise = rng.normal(size=100)
        for place in range(1, 100):  # neighbours alike, as in training
            noise[place] += 0.5 * noise[place - 1]
        found = trend(steps, 0.002 * steps + noise)
        assert found is not None
        inside += found.low <= 0.2 <= found.high
    assert 0.90 <= inside / 300 <= 0.99


def test_trend_needs_four_values() -> None:
    assert trend(np.arange(3.0), np.arange(3.0)) is None
    assert trend(np.arange(6.0), np.array([1, math.nan, math.nan, 2, math.nan, 3.0])) is None


def test_kl_share_by_hand(tmp_path: Path) -> None:
    run = read_run(with_metrics(tmp_path / "run", loss__policy=-0.06, loss__kl=2.0, kl__coef=0.02))
    assert kl_share(run) == pytest.approx(0.4)
    by_choice = replace(run, config={**run.config, "credit": "choices"})
    assert kl_share(by_choice) is None


def test_a_run_in_numbers(tmp_path: Path) -> None:
    found = analyze(read_run(made_run(tmp_path / "run")))
    assert (found.state, found.steps, found.planned) == ("done", 40, 40)
    assert found.best_step == 40
    assert found.best_reward == pytest.approx(0.6)
    assert found.held_out == "reward/greedy"
    assert found.trends["reward/mean"].slope == pytest.approx(0.5, abs=0.05)
    assert found.trends["policy/entropy"].direction == "falling"
    assert found.events == {"restore: diverged_kl": 1}
    assert found.time_s == {"sample": 0.5, "score": 0.1, "update": 0.4, "step": 1.0}
    assert found.memory_mb == 840
    assert found.validity == {"P": pytest.approx(0.99), "A": 1.0}
    assert found.warnings == ()
    assert found.notes == ()
    json.dumps(found.to_json(), allow_nan=False)


# --- warnings ---


@pytest.mark.parametrize(
    ("changes", "warning"),
    [
        ({"kl__exact": 0.85}, "85% of its threshold 1"),
        ({"reward__P__format": 0.7}, "under 80%: P 70%"),
        ({"reward__max": -0.1}, "all rewards negative in 20 of the last 20"),
        ({"policy__entropy": 0.001}, "under its floor"),
        ({"loss__kl": 10.0}, "of the loss"),
        ({"reward__flat_groups": 0.9}, "90% of the groups"),
        ({"tokens__truncated": 0.5}, "50% of the answers were cut off"),
    ],
)
def test_each_warning_alone(tmp_path: Path, changes: dict[str, float], warning: str) -> None:
    (found,) = analyze(read_run(with_metrics(tmp_path / "run", **changes))).warnings
    assert warning in found


def test_low_entropy_is_as_it_should_be_in_an_environment(tmp_path: Path) -> None:
    folder = with_metrics(tmp_path / "run", policy__entropy=0.001)
    write_json(folder / "config.json", read_json(folder / "config.json") | {"mix_env_ratio": 1.0})
    assert analyze(read_run(folder)).warnings == ()


def test_steps_of_the_environment_alone_say_nothing_of_entropy(tmp_path: Path) -> None:
    folder = with_metrics(tmp_path / "run")
    write_json(folder / "config.json", read_json(folder / "config.json") | {"backend": "trl"})
    lines = [step_metrics(step, step / 40) for step in range(1, 41)]
    for line in lines[5:]:
        line |= {"policy/entropy": 0.001}
        del line["reward/P"]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert analyze(read_run(folder)).warnings == ()


def test_loss_rising_in_a_row(tmp_path: Path) -> None:
    folder = made_run(tmp_path / "run")
    records = [step_metrics(step, step / 40) | {"loss/total": step // 10} for step in range(40)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(one) + "\n" for one in records))
    (found,) = analyze(read_run(folder)).warnings
    assert "risen 3 times in a row" in found


def test_a_stopped_run_says_why(tmp_path: Path) -> None:
    folder = made_run(tmp_path / "run", done=False)
    stop = {"step": 40, "kind": "stop", "cause": "diverged_kl", "message": "diverged: try this"}
    with (folder / "events.jsonl").open("a") as file:
        file.write(json.dumps(stop) + "\n")
    found = analyze(read_run(folder))
    assert found.state == "diverged"
    assert found.warnings[0] == "diverged: try this"


# --- disrepair ---


def test_a_truncated_line_is_said_and_the_rest_shown(tmp_path: Path) -> None:
    folder = made_run(tmp_path / "run")
    path = folder / "metrics.jsonl"
    path.write_bytes(path.read_bytes()[:-30])
    found = analyze(read_run(folder))
    assert found.notes == ("metrics.jsonl: 1 of 40 lines cut off or broken, left out",)
    assert found.steps == 39
    assert "reward/mean" in shown([folder])


def test_an_empty_run_is_one_line(tmp_path: Path) -> None:
    folder = tmp_path / "empty"
    folder.mkdir()
    found = analyze(read_run(folder))
    assert found.state == "empty"
    assert found.notes == ("the run is empty: nothing has been logged yet",)
    assert "nothing has been logged" in shown([folder, made_run(tmp_path / "run")])


def test_an_older_version_is_said_and_shown(tmp_path: Path) -> None:
    folder = made_run(tmp_path / "old")
    write_json(folder / "origin.json", {"version": "0.0.1"})
    lines = [json.dumps({"step": step, "mean_reward": 0.5}) for step in range(1, 9)]
    (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    (folder / "config.json").write_text("{")
    found = analyze(read_run(folder))
    assert found.final == {"mean_reward": 0.5}
    assert any("written by version 0.0.1" in line for line in found.notes)
    assert any(line.startswith("config.json: cannot be read") for line in found.notes)


def test_numbers_that_are_not_finite_take_no_part(tmp_path: Path) -> None:
    folder = made_run(tmp_path / "run")
    broken = {"step": 41, "reward/mean": "nan", "kl/exact": "inf"}
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(broken) + "\n")
    found = analyze(read_run(folder))
    assert found.steps == 41
    assert math.isfinite(found.final["reward/mean"])
    assert not found.warnings


def test_a_folder_of_runs_stands_for_its_runs(tmp_path: Path) -> None:
    made_run(tmp_path / "b")
    made_run(tmp_path / "a")
    assert [path.name for path in find_runs([tmp_path])] == ["a", "b"]
    assert [path.name for path in find_runs([tmp_path / "b"])] == ["b"]


def test_a_missing_folder_is_the_users_to_know(tmp_path: Path) -> None:
    with pytest.raises(RookworldError, match="no such run folder"):
        find_runs([tmp_path / "nowhere"])


def test_tables_fit_a_terminal(tmp_path: Path) -> None:
    one, two = made_run(tmp_path / "one"), made_run(tmp_path / "two")
    detail, both = shown([one], width=80), shown([one, two], width=80)
    assert "Win probability lost a move" in detail
    assert "+0.100 *" in detail
    assert "…" not in both
    assert both.count("0.500 → 0.600") == 2


def test_readers_do_not_load_torch() -> None:
    modules = "rookworld.report.tables, rookworld.report.page, rookworld.report.sweep_summary"
    code = f"import sys, {modules}; sys.exit('torch' in sys.modules or 'optuna' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
