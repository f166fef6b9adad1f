"""A run stopped anywhere and resumed is the run that never stopped, bit by bit."""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import child_process
from rookworld.cli.dispatch import main
from rookworld.evaluation.evaluate import Evaluation, load_found, save_found
from rookworld.model.checkpoint import save_checkpoint, saved_checkpoints
from rookworld.model.tokenizer import Tokenizer
from rookworld.model.weights import load_model
from rookworld.rl.metrics import Metrics
from rookworld.rl.run_log import Hooks
from rookworld.rl.settings import TrainSettings
from rookworld.rl.trainer import train
from rookworld.runtime.errors import ConfigError, RookworldError
from rookworld.runtime.processes import Interrupted
from rookworld.runtime.run_folder import read_json, read_lines
from tiny_training import (
    metrics_of,
    tiny_rows,
    tiny_settings,
    weight_evaluation,
    weights_of,
    write_jsonl,
)

pytestmark = pytest.mark.usefixtures("single_thread")

STREAMS = ("eval.jsonl", "events.jsonl", "rollouts.jsonl")
EVERYTHING: dict[str, Any] = {
    "gae": True,
    "ref_sync_every": 3,
    "adaptive_kl": True,
    "target_kl": 1e-4,
    "reward_norm": True,
    "mix_env_ratio": 0.5,
    "reward_warmup_steps": 4,
    "adaptive_threshold": True,
}


def stopped_at(step: int) -> Hooks:
    """Ctrl-C during a step."""

    def interrupt(done: int, metrics: Metrics) -> None:
        if done == step:
            os.kill(os.getpid(), signal.SIGINT)

    return Hooks(on_step=interrupt)


def whole(settings: TrainSettings, folder: Path) -> Path:
    """The same run, never stopped."""
    train(settings.but(out=folder), tiny_rows(), weight_evaluation)
    return folder


def assert_same_run(found: Path, expected: Path) -> None:
    assert metrics_of(found) == metrics_of(expected)
    for name in STREAMS:
        assert list(read_lines(found / name)) == list(read_lines(expected / name)), name
    assert weights_of(found / "final") == weights_of(expected / "final")
    logs = [(run / "train.log").read_text().splitlines() for run in (found, expected)]
    assert [line.split(" lr ")[0] for line in logs[0]] == [
        line.split(" lr ")[0] for line in logs[1]
    ]
    last = [saved_checkpoints(run)[-1] for run in (found, expected)]
    for name in ("trainer.safetensors", "trainer.json", "model.safetensors"):
        assert (last[0] / name).read_bytes() == (last[1] / name).read_bytes(), name
    assert (found / "DONE").exists()


@pytest.mark.parametrize(
    ("changes", "stops"),
    [
        ({}, [1, 4]),
        ({"baseline_type": "ema"}, [3]),
        ({"credit": "choices"}, [2]),
        ({"distill_coef": 1.0, "distill_prompts": 6}, [3]),
        ({"optimizer": "muon"}, [3]),
        (EVERYTHING, [2, 3, 5]),
    ],
    ids=["plain", "ema", "choices", "agreement", "muon", "everything"],
)
def test_a_run_stopped_after_a_step_goes_on_bit_by_bit(
    warm_folder: Path, tmp_path: Path, changes: dict[str, Any], stops: list[int]
) -> None:
    settings = tiny_settings(warm_folder, tmp_path / "run", steps=6, resume=True, **changes)
    for step in stops:
        with pytest.raises(Interrupted, match=f"stopped after step {step}; --resume goes on"):
            train(settings, tiny_rows(), weight_evaluation, hooks=stopped_at(step))
        assert saved_checkpoints(tmp_path / "run")[-1].name == f"step-{step:06d}"
    train(settings, tiny_rows(), weight_evaluation)
    expected = whole(settings, tmp_path / "whole")
    assert_same_run(tmp_path / "run", expected)
    assert len({str(line["loss/total"]) for line in metrics_of(expected)}) > 3


def test_a_finished_run_resumes_to_itself(warm_folder: Path, tmp_path: Path) -> None:
    settings = tiny_settings(warm_folder, tmp_path / "run", steps=2, resume=True)
    train(settings, tiny_rows(), weight_evaluation)
    before = weights_of(tmp_path / "run" / "final")
    train(settings, tiny_rows(), weight_evaluation)
    assert weights_of(tmp_path / "run" / "final") == before
    assert [line["step"] for line in metrics_of(tmp_path / "run")] == [1, 2]


def test_a_finished_run_may_be_made_longer(warm_folder: Path, tmp_path: Path) -> None:
    settings = tiny_settings(
        warm_folder, tmp_path / "run", steps=2, resume=True, lr_schedule="constant"
    )
    train(settings, tiny_rows(), weight_evaluation)
    longer = settings.but(steps=4)
    with pytest.raises(Interrupted):
        train(longer, tiny_rows(), weight_evaluation, hooks=stopped_at(3))
    assert not (tmp_path / "run" / "DONE").exists()
    train(longer, tiny_rows(), weight_evaluation)
    assert [line["step"] for line in metrics_of(tmp_path / "run")] == [1, 2, 3, 4]


def test_a_resumed_run_tells_the_settings_it_goes_on_with(
    warm_folder: Path, tmp_path: Path
) -> None:
    settings = tiny_settings(warm_folder, tmp_path / "run", steps=1, resume=True)
    train(settings, tiny_rows(), weight_evaluation)
    train(settings.but(steps=2, lr=1e-4), tiny_rows(), weight_evaluation)
    told = read_json(tmp_path / "run" / "config.json")
    assert (told["steps"], told["lr"]) == (2, 1e-4)


@pytest.mark.parametrize("fault", ["changed", "cut off", "no manifest"])
def test_a_broken_newest_checkpoint_is_passed_over_with_a_line(
    warm_folder: Path, tmp_path: Path, fault: str
) -> None:
    settings = tiny_settings(warm_folder, tmp_path / "run", steps=6, resume=True)
    with pytest.raises(Interrupted):
        train(settings, tiny_rows(), weight_evaluation, hooks=stopped_at(4))
    newest = saved_checkpoints(tmp_path / "run")[-1]
    (newest / "SOUND").touch()  # as if a step had been taken from it
    weights = newest / "model.safetensors"
    if fault == "changed":
        weights.write_bytes(weights.read_bytes()[:-1] + b"\0")
    elif fault == "cut off":
        weights.write_bytes(weights.read_bytes()[:1000])
    else:
        (newest / "manifest.json").unlink()
    lines: list[str] = []
    train(settings, tiny_rows(), weight_evaluation, hooks=Hooks(say=lines.append))
    assert lines[0].startswith(f"{newest}: skipped, ")
    assert lines[1] == "resumed after step 2"
    assert_same_run(tmp_path / "run", whole(settings, tmp_path / "whole"))


@pytest.mark.parametrize("resume", [False, True])
def test_a_run_is_not_destroyed_unasked(warm_folder: Path, tmp_path: Path, resume: bool) -> None:
    settings = tiny_settings(warm_folder, tmp_path, steps=2)
    train(settings, tiny_rows(), weight_evaluation)
    if resume:  # nothing to go on from
        for folder in saved_checkpoints(tmp_path):
            (folder / "manifest.json").write_text("{}")
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(ConfigError, match="--overwrite deletes it and starts over"):
        train(settings.but(resume=resume), tiny_rows(), weight_evaluation)
    assert sorted(tmp_path.rglob("*")) == before
    train(settings.but(resume=resume, overwrite=True, steps=1), tiny_rows(), weight_evaluation)
    assert [line["step"] for line in metrics_of(tmp_path)] == [1]


def test_a_live_run_is_left_alone(warm_folder: Path, tmp_path: Path) -> None:
    settings = tiny_settings(warm_folder, tmp_path, steps=2, overwrite=True)
    found: list[str] = []

    def begin_another(step: int, metrics: Any) -> None:
        with pytest.raises(RookworldError, match="is training here") as error:
            train(settings, tiny_rows(), weight_evaluation)
        found.append(str(error.value))

    train(settings, tiny_rows(), weight_evaluation, hooks=Hooks(on_step=begin_another))
    assert len(found) == 2
    assert [line["step"] for line in metrics_of(tmp_path)] == [1, 2]


def test_resuming_as_another_kind_of_run_is_one_line(warm_folder: Path, tmp_path: Path) -> None:
    settings = tiny_settings(warm_folder, tmp_path / "run", steps=4, resume=True)
    with pytest.raises(Interrupted):
        train(settings, tiny_rows(), weight_evaluation, hooks=stopped_at(1))
    with pytest.raises(RookworldError, match=r"no value\.weight .* --gae"):
        train(settings.but(gae=True), tiny_rows(), weight_evaluation)
    others: list[dict[str, Any]] = [{"trained": "blocks"}, {"optimizer": "muon"}]
    for other in others:
        with pytest.raises(ConfigError, match="the run's own --trained and --optimizer"):
            train(settings.but(**other), tiny_rows(), weight_evaluation)


@pytest.mark.parametrize(
    ("state", "maker"),
    [
        ({"step": 3}, "pretrain"),
        ({"step": 3, "guard": {}, "backend": "trl"}, "train --backend trl"),
    ],
)
def test_a_run_of_another_command_is_named(
    warm_folder: Path, tmp_path: Path, state: dict[str, Any], maker: str
) -> None:
    folder = tmp_path / "checkpoints" / "step-000003"
    save_checkpoint(folder, load_model(warm_folder), Tokenizer.load(warm_folder), {}, state)
    settings = tiny_settings(warm_folder, tmp_path, steps=4, resume=True)
    with pytest.raises(ConfigError, match=f"saved by {maker}, not by train --backend native"):
        train(settings, tiny_rows(), weight_evaluation)
    assert folder.exists()


# --- killed -------------------------------------------------------------------------------------


def command(model: Path, rows: Path, out: Path) -> list[str]:
    """`rookworld train` with everything that has a state, in steps of a few hundredths."""
    flags = {
        "--model": model,
        "--data": rows,
        "--held-out": rows,
        "--out": out,
        "--steps": 6,
        "--batch-size": 2,
        "--k-samples": 3,
        "--mix-env-ratio": 0.5,
        "--max-new-tokens": 16,
        "--lr": 1e-3,
        "--eval-every": 3,
        "--eval-policy-rows": 1,
        "--eval-environment-rows": 0,
        "--save-every": 2,
        "--sample-every": 4,
        "--ref-sync-every": 5,
        "--baseline-type": "adaptive",
        "--device": "cpu",
    }
    words = [str(word) for pair in flags.items() for word in pair]
    return ["train", *words, "--adaptive-kl", "--reward-norm", "--resume"]


def test_a_run_killed_at_random_moments_ends_as_if_it_had_not(
    warm_folder: Path, tmp_path: Path
) -> None:
    rows, log = write_jsonl(tmp_path / "rows.jsonl", tiny_rows()), tmp_path / "log"
    child_process.run(["--version"], log)  # the server of processes is up
    began = time.monotonic()
    assert child_process.run(command(warm_folder, rows, tmp_path / "whole"), log) == 0
    takes_s = time.monotonic() - began
    args = command(warm_folder, rows, tmp_path / "run")
    moments = random.Random(0)
    for _ in range(5):
        child = child_process.start(args, log)
        time.sleep(moments.uniform(0.2, 0.6) * takes_s)
        child.kill()
        child.join()
    assert child_process.run(args, log) == 0, log.read_text()
    assert_same_run(tmp_path / "run", tmp_path / "whole")


@pytest.mark.slow
def test_a_run_that_dies_between_any_two_changes_of_the_disk_loses_nothing(
    warm_folder: Path, tmp_path: Path
) -> None:
    rows, log = write_jsonl(tmp_path / "rows.jsonl", tiny_rows()), tmp_path / "log"
    assert child_process.run(command(warm_folder, rows, tmp_path / "whole"), log) == 0
    args = command(warm_folder, rows, tmp_path / "run")
    moments = random.Random(0)
    deaths = 0
    while (code := child_process.run(args, log, dies_after=moments.randint(1, 45))) != 0:
        assert code == child_process.DIED, log.read_text()
        deaths += 1
        assert deaths < 1000, "it takes more changes of the disk to end than it has"
    assert deaths > 10
    assert_same_run(tmp_path / "run", tmp_path / "whole")


@pytest.mark.slow
def test_a_command_killed_twenty_times_ends_as_if_it_had_not(
    warm_folder: Path, tmp_path: Path
) -> None:
    rows = write_jsonl(tmp_path / "rows.jsonl", tiny_rows())
    environment = os.environ | {"OMP_NUM_THREADS": "1"}

    def begin(out: Path) -> subprocess.Popen[bytes]:
        args = [sys.executable, "-m", "rookworld", *command(warm_folder, rows, out)]
        return subprocess.Popen(args, env=environment, stderr=subprocess.DEVNULL)

    began = time.monotonic()
    assert begin(tmp_path / "whole").wait() == 0
    takes_s = time.monotonic() - began
    moments = random.Random(0)
    kills = 0
    while kills < 20:
        child = begin(tmp_path / "run")
        time.sleep(moments.uniform(0.2, 1.0) * takes_s)
        kills += child.poll() is None
        child.kill()
        child.wait()
    assert begin(tmp_path / "run").wait() == 0
    assert_same_run(tmp_path / "run", tmp_path / "whole")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_writes_a_checkpoint_and_exits_130(
    warm_folder: Path, tmp_path: Path, number: signal.Signals
) -> None:
    rows = write_jsonl(tmp_path / "rows.jsonl", tiny_rows())
    args = [*command(warm_folder, rows, tmp_path / "run"), "--steps", "10000"]
    child = child_process.start(args, tmp_path / "log")
    metrics = tmp_path / "run" / "metrics.jsonl"
    child_process.wait_for(metrics, child)
    assert child.pid is not None
    os.kill(child.pid, number)
    assert child_process.ended(child) == 130
    done = metrics_of(tmp_path / "run")[-1]["step"]
    assert saved_checkpoints(tmp_path / "run")[-1].name == f"step-{done:06d}"
    shown = (tmp_path / "log").read_text()
    assert f"stopped after step {done}; --resume goes on from there" in shown
    assert "Traceback" not in shown


def test_a_resumed_run_is_compared_with_where_it_began(
    warm_folder: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    rows = write_jsonl(tmp_path / "rows.jsonl", tiny_rows())
    flags = f"--model {warm_folder} --data {rows} --held-out {rows} --out {tmp_path / 'run'}"
    more = "--preset plain --batch-size 2 --k-samples 2 --lr 1e-2 --device cpu --eval-mates 0"

    def shown(words: str) -> dict[str, list[str]]:
        """Metric, and what the closing table says of it; empty without a table."""
        assert main(["train", *flags.split(), *more.split(), *words.split()]) == 0
        lines = [re.split(r" {2,}", line.strip()) for line in capsys.readouterr().out.splitlines()]
        return {line[0]: line[1:] for line in lines if len(line) > 3}

    first = shown("--steps 2")
    resumed = shown("--steps 4 --resume")
    assert first["Reward of greedy answers"][0] == resumed["Reward of greedy answers"][0]
    assert first["Reward of greedy answers"][1] != resumed["Reward of greedy answers"][1]
    assert shown("--steps 5 --resume --eval-policy-rows 3") == {}  # other rows: no difference
    assert shown("--steps 6 --resume --p-weights legal 0.9") == {}  # nor under other rules


def test_what_an_evaluation_found_is_kept_with_what_was_asked(tmp_path: Path) -> None:
    found = Evaluation.of({"P/legal": np.array([1.0, 0.0, np.nan]), "A/by_kind/mate": np.ones(3)})
    path = tmp_path / "rows.npz"
    assert load_found(path, "these") is None
    save_found(path, found, "these")
    again = load_found(path, "these")
    assert again is not None
    assert again.estimates == found.estimates
    assert load_found(path, "others") is None
    path.write_bytes(b"PK half a file")
    assert load_found(path, "these") is None
