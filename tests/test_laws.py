"""`check`, `overfit`, `inspect` and a dry run: what they say, and that they would say otherwise."""

from __future__ import annotations

import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from rookworld.cli.dispatch import main
from rookworld.data.rows import task_name
from rookworld.model.tokenizer import Tokenizer
from rookworld.model.weights import load_model, save_model
from rookworld.rl.checks import (
    Law,
    fixed_batch,
    gold_scores_one,
    hacks_score_low,
    learns_one_batch,
    longest_run,
    overfit_criteria,
    sampler_is_trainer,
)
from rookworld.rl.settings import TrainSettings
from rookworld.runtime.run_folder import Run
from rookworld.tasks.reward import RewardRules
from rookworld.tasks.task import PolicyRow
from tiny_training import tiny_rows, tiny_settings, write_jsonl

pytestmark = pytest.mark.usefixtures("single_thread")


def test_gold_and_hacks_score_as_they_must() -> None:
    rows = tiny_rows(20, 20)
    assert gold_scores_one(rows, RewardRules()).holds
    assert hacks_score_low(rows, RewardRules()).holds


def test_a_gold_answer_that_does_not_score_is_named() -> None:
    (row, *_) = tiny_rows(1, 0)
    wrong = PolicyRow(row.fen, ("a1a1",), (0,))
    law = gold_scores_one([row, wrong], RewardRules())
    assert not law.holds
    assert row.fen in law.detail


def test_a_reward_that_pays_for_junk_is_named() -> None:
    law = hacks_score_low(tiny_rows(), RewardRules(p_weights=(("format", 5.0),)))
    assert not law.holds
    assert law.detail.startswith("nearest to its limit: ")


def test_a_reward_that_pays_for_mistakes_is_named() -> None:
    law = hacks_score_low(tiny_rows(20, 0), RewardRules(p_best_scale=0.1))
    assert not law.holds
    assert law.detail.startswith("nearest to its limit: a mistake as B, 0.")
    graduated = hacks_score_low(tiny_rows(20, 20), RewardRules(reward_shaping="graduated"))
    assert graduated.holds


def test_a_sound_model_starts_and_a_broken_one_is_refused(
    warm_folder: Path, tmp_path: Path
) -> None:
    law = sampler_is_trainer(tiny_settings(warm_folder, tmp_path / "run"), tiny_rows())
    assert law.holds
    assert "largest ratio 1.0000" in law.detail
    broken = load_model(warm_folder)
    with torch.no_grad():
        broken.ln_f.weight[0] = math.nan
    save_model(broken, tmp_path / "broken", tokenizer=Tokenizer.load(warm_folder))
    settings = tiny_settings(tmp_path / "broken", tmp_path / "run2")
    assert not sampler_is_trainer(settings, tiny_rows()).holds
    assert not learns_one_batch(settings, tiny_rows(), steps=3).holds


# --- the three criteria of `overfit` ------------------------------------------------------------


def written_run(folder: Path, **changes: Any) -> Path:
    """A run of 40 steps as a success would look, but for `changes`."""
    run = Run(folder)
    for step in range(41):
        reward = changes.get("reward", lambda step: 0.2 + 0.01 * step)(step)
        run.append("eval.jsonl", {"step": step, "reward/greedy": {"value": reward}})
        if step:
            line = {"kl/coef": 0.1, "loss/kl": 0.1, "loss/policy": 0.1, "grad/norm": 1.0}
            at = {name: changes[name](step) for name in line if name in changes}
            run.append("metrics.jsonl", {"step": step, **line, **at})
    return folder


@pytest.mark.parametrize(
    ("changes", "holds"),
    [
        ({}, [True, True, True]),
        ({"reward": lambda step: 0.5 - 0.01 * step}, [False, True, True]),
        ({"reward": lambda step: 1.0}, [True, True, True]),
        ({"reward": lambda step: 0.7}, [False, True, True]),
        ({"loss/kl": lambda step: 10.0}, [True, False, True]),
        ({"loss/kl": lambda step: 10.0 if step % 10 else 0.0}, [True, True, True]),
        ({"grad/norm": lambda step: 30.0 if step == 7 else 1.0}, [True, True, False]),
        ({"grad/norm": lambda step: math.nan if step == 7 else 1.0}, [True, True, False]),
    ],
    ids=["good", "falling", "solved", "still", "kl", "kl now and then", "spike", "nan"],
)
def test_overfitting_is_judged_by_three_criteria(
    tmp_path: Path, changes: dict[str, Any], holds: list[bool]
) -> None:
    laws = overfit_criteria(written_run(tmp_path / "run", **changes))
    assert [law.holds for law in laws] == holds


def test_runs_of_flags_by_hand() -> None:
    assert longest_run([True, False, True, True, False]) == 2
    assert longest_run([]) == 0


# --- the commands -------------------------------------------------------------------------------


@pytest.fixture
def flags(warm_folder: Path, tmp_path: Path) -> list[str]:
    rows = write_jsonl(tmp_path / "rows.jsonl", tiny_rows())
    small = "--batch-size 4 --k-samples 3 --mix-env-ratio 0.5 --max-new-tokens 16 --device cpu"
    return f"--model {warm_folder} --data {rows} --held-out {rows} {small}".split()


def test_check_says_one_line_a_law(
    flags: list[str], warm_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code = main(["check", str(warm_folder), *flags[2:]])
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0].split("  ")[1] for line in lines] == [
        "gold answers score 1.0",
        "hacks score low",
        "step 0",
        "one batch can be learnt",
    ]
    assert all(line.startswith("holds  ") for line in lines[:3])
    assert code == (0 if lines[3].startswith("holds") else 1)


def test_check_of_a_broken_model_fails_with_exit_code_1(
    flags: list[str], warm_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = load_model(warm_folder)
    with torch.no_grad():
        broken.wte.weight[5, 0] = math.inf
    save_model(broken, tmp_path / "broken", tokenizer=Tokenizer.load(warm_folder))
    assert main(["check", str(tmp_path / "broken"), *flags[2:]]) == 1
    shown = capsys.readouterr()
    assert shown.out.count("FAILS  ") == 2
    assert "nothing was trained" in shown.out


def test_overfit_says_which_criterion_fails(
    flags: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    more = f"--out {tmp_path / 'run'} --steps 4 --mix-env-ratio 0 --batch-size 2".split()
    code = main(["overfit", *flags, *more])
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 3
    assert all(line.startswith(("holds  ", "FAILS  ")) for line in lines)
    assert code == int(any(line.startswith("FAILS") for line in lines))
    assert (tmp_path / "run" / "DONE").exists()


def test_inspect_shows_answers_beside_the_truth(
    flags: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "250")
    assert main(["inspect", *flags]) == 0
    shown = capsys.readouterr().out
    assert shown.count("truth") == 4
    assert "P: " in shown
    assert "A: " in shown
    assert "candidates" in shown
    assert "board" in shown


def test_a_dry_run_says_the_plan_and_writes_nothing(
    flags: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", *flags, "--out", str(tmp_path / "run"), "--dry-run"]) == 0
    shown = capsys.readouterr().out
    assert "rows: 8 P, 4 A; first batch PAPA" in shown
    assert "150 steps of 4 prompts × 3 answers" in shown
    assert not (tmp_path / "run").exists()
    few = ["--steps", "1", "--batch-size", "1", "--eval-every", "0"]
    assert main(["train", *flags, *few, "--dry-run"]) == 0
    shown = capsys.readouterr().out
    assert "plan: 1 step of 1 prompt × 3 answers, no evaluation between, checkpoint" in shown
    assert main(["train", *flags, "--batch-size", "100", "--dry-run"]) == 0
    assert "first batch 50 P and 50 A" in capsys.readouterr().out


def test_held_out_rows_that_are_trained_on_are_a_warning(
    flags: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    few = ["--eval-mates", "0", "--dry-run"]
    assert main(["train", *flags, *few]) == 0
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "warning" in line]
    assert "positions of --held-out" in line
    assert "what is trained on measures nothing" in line
    apart = [*flags[:4], *flags[6:], *few]
    assert main(["train", *apart]) == 0
    assert "warning" not in capsys.readouterr().err
    drilled = ["--distill-coef", "1", "--distill-data"]
    assert main(["train", *apart, *drilled, "embedded:validation"]) == 0
    assert "are also in the data, " in capsys.readouterr().err
    assert main(["train", *apart, *drilled, "embedded:test"]) == 0
    assert "warning" not in capsys.readouterr().err


def test_check_takes_one_model(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "nano", "foo", "bar"]) == 2
    assert "one model at a time, not nano foo bar" in capsys.readouterr().err


def out_of_overfit(args: list[str], monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder that `overfit` would train in."""
    asked: list[TrainSettings] = []

    def not_run(settings: TrainSettings, rows: Any, hooks: Any) -> list[Law]:
        asked.append(settings)
        return []

    monkeypatch.setattr("rookworld.rl.checks.overfit", not_run)
    assert main(["overfit", *args]) == 0
    return asked[0].out


def test_overfit_has_a_folder_of_its_own_unless_one_is_given(
    flags: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tmp_path / "overfit.toml"
    config.write_text('out = "from/file"\n')
    for more, out in [
        ([], "runs/overfit"),
        (["--out", "runs/train"], "runs/train"),
        (["--out=mine"], "mine"),
        (["--config", str(config)], "from/file"),
    ]:
        assert out_of_overfit([*flags, *more], monkeypatch) == Path(out)


def test_a_dry_run_of_overfit_trains_nothing(
    flags: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["overfit", *flags, "--out", str(tmp_path / "run"), "--dry-run"]) == 0
    shown = capsys.readouterr()
    assert "rows: 2 P, 2 A; first batch PAPA" in shown.out
    assert "overfit · settings " in shown.err and "p_temperature=0.5" in shown.err
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("size", "ratio", "letters"),
    [
        (2, 0.25, "PA"),
        (2, 0.9, "PA"),
        (4, 0.25, "PPPA"),
        (1, 0.25, "PA"),
        (3, 0.0, "PPP"),
        (1, 1.0, "A"),
        (2, 1.0, "AA"),
    ],
)
def test_a_fixed_batch_has_every_task_of_the_mix(size: int, ratio: float, letters: str) -> None:
    settings = TrainSettings.of(batch_size=size, mix_env_ratio=ratio)
    batch = fixed_batch(tiny_rows(), settings)
    assert "".join(map(task_name, batch)) == letters


def test_environment_rows_alone_can_be_learnt(
    warm_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained: list[tuple[float, str]] = []

    def noted(settings: TrainSettings, rows: Any, evaluate: Any) -> None:
        trained.append((settings.mix_env_ratio, "".join(map(task_name, rows))))
        for step in range(1, settings.steps + 1):
            Run(settings.out).append("metrics.jsonl", {"step": step, "reward/mean": 0.1 * step})

    monkeypatch.setattr("rookworld.rl.checks.train", noted)
    settings = tiny_settings(warm_folder, tmp_path / "run", mix_env_ratio=1.0)
    assert learns_one_batch(settings, tiny_rows(0, 4), steps=3).holds
    mixed = settings.but(mix_env_ratio=0.5, out=tmp_path / "mixed")
    assert learns_one_batch(mixed, tiny_rows(), steps=3).holds
    assert trained == [(1.0, "AAAA"), (0.0, "PPPP")]


@pytest.mark.parametrize(("rewards", "holds"), [((1.0, 0.995), True), ((0.9, 0.8), False)])
def test_a_batch_that_is_known_already_may_waver(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rewards: tuple[float, float], holds: bool
) -> None:
    def noted(settings: TrainSettings, *_: Any) -> None:
        for step in range(3):
            line = {"step": step, "reward/mean": rewards[step > 0]}
            Run(settings.out).append("metrics.jsonl", line)

    monkeypatch.setattr("rookworld.rl.checks.train", noted)
    settings = TrainSettings.of(out=tmp_path / "run", mix_env_ratio=1.0)
    assert learns_one_batch(settings, tiny_rows(0, 4), steps=3).holds is holds


def test_a_dry_run_reads_no_weights(
    warm_folder: Path, flags: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(warm_folder, tmp_path / "model")
    (tmp_path / "model" / "model.safetensors").write_bytes(b"no weights")
    others = flags[flags.index("--model") + 2 :]
    args = ["train", *others, "--model", str(tmp_path / "model"), "--out", str(tmp_path / "run")]
    assert main([*args, "--dry-run"]) == 0
    assert "plan: " in capsys.readouterr().out and not (tmp_path / "run").exists()
    assert main(args) == 2  # that is what it would have met
