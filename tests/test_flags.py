"""Every flag of `rookworld train` reaches what it names."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from rookworld.cli import evaluate as judging
from rookworld.cli.train import held_out, read_rows, read_settings
from rookworld.cli.training_display import Recorder
from rookworld.evaluation import evaluate
from rookworld.grpo import loss as losses
from rookworld.model.weights import load_model
from rookworld.rl import collect, credit, forward, models, state, update
from rookworld.rl.collect import collect_groups, may_look_ahead, scoring_workers
from rookworld.rl.metrics import Clock
from rookworld.rl.models import Learner, reference_device
from rookworld.rl.scratch import StepScratch
from rookworld.rl.settings import TrainSettings
from rookworld.rl.state import State, new_state, sampling
from rookworld.rl.step import lr_at
from rookworld.rl.trainer import train
from rookworld.runtime import distributed
from rookworld.runtime.config import flat_fields
from rookworld.runtime.errors import ConfigError
from rookworld.runtime.run_folder import read_lines
from tiny_training import (
    metrics_of,
    no_evaluation,
    one_thread,
    tiny_rows,
    tiny_tokenizer,
    write_jsonl,
)

pytestmark = pytest.mark.usefixtures("single_thread")

TOKENIZER = tiny_tokenizer()

REACHES: list[tuple[str, Callable[[TrainSettings], Any], Any]] = [
    ("--kl-coef 0.5", lambda s: s.kl.kl_coef, 0.5),
    ("--adaptive-kl", lambda s: s.kl.adaptive_kl, True),
    ("--target-kl 0.7", lambda s: s.kl.target_kl, 0.7),
    ("--kl-coef-min 0.003", lambda s: s.kl.kl_coef_min, 0.003),
    ("--kl-coef-max 7", lambda s: s.kl.kl_coef_max, 7),
    ("--kl-warmup-steps 9", lambda s: s.kl.kl_warmup_steps, 9),
    ("--kl-warmup-factor 0.3", lambda s: s.kl.kl_warmup_factor, 0.3),
    (
        "--kl-divergence-threshold 8",
        lambda s: s.guard.kl_divergence_threshold,
        8,
    ),
    ("--adaptive-threshold", lambda s: s.guard.adaptive_threshold, True),
    ("--recovery-lr-factor 0.1", lambda s: s.guard.recovery_lr_factor, 0.1),
    ("--max-consecutive-nans 9", lambda s: s.guard.max_consecutive_nans, 9),
    ("--max-recoveries 9", lambda s: s.guard.max_recoveries, 9),
    ("--reward-shaping binary", lambda s: s.rewards.reward_shaping, "binary"),
    ("--p-weights best 3", lambda s: s.rewards.part_weights["best"], 3),
    ("--p-best-scale 0.02", lambda s: s.rewards.p_best_scale, 0.02),
    ("--p-malformed -0.7", lambda s: s.rewards.p_malformed, -0.7),
    ("--a-malformed -0.8", lambda s: s.rewards.a_malformed, -0.8),
    ("--temperature 0.5", lambda s: {t.temperature for t in both(s)}, {0.5}),
    ("--top-p 0.5", lambda s: {t.top_p for t in both(s)}, {0.5}),
    ("--top-k 5", lambda s: {t.top_k for t in both(s)}, {5}),
    ("--max-new-tokens 33", lambda s: {t.max_new_tokens for t in both(s)}, {33}),
    ("--p-temperature 0.5", lambda s: [t.temperature for t in both(s)], [0.5, 1.0]),
    ("--a-temperature 0.5", lambda s: [t.temperature for t in both(s)], [1.0, 0.5]),
    ("--p-top-p 0.5", lambda s: [t.top_p for t in both(s)], [0.5, 1.0]),
    ("--a-top-p 0.5", lambda s: [t.top_p for t in both(s)], [1.0, 0.5]),
    ("--ref-device cpu", lambda s: reference_device(s, torch.device("meta")).type, "cpu"),
    ("--score-workers 2", lambda s: workers_of(s), 2),
    ("--clip-range 0.05", lambda s: s.loss.clip_range, 0.05),
    ("--clip-range-high 0.4", lambda s: s.loss.clip_high, 0.4),
    ("--clip-range 0.1", lambda s: s.loss.clip_high, 0.1),
]


def workers_of(settings: TrainSettings) -> int:
    found = scoring_workers(settings, torch.device("cpu"))
    return 0 if found is None else found.count


def both(settings: TrainSettings) -> list[Any]:
    return list(sampling(settings.sampling, TOKENIZER).values())


@pytest.mark.parametrize(("flags", "reached", "expected"), REACHES, ids=[r[0] for r in REACHES])
def test_a_flag_reaches_what_it_names(
    flags: str, reached: Callable[[TrainSettings], Any], expected: Any
) -> None:
    assert reached(read_settings([], "rookworld train")) != expected
    assert reached(read_settings(flags.split(), "rookworld train")) == expected


@pytest.fixture
def rules_seen(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What one step hands to the pure functions."""
    return watch_rules(monkeypatch)


@pytest.fixture(scope="module")
def plain_rules(warm_folder: Path) -> dict[str, Any]:
    """The same of a step without flags."""
    with pytest.MonkeyPatch.context() as monkeypatch, one_thread():
        seen = watch_rules(monkeypatch)
        first_step("", warm_folder)
    return seen


def watch_rules(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    seen: dict[str, Any] = {}

    def spy(owner: Any, name: str) -> None:
        real = getattr(owner, name)

        def watched(*args: Any, **options: Any) -> Any:
            seen.setdefault(name, (args, options))
            return real(*args, **options)

        monkeypatch.setattr(owner, name, watched)

    owners: dict[Any, tuple[str, ...]] = {
        credit: ("group_advantages", "gae", "field_advantages"),
        forward: ("Draw", "token_stats", "split_to_budget", "expected_value"),
        losses: ("policy_loss",),
    }
    for owner, names in owners.items():
        for name in names:
            spy(owner, name)
    return seen


BY_A_STEP: list[tuple[str, Callable[[dict[str, Any]], Any], Any]] = [
    ("--baseline-type rloo", lambda seen: seen["group_advantages"][0][2].baseline_type, "rloo"),
    ("--advantage-scale none", lambda seen: seen["group_advantages"][0][2].advantage_scale, "none"),
    (
        "--advantage-std-floor 0.3",
        lambda seen: seen["group_advantages"][0][2].advantage_std_floor,
        0.3,
    ),
    ("--advantage-clip 2", lambda seen: seen["group_advantages"][0][2].advantage_clip, 2),
    ("--credit answer", lambda seen: "field_advantages" in seen, False),
    ("--credit outlook", lambda seen: seen["field_advantages"][1]["paid_by"], "outlook"),
    ("--credit choices", lambda seen: "expected_value" in seen, True),
    ("--credit choices", lambda seen: seen["field_advantages"][1]["paid_by"], "outlook"),
    ("--loss gspo", lambda seen: seen["policy_loss"][0][2].loss, "gspo"),
    ("--clip-range 0.05", lambda seen: seen["policy_loss"][0][2].clip_range, 0.05),
    ("--clip-range-high 0.4", lambda seen: seen["policy_loss"][0][2].clip_high, 0.4),
    ("--temperature 0.8", lambda seen: seen["Draw"][1]["temperature"], 0.8),
    ("--top-p 0.8", lambda seen: seen["Draw"][1]["top_p"], 0.8),
    ("--top-k 40", lambda seen: seen["Draw"][1]["top_k"], 40),
    ("--gae --gamma 0.7", lambda seen: seen.get("gae", [[0] * 5])[0][3], 0.7),
    ("--gae --gae-lambda 0.6", lambda seen: seen.get("gae", [[0] * 5])[0][4], 0.6),
    ("--kl-type reverse", lambda seen: seen["token_stats"][1]["kind"], "reverse"),
    ("--micro-tokens 512", lambda seen: seen["split_to_budget"][0][1], 512),
]
SMALL = "--mix-env-ratio 0 --max-new-tokens 16 --k-samples 3 --batch-size 2 --device cpu"


def first_step(flags: str, model: Path) -> tuple[State, TrainSettings]:
    args = f"--model {model} {SMALL} {flags}".split()
    settings = read_settings(args, "rookworld train")
    state = new_state(settings, tiny_rows(), torch.device("cpu"))
    collected = collect_groups(state, settings, None, Clock(torch.device("cpu")), StepScratch())
    micros = forward.prepare(collected.groups, state.learner, settings, state.tokenizer.eos)
    credit.set_advantages(micros, state.learner, settings, state.running, None, 0.1)
    totals = update.step_totals(micros, 8)
    assert totals is not None
    update.gradient(micros, state.learner, totals, settings, update.Coefs(0.1, 0.0), StepScratch())
    return state, settings


@pytest.mark.parametrize(("flags", "reached", "expected"), BY_A_STEP, ids=[r[0] for r in BY_A_STEP])
def test_a_flag_reaches_the_step(
    flags: str,
    reached: Callable[[dict[str, Any]], Any],
    expected: Any,
    rules_seen: dict[str, Any],
    plain_rules: dict[str, Any],
    warm_folder: Path,
) -> None:
    first_step(flags, warm_folder)
    assert reached(rules_seen) == expected
    assert reached(rules_seen) != reached(plain_rules)


BY_THE_STATE: list[tuple[str, Callable[[State, TrainSettings], Any], Any]] = [
    ("--seed 4", lambda state, s: state.prompts.seed, 4),
    ("--mix-env-ratio 0.5", lambda state, s: state.prompts.shares[0][1], 0.5),
    (
        "--weight-decay 0.3",
        lambda state, s: state.optimizers[0].param_groups[0]["weight_decay"],
        0.3,
    ),
    ("--adam-eps 1e-5", lambda state, s: state.optimizers[0].param_groups[0]["eps"], 1e-5),
    ("--optimizer muon", lambda state, s: len(state.optimizers), 2),
    ("--lr 0.5 --lr-warmup-steps 0", lambda state, s: lr_at(state, s), 0.5),
    ("--lr 0.5 --lr-warmup-steps 5", lambda state, s: lr_at(state, s), 0.1),
    ("--gae", lambda state, s: state.learner.value_head is not None, True),
    ("--trained blocks", lambda state, s: state.learner.model.wte.weight.requires_grad, False),
]


def learning(state: State) -> list[Tensor]:
    return [p for one in state.optimizers for group in one.param_groups for p in group["params"]]


@pytest.mark.parametrize(
    ("flags", "reached", "expected"), BY_THE_STATE, ids=[r[0] for r in BY_THE_STATE]
)
def test_a_flag_reaches_the_state(
    flags: str,
    reached: Callable[[State, TrainSettings], Any],
    expected: Any,
    tiny_folder: Path,
) -> None:
    def made(more: str) -> tuple[State, TrainSettings]:
        args = f"--model {tiny_folder} {SMALL} {more}".split()
        settings = read_settings(args, "rookworld train")
        return new_state(settings, tiny_rows(), torch.device("cpu")), settings

    assert reached(*made("")) != pytest.approx(expected)
    assert reached(*made(flags)) == pytest.approx(expected)


# --- seen in the run folder ---------------------------------------------------------------------


def last(run: Path, name: str) -> Any:
    return metrics_of(run)[-1][name]


def total(run: Path, name: str) -> float:
    return sum(float(line[name]) for line in metrics_of(run))


def lines(run: Path, name: str) -> int:
    return sum(1 for _ in read_lines(run / name))


def folders(run: Path) -> int:
    return len(list((run / "checkpoints").glob("step-*")))


BY_A_RUN: list[tuple[str, Callable[[Path], Any]]] = [
    ("--steps 2", lambda run: lines(run, "metrics.jsonl")),
    ("--batch-size 3", lambda run: last(run, "reward/mean")),
    ("--k-samples 4", lambda run: len(next(read_lines(run / "rollouts.jsonl"))["answers"])),
    ("--lr-schedule constant", lambda run: last(run, "lr")),
    ("--lr-final 0.3", lambda run: last(run, "lr")),
    ("--clip-norm 1e-9", lambda run: last(run, "kl/exact")),
    ("--updates-per-rollout 2", lambda run: last(run, "policy/ratio_max") > 1.0001),
    ("--kl-type k2", lambda run: last(run, "loss/kl")),
    ("--kl-collect-cap 0.03", lambda run: total(run, "kl/left_out")),
    ("--ref-sync-every 1", lambda run: last(run, "kl/exact") == 0),
    ("--ref-sync-every 1 --dtype bfloat16", lambda run: last(run, "kl/exact") == 0),
    ("--ref-reset-kl 1e-9", lambda run: state_of(run)["kl_high"]),
    ("--entropy-coef 0.5", lambda run: last(run, "loss/total") < -0.1),
    ("--distill-coef 9", lambda run: last(run, "loss/total") > 0.1),
    ("--guide 0.5", lambda run: "guide/share" in next(read_lines(run / "metrics.jsonl"))),
    ("--flat-tries 0", lambda run: state_of(run)["position"]),
    ("--reward-norm", lambda run: state_of(run)["norm"]["batches"]),
    ("--eval-every 1", lambda run: lines(run, "eval.jsonl")),
    ("--save-every 50", folders),
    ("--keep 1", folders),
    ("--sample-every 1", lambda run: lines(run, "rollouts.jsonl")),
    ("--dtype bfloat16", lambda run: last(run, "sampler/logp_gap") > 1e-4),
]


def state_of(run: Path) -> dict[str, Any]:
    newest = max((run / "checkpoints").glob("step-*"))
    return next(read_lines(newest / "trainer.json"))


def run_of(model: Path, folder: Path, flags: str) -> Path:
    rare = "--steps 3 --eval-every 0 --save-every 1 --sample-every 0 --lr 1e-3"
    args = f"--model {model} --out {folder} {SMALL} --lr-warmup-steps 0 {rare} {flags}".split()
    train(read_settings(args, "rookworld train"), tiny_rows(), no_evaluation)
    return folder


@pytest.fixture(scope="module")
def plain_run(warm_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    with one_thread():
        return run_of(warm_folder, tmp_path_factory.mktemp("runs") / "plain", "")


@pytest.mark.parametrize(("flags", "seen"), BY_A_RUN, ids=[r[0] for r in BY_A_RUN])
def test_a_flag_is_seen_in_the_run(
    flags: str, seen: Callable[[Path], Any], plain_run: Path, warm_folder: Path, tmp_path: Path
) -> None:
    assert seen(run_of(warm_folder, tmp_path / "run", flags)) != seen(plain_run)


# --- handed to the surroundings -----------------------------------------------------------------

ELSEWHERE = """
model data held_out out resume overwrite dry_run eval_policy_rows eval_environment_rows eval_mates
judge engine nodes log_dir wandb device memory recompute graphs shard reward_warmup_steps backend
trl_phase_steps select_by distill_data distill_prompts distill_first distill_first_power
distill_schedule
"""
"""Fields that the tests below, or those of resuming and of the commands, look after."""


def test_evaluation_flags_choose_the_held_out_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, Any] = {}
    monkeypatch.setattr(
        evaluate, "held_out_from", lambda source, rows, **n: asked.update(n, of=source, **rows)
    )
    flags = "--held-out x --eval-policy-rows 3 --eval-environment-rows 4 --eval-mates 5"
    held_out(read_settings(flags.split(), "rookworld train"))
    assert asked == {"of": "x", "P": 3, "A": 4, "n_mates": 5}


def test_data_may_be_several_sources(tmp_path: Path) -> None:
    one = write_jsonl(tmp_path / "one.jsonl", tiny_rows(2, 0))
    two = write_jsonl(tmp_path / "two.jsonl", tiny_rows(0, 3))
    settings = read_settings(["--data", str(one), str(two)], "rookworld train")
    assert len(read_rows(settings.data)) == 5


def test_judge_flags_choose_the_engine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    missing = str(tmp_path / "no-engine")
    settings = read_settings(
        f"--judge stockfish --engine {missing} --nodes 7".split(), "rookworld train"
    )
    assert settings.nodes == 7
    with (
        pytest.raises(Exception, match="no-engine"),
        judging.open_judge(settings.judge, settings.engine, settings.nodes),
    ):
        pass
    with judging.open_judge("labels", None, 1) as judge:
        assert judge is None


def test_a_logger_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rookworld.cli.training_display.find_spec", lambda name: None)
    recorder = Recorder(read_settings(["--wandb"], "rookworld train"))
    with pytest.raises(ConfigError, match="wandb"), recorder:
        pass


def test_a_folder_for_curves_is_filled_without_tensorboard(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("rookworld.cli.training_display.find_spec", lambda name: None)
    flags = ["--log-dir", str(tmp_path / "logs")]
    with Recorder(read_settings(flags, "rookworld train")) as record:
        record(1, {"reward/mean": 0.5})
        record(2, {"reward/mean": 0.6})
    assert list(read_lines(tmp_path / "logs" / "curves.jsonl")) == [
        {"step": 1, "reward/mean": 0.5},
        {"step": 2, "reward/mean": 0.6},
    ]
    assert "TensorBoard is not installed" in capsys.readouterr().err


def test_recomputing_is_the_policys_alone(tiny_folder: Path) -> None:
    args = f"--model {tiny_folder} {SMALL} --recompute".split()
    state = new_state(read_settings(args, "rookworld train"), tiny_rows(), torch.device("cpu"))
    assert state.learner.model.recompute and not state.learner.reference.recompute


def test_passes_are_recorded_only_where_that_is_possible_and_asked_for(
    monkeypatch: pytest.MonkeyPatch, tiny_folder: Path
) -> None:
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    model = load_model(tiny_folder)
    for flags, device, records in (
        ("", "cuda", True),
        ("--no-graphs", "cuda", False),
        ("--shard", "cuda", False),
        ("", "cpu", False),
    ):
        learner = Learner(model, copy.deepcopy(model).requires_grad_(False))
        monkeypatch.setattr(state, "new_learner", lambda *_, made=learner: made)
        args = f"--model {tiny_folder} {SMALL} {flags}".split()
        new_state(read_settings(args, "rookworld train"), tiny_rows(), torch.device(device))
        assert (learner.graphs is not None, learner.ref_graphs is not None) == (records, records)
    learner = Learner(model, copy.deepcopy(model).to("meta"))
    models.record_passes(learner)
    assert learner.ref_graphs is None, "another device runs its passes as they are"


@pytest.mark.parametrize(
    ("flags", "apart", "device", "looks"),
    [
        ("", True, "meta", False),
        ("", False, "cuda", False),
        ("", True, "cuda", True),
        ("--shard", True, "cuda", False),
    ],
)
def test_the_reference_looks_ahead_on_an_idle_gpu_alone(
    flags: str, apart: bool, device: str, looks: bool, tiny_folder: Path
) -> None:
    """And only of a policy that differs from it: not at first, nor after it was synced."""
    settings = read_settings(f"--model {tiny_folder} {SMALL} {flags}".split(), "rookworld train")
    state = new_state(settings, tiny_rows(), torch.device("cpu"))
    state.step = 5
    its = [weight + apart for weight in state.learner.model.parameters()]
    reference = SimpleNamespace(device=torch.device(device), parameters=lambda: iter(its))
    state.learner = Learner(state.learner.model, reference)  # type: ignore[arg-type]
    assert may_look_ahead(state, settings) == looks


def test_content_counts_more_and_more_while_rewards_warm_up(
    monkeypatch: pytest.MonkeyPatch, tiny_folder: Path
) -> None:
    progress: list[float] = []
    monkeypatch.setattr(collect, "collect", lambda *args, **options: progress.append(args[4]))
    args = f"--model {tiny_folder} {SMALL} --reward-warmup-steps 100".split()
    settings = read_settings(args, "rookworld train")
    state = new_state(settings, tiny_rows(), torch.device("cpu"))
    for state.step in (0, 50, 100, 200):
        collect_groups(state, settings, None, Clock(torch.device("cpu")), StepScratch())
    assert progress == [0.0, 0.5, 1.0, 1.0]


def test_the_device_is_where_the_run_begins() -> None:
    settings = read_settings(["--device", "cpu"], "rookworld train")
    assert distributed.start(settings.compute.device) == torch.device("cpu")


def test_no_flag_is_forgotten_here() -> None:
    tables = [row[0] for table in (REACHES, BY_A_STEP, BY_THE_STATE, BY_A_RUN) for row in table]
    words = " ".join(tables).split()
    seen = {word[2:].replace("-", "_") for word in words if word.startswith("--")}
    fields = set(flat_fields(TrainSettings))
    assert fields - seen - set(ELSEWHERE.split()) == set()
    assert seen | set(ELSEWHERE.split()) <= fields
