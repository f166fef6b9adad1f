"""The guard in anger: what goes wrong is answered as promised, and nothing written is lost."""

from __future__ import annotations

import errno
import math
from collections.abc import Callable, Sequence
from itertools import count, pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

import child_process
from fake_engine import install_fake
from label_judge import LabelJudge
from rookworld.evaluation.evaluate import Evaluation
from rookworld.model import checkpoint
from rookworld.model.checkpoint import fault_of, saved_checkpoints
from rookworld.model.gpt2 import GPT2
from rookworld.model.tokenizer import Tokenizer
from rookworld.model.weights import load_model
from rookworld.rl.run_log import Hooks
from rookworld.rl.trainer import train
from rookworld.runtime.errors import Diverged, EngineError, RookworldError
from rookworld.runtime.run_folder import read_lines
from rookworld.tasks.task import PolicyRow
from tiny_training import (
    evaluation,
    judge_by,
    metrics_of,
    no_evaluation,
    share_of_low_moves,
    tiny_rows,
    tiny_settings,
    weights_of,
    write_jsonl,
)

pytestmark = pytest.mark.usefixtures("single_thread")


def at_evaluation(number: int, harm: Callable[[GPT2], Any], scores: Sequence[float] = ()) -> Any:
    """An evaluation that, the `number`-th time, does harm to the model (0: before training)."""
    calls = count()

    def harmful(model: GPT2, tokenizer: Tokenizer) -> Evaluation:
        now = next(calls)
        if now == number:
            with torch.no_grad():
                harm(model)
        return evaluation(scores[now] if now < len(scores) else 0.0)

    return harmful


def events_of(run: Path) -> list[tuple[str, str]]:
    return [(event["kind"], event["cause"]) for event in read_lines(run / "events.jsonl")]


def assert_whole(run: Path, steps: int) -> None:
    """Each step once, a finite model, and every checkpoint sound."""
    assert [line["step"] for line in metrics_of(run)] == list(range(1, steps + 1))
    model = load_model(run / "final")
    assert all(bool(parameter.isfinite().all()) for parameter in model.parameters())
    assert all(fault_of(folder) is None for folder in saved_checkpoints(run))
    assert not list((run / "checkpoints").glob(".*"))


def command(model: Path, rows: Path, run: Path, more: str) -> list[str]:
    """`rookworld train` on the tiny model."""
    flags = f"--model {model} --data {rows} --held-out {rows} --out {run} --device cpu"
    small = "--batch-size 2 --k-samples 3 --mix-env-ratio 0 --max-new-tokens 16"
    rare = "--eval-policy-rows 1 --eval-environment-rows 0"
    return f"train {flags} {small} {rare} {more}".split()


def poison(model: GPT2) -> None:
    model.h[0].get_parameter("mlp.c_fc.weight")[0, 0] = math.nan


def test_nan_in_a_weight_is_skipped_and_then_restored(warm_folder: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    settings = tiny_settings(warm_folder, run, steps=8, max_consecutive_nans=3)
    said: list[str] = []
    train(settings, tiny_rows(), at_evaluation(2, poison), hooks=Hooks(say=said.append))
    assert events_of(run) == [
        ("skip", "non_finite"),
        ("skip", "non_finite"),
        ("restore", "non_finite"),
    ]
    steps = [event["step"] for event in read_lines(run / "events.jsonl")]
    assert steps == [5, 6, 7]
    # the poisoned checkpoint of step 4 was never found sound, that of step 2 was
    assert said == ["restored the state after step 2"]
    assert_whole(run, 8)
    assert [line["guard/recoveries"] for line in metrics_of(run)] == [0, 0, 1, 1, 1, 1, 1, 1]
    rates = [line["lr"] for line in metrics_of(run)]
    assert rates[2] / rates[1] < 0.51


def test_nan_in_a_gradient_skips_that_update_alone(warm_folder: Path, tmp_path: Path) -> None:
    calls = count()

    def break_third(model: GPT2) -> None:
        weight: Any = model.ln_f.weight
        weight.register_hook(lambda g: g * math.nan if next(calls) == 2 else g)

    run = tmp_path / "run"
    settings = tiny_settings(warm_folder, run, steps=5, save_every=1, keep=9, micro_tokens=10**6)
    train(settings, tiny_rows(), at_evaluation(0, break_third))
    assert events_of(run) == [("skip", "non_finite")]
    weights = [weights_of(folder) for folder in saved_checkpoints(run)]
    changed = [before != after for before, after in pairwise(weights)]
    assert changed == [True, True, False, True, True]
    assert [line["guard/skipped"] for line in metrics_of(run)] == [0, 0, 1, 1, 1]
    assert [str(line["grad/norm"]) == "nan" for line in metrics_of(run)].index(True) == 2
    assert_whole(run, 5)


def test_a_nan_reward_costs_its_group_and_is_said(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = count()
    judge_by(monkeypatch, lambda text: math.nan if next(calls) == 7 else share_of_low_moves(text))
    run = tmp_path / "run"
    settings = tiny_settings(tiny_folder, run, max_new_tokens=4, flat_tries=0)
    train(settings, tiny_rows(), no_evaluation)
    assert events_of(run) == [("warning", "invalid_reward")]
    assert [line["reward/invalid_groups"] for line in metrics_of(run)] == [0, 0.5, 0, 0]
    assert_whole(run, 4)


def test_rewards_that_stay_nan_end_the_run_with_a_diagnosis(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = count()
    judge_by(monkeypatch, lambda text: share_of_low_moves(text) if next(calls) < 12 else math.nan)
    run = tmp_path / "run"
    settings = tiny_settings(tiny_folder, run, flat_tries=0, max_new_tokens=4, steps=20)
    settings = settings.but(max_consecutive_nans=2, max_recoveries=1)
    with pytest.raises(Diverged, match=r"diverged at step \d+ \(non_finite\).* Try "):
        train(settings, tiny_rows(), no_evaluation)
    kinds = [kind for kind, cause in events_of(run) if cause == "non_finite"]
    assert kinds == ["skip", "restore", "skip", "stop"]
    assert saved_checkpoints(run)
    assert all(fault_of(folder) is None for folder in saved_checkpoints(run))


def test_a_kl_explosion_is_restored_until_the_rate_is_low_enough(
    warm_folder: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    settings = tiny_settings(warm_folder, run, lr=1.0, recovery_lr_factor=1e-4, steps=6)
    train(settings.but(lr_schedule="constant"), tiny_rows(), no_evaluation)
    assert events_of(run)[-1] == ("restore", "diverged_kl")
    assert_whole(run, 6)
    assert metrics_of(run)[-1]["lr"] == pytest.approx(1e-4)
    assert metrics_of(run)[-1]["kl/exact"] < 0.9


def test_a_kl_explosion_beyond_recovery_keeps_the_best_and_exits_3(
    warm_folder: Path, tmp_path: Path
) -> None:
    rows, log = write_jsonl(tmp_path / "rows.jsonl", tiny_rows()), tmp_path / "log"
    run = tmp_path / "run"
    huge = "--steps 30 --lr 10 --lr-warmup-steps 0 --max-recoveries 2 --recovery-lr-factor 0.9"
    args = command(warm_folder, rows, run, huge)
    assert child_process.run(args, log) == 3
    last = log.read_text().splitlines()[-1]
    assert last.startswith("rookworld: training diverged at step ")
    assert "the policy kept running away from the reference" in last
    assert "Try a lower --lr" in last
    assert [kind for kind, _ in events_of(run) if kind != "warning"] == ["restore"] * 2 + ["stop"]
    best = run / "checkpoints" / "best"
    assert fault_of(best) is None
    assert weights_of(best) == weights_of(warm_folder)
    assert not (run / "DONE").exists()


def test_an_entropy_collapse_is_restored(warm_folder: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    settings = tiny_settings(warm_folder, run, steps=8, eval_every=1, kl_divergence_threshold=0.0)
    harm = at_evaluation(2, lambda model: model.ln_f.weight.mul_(1000))
    train(settings, tiny_rows(), harm)
    assert ("warning", "entropy_low") in events_of(run)
    assert ("restore", "entropy_collapse") in events_of(run)
    assert_whole(run, 8)
    assert metrics_of(run)[-1]["policy/entropy"] > 0.1


def test_lost_format_at_an_evaluation_is_restored(warm_folder: Path, tmp_path: Path) -> None:
    shown = iter([1.0, 1.0, 0.4])

    def forgetful(model: GPT2, tokenizer: Tokenizer) -> Evaluation:
        return evaluation(0.5, next(shown, 1.0))

    run = tmp_path / "run"
    train(tiny_settings(warm_folder, run, steps=6), tiny_rows(), forgetful)
    assert events_of(run) == [("restore", "format_collapse")]
    assert [line["step"] for line in read_lines(run / "eval.jsonl")] == [0, 2, 4, 6]
    assert_whole(run, 6)


def test_the_best_model_outlives_the_restore_that_leaves_its_course(
    warm_folder: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    settings = tiny_settings(warm_folder, run, steps=8, kl_divergence_threshold=0.5)
    # best at step 4, and from there on far away from the reference
    harm = at_evaluation(2, lambda model: model.wpe.weight.mul_(-3), [0.1, 0.2, 0.9])
    found: list[bytes] = []

    def remember(event: dict[str, Any]) -> None:
        if event["kind"] == "restore":
            found.append(weights_of(run / "checkpoints" / "step-000004"))

    train(settings, tiny_rows(), harm, hooks=Hooks(on_event=remember))
    assert events_of(run)[-1] == ("restore", "diverged_kl")
    best = run / "checkpoints" / "best"
    assert best.resolve().name == "best-000004"
    assert fault_of(best) is None
    assert [weights_of(best)] == found
    assert_whole(run, 8)


def test_events_of_a_course_that_was_left_survive_a_resume(
    warm_folder: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    settings = tiny_settings(warm_folder, run, steps=8, max_consecutive_nans=3, save_every=1)

    def stop(step: int, metrics: dict[str, float]) -> None:
        if metrics["guard/recoveries"] and step == 5:
            raise EngineError("enough")

    with pytest.raises(EngineError):
        train(settings, tiny_rows(), at_evaluation(2, poison), hooks=Hooks(on_step=stop))
    before = events_of(run)
    assert ("restore", "non_finite") in before
    train(settings.but(resume=True), tiny_rows(), no_evaluation)
    assert events_of(run) == before
    assert_whole(run, 8)


# --- the machine --------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["save_file", "write_model"])
def test_a_full_disk_while_saving_leaves_the_earlier_checkpoints(
    warm_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    calls, write = count(), getattr(checkpoint, name)

    def full(*args: Any, **options: Any) -> Any:
        if next(calls) >= 2:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(*args, **options)

    run = tmp_path / "run"
    settings = tiny_settings(warm_folder, run, steps=6, resume=True)
    monkeypatch.setattr(checkpoint, name, full)
    with pytest.raises(RookworldError, match=r"step-000004: .*No space left .* --resume") as error:
        train(settings, tiny_rows(), no_evaluation)
    assert error.value.exit_code == 2
    assert [folder.name for folder in saved_checkpoints(run)] == ["step-000000", "step-000002"]
    assert all(fault_of(folder) is None for folder in saved_checkpoints(run))
    assert [line["step"] for line in metrics_of(run)] == [1, 2, 3, 4]
    monkeypatch.undo()
    train(settings, tiny_rows(), no_evaluation)
    assert_whole(run, 6)
    whole = settings.but(out=tmp_path / "whole")
    train(whole, tiny_rows(), no_evaluation)
    assert metrics_of(run) == metrics_of(tmp_path / "whole")


def test_a_disk_that_is_really_full_is_one_line_and_exit_2(
    warm_folder: Path, tmp_path: Path
) -> None:
    rows, run = write_jsonl(tmp_path / "rows.jsonl", tiny_rows()), tmp_path / "run"
    args = command(warm_folder, rows, run, "--save-every 2 --resume")
    assert child_process.run([*args, "--steps", "2"], tmp_path / "log") == 0
    # the moments of the optimizer make the second file larger than any weights
    limit = (run / "checkpoints" / "step-000002" / "trainer.safetensors").stat().st_size - 1
    for largest_file in (limit, limit // 9, 20_000):
        log = tmp_path / f"log-{largest_file}"
        assert child_process.run([*args, "--steps", "4"], log, largest_file=largest_file) == 2
        lines = [line for line in log.read_text().splitlines() if line.startswith("rookworld:")]
        assert len(lines) == 1
        assert "cannot be written" in lines[0]
        assert "Traceback" not in log.read_text()
        assert [line["step"] for line in metrics_of(run)][:2] == [1, 2]
    assert child_process.run([*args, "--steps", "4"], tmp_path / "log") == 0
    assert_whole(run, 4)


class MortalJudge(LabelJudge):
    """Dies after so many batches."""

    def __init__(self, batches: int) -> None:
        self.left = batches

    def prefetch(self, rows: Sequence[PolicyRow], *, every_move: bool = False) -> None:
        self.left -= 1
        if self.left < 0:
            raise EngineError("the engine died 3 times in a row")


def test_an_engine_that_dies_ends_the_run_and_the_next_one_goes_on(
    warm_folder: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    settings = tiny_settings(warm_folder, run, steps=6, flat_tries=0, resume=True)
    with pytest.raises(EngineError, match="the engine died"):
        train(settings, tiny_rows(), no_evaluation, MortalJudge(3))
    assert [line["step"] for line in metrics_of(run)] == [1, 2, 3]
    assert saved_checkpoints(run)[-1].name == "step-000002"
    train(settings, tiny_rows(), no_evaluation, MortalJudge(99))
    assert_whole(run, 6)
    train(settings.but(out=tmp_path / "whole"), tiny_rows(), no_evaluation, MortalJudge(99))
    assert weights_of(run / "final") == weights_of(tmp_path / "whole" / "final")


def test_a_dead_stockfish_is_one_line_and_exit_2(warm_folder: Path, tmp_path: Path) -> None:
    (start, *_) = tiny_rows(1, 0)
    rows, log = write_jsonl(tmp_path / "rows.jsonl", [start]), tmp_path / "log"
    run = tmp_path / "run"
    args = command(warm_folder, rows, run, "--steps 2 --judge stockfish --engine")
    own = {"XDG_CACHE_HOME": str(tmp_path / "cache")}
    dead = str(install_fake(tmp_path, "die", faults=1000))
    assert child_process.run([*args, dead], log, environment=own) == 2
    lines = [line for line in log.read_text().splitlines() if line.startswith("rookworld:")]
    assert len(lines) == 1
    assert "engine" in lines[0]
    assert fault_of(run / "checkpoints" / "step-000000") is None
    alive = str(install_fake(tmp_path, "normal"))
    assert child_process.run([*args, alive, "--resume"], log, environment=own) == 0
    assert_whole(run, 2)
