"""TRL: our rewards as its reward functions, the plan of a run, and runs of its trainer."""

from __future__ import annotations

import math
import os
import re
import shutil
import signal
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from label_judge import LabelJudge
from rookworld.cli.dispatch import main
from rookworld.cli.train import read_settings
from rookworld.evaluation.evaluate import HeldOut
from rookworld.model.gpt2 import GPT2
from rookworld.model.weights import load_model
from rookworld.rl.run_log import Hooks
from rookworld.rl.settings import TrainSettings
from rookworld.rl.trainer import train as native_train
from rookworld.runtime.atomic_files import write_json
from rookworld.runtime.errors import ConfigError, DataError, Diverged, RookworldError
from rookworld.runtime.processes import Interrupted
from rookworld.runtime.run_folder import read_json, read_lines
from rookworld.tasks.environment import ENVIRONMENT
from rookworld.tasks.policy import POLICY
from rookworld.tasks.reward import RewardRules
from rookworld.tasks.task import EnvironmentRow, PolicyRow
from rookworld.trl import plan
from rookworld.trl.rewards import environment_reward, policy_reward, records, reward_function
from tiny_training import (
    metrics_of,
    no_evaluation,
    tiny_rows,
    tiny_settings,
    tiny_tokenizer,
    weight_evaluation,
    weights_of,
    write_jsonl,
)

pytestmark = pytest.mark.usefixtures("single_thread")

ROWS = tiny_rows(3, 3)


def gold(row: PolicyRow | EnvironmentRow) -> str:
    if isinstance(row, PolicyRow):
        return POLICY.answer(row, "compact")
    return ENVIRONMENT.answer(row, "compact")


def columns_of(rows: list[PolicyRow | EnvironmentRow]) -> dict[str, list[Any]]:
    """What TRL hands to a reward function: every column but the prompt, and some of its own."""
    made = records(rows)
    return {name: [one[name] for one in made] for name in made[0] if name != "prompt"} | {
        "trainer_state": [None],
        "completion_ids": [[1]] * len(rows),
    }


# --- reward functions ---------------------------------------------------------------------------


def test_gold_earns_all_of_its_own_task_and_nothing_is_said_of_the_other() -> None:
    answers, columns = [gold(row) for row in ROWS], columns_of(ROWS)
    prompts = [record["prompt"] for record in records(ROWS)]
    assert policy_reward(prompts, answers, **columns) == [1.0] * 3 + [None] * 3
    assert environment_reward(prompts, answers, **columns) == [None] * 3 + [1.0] * 3


def test_rewards_are_those_of_the_tasks() -> None:
    answers = ["", " e2e4 E: 0.3 B: e2e4", gold(ROWS[2]).replace("B:", "B: e2e4"), *["junk"] * 3]
    found = policy_reward([""] * 6, answers, **columns_of(ROWS))
    rules = RewardRules()
    expected = [
        POLICY.verify(row, text, rules).total
        for row, text in zip(ROWS, answers, strict=True)
        if isinstance(row, PolicyRow)
    ]
    assert found == [*expected, None, None, None]
    assert expected[0] == rules.p_malformed
    assert max(expected) <= 0.2


def test_an_answer_without_its_end_is_malformed_where_the_end_is_known() -> None:
    rules, row = RewardRules(p_malformed=-0.7), ROWS[:1]
    columns = columns_of(row) | {"completion_ids": [[5, 6]]}
    cut = reward_function("P", rules, end=0)
    assert cut([""], [gold(row[0])], **columns) == [-0.7]
    assert cut([""], [gold(row[0])], **(columns | {"completion_ids": [[5, 0]]})) == [1.0]
    assert reward_function("P", judge=LabelJudge())([""], [gold(row[0])], **columns) == [1.0]
    assert cut.__name__ == "policy_reward"


def test_a_dataset_without_the_truth_is_named() -> None:
    with pytest.raises(DataError, match=r"no column moves, cp .* rookworld\.trl\.rewards\.records"):
        policy_reward([""], ["x"], fen=["8/8/8/8/8/8/8/K1k5 w - - 0 1"])


# --- the plan -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("steps", "cycle", "ratio", "turns"),
    [
        (20, 20, 0.25, "P" * 15 + "A" * 5),
        (10, 4, 0.5, "PPAAPPAAPP"),
        (6, 3, 0.01, "PPAPPA"),
        (6, 3, 0.99, "PAAPAA"),
        (3, 2, 0.0, "PPP"),
        (3, 2, 1.0, "AAA"),
    ],
)
def test_phases_take_turns_by_the_share_of_environment_prompts(
    steps: int, cycle: int, ratio: float, turns: str
) -> None:
    made = plan.phases(steps, cycle, ratio)
    assert "".join(phase.letter * phase.steps for phase in made) == turns
    assert [phase.first for phase in made] == [
        sum(one.steps for one in made[:n]) for n in range(len(made))
    ]
    settings = TrainSettings.of(steps=steps, trl_phase_steps=cycle, mix_env_ratio=ratio)
    assert plan.letters(settings) == turns


REFUSED = [
    *("--gae", "--gamma 0.9", "--gae-lambda 0.5", "--baseline-type rloo"),
    *("--advantage-std-floor 0.1", "--reward-norm", "--updates-per-rollout 2"),
    *("--kl-type k2", "--kl-collect-cap 1", "--ref-reset-kl 1"),
    *("--ref-device cpu", "--recovery-lr-factor 0.1", "--max-recoveries 1"),
    *("--shard", "--recompute", "--no-graphs", "--credit outlook", "--credit choices"),
    *(
        "--guide 0.2",
        "--flat-tries 3",
        "--p-temperature 0.8",
        "--a-temperature 0.8",
        "--device cuda:1",
    ),
]


@pytest.mark.parametrize("flag", REFUSED)
def test_what_trl_would_ignore_is_refused_by_name(flag: str) -> None:
    settings = read_settings(f"--backend trl {flag}".split(), "rookworld train")
    with pytest.raises(ConfigError, match=rf"cannot honour {flag}(\.0)?: ") as error:
        plan.check_flags(settings)
    assert ("one temperature it was built with" in str(error.value)) == ("temperature" in flag)


def test_what_trl_can_do_is_let_through() -> None:
    flags = "--preset stable --kl-type k3 --loss gspo --adaptive-kl --temperature 0.8"
    settings = read_settings([*flags.split(), "--p-temperature", "0.8"], "rookworld train")
    plan.check_flags(settings)


def test_a_plan_needs_rows_of_each_task_and_held_out_positions_of_its_own() -> None:
    settings = TrainSettings.of(steps=40)
    both, trained = HeldOut(), tiny_rows(3, 3)
    with pytest.raises(DataError, match=r"no A: rows in --data .* --mix-env-ratio 0.25"):
        plan.plan(settings, tiny_rows(3, 0), both)
    seen = HeldOut(trained[:1])
    with pytest.raises(DataError, match="1 of 1 positions of --held-out embedded:validation"):
        plan.plan(settings, trained, seen)
    lines = plan.plan(settings, trained, both)
    assert "phases: P 1–15, A 16–20, P 21–35, A 36–40 (30 P and 10 A steps)" in lines


def test_a_dry_run_prints_the_plan_without_model_or_judge(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan, "version", _missing)
    files = data_files(tmp_path)
    args = f"train --backend trl --model {tmp_path}/none --engine none --judge stockfish {files}"
    assert main([*args.split(), "--dry-run", "--steps", "20", "--out", str(tmp_path / "run")]) == 0
    printed = capsys.readouterr().out
    assert 'backend: TRL is not installed; pip install "rookworld[trl]"' in printed
    assert "rows: 8 P, 4 A; held out: 3 P, 3 A, no position in common" in printed
    assert "phases: P 1–15, A 16–20" in printed
    assert not (tmp_path / "run").exists()


def test_without_trl_a_run_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan, "version", _missing)
    args = f"train --backend trl --out {tmp_path / 'run'} {data_files(tmp_path)}"
    assert main(args.split()) == 2
    said = capsys.readouterr().err.splitlines()[-1]
    assert said == 'rookworld: --backend trl needs TRL: pip install "rookworld[trl]"'


def _missing(name: str) -> str:
    raise PackageNotFoundError(name)


def data_files(folder: Path) -> str:
    """Flags for rows of the game's first positions, held-out ones of its last."""
    late = tiny_rows(20, 20)
    late = [*late[17:20], *late[37:40]]
    trained = write_jsonl(folder / "train.jsonl", tiny_rows())
    held = write_jsonl(folder / "held.jsonl", late)
    return f"--data {trained} --held-out {held}"


# --- runs ---------------------------------------------------------------------------------------


@pytest.fixture
def backend() -> Any:
    pytest.importorskip("trl")

    from rookworld.trl import trainer

    return trainer


def small(model: Path, out: Path, **changes: Any) -> TrainSettings:
    mixed: dict[str, Any] = {"backend": "trl", "mix_env_ratio": 0.5, "trl_phase_steps": 2}
    return tiny_settings(model, out, **(mixed | {"max_new_tokens": None} | changes))


def moments_of(checkpoint: Path) -> dict[str, torch.Tensor]:
    return load_file(checkpoint / "trainer.safetensors")


def test_twenty_steps_leave_a_run_that_everything_reads(
    backend: Any, warm_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    often = "--steps 20 --trl-phase-steps 8 --mix-env-ratio 0.25 --eval-every 10 --save-every 10"
    tiny = "--batch-size 2 --k-samples 3 --lr 1e-3 --device cpu --eval-policy-rows 3"
    args = f"train --backend trl --model {warm_folder} --out {run} {data_files(tmp_path)}"
    assert main([*f"{args} {often} {tiny} --eval-environment-rows 3".split()]) == 0
    lines = list(read_lines(run / "metrics.jsonl"))
    assert [line["step"] for line in lines] == list(range(1, 21))
    assert abs(lines[0]["kl/exact"]) < 1e-6
    assert lines[-1]["kl/exact"] > 1e-3
    assert all(math.isfinite(line["reward/mean"]) for line in lines)
    turns = ["P" if "reward/P" in line else "A" for line in lines]
    assert [(letter, len(list(same))) for letter, same in groupby(turns)] == [
        *[("P", 6), ("A", 2)] * 2,
        ("P", 4),
    ]
    assert [line["step"] for line in read_lines(run / "eval.jsonl")] == [0, 10, 20]
    assert {one["task"] for one in read_lines(run / "rollouts.jsonl")} == {"P"}
    assert read_json(run / "config.json")["backend"] == "trl"
    assert read_json(run / "origin.json")["trl"]
    assert (run / "DONE").exists()
    # one optimizer for all phases: its moments have seen every step
    assert float(moments_of(run / "checkpoints/step-000020")["trl.optimizer.0.step"]) == 20
    capsys.readouterr()
    assert main(["analyze", str(run)]) == 0
    assert main(["report", str(run), "--out", str(tmp_path / "page.html")]) == 0
    assert "kl/exact" in (tmp_path / "page.html").read_text()


def test_promised_metrics_are_there(backend: Any, warm_folder: Path, tmp_path: Path) -> None:
    from test_train import PROMISED

    settings = small(warm_folder, tmp_path / "run", steps=2)
    backend.train(settings, tiny_rows(), no_evaluation)
    names = {name for line in read_lines(tmp_path / "run/metrics.jsonl") for name in line}
    assert set(PROMISED.split()) - names == {"sampler/logp_gap"}


def test_both_kinds_of_loader_read_the_final_model(
    backend: Any, warm_folder: Path, tmp_path: Path
) -> None:
    from transformers import AutoModelForCausalLM

    rows = tiny_rows()
    final = backend.train(small(warm_folder, tmp_path / "run", steps=2), rows, no_evaluation)
    load: Any = AutoModelForCausalLM.from_pretrained
    ids = torch.tensor([tiny_tokenizer().encode(POLICY.prompt(ROWS[0], "compact"))])  # type: ignore[arg-type]
    ours, theirs = load_model(final), load(final).eval()
    with torch.no_grad():
        assert torch.allclose(ours.logits(ours(ids)), theirs(ids).logits, atol=1e-5)
    assert weights_of(final) != weights_of(warm_folder)
    # and TRL starts from what the native loop has saved, and the other way round
    settings = small(final, tmp_path / "native", steps=1, backend="native")
    again = backend.train(
        small(native_train(settings, rows, no_evaluation), tmp_path / "again", steps=1),
        rows,
        no_evaluation,
    )
    assert load_model(again).config == ours.config


def watched(
    monkeypatch: pytest.MonkeyPatch, backend: Any, look: Callable[[Any], Any]
) -> list[tuple[int, Any]]:
    """What `look(trainer)` sees when the loss of each step is computed."""
    seen: list[tuple[int, Any]] = []
    real = backend.GRPOTrainer._compute_loss

    def spy(trainer: Any, *args: Any) -> Any:
        seen.append((trainer.session.step, look(trainer)))
        return real(trainer, *args)

    monkeypatch.setattr(backend.GRPOTrainer, "_compute_loss", spy)
    return seen


def test_the_kl_weight_warms_up_and_adapts_where_the_loss_is_computed(
    backend: Any, warm_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = watched(monkeypatch, backend, lambda trainer: trainer.beta)
    settings = small(
        warm_folder, tmp_path / "run", steps=5, kl_coef=0.2, kl_warmup_steps=2, adaptive_kl=True
    )
    settings = settings.but(target_kl=1e-6, kl_coef_max=0.4, mix_env_ratio=0.0)
    backend.train(settings, tiny_rows(), no_evaluation)
    assert [beta for _, beta in seen] == pytest.approx([0.0, 0.0, 0.2, 0.3, 0.4])
    logged = metrics_of(tmp_path / "run")
    assert [line["kl/coef"] for line in logged] == [beta for _, beta in seen]
    # the distance is known before it costs anything
    assert logged[1]["kl/exact"] > 1e-6


def test_what_we_measure_is_what_trl_measures(
    backend: Any, warm_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Any] = []
    real = backend.new_trainer

    def kept(*args: Any) -> Any:
        made.append(real(*args))
        return made[0]

    monkeypatch.setattr(backend, "new_trainer", kept)
    settings = small(warm_folder, tmp_path / "run", kl_coef=0.5, entropy_coef=0.01)
    backend.train(settings, tiny_rows(), no_evaluation)
    ours = metrics_of(tmp_path / "run")
    theirs = [line for line in made[0].state.log_history if "loss" in line]
    for mine, other in zip(ours, theirs, strict=True):
        assert mine["policy/entropy"] == pytest.approx(other["entropy"], rel=1e-4)
        assert mine["loss/kl"] == pytest.approx(other["kl"], rel=1e-4, abs=1e-6)
        assert mine["loss/total"] == pytest.approx(other["loss"], rel=1e-4, abs=1e-6)
        assert mine["loss/policy"] == pytest.approx(
            other["policy_loss"] - 0.5 * other["kl"], rel=1e-3, abs=1e-5
        )
        assert mine["reward/mean"] == pytest.approx(other["reward"], rel=1e-4)
        assert mine["lr"] == pytest.approx(other["learning_rate"])
        assert mine["tokens/mean_length"] == pytest.approx(other["completions/mean_length"])


def test_every_answer_gets_its_own_reward(
    backend: Any, warm_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from rookworld.trl.callback import Session

    real, spread, end = Session.score, set(), tiny_tokenizer().eos

    def checked(self: Session, **columns: Any) -> list[float]:
        found = real(self, **columns)
        rows = [self.stream[place].row for place in columns["place"]]
        assert columns["prompts"] == [record["prompt"] for record in records(rows)]
        told = columns_of(rows) | {"completion_ids": columns["completion_ids"]}
        for letter in ("P", "A"):
            alone = reward_function(letter, end=end)([], columns["completions"], **told)
            assert all(b is None or a == b for a, b in zip(found, alone, strict=True))
        spread.update(found)
        return found

    monkeypatch.setattr(Session, "score", checked)
    settings = small(warm_folder, tmp_path / "run", k_samples=8)
    backend.train(settings, tiny_rows(), no_evaluation)
    assert len(spread) > 2


def test_advantages_are_clipped(
    backend: Any, warm_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    largest: list[float] = []
    real = backend.GRPOTrainer._compute_loss

    def spy(trainer: Any, model: Any, inputs: Any) -> Any:
        largest.append(float(inputs["advantages"].abs().max()))
        return real(trainer, model, inputs)

    monkeypatch.setattr(backend.GRPOTrainer, "_compute_loss", spy)
    settings = small(warm_folder, tmp_path / "run", steps=1, advantage_clip=0.25)
    backend.train(settings, tiny_rows(), no_evaluation)
    assert largest == [0.25]


def test_dropout_of_a_loaded_config_is_off(backend: Any, warm_folder: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(warm_folder, folder)
    config = read_json(folder / "config.json")
    write_json(folder / "config.json", config | {"resid_pdrop": 0.5, "embd_pdrop": 0.5})
    backend.train(small(folder, tmp_path / "run", steps=1), tiny_rows(), no_evaluation)
    assert abs(metrics_of(tmp_path / "run")[0]["kl/exact"]) < 1e-6


def test_each_phase_has_its_generation_settings(
    backend: Any, warm_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def look(trainer: Any) -> tuple[int, int, float]:
        made = trainer.generation_config
        return made.max_new_tokens, trainer.max_completion_length, made.top_p

    seen = watched(monkeypatch, backend, look)
    settings = small(warm_folder, tmp_path / "run", steps=4, a_top_p=0.9)
    backend.train(settings, tiny_rows(), no_evaluation)
    p, a = (16, 16, 1.0), (90, 90, 0.9)
    assert [found for _, found in seen] == [p, a, p, a]


def test_steps_cut_into_passes_are_the_same_steps(
    backend: Any, warm_folder: Path, tmp_path: Path
) -> None:
    whole = small(warm_folder, tmp_path / "whole", steps=2, micro_tokens=100_000)
    parts = whole.but(out=tmp_path / "parts", micro_tokens=400)
    for settings in (whole, parts):
        backend.train(settings, tiny_rows(), no_evaluation)
    lines = [metrics_of(tmp_path / name) for name in ("whole", "parts")]
    for one, other in zip(*lines, strict=True):
        for name in ("reward/mean", "loss/total", "grad/norm", "kl/exact", "policy/entropy"):
            assert other[name] == pytest.approx(one[name], rel=1e-4, abs=1e-6), name


def test_padding_does_not_move_positions(backend: Any, warm_folder: Path) -> None:
    from transformers import AutoModelForCausalLM

    load: Any = AutoModelForCausalLM.from_pretrained
    theirs, ours = load(warm_folder).eval(), load_model(warm_folder)
    row = torch.tensor([tiny_tokenizer().encode(gold(ROWS[0]))])
    padded = torch.cat([torch.zeros(1, 5, dtype=torch.long), row], 1)
    mask = torch.cat([torch.zeros(1, 5, dtype=torch.long), torch.ones_like(row)], 1)
    with torch.no_grad():
        expected = ours.logits(ours(row))
        moved = theirs(padded, attention_mask=mask).logits[:, 5:]
        theirs.transformer.register_forward_pre_hook(backend.true_positions, with_kwargs=True)
        right = theirs(padded, attention_mask=mask).logits[:, 5:]
    assert torch.allclose(right, expected, atol=1e-4)
    assert not torch.allclose(moved, expected, atol=1e-2)


def test_a_run_stopped_by_a_signal_goes_on_where_it_was(
    backend: Any, warm_folder: Path, tmp_path: Path
) -> None:
    settings = small(
        warm_folder,
        tmp_path / "run",
        steps=4,
        ref_sync_every=1,
        save_every=9,
        adaptive_kl=True,
        kl_coef_min=0.05,
        lr_final=0.2,
    )

    def interrupt(step: int, metrics: Any) -> None:
        if step == 2:
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(Interrupted, match="stopped after step 2"):
        backend.train(settings, tiny_rows(), no_evaluation, hooks=Hooks(on_step=interrupt))
    before = read_json(tmp_path / "run/checkpoints/step-000002/trainer.json")
    resumed = settings.but(resume=True)
    backend.train(resumed, tiny_rows(), no_evaluation)
    lines = metrics_of(tmp_path / "run")
    assert [line["step"] for line in lines] == [1, 2, 3, 4]
    assert lines[2]["kl/coef"] == before["control"]["coef"] != settings.kl.kl_coef
    # the reference of step 3 is the policy after step 2: it was saved and has come back
    assert lines[2]["kl/exact"] == pytest.approx(0, abs=1e-6)
    assert [line["lr"] for line in lines] == pytest.approx([1e-3, 8e-4, 4e-4, 2e-4])
    moments = moments_of(tmp_path / "run/checkpoints/step-000004")
    assert float(moments["trl.optimizer.0.step"]) == 4
    done = weights_of(tmp_path / "run/final")
    backend.train(resumed, tiny_rows(), no_evaluation)
    assert weights_of(tmp_path / "run/final") == done
    with pytest.raises(RookworldError, match="saved by train --backend trl"):
        native_train(resumed.but(steps=5, backend="native"), tiny_rows(), no_evaluation)


def test_a_native_run_is_not_resumed_here(backend: Any, warm_folder: Path, tmp_path: Path) -> None:
    settings = small(warm_folder, tmp_path / "run", steps=1, backend="native")
    native_train(settings, tiny_rows(), no_evaluation)
    with pytest.raises(RookworldError, match="saved by train --backend native"):
        backend.train(settings.but(resume=True, steps=2), tiny_rows(), no_evaluation)


def test_the_guard_skips_what_is_not_finite_and_stops_what_runs_away(
    backend: Any, warm_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from rookworld.trl.callback import Session

    real = Session.measure

    def broken(self: Session, model: Any, reference: Any, inputs: Any, loss: float) -> None:
        real(self, model, reference, inputs, math.nan if self.step == 1 else loss)

    monkeypatch.setattr(Session, "measure", broken)
    settings = small(warm_folder, tmp_path / "run", steps=2, save_every=1, mix_env_ratio=0.0)
    backend.train(settings, tiny_rows(), no_evaluation)
    saved = [tmp_path / f"run/checkpoints/step-00000{n}" for n in (0, 1, 2)]
    assert weights_of(saved[0]) != weights_of(saved[1]) == weights_of(saved[2])
    (event,) = read_lines(tmp_path / "run/events.jsonl")
    assert (event["kind"], event["step"]) == ("skip", 2)
    monkeypatch.undo()
    careful = settings.but(out=tmp_path / "stop", kl_divergence_threshold=1e-6)
    with pytest.raises(Diverged, match="diverged_kl"):
        backend.train(careful, tiny_rows(), no_evaluation)
    assert not (tmp_path / "stop/DONE").exists()


def test_a_reference_that_differs_is_refused(
    backend: Any, warm_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = backend.new_trainer

    def shifted(*args: Any) -> Any:
        trainer = real(*args)
        trainer.ref_model.transformer.ln_f.weight.data.mul_(1.5)
        return trainer

    monkeypatch.setattr(backend, "new_trainer", shifted)
    settings = small(warm_folder, tmp_path / "run", steps=1)
    with pytest.raises(RookworldError, match=r"KL to the reference is .*, not 0"):
        backend.train(settings, tiny_rows(), no_evaluation)


def test_held_out_rewards_choose_the_best_checkpoint(
    backend: Any, warm_folder: Path, tmp_path: Path
) -> None:
    settings = small(warm_folder, tmp_path / "run", steps=2, eval_every=1, save_every=1)
    seen: list[GPT2] = []

    def measured(model: GPT2, tokenizer: Any) -> Any:
        seen.append(model)
        return weight_evaluation(model, tokenizer)

    backend.train(settings, tiny_rows(), measured)
    values = [line["reward/greedy"]["value"] for line in read_lines(tmp_path / "run/eval.jsonl")]
    assert len(values) == len(seen) == 3 == len(set(values))
    best = (tmp_path / "run/checkpoints/best").resolve().name
    assert best == f"step-{values.index(max(values)):06d}"


def test_more_positions_than_the_model_has_are_refused(
    backend: Any, warm_folder: Path, tmp_path: Path
) -> None:
    settings = small(warm_folder, tmp_path / "run", max_new_tokens=150)
    with pytest.raises(ConfigError, match=r"tokens, the model has only 192 positions"):
        backend.train(settings, tiny_rows(), no_evaluation)


def test_several_processes_are_refused(
    backend: Any, warm_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match="one process"):
        backend.train(small(warm_folder, tmp_path), tiny_rows(), no_evaluation)


def test_the_script_of_the_documentation_runs(
    backend: Any, warm_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = (Path(__file__).parent.parent / "docs/trl.md").read_text(encoding="utf-8")
    script, snippet = re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL)
    rows = write_jsonl(tmp_path / "rows.jsonl", tiny_rows())
    for written, here in {
        'resolve_folder("nano")': repr(str(warm_folder)),
        "embedded:train": str(rows),
        "runs/plain-trl": str(tmp_path / "out"),
        "max_steps=20": "max_steps=2, use_cpu=True, dataloader_pin_memory=False",
        "train_batch_size=64": "train_batch_size=16",
    }.items():
        assert written in script
        script = script.replace(written, here)
    monkeypatch.chdir(tmp_path)
    left: dict[str, Any] = {}
    exec(script, left)
    history = left["trainer"].state.log_history
    assert history[-1]["step"] == 2
    names = {name for line in history for name in line}
    assert {"rewards/policy_reward/mean", "rewards/environment_reward/mean"} <= names
    exec(snippet, left)
    assert left["reward"].__name__ == "policy_reward"
