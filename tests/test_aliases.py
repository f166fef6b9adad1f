"""Names that users of other trainers type: each is read with a line, or answered with the way.

Law: a name is never sent to a flag that merely looks alike.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from rookworld.cli.pretrain import read_settings as read_pretraining
from rookworld.cli.train import read_settings
from rookworld.pretrain.settings import PretrainSettings
from rookworld.rl.aliases import ADVICE, ALIASES, IGNORED
from rookworld.rl.settings import TrainSettings
from rookworld.runtime import config
from rookworld.runtime.config import flat_fields, value_of
from rookworld.runtime.errors import ConfigError

ROOT = Path(__file__).parents[1]
SETTINGS = flat_fields(TrainSettings)
OTHERS = {"preset", "config", "help_all", "nproc_per_node"}
"""Flags that are no settings."""


@pytest.mark.parametrize(
    ("flag", "value", "name"),
    [
        ("--max-steps", "3", "steps"),
        ("--num-train-steps", "3", "steps"),
        ("--epsilon", "0.3", "clip_range"),
        ("--epsilon_high", "0.3", "clip_range_high"),
        ("--max_completion_length", "99", "max_new_tokens"),
        ("--output-dir", "runs/b", "out"),
        ("--eval-steps", "3", "eval_every"),
        ("--eval_freq", "3", "eval_every"),
        ("--save-steps", "3", "save_every"),
        ("--max_grad_norm", "0.5", "clip_norm"),
        ("--warmup-steps", "3", "lr_warmup_steps"),
        ("--n-samples-per-prompt", "3", "k_samples"),
        ("--init-kl-coef", "0.3", "kl_coef"),
        ("--num_iterations", "2", "updates_per_rollout"),
        ("--model_name_or_path", "other", "model"),
        ("--lambd", "0.5", "gae_lambda"),
    ],
)
def test_a_name_of_another_trainer_is_read_with_a_line(
    flag: str, value: str, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    config.notice.cache_clear()
    settings = read_settings([flag, value], "rookworld train")
    assert str(value_of(settings, name)) == value
    assert f"{flag.replace('_', '-')} is read as --{name.replace('_', '-')}" in caplog.text


@pytest.mark.parametrize(
    ("flag", "said"),
    [
        ("--epochs", "--steps counts updates"),
        ("--num-train-epochs", "--steps counts updates"),
        ("--per-device-train-batch-size", "--batch-size counts the prompts"),
        ("--train_batch_size", "--k-samples the answers"),
        ("--gradient-accumulation-steps", "--memory, or --micro-tokens"),
        ("--loss-type", "--loss token (dapo elsewhere)"),
        ("--scale_rewards", "--advantage-scale"),
        ("--use-vllm", "built in"),
        ("--report-to", "--log-dir for TensorBoard, --wandb for W&B"),
        ("--fp16", "--dtype bfloat16"),
        ("--resume-from-checkpoint", "--out RUN --resume"),
        ("--new-run", "unless --resume is given"),
        ("--stockfish-path", "--judge stockfish --engine PATH"),
        ("--overfit-single-batch", "`rookworld overfit`"),
        ("--no-dataset", "prompts come from --data"),
        ("--dataset_size", "every row of --data"),
        ("--stepz", "did you mean '--steps'"),
        ("--kl-coeff-warmup", "unknown flag '--kl-coeff-warmup'"),
    ],
)
def test_a_name_that_means_nothing_here_is_answered_with_the_way(flag: str, said: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(said)) as error:
        read_settings([flag, "3"], "rookworld train")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("flag", ["--foo", "--zigzag", "--min-length", "--hub-token", "--packing"])
def test_nothing_is_suggested_where_nothing_is_near(flag: str) -> None:
    with pytest.raises(ConfigError) as error:
        read_settings([flag, "3"], "rookworld train")
    assert "did you mean" not in str(error.value)


def test_a_command_of_the_trl_days_is_understood(caplog: pytest.LogCaptureFixture) -> None:
    config.notice.cache_clear()
    words = "--batch_size 8 --learning_rate 2e-5 --bf16 --num_generations 6 --tensorboard"
    settings = read_settings(words.split(), "rookworld train")
    assert settings == TrainSettings.of(batch_size=8, lr=2e-5, k_samples=6)
    assert "--bf16 does nothing" in caplog.text and "--tensorboard does nothing" in caplog.text


def test_advice_and_aliases_name_settings_that_there_are() -> None:
    assert set(ALIASES.values()) <= set(SETTINGS)
    assert not (set(ALIASES) | set(ADVICE) | set(IGNORED)) & set(SETTINGS)
    assert not set(ALIASES) & set(ADVICE) and not set(IGNORED) & (set(ALIASES) | set(ADVICE))
    named = {
        flag.replace("-", "_")
        for text in [*ADVICE.values(), *IGNORED.values()]
        for flag in re.findall(r"--([a-z][a-z-]*[a-z])", text)
    }
    assert named <= set(SETTINGS) | OTHERS


def test_pretraining_answers_its_own_names() -> None:
    known = flat_fields(PretrainSettings)
    assert set(PretrainSettings.ALIASES.values()) <= set(known)
    assert not (set(PretrainSettings.ALIASES) | set(PretrainSettings.ADVICE)) & set(known)
    args = ["--max-iters", "3", "--block-size", "64"]
    settings = read_pretraining(args, PretrainSettings())
    assert settings == PretrainSettings.of(steps=3, n_positions=64)
    with pytest.raises(ConfigError, match="--epochs: --steps counts updates"):
        read_pretraining(["--epochs", "3"], PretrainSettings())


def test_a_file_with_another_trainers_key_is_answered_too(tmp_path: Path) -> None:
    file = tmp_path / "own.toml"
    file.write_text("num_train_epochs = 3\n")
    with pytest.raises(ConfigError, match=r"own\.toml: unknown key .*--steps counts updates"):
        read_settings(["--config", str(file)], "rookworld train")


MIGRATION = (ROOT / "docs" / "migration.md").read_text(encoding="utf-8")


def first_cells(heading: str) -> list[str]:
    """What stands in `code` in the first column of the table under a heading."""
    section = MIGRATION.split(f"## {heading}")[1].split("\n## ")[0]
    cells = [line.split("|")[1] for line in section.splitlines() if line.startswith("|")]
    return [name for cell in cells for name in re.findall(r"`([^`]+)`", cell)]


def test_every_flag_of_the_migration_page_is_known() -> None:
    known = set(SETTINGS) | set(ALIASES) | set(ADVICE) | set(IGNORED)
    names = [one for one in first_cells("Flags of") if "…" not in one]
    plain = [re.split(r"[= ]", one.removeprefix("--"))[0] for one in names]
    joined = [one.replace("data.", "").replace(".", "_").replace("-", "_") for one in plain]
    assert len(joined) > 70
    assert [one for one in joined if one not in known] == []


def test_every_variable_of_the_migration_page_is_one_of_train_sh() -> None:
    script = (ROOT / "train.sh").read_text(encoding="utf-8")
    names = first_cells("Variables of `train.sh`")
    unread = [name for name in names if not re.search(rf"\b{name}\b", script)]
    assert unread == ["STOCKFISH_PATH"]  # read by the engine's own search
