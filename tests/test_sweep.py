"""Sweeps of trainings that take a moment: plans, causes, kills, and processes side by side."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

import fake_trainer as fake
from rookworld.cli.train import read_settings, usual
from rookworld.report.sweep_summary import explained_share, level_labels, summarize
from rookworld.rl.settings import TrainSettings
from rookworld.runtime.errors import ConfigError, RookworldError
from rookworld.sweep.runner import SweepHooks, SweepSettings, command, gpu_names, plan, run_sweep
from rookworld.sweep.space import read_sweep_file
from rookworld.sweep.trial import CAUSES, Outcome, failure

pytest.importorskip("optuna")

ROOT = Path(__file__).parent.parent
FAKE = (sys.executable, str(Path(__file__).with_name("fake_trainer.py")))
SMALL = """
sampler = "grid"
[train]
steps = 30
[space]
lr = [0.1, 0.2, 0.3]
"batch_size,k_samples" = [[1, 2], [2, 4]]
"""


def written(folder: Path, text: str = SMALL) -> Path:
    path = folder / "small.toml"
    path.write_text(text)
    return path


def swept(folder: Path, text: str = SMALL, **settings: Any) -> dict[str, Any]:
    """Run a sweep here with the double; its sweep.json."""
    out = folder / "sweep"
    run_sweep(SweepSettings(file=written(folder, text), out=out, **settings), trainer=FAKE)
    record: dict[str, Any] = json.loads((out / "sweep.json").read_text())
    return record


def process(folder: Path, log: Path, seconds: float, **settings: Any) -> subprocess.Popen[bytes]:
    """A sweep in its own process."""
    given = ", ".join(f"{key}={value!r}" for key, value in settings.items())
    code = (
        "from pathlib import Path, PosixPath; from rookworld.sweep.runner import *\n"
        f"settings = SweepSettings(file=Path({str(written(folder))!r}), {given})\n"
        f"run_sweep(settings, trainer={FAKE!r})"
    )
    environment = {**os.environ, "FAKE_LOG": str(log), "FAKE_SECONDS": str(seconds)}
    return subprocess.Popen([sys.executable, "-c", code], env=environment)


def lines_of(log: Path) -> list[str]:
    return log.read_text().splitlines() if log.exists() else []


def waited_for(log: Path, count: int, event: str) -> None:
    deadline = time.monotonic() + 60
    while sum(line.startswith(event) for line in lines_of(log)) < count:
        assert time.monotonic() < deadline, lines_of(log)
        time.sleep(0.02)


# --- files ---


@pytest.mark.parametrize(("name", "trials"), [("grid-432", 432), ("r4", 12), ("random-48", 48)])
def test_built_in_sweeps(name: str, trials: int) -> None:
    settings = SweepSettings(file=ROOT / "configs" / "sweeps" / f"{name}.toml")
    lines = list(plan(settings))
    assert len(lines) == len(set(lines)) == trials
    assert all("rookworld train --preset plain --steps" in line for line in lines)
    assert lines == list(plan(settings))


def test_the_grid_holds_every_combination() -> None:
    sweep = read_sweep_file(ROOT / "configs" / "sweeps" / "grid-432.toml")
    tried = {json.dumps(sweep.params(number)) for number in range(432)}
    assert len(tried) == 432
    assert sweep.settings(sweep.params(431)) | {"keep": 0} == {
        **sweep.train,
        "keep": 0,
        "lr": 5e-5,
        "kl_coef": 0.2,
        "clip_range": 0.2,
        "clip_range_high": 0.2,
        "temperature": 1.0,
        "mix_env_ratio": 0.2,
        "batch_size": 2,
        "k_samples": 4,
        "kl_type": "k3",
    }


def test_random_draws_stay_in_their_ranges() -> None:
    sweep = read_sweep_file(ROOT / "configs" / "sweeps" / "random-48.toml")
    rates = [sweep.params(number)["lr"] for number in range(48)]
    assert all(1e-7 <= rate <= 1e-4 for rate in rates)
    assert 15 <= sum(rate < 3.16e-6 for rate in rates) <= 33


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("sampler = 'grid'\n[space]\nlrr = [1e-5]", "unknown key 'lrr', did you mean 'lr'?"),
        ("samplerr = 'grid'", "unknown key 'samplerr', did you mean 'sampler'?"),
        ("[space]\nheld_out = ['a', 'b']", "held_out cannot be swept"),
        ("[train]\nlr = 1e-5\n[space]\nlr = [1e-5]", "both in [train] and in [space]"),
        ("[space]\nlr = { low = 1e-5, high = 1e-4 }", "a grid needs lists"),
        ("sampler = 'random'\n[space]\nlr = [1e-5]", "say how many `trials`"),
        ("[space]\nlr = 1e-5", "give a list of values"),
        ("[space]\n'lr,seed' = [[1e-5]]", "needs 2 values"),
        ("[space]\nk_samples = [1]", "a group needs at least 2"),
        ("preset = 'demoo'\n[space]\nlr = [1e-5]", "did you mean 'demo'?"),
        ("", "[space] is empty"),
    ],
)
def test_a_wrong_file_is_one_line(tmp_path: Path, text: str, told: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_sweep_file(written(tmp_path, text))
    assert told in str(caught.value)
    assert "\n" not in str(caught.value)


def test_settings_become_flags(tmp_path: Path) -> None:
    text = "preset = 'mini'\n[train]\ngae = false\ndata = ['a', 'b']\n[space]\nlr = [1e-5]"
    sweep = read_sweep_file(written(tmp_path, text), ("steps=7", "adaptive-kl=true", "model=x/y"))
    found = command(sweep, sweep.params(0), Path("out"))
    assert " ".join(found) == (
        "--preset mini --no-gae --data a b --steps 7 --adaptive-kl --model x/y --lr 1e-05 --out out"
    )


def test_a_trial_means_the_same_with_and_without_a_gpu(tmp_path: Path) -> None:
    sweep = read_sweep_file(written(tmp_path, "[space]\nlr = [1e-5]"))
    args = command(sweep, sweep.params(0), Path("out"))
    assert usual(args) == args
    assert read_settings(args, "rookworld train") == TrainSettings.of(lr=1e-5, out=Path("out"))


def test_gpus_by_name() -> None:
    assert gpu_names("0, 2") == ("0", "2")
    assert gpu_names("none") == ("",)


# --- running ---


def test_a_grid_runs_whole_and_once(tmp_path: Path) -> None:
    record = swept(tmp_path, parallel=3)
    assert [one["state"] for one in record["trials"]] == ["done"] * 6
    assert record["trials"][5]["params"] == {"lr": 0.3, "batch_size,k_samples": [2, 4]}
    assert record["trials"][5]["value"] == pytest.approx(0.4 + 3 * 0.3)
    summary = summarize(record)
    assert summary.survival == 1
    assert summary.best[0]["params"]["lr"] == 0.3
    importance = {factor.name: factor.importance for factor in summary.factors}
    assert importance["lr"] == pytest.approx(1.0)
    assert importance["batch_size,k_samples"] == 0
    kept = [path.parent.name for path in (tmp_path / "sweep" / "trials").glob("*/final")]
    assert kept == ["0004"]


ENDS = {
    fake.OK: None,
    fake.DIVERGES: "entropy_collapse",
    fake.BREAKS: "bug",
    fake.NO_MEMORY: "out_of_memory",
    fake.HANGS: "timeout",
    fake.NO_ENGINE: "engine",
    fake.NO_ROWS: "data",
    fake.SILENT: "bug",
    fake.KILLED: "killed",
    99: "settings",
}


def test_every_failure_has_its_cause(tmp_path: Path) -> None:
    text = f"[train]\nlr = 0.1\n[space]\nseed = {list(ENDS)}"
    record = swept(tmp_path, text, parallel=4, timeout_s=2)
    assert {one["params"]["seed"]: one["cause"] for one in record["trials"]} == ENDS
    assert summarize(record).causes["bug"] == 2
    told = {one["cause"]: one["message"] for one in record["trials"]}
    assert "took more than 2 s" in told["timeout"]
    bug = next(one for one in record["trials"] if one["params"]["seed"] == fake.BREAKS)
    traceback = Path(bug["message"].split("traceback in ")[1])
    assert "ValueError: a bug of ours" in traceback.read_text()


def test_a_killed_training_is_started_again_once(tmp_path: Path) -> None:
    said: list[str] = []
    log = tmp_path / "log"
    os.environ["FAKE_LOG"] = str(log)
    try:
        settings = SweepSettings(
            file=written(tmp_path, f"[space]\nseed = [{fake.KILLED}]"), out=tmp_path / "sweep"
        )
        run_sweep(settings, SweepHooks(say=said.append), FAKE)
    finally:
        del os.environ["FAKE_LOG"]
    assert lines_of(log) == ["start 0000", "start 0000"]
    assert len(said) == 1


@pytest.mark.parametrize("code", [1, 2, 3, 4, 130, -6, -9, -11, -15])
def test_no_exit_code_is_without_a_cause(tmp_path: Path, code: int) -> None:
    cause, message = failure(code, [], tmp_path / "nothing.log")
    assert cause in CAUSES
    assert message


def test_pruning_stops_the_worse_half(tmp_path: Path) -> None:
    os.environ["FAKE_SECONDS"] = "1.5"
    try:
        text = "prune = true\nprune_after = 1\n[space]\nlr = [0.3, 0.1]"
        record = swept(tmp_path, text)
    finally:
        del os.environ["FAKE_SECONDS"]
    assert [one["state"] for one in record["trials"]] == ["done", "pruned"]
    assert summarize(record).survival == 1


def test_tpe_learns_and_repeats_itself(tmp_path: Path) -> None:
    text = "sampler = 'tpe'\ntrials = 12\n[space]\nlr = { low = 0.0, high = 1.0 }\nseed = [0]"
    runs = []
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        record = swept(tmp_path / name, text)
        runs.append([one["params"]["lr"] for one in record["trials"]])
    assert runs[0] == runs[1]
    assert len(set(runs[0])) == 12
    assert max(runs[0][10:]) > 0.5


def test_a_study_goes_on_only_with_its_own_file(tmp_path: Path) -> None:
    swept(tmp_path)
    with pytest.raises(ConfigError, match="begun with other settings"):
        swept(tmp_path, SMALL.replace("0.3", "0.4"))


def test_a_storage_that_is_none_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(RookworldError, match="--storage nonsense"):
        swept(tmp_path, storage="nonsense")


def test_a_storage_that_cannot_be_reached_keeps_its_password(tmp_path: Path) -> None:
    with pytest.raises(RookworldError, match="--storage nonsense://user:") as refused:
        swept(tmp_path, storage="nonsense://user:secret@nowhere/sweeps")
    assert "secret" not in str(refused.value)


def test_a_storage_without_its_driver_names_the_package() -> None:
    from rookworld.sweep.study import reason

    error = ImportError("Please install appropriate one.")
    error.__cause__ = ModuleNotFoundError("No module named 'psycopg'", name="psycopg")
    assert reason(error) == "No module named 'psycopg': pip install \"psycopg[binary]\""


# --- killed, and side by side ---


def test_killed_twice_it_ends_as_if_it_had_not_been(tmp_path: Path) -> None:
    log, out = tmp_path / "log", tmp_path / "sweep"
    for started in (2, 4):
        sweep = process(tmp_path, log, 1.0, out=out, parallel=2)
        waited_for(log, started, "start")
        sweep.send_signal(signal.SIGKILL)
        sweep.wait()
    os.environ["FAKE_LOG"] = str(log)
    try:
        record = swept(tmp_path, parallel=2)
    finally:
        del os.environ["FAKE_LOG"]
    (tmp_path / "whole").mkdir()
    whole = swept(tmp_path / "whole", parallel=2)
    told = [[(t["number"], t["params"], t["state"]) for t in r["trials"]] for r in (record, whole)]
    assert told[0] == told[1]
    # a training outlives its killed sweep and is not started a second time
    assert Counter(lines_of(log)) == Counter(
        f"{event} {number:04d}" for event in ("start", "end") for number in range(6)
    )


@pytest.mark.parametrize("journal", [False, True])
def test_two_processes_never_run_the_same_trial(tmp_path: Path, journal: bool) -> None:
    log = tmp_path / "log"
    storage = f"journal://{tmp_path / 'journal.log'}" if journal else None
    storage = storage or f"sqlite:///{tmp_path / 'study.db'}"
    outs = (tmp_path / "a", tmp_path / "b") if journal else (tmp_path / "a", tmp_path / "a")
    pair = [process(tmp_path, log, 0.3, out=out, storage=storage, parallel=2) for out in outs]
    assert [one.wait(timeout=90) for one in pair] == [0, 0]
    assert sorted(lines_of(log)) == sorted(
        f"{event} {number:04d}" for event in ("start", "end") for number in range(6)
    )
    for out in outs:
        record = json.loads((out / "sweep.json").read_text())
        assert [one["state"] for one in record["trials"]] == ["done"] * 6


def test_interrupted_it_leaves_its_trials_open(tmp_path: Path) -> None:
    log, out = tmp_path / "log", tmp_path / "sweep"
    sweep = process(tmp_path, log, 2.0, out=out, parallel=2)
    waited_for(log, 2, "start")
    sweep.send_signal(signal.SIGTERM)
    assert sweep.wait(timeout=60) != 0
    record = json.loads((out / "sweep.json").read_text())
    assert [one["state"] for one in record["trials"]] == ["running", "running"]
    record = swept(tmp_path, parallel=3)
    assert [one["state"] for one in record["trials"]] == ["done"] * 6


@pytest.mark.parametrize(("silence_s", "number"), [(600.0, 1), (0.0, 0)])
def test_another_machines_trial_is_taken_over_when_it_falls_silent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, silence_s: float, number: int
) -> None:
    from rookworld.sweep import study

    monkeypatch.setattr(study, "SETTLE_S", 0.01)
    sweep = read_sweep_file(written(tmp_path))
    queues = []
    for name in ("here", "there"):
        (tmp_path / name).mkdir()
        url = f"sqlite:///{tmp_path / 'study.db'}"
        queues.append(study.TrialQueue(sweep, tmp_path / name, url, silence_s))
    gone, mine = (queue.claim() for queue in queues)
    assert gone is not None and mine is not None
    assert (gone.number, mine.number) == (0, number)
    assert mine.params == sweep.params(number)
    # whoever lost a trial and comes back does not end it a second time
    here, there = queues
    assert here.heartbeat(gone) is (number == 1)
    there.finish(mine, Outcome("done", value=0.5), 1.0)
    here.finish(gone, Outcome("done", value=0.4), 1.0)
    values = [one["value"] for one in there.records()]
    assert values == ([0.4, 0.5] if number == 1 else [0.5])


# --- what mattered ---


def test_explained_share_by_hand() -> None:
    import numpy as np

    labels = ["a", "a", "b", "b"]
    assert explained_share(labels, np.array([1.0, 1.0, 3.0, 3.0])) == pytest.approx(1.0)
    # means 1 and 3, each ± 1: within 4, between 4, total 8, chance 1 · 4 / 2
    assert explained_share(labels, np.array([0.0, 2.0, 2.0, 4.0])) == pytest.approx(0.25)
    assert explained_share(["a"] * 4, np.arange(4.0)) is None
    assert explained_share(labels, np.ones(4)) is None


def test_many_numbers_become_ranges() -> None:
    labels = level_labels([float(number) for number in range(20)])
    assert sorted(Counter(labels).values()) == [5, 5, 5, 5]
    assert level_labels([[1, 2], [2, 4]]) == ["1 × 2", "2 × 4"]
