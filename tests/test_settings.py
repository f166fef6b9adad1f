"""Settings: every field is read, every preset loads, every mistake is named."""

from __future__ import annotations

import ast
import dataclasses
import tomllib
from functools import cache
from itertools import pairwise
from pathlib import Path

import pytest

import rookworld
from rookworld.commands.training import read_settings
from rookworld.errors import ConfigError
from rookworld.presets import PRETRAIN_PRESETS, TRAIN_PRESETS
from rookworld.settings import PretrainSettings, RewardWeights, TrainSettings
from rookworld.trainer_state import guard_settings, kl_settings, reward_rules

PACKAGE = Path(str(rookworld.__path__[0]))


@cache
def attributes_read() -> frozenset[str]:
    """Names read as `something.name` anywhere in the package but in settings.py."""
    found = set()
    for path in PACKAGE.rglob("*.py"):
        if path.name != "settings.py":
            tree = ast.parse(path.read_text(encoding="utf-8"))
            found |= {
                node.attr
                for node in ast.walk(tree)
                if isinstance(node, ast.Attribute)
                and isinstance(node.ctx, ast.Load)
                and isinstance(node.value, ast.Name | ast.Attribute)
                and ast.unparse(node.value).endswith("settings")
            }
    return frozenset(found)


def properties_reading(kind: type) -> dict[str, set[str]]:
    """Property of a settings class -> fields that it reads."""
    tree = ast.parse((PACKAGE / "settings.py").read_text(encoding="utf-8"))
    (found,) = (n for n in tree.body if isinstance(n, ast.ClassDef) and n.name == kind.__name__)
    return {
        node.name: {
            inner.attr
            for inner in ast.walk(node)
            if isinstance(inner, ast.Attribute) and ast.unparse(inner.value) == "self"
        }
        for node in found.body
        if isinstance(node, ast.FunctionDef) and node.name != "__post_init__"
    }


@pytest.mark.parametrize("kind", [TrainSettings, PretrainSettings])
def test_every_field_is_read_outside_of_the_settings(kind: type) -> None:
    read = set(attributes_read())
    for name, fields in properties_reading(kind).items():
        if name in read:
            read |= fields
    if "chosen" in read:  # all of them at once; test_flags sees each reach the rules
        read |= {field.name for field in dataclasses.fields(RewardWeights)}
    unread = [field.name for field in dataclasses.fields(kind) if field.name not in read]
    assert unread == []


@pytest.mark.parametrize("kind", [TrainSettings, PretrainSettings])
def test_every_field_says_what_it_is(kind: type) -> None:
    tree = ast.parse((PACKAGE / "settings.py").read_text(encoding="utf-8"))
    (found,) = (n for n in tree.body if isinstance(n, ast.ClassDef) and n.name == kind.__name__)
    body = found.body[1:]
    for node, after in pairwise(body):
        if isinstance(node, ast.AnnAssign):
            assert isinstance(after, ast.Expr), ast.unparse(node)
            assert isinstance(after.value, ast.Constant), ast.unparse(node)


@pytest.mark.parametrize("preset", TRAIN_PRESETS)
def test_every_training_preset_loads_and_flags_win_over_it(preset: str) -> None:
    settings = read_settings(["--preset", preset], "rookworld train")
    for name, value in TRAIN_PRESETS[preset].items():
        assert getattr(settings, name) == value
    assert read_settings(["--preset", preset, "--lr", "0.5"], "rookworld train").lr == 0.5
    guard_settings(settings)
    kl_settings(settings)
    reward_rules(settings)


@pytest.mark.parametrize("preset", PRETRAIN_PRESETS)
def test_every_pretraining_preset_loads(preset: str) -> None:
    PretrainSettings(**PRETRAIN_PRESETS[preset])


def test_settings_come_from_defaults_then_preset_then_file_then_flags(tmp_path: Path) -> None:
    file = tmp_path / "own.toml"
    file.write_text('lr = 3e-5\nkl-coef = 0.7\nkl_type = "reverse"\n')
    args = f"--preset stable --config {file} --kl_coef 0.9".split()
    settings = read_settings(args, "rookworld train")
    assert (settings.clip_range, settings.lr) == (0.1, 3e-5)
    assert (settings.kl_coef, settings.kl_type) == (0.9, "reverse")
    file.write_text("learning_rate = 1\n")
    with pytest.raises(ConfigError, match="unknown key 'learning_rate'"):
        read_settings(["--config", str(file)], "rookworld train")


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--steps 0", "--steps 0: must be positive"),
        ("--k-samples 1", "--k-samples 1: a group needs at least 2"),
        ("--mix-env-ratio 1.5", "--mix-env-ratio 1.5"),
        ("--a-temperature 0", "--a-temperature 0.0: greedy answers are all alike"),
        ("--p-top-p 1.2", "--p-top-p 1.2"),
        ("--kl-type k1_reward --top-k 5", "--kl-type k1_reward"),
        ("--kl-type k1_reward --credit outlook", "--credit outlook with --kl-type k1_reward"),
        ("--kl-coef-min 1 --kl-coef-max 0.5", "--kl-coef-min 1.0 is above --kl-coef-max 0.5"),
        ("--loss ppo", "ppo"),
        ("--recovery-lr-factor 2", "recovery_lr_factor is 2"),
    ],
)
def test_a_value_that_cannot_be_is_refused_by_name(flags: str, said: str) -> None:
    with pytest.raises(ConfigError) as refused:
        guard_settings(read_settings(flags.split(), "rookworld train"))
    assert said in str(refused.value)


@pytest.mark.parametrize("name", TRAIN_PRESETS)
def test_a_preset_is_written_out_as_a_file(name: str) -> None:
    file = Path(__file__).parents[1] / "configs" / f"{name}.toml"
    with file.open("rb") as opened:
        assert tomllib.load(opened) == TRAIN_PRESETS[name]
    by_name = read_settings(["--preset", name], "rookworld train")
    assert read_settings(["--config", str(file)], "rookworld train") == by_name
