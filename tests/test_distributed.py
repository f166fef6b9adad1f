"""Two ranks do what one does, decide together, and do not hang."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import child_process
from rookworld.cli.dispatch import main
from rookworld.evaluation.evaluate import Evaluation
from rookworld.model.checkpoint import fault_of, saved_checkpoints
from rookworld.model.gpt2 import GPT2
from rookworld.model.tokenizer import Tokenizer
from rookworld.model.weights import load_model
from rookworld.rl.collect import collect_groups
from rookworld.rl.metrics import Clock
from rookworld.rl.scratch import StepScratch
from rookworld.rl.state import new_state
from rookworld.rl.step import learn
from rookworld.rl.trainer import train
from rookworld.runtime import distributed
from rookworld.runtime.errors import ConfigError
from rookworld.runtime.run_folder import read_lines
from tiny_training import metrics_of, tiny_rows, tiny_settings, write_jsonl


def command(model: Path, rows: Path, out: Path, more: str = "") -> list[str]:
    """Both tasks, flat groups, uneven shares, and everything that sums over ranks."""
    flags = f"--model {model} --data {rows} --held-out {rows} --out {out} --device cpu --resume"
    small = "--batch-size 3 --k-samples 4 --mix-env-ratio 0.3 --max-new-tokens 16"
    kinds = "--baseline-type adaptive --reward-norm --adaptive-kl --lr-schedule constant"
    rare = "--eval-policy-rows 1 --eval-environment-rows 0 --eval-every 0 --save-every 50"
    return f"train {flags} {small} {kinds} {rare} {more}".split()


def run_ranks(args: list[str], log: Path, count: int = 2) -> None:
    children = child_process.ranks(args, log, count)
    codes = [child_process.ended(child) for child in children]
    assert codes == [0] * count, log.read_text()


def furthest(found: Path, expected: Path) -> float:
    """Largest difference of any weight."""
    pairs = zip(load_model(found).parameters(), load_model(expected).parameters(), strict=True)
    return max(float((a - b).detach().abs().max()) for a, b in pairs)


def assert_same_trajectory(found: Path, expected: Path, steps: int) -> None:
    mine, theirs = metrics_of(found), metrics_of(expected)
    assert [line["step"] for line in mine] == list(range(1, steps + 1))
    for one, other in zip(mine, theirs, strict=True):
        assert one.keys() == other.keys()
        for name in ("loss/total", "loss/policy", "reward/mean", "kl/exact", "policy/entropy"):
            assert one[name] == pytest.approx(other[name], abs=1e-6), (one["step"], name)
    assert furthest(found / "final", expected / "final") < 1e-6


@pytest.fixture(scope="module")
def alone(warm_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Twenty steps of one process; the rows lie beside the run."""
    folder = tmp_path_factory.mktemp("alone")
    rows = write_jsonl(folder / "rows.jsonl", tiny_rows())
    args = command(warm_folder, rows, folder / "run", "--steps 20 --lr 1e-4")
    assert child_process.run(args, folder / "log") == 0
    return folder / "run"


def test_two_ranks_go_the_way_of_one(warm_folder: Path, alone: Path, tmp_path: Path) -> None:
    rows = alone.with_name("rows.jsonl")
    args = command(warm_folder, rows, tmp_path / "run", "--steps 20 --lr 1e-4")
    run_ranks(args, tmp_path / "log")
    assert_same_trajectory(tmp_path / "run", alone, 20)
    assert furthest(alone / "final", warm_folder) > 1e-4


@pytest.mark.parametrize(
    "changing",
    [[(10, 2), (20, 1)], pytest.param([(3, 2), (9, 1), (20, 4)], marks=pytest.mark.slow)],
    ids=["2-1", "2-1-4"],
)
def test_the_number_of_ranks_may_change_on_resume(
    warm_folder: Path, alone: Path, tmp_path: Path, changing: list[tuple[int, int]]
) -> None:
    rows = alone.with_name("rows.jsonl")
    for steps, count in changing:
        args = command(warm_folder, rows, tmp_path / "run", f"--steps {steps} --lr 1e-4")
        run_ranks(args, tmp_path / "log", count)
    assert_same_trajectory(tmp_path / "run", alone, 20)


@pytest.mark.slow
def test_two_ranks_go_the_way_of_one_with_the_embedded_model(tmp_path: Path) -> None:
    """Thousands of its tokens are never sampled: their gradients are rounding and hardly more."""
    small = "--batch-size 4 --k-samples 2 --eval-policy-rows 1 --eval-environment-rows 0"
    rare = "--eval-mates 0 --eval-every 0 --save-every 50 --seed 3"
    for count in (1, 2):
        args = f"train --steps 20 --device cpu --dtype float32 {small} {rare}"
        run_ranks([*args.split(), "--out", str(tmp_path / str(count))], tmp_path / "log", count)
    assert_same_trajectory(tmp_path / "2", tmp_path / "1", 20)


@pytest.mark.slow
@pytest.mark.parametrize(
    "more",
    [
        "--gae",
        "--credit choices --reward-norm",
        "--distill-coef 1 --distill-prompts 6",
        "--guide 0.4 --max-new-tokens 90",
    ],
)
def test_two_ranks_go_the_way_of_one_by_other_credit(
    warm_folder: Path, tmp_path: Path, more: str
) -> None:
    rows, log = write_jsonl(tmp_path / "rows.jsonl", tiny_rows()), tmp_path / "log"
    for count in (1, 2):
        out = tmp_path / str(count)
        run_ranks(command(warm_folder, rows, out, f"--steps 20 --lr 1e-4 {more}"), log, count)
    assert_same_trajectory(tmp_path / "2", tmp_path / "1", 20)


def test_a_rank_that_dies_ends_the_others_with_a_line_and_a_usable_checkpoint(
    warm_folder: Path, tmp_path: Path
) -> None:
    rows, log = write_jsonl(tmp_path / "rows.jsonl", tiny_rows()), tmp_path / "log"
    args = command(warm_folder, rows, tmp_path / "run", "--steps 10000")
    first, second = child_process.ranks(args, log, 2)
    child_process.wait_for(tmp_path / "run" / "metrics.jsonl", first)
    second.kill()
    assert child_process.ended(first, timeout_s=30) == 2
    lines = [line for line in log.read_text().splitlines() if line.startswith("rookworld:")]
    assert len(lines) == 1
    assert "rank 0: another process of this training does not answer" in lines[0]
    assert "--resume" in lines[0]
    assert fault_of(saved_checkpoints(tmp_path / "run")[-1]) is None


def train_and_hang(args: list[str], hangs: bool) -> None:
    """`rookworld ARGS` with little patience, by a rank that may stop answering after a step."""
    distributed.TIMEOUT = timedelta(seconds=4)
    if hangs:
        distributed.mean_by_name = lambda sums: os.kill(os.getpid(), signal.SIGSTOP)  # type: ignore[assignment,return-value]
    sys.exit(main(args))


@pytest.mark.slow
def test_a_rank_that_hangs_ends_the_others_after_the_time_out(
    warm_folder: Path, tmp_path: Path
) -> None:
    rows, log = write_jsonl(tmp_path / "rows.jsonl", tiny_rows()), tmp_path / "log"
    args = command(warm_folder, rows, tmp_path / "run", "--steps 5")
    first, second = (
        child_process.call(
            train_and_hang, (args, rank == 1), log, child_process.rank_of(2, rank, log)
        )
        for rank in range(2)
    )
    assert child_process.ended(first, timeout_s=60) == 2
    second.kill()
    lines = [line for line in log.read_text().splitlines() if line.startswith("rookworld:")]
    assert len(lines) == 1
    assert "Timed out" in lines[0]
    assert fault_of(saved_checkpoints(tmp_path / "run")[-1]) is None


def train_with_a_slow_evaluation(model: str, folder: str) -> None:
    """Rank 0 evaluates for longer than the others would wait for it within a step."""
    distributed.TIMEOUT = timedelta(seconds=3)

    def slow(model: GPT2, tokenizer: Tokenizer) -> Evaluation:
        time.sleep(5)
        return Evaluation()

    settings = tiny_settings(Path(model), Path(folder) / "run", steps=1, eval_every=0)
    train(settings, tiny_rows(), slow)
    distributed.stop()


@pytest.mark.slow
def test_an_evaluation_may_take_longer_than_the_time_out(warm_folder: Path, tmp_path: Path) -> None:
    log = tmp_path / "log"
    children = [
        child_process.call(
            train_with_a_slow_evaluation,
            (str(warm_folder), str(tmp_path)),
            log,
            child_process.rank_of(2, rank, log),
        )
        for rank in range(2)
    ]
    assert [child_process.ended(child) for child in children] == [0, 0], log.read_text()


def spoilt(module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
    """A forward hook: the gradient that comes back is not a number."""
    if output.requires_grad:
        output.register_hook(lambda gradient: gradient * math.nan)  # type: ignore[no-untyped-call]


def steps_with_a_nan_on_one_rank(model: str, folder: str, shard: bool) -> None:
    """Four steps; from the third on, rank 1's gradient is broken. Each rank writes what it has."""
    settings = tiny_settings(Path(model), Path(folder) / "run", batch_size=4, shard=shard)
    device = distributed.start("cpu")
    state = new_state(settings, tiny_rows(), device)
    decisions = []
    for number in range(4):
        if number == 2 and distributed.rank() == 1:
            state.learner.model.ln_f.register_forward_hook(spoilt)
        scratch = StepScratch()
        collected = collect_groups(state, settings, None, Clock(device), scratch)
        _, ruling = learn(state, collected, scratch, settings, Clock(device))
        decisions.append(type(ruling.decision).__name__)
        state.step += 1
    kept = {"decisions": decisions, "weights": list(state.learner.whole.parameters())}
    torch.save(kept, Path(folder) / f"rank-{distributed.rank()}.pt")
    distributed.stop()


@pytest.mark.parametrize("shard", [False, True], ids=["whole", "shares"])
def test_a_nan_on_one_rank_skips_the_step_on_all(
    warm_folder: Path, tmp_path: Path, shard: bool
) -> None:
    log = tmp_path / "log"
    children = [
        child_process.call(
            steps_with_a_nan_on_one_rank,
            (str(warm_folder), str(tmp_path), shard),
            log,
            child_process.rank_of(2, rank, log),
        )
        for rank in range(2)
    ]
    assert [child_process.ended(child) for child in children] == [0, 0], log.read_text()
    first, second = (torch.load(tmp_path / f"rank-{rank}.pt") for rank in range(2))
    assert first["decisions"] == second["decisions"] == ["Continue", "Continue", "Skip", "Skip"]
    for one, other in zip(first["weights"], second["weights"], strict=True):
        assert torch.equal(one, other)


@pytest.mark.slow
def test_ranks_restore_and_give_up_together(warm_folder: Path, tmp_path: Path) -> None:
    rows = write_jsonl(tmp_path / "rows.jsonl", tiny_rows())
    far = "--steps 200 --lr 1e-2 --kl-divergence-threshold 0.01 --max-recoveries 2"
    happened = []
    for name, count, more in (("one", 1, ""), ("two", 2, ""), ("shares", 2, "--shard")):
        log = tmp_path / f"{name}.log"
        args = command(warm_folder, rows, tmp_path / name, f"{far} {more}")
        codes = [child_process.ended(child) for child in child_process.ranks(args, log, count)]
        assert codes == [3] * count, log.read_text()
        assert log.read_text().count("rookworld:") == 1
        events = list(read_lines(tmp_path / name / "events.jsonl"))
        happened.append([(event["step"], event["kind"], event["cause"]) for event in events])
    assert happened[0] == happened[1] == happened[2]
    assert len(happened[0]) >= 3


# --- as a person starts it ----------------------------------------------------------------------


def torchrun(count: int, args: list[str]) -> subprocess.CompletedProcess[str]:
    start = f"-m torch.distributed.run --standalone --nproc-per-node {count}"
    return subprocess.run(
        [sys.executable, *start.split(), *args],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )


@pytest.mark.slow
def test_torchrun_goes_the_way_of_one(warm_folder: Path, alone: Path, tmp_path: Path) -> None:
    rows = alone.with_name("rows.jsonl")
    args = command(warm_folder, rows, tmp_path / "run", "--steps 20 --lr 1e-4")
    done = torchrun(2, ["-m", "rookworld", *args])
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("model: ") == 1
    assert done.stderr.count("train · settings") == 1
    assert_same_trajectory(tmp_path / "run", alone, 20)


MORTAL = """
import os, signal, sys, threading, time
from pathlib import Path
from rookworld.cli.dispatch import main

def die_in_the_seventh_step():
    path = Path(sys.argv[sys.argv.index("--out") + 1]) / "metrics.jsonl"
    while not path.exists() or path.read_text().count(chr(10)) < 6:
        time.sleep(0.001)
    os.kill(os.getpid(), signal.SIGKILL)

if os.environ["RANK"] == "1" and "--mortal" in sys.argv:
    threading.Thread(target=die_in_the_seventh_step, daemon=True).start()
sys.exit(main([arg for arg in sys.argv[1:] if arg != "--mortal"]))
"""


@pytest.mark.slow
@pytest.mark.parametrize("shard", ["", "--shard"], ids=["whole", "shares"])
def test_a_job_that_loses_a_rank_ends_with_one_line_and_can_be_resumed(
    warm_folder: Path, alone: Path, tmp_path: Path, shard: str
) -> None:
    script = tmp_path / "mortal.py"
    script.write_text(MORTAL)
    rows = alone.with_name("rows.jsonl")
    more = f"--steps 20 --lr 1e-4 --save-every 3 {shard}"
    args = command(warm_folder, rows, tmp_path / "run", more)
    began = time.monotonic()
    died = torchrun(3, [str(script), *args, "--mortal"])
    assert died.returncode != 0
    assert time.monotonic() - began < 60
    lines = [line for line in died.stderr.splitlines() if line.startswith("rookworld:")]
    assert len(lines) == 1, died.stderr
    assert "another process of this training does not answer" in lines[0]
    assert not (tmp_path / "run" / "DONE").exists()
    assert saved_checkpoints(tmp_path / "run")[-1].name >= "step-000003"
    assert torchrun(2, [str(script), *args]).returncode == 0
    assert_same_trajectory(tmp_path / "run", alone, 20)


# --- one process --------------------------------------------------------------------------------


def test_alone_everything_is_ones_own() -> None:
    values = torch.tensor([1.0, 2.0])
    assert distributed.sum_over_ranks(values) is values
    assert distributed.max_over_ranks(values) is values
    assert distributed.share(5) == slice(0, 5)
    assert distributed.gather_floats([1.0]) == [1.0]
    assert distributed.from_first([2.0]) == [2.0]
    assert distributed.any_rank(True)
    assert not distributed.any_rank(False)
    assert distributed.mean_by_name({"a": [6.0, 3.0], "none": [0.0, 0.0]}) == {"a": 2.0}
    distributed.barrier()
    distributed.stop()


def test_shares_cover_everything_once(monkeypatch: pytest.MonkeyPatch) -> None:
    for size in (1, 2, 3, 7):
        monkeypatch.setattr(distributed, "world_size", lambda size=size: size)
        for count in (0, 1, 5, 64):
            taken = []
            for rank in range(size):
                monkeypatch.setattr(distributed, "rank", lambda rank=rank: rank)
                taken += list(range(count))[distributed.share(count)]
            assert taken == list(range(count))


def test_a_device_that_is_not_there_is_the_users_mistake(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert distributed.pick_device("auto") == "cpu"
    with pytest.raises(ConfigError, match="--device cuda: no CUDA device here"):
        distributed.pick_device("cuda")
    with pytest.raises(ConfigError, match="--device tpu"):
        distributed.pick_device("tpu")


def test_more_processes_than_gpus_are_the_users_mistake(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert distributed.own_gpu(1) == torch.device("cuda", 1)
    with pytest.raises(ConfigError, match="process 3 of this machine has no GPU of its own"):
        distributed.own_gpu(2)
