"""The loop: what holds before the first update, what a step does, and that it learns."""

from __future__ import annotations

import math
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
import torch

import child_process
from rookworld.evaluation.evaluate import Evaluation
from rookworld.evaluation.statistics import Estimate
from rookworld.grpo.decisions import Continue, Ruling
from rookworld.grpo.guard import Guard
from rookworld.model.checkpoint import load_checkpoint
from rookworld.model.gpt2 import GPT2
from rookworld.model.kernels import cpu
from rookworld.model.tokenizer import Tokenizer
from rookworld.model.weights import load_model
from rookworld.report.analysis import analyze
from rookworld.report.run_reader import read_run
from rookworld.rl import collect
from rookworld.rl.collect import collect_groups
from rookworld.rl.metrics import Clock, Metrics
from rookworld.rl.models import reference_device
from rookworld.rl.run_log import Hooks
from rookworld.rl.scratch import StepScratch
from rookworld.rl.settings import TrainSettings
from rookworld.rl.state import State, new_state
from rookworld.rl.step import follow_reference, learn, lr_at, merge_decisions
from rookworld.rl.trainer import train
from rookworld.rollout.collector import Collected
from rookworld.runtime.errors import ConfigError, Diverged, RookworldError
from rookworld.runtime.run_folder import read_json, read_lines
from tiny_training import (
    evaluation,
    judge_by,
    metrics_of,
    no_evaluation,
    relative,
    share_of_low_moves,
    tiny_rows,
    tiny_settings,
    weight_evaluation,
    write_jsonl,
)

pytestmark = pytest.mark.usefixtures("single_thread")

CPU = torch.device("cpu")
PROMISED = (
    "reward/mean reward/std reward/P reward/A reward/P/format reward/flat_groups kl/exact kl/coef "
    "policy/ratio_max policy/clipped policy/entropy loss/total loss/policy loss/kl grad/norm lr "
    "tokens/mean_length tokens/truncated sampler/logp_gap time/sample_s time/score_s time/update_s "
    "time/step_s mem/peak_mb guard/skipped guard/recoveries"
)


def step(state: State, settings: TrainSettings) -> tuple[Collected, Metrics, Ruling]:
    clock = Clock(CPU)
    scratch = StepScratch()
    collected = collect_groups(state, settings, None, clock, scratch)
    metrics, ruling = learn(state, collected, scratch, settings, clock)
    state.step += 1
    return collected, metrics, ruling


# --- before the first update --------------------------------------------------------------------


def test_policy_sampler_and_reference_are_one_before_the_first_update(
    warm_folder: Path, tmp_path: Path
) -> None:
    settings = tiny_settings(
        warm_folder, tmp_path, mix_env_ratio=0.5, batch_size=4, p_temperature=0.7, a_top_p=0.8
    )
    _, metrics, _ = step(new_state(settings, tiny_rows(), CPU), settings)
    assert metrics["kl/exact"] == pytest.approx(0, abs=1e-7)
    assert metrics["policy/ratio_max"] == pytest.approx(1, abs=1e-4)
    assert metrics["sampler/logp_gap"] < 1e-4
    assert metrics["policy/clipped"] == 0


@pytest.mark.parametrize("updates", [1, 2])
def test_what_is_done_while_others_score_changes_nothing(
    warm_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, updates: int
) -> None:
    """The reference's passes and the distillation, as beside a GPU."""
    settings = tiny_settings(
        warm_folder, tmp_path, distill_coef=1.0, distill_prompts=6, updates_per_rollout=updates
    )
    found = []
    for ahead in (False, True):
        monkeypatch.setattr(collect, "may_look_ahead", lambda state, settings, now=ahead: now)
        settings = settings.but(score_workers=int(ahead))
        state = new_state(settings, tiny_rows(), CPU)
        measured = [step(state, settings)[1] for _ in range(3)]
        found.append((measured, [p.detach().clone() for p in state.learner.model.parameters()]))
    (plain, weights), (ahead_of, others) = found
    assert plain[2]["distill/loss"] == pytest.approx(ahead_of[2]["distill/loss"], rel=1e-5)
    assert relative(others, weights) < 1e-5


def test_a_reference_that_is_another_model_is_refused(warm_folder: Path, tmp_path: Path) -> None:
    settings = tiny_settings(warm_folder, tmp_path)
    state = new_state(settings, tiny_rows(), CPU)
    with torch.no_grad():
        state.learner.reference.ln_f.weight.mul_(1.1)
    with pytest.raises(RookworldError, match=r"KL to the reference is .* nothing was trained"):
        step(state, settings)


def test_a_sampler_that_is_not_the_trainer_is_refused(
    warm_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # the trainer takes the answers to be drawn at another temperature than they were
    settings = tiny_settings(warm_folder, tmp_path)
    state = new_state(settings, tiny_rows(), CPU)
    clock = Clock(CPU)
    collected = collect_groups(state, settings, None, clock, StepScratch())
    with pytest.raises(RookworldError, match="nats a token off the trainer's"):
        learn(state, collected, StepScratch(), settings.but(temperature=1.5), clock)


def test_a_broken_model_is_refused_before_anything_is_trained(
    warm_folder: Path, tmp_path: Path
) -> None:
    settings = tiny_settings(warm_folder, tmp_path)
    state = new_state(settings, tiny_rows(), CPU)
    with torch.no_grad():
        state.learner.model.ln_f.weight[0] = math.nan
    with pytest.raises(RookworldError, match=r"before the first update KL .* is nan"):
        step(state, settings)


def test_a_model_too_short_for_an_answer_is_refused(warm_folder: Path, tmp_path: Path) -> None:
    settings = tiny_settings(warm_folder, tmp_path, max_new_tokens=192)
    with pytest.raises(ConfigError, match="--max-new-tokens 192: the model has only 192"):
        new_state(settings, tiny_rows(), CPU)


def test_a_reference_device_that_is_not_here_falls_back_with_a_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    settings = tiny_settings(tmp_path, tmp_path, ref_device="cuda:99")
    assert reference_device(settings, CPU) == CPU
    assert "--ref-device cuda:99 is not here; the reference stays on cpu" in caplog.text
    assert reference_device(settings.but(ref_device="cpu"), CPU) == CPU
    with pytest.raises(ConfigError, match="--ref-device tpu"):
        reference_device(settings.but(ref_device="tpu"), CPU)


# --- a run --------------------------------------------------------------------------------------


def test_a_run_writes_what_it_promises(warm_folder: Path, tmp_path: Path) -> None:
    settings = tiny_settings(warm_folder, tmp_path / "run", mix_env_ratio=0.5, batch_size=4)
    seen: list[int] = []
    final = train(
        settings,
        tiny_rows(),
        weight_evaluation,
        hooks=Hooks(on_step=lambda step, metrics: seen.append(step)),
    )
    run = tmp_path / "run"
    lines = list(read_lines(run / "metrics.jsonl"))
    assert seen == [line["step"] for line in lines] == [1, 2, 3, 4]
    assert all(name in line for line in lines for name in PROMISED.split())
    log = (run / "train.log").read_text().splitlines()
    assert [line.split()[:2] for line in log] == [["Step", str(n)] for n in seen]
    assert [line["step"] for line in read_lines(run / "eval.jsonl")] == [0, 2, 4]
    assert read_json(run / "config.json")["lr"] == 1e-3
    assert read_json(run / "origin.json")["seed"] == 0
    rollouts = list(read_lines(run / "rollouts.jsonl"))
    assert {line["task"] for line in rollouts} == {"P", "A"}
    assert all(len(line["answers"]) == 3 for line in rollouts)
    assert final == run / "final"
    assert (run / "DONE").exists()
    saved = [path.name for path in sorted((run / "checkpoints").glob("step-*"))]
    assert saved == ["step-000000", "step-000002", "step-000004"]
    best = max(read_lines(run / "eval.jsonl"), key=lambda line: line["reward/greedy"]["value"])
    assert (run / "checkpoints" / "best").resolve().name == f"step-{best['step']:06d}"


def test_a_run_in_a_used_folder_starts_afresh(warm_folder: Path, tmp_path: Path) -> None:
    settings = tiny_settings(warm_folder, tmp_path / "run", steps=2)
    train(settings, tiny_rows(), no_evaluation)
    train(settings.but(steps=1, overwrite=True), tiny_rows(), no_evaluation)
    assert [line["step"] for line in metrics_of(tmp_path / "run")] == [1]


def test_the_best_checkpoint_is_that_with_the_best_held_out_reward(
    warm_folder: Path, tmp_path: Path
) -> None:
    rewards = iter([0.5, 0.3, 0.9, 0.7, 0.6, 0.2, 0.1])

    def scripted(model: GPT2, tokenizer: Tokenizer) -> Evaluation:
        return evaluation(next(rewards))

    settings = tiny_settings(
        warm_folder, tmp_path / "run", steps=6, eval_every=1, save_every=6, keep=1
    )
    train(settings, tiny_rows(), scripted)
    checkpoints = tmp_path / "run" / "checkpoints"
    assert (checkpoints / "best").resolve().name == "step-000002"
    assert (checkpoints / "step-000006").is_dir()


def test_a_policy_at_rest_still_teaches_its_value_head(warm_folder: Path, tmp_path: Path) -> None:
    settings = tiny_settings(warm_folder, tmp_path / "run", steps=2, lr=0.0, gae=True)
    train(settings, tiny_rows(), no_evaluation)
    saved = load_checkpoint(tmp_path / "run/checkpoints/step-000002")
    assert saved.tensors["value.weight"].abs().max() > 1e-4
    for name, weights in load_model(saved.folder).state_dict().items():
        assert torch.equal(weights, load_model(warm_folder).state_dict()[name])


def of_metrics(**values: float) -> Evaluation:
    named = {name.replace("__", "/"): value for name, value in values.items()} | {"P/format": 1.0}
    return Evaluation({n: Estimate(v, 100, v - 0.01, v + 0.01) for n, v in named.items()})


@pytest.mark.parametrize(("metric", "best"), [("reward/greedy", 1), ("P/best", 2)])
def test_the_best_checkpoint_goes_by_greedy_reward_or_the_metric_of_choice(
    warm_folder: Path, tmp_path: Path, metric: str, best: int
) -> None:
    """A sampled reward rises by mere sharpness: no checkpoint is best for that."""
    found = iter(
        [
            of_metrics(reward__greedy=0.5, reward__sampled=0.3, P__best=0.3),
            of_metrics(reward__greedy=0.6, reward__sampled=0.4, P__best=0.3),
            of_metrics(reward__greedy=0.5, reward__sampled=0.4, P__best=0.4),
            of_metrics(reward__greedy=0.5, reward__sampled=0.9, P__best=0.3),
        ]
    )
    out = tmp_path / "run"
    settings = tiny_settings(warm_folder, out, steps=3, eval_every=1, select_by=metric)
    train(settings, tiny_rows(), lambda model, tokenizer: next(found))
    assert (out / "checkpoints/best").resolve().name == f"step-{best:06d}"
    (halved,) = read_lines(out / "events.jsonl")  # the guard looked at the same metric
    assert (halved["cause"], halved["step"]) == ("held_out_trend", best + 1)
    analysis = analyze(read_run(out))
    assert (analysis.held_out, analysis.best_step) == (metric, best)


def test_the_best_of_another_metric_is_no_best(warm_folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    settings = tiny_settings(warm_folder, out, steps=1, eval_every=1)
    measured = of_metrics(reward__greedy=0.5, reward__sampled=0.3, P__best=0.3)
    train(settings, tiny_rows(), lambda model, tokenizer: measured)
    again = settings.but(steps=2, resume=True, select_by="P/best")
    train(again, tiny_rows(), lambda model, tokenizer: measured)
    assert (out / "checkpoints/best").resolve().name == "step-000002"


def test_a_metric_that_is_not_evaluated_is_refused_before_training(
    warm_folder: Path, tmp_path: Path
) -> None:
    settings = tiny_settings(warm_folder, tmp_path / "run", steps=1, select_by="P/bset")
    with pytest.raises(RookworldError, match=r"--select-by P/bset: .* reward/greedy"):
        train(settings, tiny_rows(), weight_evaluation)


GOLDEN: dict[str, list[float]] = {
    "reward/mean": [
        0.4,
        0.433333,
        0.475,
        0.525,
        0.391667,
        0.508333,
        0.633333,
        0.358333,
        0.288889,
        0.441667,
        0.4,
        0.383333,
        0.275,
        0.341667,
        0.466667,
        0.35,
        0.383333,
        0.419444,
        0.513889,
        0.433333,
    ],
    "loss/total": [
        -0.127053,
        -0.053388,
        -0.031865,
        -0.024375,
        -0.018158,
        -0.011781,
        -0.015274,
        -0.01064,
        -0.008241,
        -0.0063,
        -0.007658,
        -0.005715,
        -0.003292,
        -0.002757,
        -0.002844,
        -0.001712,
        -0.0008,
        -0.000885,
        -0.000629,
        -0.00043,
    ],
    "kl/exact": [
        0.000881,
        0.003668,
        0.005352,
        0.006934,
        0.007783,
        0.007444,
        0.00852,
        0.008301,
        0.008374,
        0.008703,
        0.008772,
        0.008847,
        0.00919,
        0.00962,
        0.008793,
        0.009193,
        0.009048,
        0.009433,
        0.008838,
        0.0091,
    ],
    "grad/norm": [
        1.833081,
        1.707003,
        1.654831,
        1.437627,
        1.274789,
        1.22584,
        1.309891,
        1.180167,
        1.188016,
        1.160238,
        1.180736,
        1.164622,
        1.158662,
        1.125429,
        1.174715,
        1.174964,
        1.12292,
        1.162547,
        1.14523,
        1.141634,
    ],
}


def test_twenty_steps_go_as_they_always_went(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    judge_by(monkeypatch, share_of_low_moves)
    settings = tiny_settings(
        tiny_folder, tmp_path / "run", steps=20, mix_env_ratio=0.5, max_new_tokens=5
    )
    settings = settings.but(updates_per_rollout=2, kl_coef=0.1, save_every=20, eval_every=0)
    # the promises of --credit fields know real rewards only
    train(settings.but(credit="answer"), tiny_rows(), no_evaluation)
    lines = metrics_of(tmp_path / "run")
    for name, expected in GOLDEN.items():
        assert [line[name] for line in lines] == pytest.approx(expected, rel=1e-3, abs=1e-5), name


@pytest.mark.parametrize("changes", [{}, {"gae": True}, {"updates_per_rollout": 2}], ids=str)
def test_a_bandit_with_a_known_answer_is_learnt(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any]
) -> None:
    """Half of all words begin with a…d, and only those pay: the reward must go towards 1."""
    judge_by(monkeypatch, share_of_low_moves)
    settings = tiny_settings(
        tiny_folder, tmp_path / "run", steps=30, k_samples=16, lr=0.03, kl_coef=0.0, **changes
    )
    settings = settings.but(lr_schedule="constant", max_new_tokens=1, save_every=30)
    settings = settings.but(kl_divergence_threshold=0.0, eval_every=0)
    monkeypatch.setattr(Guard, "entropy_floor", 0.0)  # to be sure is what is asked for here
    train(settings, tiny_rows(), no_evaluation)
    rewards = [line["reward/mean"] for line in metrics_of(tmp_path / "run")]
    assert fmean(rewards[:5]) < 0.6
    assert fmean(rewards[-5:]) > 0.9


def test_answers_are_sampled_from_the_weights_as_they_are(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    judge_by(monkeypatch, share_of_low_moves)
    settings = tiny_settings(tiny_folder, tmp_path, lr=1e-2, max_new_tokens=4)
    state = new_state(settings, tiny_rows(), CPU)
    for _ in range(4):
        _, metrics, _ = step(state, settings)
        # a sampler with the weights of a step ago would be off by the update
        assert metrics["sampler/logp_gap"] < 1e-4


def test_several_updates_of_one_rollout_move_the_ratio(warm_folder: Path, tmp_path: Path) -> None:
    settings = tiny_settings(warm_folder, tmp_path, updates_per_rollout=3, clip_range=0.01)
    settings = settings.but(clip_range_high=None)
    _, metrics, _ = step(new_state(settings, tiny_rows(), CPU), settings)
    assert metrics["policy/ratio_max"] > 1.01
    assert metrics["policy/clipped"] > 0


def test_rulings_of_one_step_keep_every_event_and_the_first_weights_soundness() -> None:
    first = Ruling(Continue(), ({"cause": "a"},), sound=True)
    second = Ruling(Continue(), ({"cause": "b"},), sound=False)
    merged = merge_decisions([first, second], [{"cause": "c"}])
    assert [event["cause"] for event in merged.events] == ["c", "a", "b"]
    assert merged.sound


# --- the reference ------------------------------------------------------------------------------


def test_reference_stays_frozen_unless_told(warm_folder: Path, tmp_path: Path) -> None:
    settings = tiny_settings(warm_folder, tmp_path)
    state = new_state(settings, tiny_rows(), CPU)
    before = [p.clone() for p in state.learner.reference.parameters()]
    for _ in range(3):
        step(state, settings)
    after = list(state.learner.reference.parameters())
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    assert not torch.equal(state.learner.model.wte.weight, state.learner.reference.wte.weight)


def test_reference_follows_every_so_many_steps(warm_folder: Path, tmp_path: Path) -> None:
    settings = tiny_settings(warm_folder, tmp_path, ref_sync_every=2)
    state = new_state(settings, tiny_rows(), CPU)
    kl = [step(state, settings)[1]["kl/exact"] for _ in range(4)]
    assert kl[1] > 1e-6
    assert kl[2] == pytest.approx(0, abs=1e-7)
    assert kl[3] > 1e-6


def test_reference_is_reset_with_the_moments_when_kl_stays_high(
    warm_folder: Path, tmp_path: Path
) -> None:
    settings = tiny_settings(warm_folder, tmp_path, ref_reset_kl=0.1)
    state = new_state(settings, tiny_rows(), CPU)
    step(state, settings)
    follow_reference(state, 0.05, settings)
    assert state.kl_high == 0
    for _ in range(19):
        follow_reference(state, 0.2, settings)
    assert state.optimizers[0].state
    follow_reference(state, 0.2, settings)
    assert torch.equal(state.learner.model.wte.weight, state.learner.reference.wte.weight)
    assert not state.optimizers[0].state
    assert state.kl_high == 0


# --- rates --------------------------------------------------------------------------------------


def test_the_rate_follows_its_schedule_and_the_guard(warm_folder: Path, tmp_path: Path) -> None:
    settings = tiny_settings(
        warm_folder, tmp_path, steps=21, lr=1.0, lr_warmup_steps=10, lr_schedule="linear"
    )
    state = new_state(settings, tiny_rows(), CPU)
    rates = []
    for state.step in range(21):
        rates.append(lr_at(state, settings))
    assert rates[:3] == pytest.approx([0.1, 0.2, 0.3])
    assert rates[9] == rates[10] == pytest.approx(1.0)
    assert rates[20] == pytest.approx(0.1)
    state.guard._memory.lr_scale = 0.5
    assert lr_at(state, settings) == pytest.approx(0.05)


def test_samples_beyond_the_cap_are_counted_and_all_of_them_end_the_run(
    warm_folder: Path, tmp_path: Path
) -> None:
    settings = tiny_settings(warm_folder, tmp_path, k_samples=8, kl_collect_cap=5.0)
    state = new_state(settings, tiny_rows(), CPU)
    _, metrics, _ = step(state, settings)
    assert metrics["kl/left_out"] == 0
    with torch.no_grad():
        table = state.learner.model.wpe.weight
        table.add_(0.1 * torch.randn(table.shape, generator=torch.Generator().manual_seed(0)))
    _, metrics, _ = step(state, settings.but(kl_collect_cap=0.03))
    assert 0 < metrics["kl/left_out"] < 1
    with pytest.raises(Diverged, match="--kl-collect-cap 1e-09 left out every sample of step 3"):
        step(state, settings.but(kl_collect_cap=1e-9))


@pytest.mark.slow
def test_memory_stays_flat_over_a_thousand_steps(warm_folder: Path, tmp_path: Path) -> None:
    rows, run = write_jsonl(tmp_path / "rows.jsonl", tiny_rows()), tmp_path / "run"
    files = f"--model {warm_folder} --data {rows} --held-out {rows} --out {run} --device cpu"
    small = "--batch-size 2 --k-samples 3 --mix-env-ratio 0.5 --max-new-tokens 16 --steps 1000"
    often = "--eval-every 20 --eval-policy-rows 2 --eval-environment-rows 2 --save-every 20"
    args = f"train {files} {small} {often} --lr 1e-5 --gae".split()
    few = dict.fromkeys(cpu.CAPACITIES, "32")  # soon reached
    assert child_process.run(args, tmp_path / "log", environment=few, timeout_s=900) == 0
    peaks = [line["mem/peak_mb"] for line in read_lines(run / "metrics.jsonl")]
    assert len(peaks) == 1000
    assert peaks[-1] <= 1.02 * peaks[199]


def test_weights_that_are_held_still_stay_as_they_were(tiny_folder: Path, tmp_path: Path) -> None:
    settings = tiny_settings(tiny_folder, tmp_path / "run", steps=2, lr=0.01, save_every=1)
    settings = settings.but(trained="blocks", eval_every=0, max_new_tokens=6)
    final = train(settings, tiny_rows(), no_evaluation)
    before, after = load_model(tiny_folder), load_model(final)
    moved = {
        name
        for (name, old), new in zip(before.named_parameters(), after.parameters(), strict=True)
        if not torch.equal(old, new)
    }
    assert moved
    assert all(name.startswith(("h.", "ln_f.")) for name in moved)
    resumed = settings.but(steps=3, resume=True)
    train(resumed, tiny_rows(), no_evaluation)
    assert len(metrics_of(tmp_path / "run")) == 3
