"""`./train.sh`: every variable of the earlier scripts is read, or refused with a line."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from rookworld.cli.train import read_settings
from rookworld.rl.settings import TrainSettings
from rookworld.runtime.config import value_of
from rookworld.runtime.errors import ConfigError

ROOT = Path(__file__).parents[1]
USUAL = Path("runs/train-sh")


def run_train_sh(folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """What it does under these variables, in a folder where `rookworld` prints its arguments."""
    shutil.copy(ROOT / "train.sh", folder)
    command = folder / ".venv" / "bin" / "rookworld"
    command.parent.mkdir(parents=True, exist_ok=True)
    command.write_text("#!/bin/sh\nprintf '%s\\n' \"$@\"\n")
    command.chmod(0o755)
    (folder / "star.jsonl").touch()
    return subprocess.run(
        ["bash", str(folder / "train.sh")],
        env={"PATH": os.environ["PATH"]} | environment,
        capture_output=True,
        text=True,
        check=False,
    )


def given_by_train_sh(folder: Path, **environment: str) -> TrainSettings:
    """The settings that it asks for under these variables."""
    told = run_train_sh(folder, **environment)
    assert told.returncode == 0, told.stderr
    name, *args = told.stdout.splitlines()
    assert name == "train"
    return read_settings(args, "rookworld train")


def made_run(folder: Path) -> Path:
    """A run that has trained."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    (folder / "metrics.jsonl").write_text('{"step": 1}\n')
    return folder


def test_it_takes_several_sources_as_they_are_written(tmp_path: Path) -> None:
    settings = given_by_train_sh(tmp_path, DATA="a.jsonl *.jsonl", STEPS="5")
    assert settings.data == ("a.jsonl", "*.jsonl")
    assert settings.steps == 5


def test_without_variables_it_is_its_preset_and_begins_a_run(tmp_path: Path) -> None:
    settings = given_by_train_sh(tmp_path)
    expected = read_settings(["--preset", "train-sh"], "rookworld train")
    assert settings == expected.but(out=USUAL)


@pytest.mark.parametrize("clip", ["0.05", "0.2"])
def test_it_sets_both_sides_of_the_clip_range(tmp_path: Path, clip: str) -> None:
    settings = given_by_train_sh(tmp_path, CLIP_RANGE=clip)
    assert settings.loss.clip_range == settings.loss.clip_high == float(clip)
    settings = given_by_train_sh(tmp_path, CLIP_RANGE=clip, CLIP_RANGE_HIGH="0.3")
    assert settings.loss.clip_high == 0.3


@pytest.mark.parametrize(
    ("variable", "value", "name"),
    [
        ("BATCH_POSITIONS", "3", "batch_size"),
        ("GROUP_SIZE", "3", "k_samples"),
        ("NUM_GENERATIONS", "3", "k_samples"),
        ("LEARNING_RATE", "0.003", "lr"),
        ("BETA", "0.3", "kl_coef"),
        ("WARMUP_STEPS", "3", "lr_warmup_steps"),
        ("MAX_GRAD_NORM", "0.5", "clip_norm"),
        ("KL_WARMUP_FACTOR", "0.5", "kl_warmup_factor"),
        ("KL_DIVERGENCE_THRESHOLD", "5.0", "kl_divergence_threshold"),
        ("REWARD_WARMUP_STEPS", "3", "reward_warmup_steps"),
        ("REWARD_SHAPING", "graduated", "reward_shaping"),
        ("MAX_NEW_TOKENS", "99", "max_new_tokens"),
        ("MAX_COMPLETION_LENGTH", "99", "max_new_tokens"),
        ("EVAL_FREQ", "3", "eval_every"),
        ("EVAL_STEPS", "3", "eval_every"),
        ("SAVE_FREQ", "3", "save_every"),
        ("LOG_DIR", "logs", "log_dir"),
        ("OUTPUT_DIR", "runs/b", "out"),
        ("MODEL_NAME", "other", "model"),
        ("P_TEMPERATURE", "0.5", "p_temperature"),
        ("A_TOP_P", "0.9", "a_top_p"),
        ("MIX_ENV_RATIO", "0.5", "mix_env_ratio"),
    ],
)
def test_a_variable_reaches_its_setting(
    tmp_path: Path, variable: str, value: str, name: str
) -> None:
    settings = given_by_train_sh(tmp_path, **{variable: value})
    assert str(value_of(settings, name)) == value


@pytest.mark.parametrize(
    ("variable", "value", "said"),
    [
        ("NUM_EPOCHS", "1", "--steps counts updates"),
        ("DATASET_SIZE", "500", "every row of --data"),
        ("N_TRAIN_SAMPLES", "1000", "every row of --data"),
        ("MAX_NEW_TOKENS_ENV", "150", "--max-new-tokens for both"),
        ("LOGGING_STEPS", "10", "every step is logged"),
        ("USE_DATASET", "false", "prompts come from --data"),
    ],
)
def test_a_variable_that_means_nothing_here_is_refused(
    tmp_path: Path, variable: str, value: str, said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        given_by_train_sh(tmp_path, **{variable: value})


def test_switches_of_before_are_read(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    plain = given_by_train_sh(tmp_path)
    assert given_by_train_sh(tmp_path, USE_TORCH_COMPILE="false", USE_DATASET="true") == plain
    assert given_by_train_sh(tmp_path, USE_BF16="false") == plain.but(dtype="float32")
    assert "TASK_CONDITIONAL_GEN" in run_train_sh(tmp_path, TASK_CONDITIONAL_GEN="true").stderr


def test_a_new_run_begins_beside_the_one_that_is_there(tmp_path: Path) -> None:
    made_run(tmp_path / USUAL)
    told = run_train_sh(tmp_path)
    assert "--out\nruns/train-sh-2\n" in told.stdout and "--resume" not in told.stdout
    assert "runs/train-sh holds a run; a new one begins in runs/train-sh-2" in told.stderr
    assert "--out\nruns/train-sh\n--" not in run_train_sh(tmp_path, NEW_RUN="true").stdout
    again = given_by_train_sh(tmp_path, OVERWRITE="1")
    assert again.overwrite and again.out == USUAL


@pytest.mark.parametrize("wish", [{"RESUME": "1"}, {"NEW_RUN": "false"}])
def test_only_when_asked_it_goes_on_with_the_newest_run(
    tmp_path: Path, wish: dict[str, str]
) -> None:
    os.utime(made_run(tmp_path / USUAL), (1, 1))
    made_run(tmp_path / "runs/train-sh-2")
    told = run_train_sh(tmp_path, **wish, STEPS="9")
    assert told.stdout.splitlines() == [
        *("train", "--resume", "--out", "runs/train-sh-2", "--steps", "9")
    ]
    assert "going on in runs/train-sh-2" in told.stderr
    named = given_by_train_sh(tmp_path, **wish, OUT="runs/train-sh")
    assert named.resume and named.out == USUAL


def test_what_is_neither_true_nor_false_is_refused(tmp_path: Path) -> None:
    for wish in ({"RESUME": "maybe"}, {"RESUME": "1", "NEW_RUN": "1"}):
        told = run_train_sh(tmp_path, **wish)
        assert told.returncode == 2 and told.stderr.startswith("train.sh: ")


def test_true_and_false_are_read_in_any_case(tmp_path: Path) -> None:
    plain = given_by_train_sh(tmp_path)
    assert given_by_train_sh(tmp_path, USE_TORCH_COMPILE="False", USE_DATASET="TRUE") == plain
    made_run(tmp_path / USUAL)
    assert given_by_train_sh(tmp_path, OVERWRITE="Yes").overwrite


@pytest.mark.parametrize("name", ["RESUME", "NEW_RUN", "OVERWRITE", "USE_BF16"])
def test_the_variable_that_is_refused_is_named(tmp_path: Path, name: str) -> None:
    told = run_train_sh(tmp_path, **{name: "maybe"})
    assert told.returncode == 2 and told.stdout == ""
    assert told.stderr == f"train.sh: {name}: maybe is neither true nor false\n"


def test_going_on_with_nothing_begins_and_says_so(tmp_path: Path) -> None:
    told = run_train_sh(tmp_path, RESUME="1")
    assert told.stderr == "train.sh: runs/train-sh: nothing there yet: beginning\n"
    assert told.stdout.startswith("train\n--preset\ntrain-sh\n")
