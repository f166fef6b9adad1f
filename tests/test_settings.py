"""Settings: every field is read, every preset loads, every mistake is named."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import json
import math
import os
import shutil
import subprocess
import tomllib
import typing
from dataclasses import replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

import rookworld
from rookworld.cli.train import read_settings, train_settings, usual
from rookworld.pretrain.settings import PRETRAIN_BOUNDS, PretrainSettings
from rookworld.rl.presets import PRETRAIN_PRESETS, TRAIN_PRESETS
from rookworld.rl.settings import TRAIN_BOUNDS, RewardWeights, TrainSettings
from rookworld.rl.state import guard_settings, kl_settings, reward_rules
from rookworld.runtime.config import Bounds, of_run, resolved
from rookworld.runtime.errors import ConfigError

PACKAGE = Path(str(rookworld.__path__[0]))
ROOT = Path(__file__).parents[1]


@cache
def attributes_read() -> frozenset[str]:
    """Names read as `something.name` anywhere in the package but where settings are defined."""
    found = set()
    for path in PACKAGE.rglob("*.py"):
        if path.name not in ("settings.py", "pretrain_settings.py"):
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


def definition(kind: type) -> ast.ClassDef:
    """A settings class as it is written."""
    tree = ast.parse(Path(inspect.getfile(kind)).read_text(encoding="utf-8"))
    (found,) = (n for n in tree.body if isinstance(n, ast.ClassDef) and n.name == kind.__name__)
    return found


def properties_reading(kind: type) -> dict[str, set[str]]:
    """Property of a settings class -> fields that it reads."""
    return {
        node.name: {
            inner.attr
            for inner in ast.walk(node)
            if isinstance(inner, ast.Attribute) and ast.unparse(inner.value) == "self"
        }
        for node in definition(kind).body
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
    body = definition(kind).body[1:]
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


@pytest.mark.parametrize(
    ("words", "device", "demo"),
    [
        ("", "cpu", True),
        ("--steps 3", "cpu", True),
        ("", "cuda", False),
        ("--preset plain", "cpu", False),
        ("--preset=stable", "cpu", False),
        ("--config configs/h200.toml", "cpu", False),
        ("--model runs/a/final", "cpu", False),
        ("--backend trl", "cpu", False),
    ],
)
def test_without_a_gpu_the_embedded_model_is_trained_as_in_the_demo(
    words: str, device: str, demo: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rookworld.runtime.distributed.pick_device", lambda _: device)
    args = words.split()
    assert list(usual(args)) == (["--preset", "demo", *args] if demo else args)


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
        ("--kl-type k1_reward --credit choices", "--credit choices with --kl-type k1_reward"),
        ("--credit choices --loss gspo", "--credit choices with --loss gspo"),
        ("--kl-coef-min 1 --kl-coef-max 0.5", "--kl-coef-min 1.0 is above --kl-coef-max 0.5"),
        ("--adaptive-kl --kl-coef 0", "--adaptive-kl with --kl-coef 0"),
        ("--loss ppo", "ppo"),
        ("--recovery-lr-factor 2", "--recovery-lr-factor 2.0: give more than 0 and at most 1"),
        ("--clip-norm -1", "--clip-norm -1.0: give more than 0"),
        ("--clip-norm 0", "--clip-norm 0.0: give more than 0"),
        ("--lr nan", "--lr nan: give a finite number"),
        ("--temperature inf", "--temperature inf: give a finite number"),
        ("--seed -1", "--seed -1: give 0 to 18446744073709551615"),
        ("--k-samples 0 --gae", "--k-samples 0: must be positive"),
        ("--flat-tries -1", "--flat-tries -1: give 0 or more"),
        ("--p-malformed 2", "--p-malformed 2.0: give 0 or less"),
        ("--gamma 1.5", "--gamma 1.5: give 0 to 1"),
        ("--optimizer muon --trained vectors", "--optimizer muon with --trained vectors"),
        ("--optimizer muon --shard", "--optimizer muon steps whole matrices"),
    ],
)
def test_a_value_that_cannot_be_is_refused_by_name(flags: str, said: str) -> None:
    with pytest.raises(ConfigError) as refused:
        guard_settings(read_settings(flags.split(), "rookworld train"))
    assert said in str(refused.value)


def test_a_shape_without_heads_is_refused_before_it_divides() -> None:
    with pytest.raises(ConfigError, match="--n-head 0: must be positive"):
        PretrainSettings(n_head=0)


# --- bounds -------------------------------------------------------------------------------------


def numbers(kind: type) -> list[str]:
    """Fields that hold an int or a float."""
    hints = typing.get_type_hints(kind)
    parts = {name: {hint, *typing.get_args(hint)} for name, hint in hints.items()}
    return [name for name, kinds in parts.items() if kinds & {int, float}]


TABLES: dict[type[Any], dict[str, Bounds]] = {
    PretrainSettings: PRETRAIN_BOUNDS,
    TrainSettings: TRAIN_BOUNDS,
}
NUMBERS = [(kind, name) for kind in TABLES for name in numbers(kind)]


@pytest.mark.parametrize("kind", TABLES)
def test_the_table_of_bounds_holds_every_number_and_nothing_else(kind: type) -> None:
    assert sorted(TABLES[kind]) == sorted(numbers(kind))


def beyond(bounds: Bounds) -> list[float]:
    """The nearest values that are refused on either side, and what is no number at all."""
    under = bounds.lowest - 1 if bounds.lowest_allowed else bounds.lowest
    sides = [under, bounds.lowest - 1, bounds.highest + 1]
    return [math.nan, math.inf, -math.inf, *(value for value in sides if math.isfinite(value))]


@pytest.mark.parametrize(("kind", "name"), NUMBERS, ids=[f"{k.__name__}.{n}" for k, n in NUMBERS])
def test_a_number_beyond_its_bounds_is_refused_by_its_flag(kind: type, name: str) -> None:
    for value in beyond(TABLES[kind][name]):
        with pytest.raises(ConfigError) as refused:
            kind(**{name: value})
        assert str(refused.value).startswith(f"--{name.replace('_', '-')} {value}: ")


CHOSEN: list[tuple[type[Any], dict[str, Any]]] = [
    *((PretrainSettings, values) for values in ({}, *PRETRAIN_PRESETS.values())),
    *((TrainSettings, values) for values in ({}, *TRAIN_PRESETS.values())),
]


@pytest.mark.parametrize(("kind", "values"), CHOSEN)
def test_defaults_and_presets_lie_within_the_bounds(kind: type, values: dict[str, Any]) -> None:
    settings = kind(**values)
    for name, bounds in TABLES[kind].items():
        value = getattr(settings, name)
        assert value is None or bounds.hold(value), name


# --- the clip range -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "below", "above"),
    [
        ("", 0.2, 0.28),
        ("--clip-range 0.1", 0.1, 0.1),
        ("--clip-range-high 0.4", 0.2, 0.4),
        ("--clip-range 0.1 --clip-range-high 0.4", 0.1, 0.4),
        ("--clip-range 0.2 --clip-range-high 0.2", 0.2, 0.2),
        ("--preset mini", 0.2, 0.2),
        ("--preset stable", 0.1, 0.1),
        ("--preset train-sh", 0.1, 0.1),
        ("--preset train-sh --clip-range 0.05", 0.05, 0.05),
    ],
)
def test_a_clip_range_alone_is_that_of_both_sides(flags: str, below: float, above: float) -> None:
    settings = read_settings(flags.split(), "rookworld train")
    assert (settings.clip_range, settings.clip_high) == (below, above)


def test_a_clip_range_from_a_file_is_that_of_both_sides(tmp_path: Path) -> None:
    file = tmp_path / "own.toml"
    file.write_text("clip_range = 0.1\n")
    assert read_settings(["--config", str(file)], "rookworld train").clip_high == 0.1


# --- train.sh -----------------------------------------------------------------------------------


def given_by_train_sh(folder: Path, **environment: str) -> TrainSettings:
    """The settings that train.sh asks for under these variables."""
    shutil.copy(ROOT / "train.sh", folder)
    command = folder / ".venv" / "bin" / "rookworld"
    command.parent.mkdir(parents=True)
    command.write_text("#!/bin/sh\nprintf '%s\\n' \"$@\"\n")
    command.chmod(0o755)
    (folder / "star.jsonl").touch()
    plain = {"PATH": os.environ["PATH"]}
    told = subprocess.run(
        ["bash", str(folder / "train.sh")],
        env=plain | environment,
        capture_output=True,
        text=True,
        check=True,
    )
    name, *args = told.stdout.splitlines()
    assert name == "train"
    return read_settings(args, "rookworld train")


def test_train_sh_takes_several_sources_as_they_are_written(tmp_path: Path) -> None:
    settings = given_by_train_sh(tmp_path, DATA="a.jsonl *.jsonl", STEPS="5")
    assert settings.data == ("a.jsonl", "*.jsonl")
    assert settings.steps == 5


def test_train_sh_without_variables_is_its_preset(tmp_path: Path) -> None:
    settings = given_by_train_sh(tmp_path)
    expected = read_settings(["--preset", "train-sh"], "rookworld train")
    assert settings == dataclasses.replace(expected, out=settings.out, resume=True)


@pytest.mark.parametrize("clip", ["0.05", "0.2"])
def test_train_sh_sets_both_sides_of_the_clip_range(tmp_path: Path, clip: str) -> None:
    settings = given_by_train_sh(tmp_path, CLIP_RANGE=clip)
    assert settings.clip_range == settings.clip_high == float(clip)


@pytest.mark.parametrize("name", TRAIN_PRESETS)
def test_a_preset_is_written_out_as_a_file(name: str) -> None:
    file = ROOT / "configs" / f"{name}.toml"
    with file.open("rb") as opened:
        assert tomllib.load(opened) == TRAIN_PRESETS[name]
    by_name = read_settings(["--preset", name], "rookworld train")
    assert read_settings(["--config", str(file)], "rookworld train") == by_name


def test_what_is_not_given_resume_takes_from_the_run(tmp_path: Path) -> None:
    """Flags and presets win; where a run lies and what to do with it is not asked of it."""
    old = TrainSettings(lr=1e-3, steps=7, p_best=0.4, data=("a", "b"), out=Path("elsewhere"))
    (tmp_path / "config.json").write_text(json.dumps(resolved(old)), encoding="utf-8")
    again = ["--out", str(tmp_path), "--resume"]
    found = train_settings([*again, "--steps", "9"])
    assert found == replace(old, steps=9, out=tmp_path, resume=True)
    over = train_settings([*again, "--preset", "overfit"])
    assert (over.lr, over.steps) == (TRAIN_PRESETS["overfit"]["lr"], 7)
    assert train_settings(["--preset", "plain", "--out", str(tmp_path)]).lr == TrainSettings().lr


@pytest.mark.parametrize("text", ["{", "[]", json.dumps(resolved(PretrainSettings()))])
def test_a_run_of_another_kind_gives_no_settings(text: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(text, encoding="utf-8")
    assert of_run(TrainSettings(), tmp_path) is None
    assert of_run(TrainSettings(), tmp_path / "nowhere") is None
