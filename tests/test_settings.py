"""Settings: every field is read, every preset loads, every mistake is named."""

from __future__ import annotations

import ast
import dataclasses
import json
import math
import tomllib
import typing
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import rookworld
from rookworld.cli.help import docs
from rookworld.cli.train import read_settings, train_settings, usual
from rookworld.pretrain.presets import PRETRAIN_PRESETS
from rookworld.pretrain.settings import PretrainSettings
from rookworld.pretrain.sources import pick_tokenizer
from rookworld.rl.presets import TRAIN_PRESETS
from rookworld.rl.settings import TrainSettings
from rookworld.runtime import config
from rookworld.runtime.bounds import Bounds, bounds_of
from rookworld.runtime.config import flat_fields, of_run, resolved, value_of
from rookworld.runtime.errors import ConfigError

PACKAGE = Path(str(rookworld.__path__[0]))
ROOT = Path(__file__).parents[1]


@cache
def attributes_read() -> frozenset[str]:
    """Names read as `something.name` anywhere in the package but where settings are defined.

    A property of settings counts for the fields that it reads.
    """
    found: set[str] = set()
    within: dict[str, set[str]] = {}
    for path in PACKAGE.rglob("*.py"):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        if path.name == "settings.py":
            within |= {f.name: reads_of(f) for f in ast.walk(tree) if isinstance(f, FUNCTION)}
        else:
            found |= reads_of(tree)
    return frozenset(found.union(*(within[name] for name in found & within.keys())))


FUNCTION = ast.FunctionDef


def reads_of(tree: ast.AST) -> set[str]:
    """Attributes that are read, and names in texts (`getattr(…, f"{letter}_top_p")`)."""
    reads = {n.attr for n in ast.walk(tree) if isinstance(n, ast.Attribute)}
    texts = {n.value for n in ast.walk(tree) if isinstance(n, ast.Constant)}
    both = {f"{letter}{text}" for text in texts if isinstance(text, str) for letter in "pa"}
    return reads | both


@pytest.mark.parametrize("kind", [TrainSettings, PretrainSettings])
def test_every_field_is_read_outside_of_the_settings(kind: type) -> None:
    assert [name for name in flat_fields(kind) if name not in attributes_read()] == []


@pytest.mark.parametrize("kind", [TrainSettings, PretrainSettings])
def test_every_field_says_what_it_is(kind: type) -> None:
    places = flat_fields(kind)
    assert [name for name in places if not docs(places[name].owner).get(name)] == []


@pytest.mark.parametrize("kind", [TrainSettings, PretrainSettings])
def test_no_default_is_written_twice(kind: type) -> None:
    """A section is made without arguments: its defaults stand where it is defined alone."""
    for field in dataclasses.fields(kind):
        if isinstance(field.default_factory, type):
            assert field.default_factory() == getattr(kind(), field.name)


@pytest.mark.parametrize("preset", TRAIN_PRESETS)
def test_every_training_preset_loads_and_flags_win_over_it(preset: str) -> None:
    settings = read_settings(["--preset", preset], "rookworld train")
    for name, value in TRAIN_PRESETS[preset].items():
        found = value_of(settings, name)
        if isinstance(value, dict):
            assert value.items() <= dict(found).items()
        else:
            assert found == (tuple(value) if isinstance(value, list) else value)
    faster = read_settings(["--preset", preset, "--lr", "0.5"], "rookworld train")
    assert faster.optimizer.lr == 0.5


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
        ("--model nano", "cpu", False),
        ("--backend trl", "cpu", False),
    ],
)
def test_without_a_gpu_the_embedded_model_is_trained_as_in_the_demo(
    words: str,
    device: str,
    demo: bool,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("rookworld.runtime.distributed.pick_device", lambda _: device)
    args = words.split()
    assert list(usual(args)) == (["--preset", "demo", *args] if demo else args)
    said = capsys.readouterr().err
    sets = [f"{name}={value}" for name, value in TRAIN_PRESETS["demo"].items()]
    assert all((one in said) == demo for one in sets)


@pytest.mark.parametrize(
    ("layers", "tokenizer", "device", "taken"),
    [
        (12, "gpt2", "cuda", True),
        (12, "gpt2", "cpu", False),
        (6, "gpt2", "cuda", False),
        (12, "chess", "cuda", False),
    ],
)
def test_a_model_like_the_public_one_meets_its_preset_on_a_gpu(
    layers: int,
    tokenizer: str,
    device: str,
    taken: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("rookworld.runtime.distributed.pick_device", lambda _: device)
    shape = {"model_type": "gpt2", "n_layer": layers, "n_embd": 768, "n_head": 12}
    (tmp_path / "config.json").write_text(json.dumps(shape))
    pick_tokenizer(tokenizer).save(tmp_path)
    args = ["--model", str(tmp_path), "--steps", "3"]
    assert list(usual(args)) == (["--preset", "rookworld-lm", *args] if taken else args)
    assert list(usual(["--preset", "mini", *args])) == ["--preset", "mini", *args]


@pytest.mark.parametrize("preset", PRETRAIN_PRESETS)
def test_every_pretraining_preset_loads(preset: str) -> None:
    PretrainSettings.of(**PRETRAIN_PRESETS[preset])


def test_settings_come_from_defaults_then_preset_then_file_then_flags(tmp_path: Path) -> None:
    file = tmp_path / "own.toml"
    file.write_text('lr = 3e-5\nkl-coef = 0.7\nkl_type = "reverse"\n')
    args = f"--preset stable --config {file} --kl_coef 0.9".split()
    settings = read_settings(args, "rookworld train")
    assert (settings.loss.clip_range, settings.optimizer.lr) == (0.1, 3e-5)
    assert (settings.kl.kl_coef, settings.kl.kl_type) == (0.9, "reverse")
    file.write_text("learn_rate = 1\n")
    with pytest.raises(ConfigError, match="unknown key 'learn_rate'"):
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
        ("--select-by P/eval_mae", "--select-by P/eval_mae: less of it is better"),
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
        ("--trained vectors", "vectors"),
        ("--p-weights bets 1", "--p-weights bets: not one of format, legal, best"),
        ("--optimizer muon --shard", "--optimizer muon steps whole matrices"),
    ],
)
def test_a_value_that_cannot_be_is_refused_by_name(flags: str, said: str) -> None:
    with pytest.raises(ConfigError) as refused:
        read_settings(flags.split(), "rookworld train")
    assert said in str(refused.value)


def test_a_shape_without_heads_is_refused_before_it_divides() -> None:
    with pytest.raises(ConfigError, match="--n-head 0: must be positive"):
        PretrainSettings(n_head=0)


# --- bounds -------------------------------------------------------------------------------------


def bounds_in(kind: type[Any]) -> dict[str, Bounds | None]:
    """Every setting that holds numbers -> its bounds."""
    hints = {name: place.hint for name, place in flat_fields(kind).items()}
    return {n: bounds_of(hint) for n, hint in hints.items() if {int, float} & types_in(hint)}


def types_in(hint: Any) -> set[Any]:
    inner = typing.get_args(hint)
    return {hint}.union(*map(types_in, inner))


KINDS: list[type[Any]] = [PretrainSettings, TrainSettings]
WEIGHED = "p_weights"
"""A table of numbers, which looks after itself (tests/test_reward.py)."""
NUMBERS = [(kind, name) for kind in KINDS for name in bounds_in(kind) if name != WEIGHED]


@pytest.mark.parametrize(("kind", "name"), NUMBERS, ids=[f"{k.__name__}.{n}" for k, n in NUMBERS])
def test_every_number_has_bounds(kind: type[Any], name: str) -> None:
    assert bounds_in(kind)[name] is not None


def beyond(bounds: Bounds) -> list[float]:
    """The nearest values that are refused on either side, and what is no number at all."""
    under = bounds.lowest - 1 if bounds.lowest_allowed else bounds.lowest
    sides = [under, bounds.lowest - 1, bounds.highest + 1]
    return [math.nan, math.inf, -math.inf, *(value for value in sides if math.isfinite(value))]


@pytest.mark.parametrize(("kind", "name"), NUMBERS, ids=[f"{k.__name__}.{n}" for k, n in NUMBERS])
def test_a_number_beyond_its_bounds_is_refused_by_its_flag(kind: type[Any], name: str) -> None:
    bounds = bounds_in(kind)[name]
    assert bounds is not None
    for value in beyond(bounds):
        with pytest.raises(ConfigError) as refused:
            kind.of(**{name: value})
        assert str(refused.value).startswith(f"--{name.replace('_', '-')} {value}: ")


CHOSEN: list[tuple[type[Any], dict[str, Any]]] = [
    *((PretrainSettings, values) for values in ({}, *PRETRAIN_PRESETS.values())),
    *((TrainSettings, values) for values in ({}, *TRAIN_PRESETS.values())),
]


@pytest.mark.parametrize(("kind", "values"), CHOSEN)
def test_defaults_and_presets_lie_within_the_bounds(
    kind: type[Any], values: dict[str, Any]
) -> None:
    settings = kind.of(**values)
    for name, bounds in bounds_in(kind).items():
        value = value_of(settings, name)
        assert value is None or bounds is None or bounds.hold(value), name


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
    assert (settings.loss.clip_range, settings.loss.clip_high) == (below, above)


def test_a_clip_range_from_a_file_is_that_of_both_sides(tmp_path: Path) -> None:
    file = tmp_path / "own.toml"
    file.write_text("clip_range = 0.1\n")
    assert read_settings(["--config", str(file)], "rookworld train").loss.clip_high == 0.1


@pytest.mark.parametrize("name", TRAIN_PRESETS)
def test_a_preset_is_written_out_as_a_file(name: str) -> None:
    file = ROOT / "configs" / f"{name}.toml"
    with file.open("rb") as opened:
        assert tomllib.load(opened) == TRAIN_PRESETS[name]
    by_name = read_settings(["--preset", name], "rookworld train")
    assert read_settings(["--config", str(file)], "rookworld train") == by_name


def test_what_is_not_given_resume_takes_from_the_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Flags and presets win; where a run lies and what to do with it is not asked of it."""
    old = TrainSettings.of(
        lr=1e-3, steps=7, p_weights={"best": 0.4}, data=("a", "b"), out=Path("elsewhere")
    )
    (tmp_path / "config.json").write_text(json.dumps(resolved(old)), encoding="utf-8")
    again = ["--out", str(tmp_path), "--resume"]
    found = train_settings([*again, "--steps", "9"])
    assert found == old.but(steps=9, out=tmp_path, resume=True)
    assert "not as the run began: steps 7 -> 9\n" in capsys.readouterr().err
    over = train_settings([*again, "--preset", "overfit"])
    assert over.optimizer.lr == TRAIN_PRESETS["overfit"]["lr"] and over.steps == 7
    assert train_settings(["--preset", "plain", "--out", str(tmp_path)]) == TrainSettings.of(
        out=tmp_path
    )


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "cannot be read"),
        ("[]", "not a table of settings"),
        (json.dumps(resolved(PretrainSettings())), "another command's run"),
    ],
)
def test_what_cannot_be_gone_on_with_stops_with_a_line(
    text: str, said: str, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match=f"config.json: .*{said}"):
        of_run(TrainSettings(), tmp_path)
    assert of_run(TrainSettings(), tmp_path / "nowhere") is None


@pytest.fixture
def notices(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    """Lines about settings, each of which is said once a process."""
    config.notice.cache_clear()
    return caplog


def test_a_run_of_an_earlier_version_resumes(
    notices: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    """Its deleted settings are ignored, its old names read, and what it lacks has its default."""
    old = resolved(TrainSettings.of(lr=1e-3)) | {"tv_delta": 0.2, "compile": False}
    old |= {"agreement_coef": 0.5, "p_best": 0.7, "p_legal": None}
    del old["distill_coef"], old["keep"], old["p_weights"]
    (tmp_path / "config.json").write_text(json.dumps(old), encoding="utf-8")
    assert of_run(TrainSettings(), tmp_path) == TrainSettings.of(
        lr=1e-3, distill_coef=0.5, p_weights={"best": 0.7}
    )
    assert "ignored: tv_delta=0.2, compile=False" in notices.text
    assert "left at their defaults: keep=3" in notices.text


@pytest.mark.parametrize(
    ("alias", "name"),
    [
        ("--learning-rate", "lr"),
        ("--beta", "kl_coef"),
        ("--num-generations", "k_samples"),
        ("--group_size", "k_samples"),
        ("--batch-positions", "batch_size"),
        ("--agreement-coef", "distill_coef"),
    ],
)
def test_names_of_other_trainers_and_of_before_are_read(
    alias: str, name: str, notices: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    settings = read_settings([alias, "3"], "rookworld train")
    assert value_of(settings, name) == 3
    assert f"{alias.replace('_', '-')} is read as --{name.replace('_', '-')}" in notices.text
    file = tmp_path / "own.toml"
    file.write_text(f"{alias[2:]} = 3\n")
    assert read_settings(["--config", str(file)], "rookworld train") == settings


@pytest.mark.parametrize("flag", ["--compile", "--no-compile"])
def test_a_flag_that_lost_is_accepted_with_a_line(
    flag: str, notices: pytest.LogCaptureFixture
) -> None:
    assert read_settings([flag], "rookworld train") == TrainSettings()
    assert "--compile does nothing" in notices.text


def test_the_short_help_has_what_a_beginner_needs(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        read_settings(["--help"], "rookworld train")
    short = capsys.readouterr().out
    assert len(short.splitlines()) <= 60
    assert all(f"--{name.replace('_', '-')}" in short for name in TrainSettings.FIRST)
    assert "--help-all" in short
    with pytest.raises(SystemExit):
        read_settings(["--help-all"], "rookworld train")
    whole = capsys.readouterr().out
    assert all(f"\n  --{name.replace('_', '-')}" in whole for name in flat_fields(TrainSettings))


def test_overfit_is_r4() -> None:
    """Analyses alone, a cool P and a hotter A, no KL for 20 steps, a floor and a cap."""
    r4 = read_settings(["--preset", "overfit"], "rookworld overfit")
    assert r4.mix_env_ratio == 0 and r4.sampling.k_samples == 12 and r4.optimizer.lr == 2e-6
    assert r4.sampling.of_task("P") == (0.5, 0.9) and r4.sampling.of_task("A") == (0.95, 0.95)
    assert (r4.kl.kl_coef, r4.kl.kl_warmup_steps, r4.kl.kl_warmup_factor) == (0.005, 20, 0.0)
    assert (r4.advantages.advantage_std_floor, r4.advantages.advantage_clip) == (0.05, 2.0)
