"""Settings: defaults < preset < file < flags; a mistake is one line with a suggestion."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import pytest

from rookworld.cli.flags import layered, leading, parse
from rookworld.runtime.config import resolved, short_hash
from rookworld.runtime.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Dish:
    """A dish."""

    salt: float = 0.5
    """grams"""
    kind: Literal["soup", "stew"] = "soup"
    """which"""
    herbs: tuple[str, ...] = ()
    """by name"""
    lid: bool = False
    """covered"""
    pot: Path | None = None
    """where"""


PRESETS = {"rich": {"salt": 2, "kind": "stew"}}


def read(*args: str) -> Dish:
    default, rest = layered(Dish(), PRESETS, args)
    return parse(Dish, rest, command="rookworld cook", default=default)


def test_flags_win_over_file_over_preset_over_defaults(tmp_path: Path) -> None:
    file = tmp_path / "dish.toml"
    file.write_text('salt = 3\nherbs = ["dill"]\npot = "big"\n')
    dish = read("--preset", "rich", f"--config={file}", "--salt", "4")
    assert dish == Dish(salt=4.0, kind="stew", herbs=("dill",), pot=Path("big"))


def test_dashes_and_underscores_and_switches() -> None:
    assert read("--lid").lid
    assert not read("--no-lid").lid
    assert read("--herbs", "dill", "thyme").herbs == ("dill", "thyme")


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        (["--slat", "1"], "did you mean '--salt'"),
        (["--salt", "much"], "--salt"),
        (["--herbs", "dill", "--herbs", "thyme"], "--herbs is there 2 times"),
        (["--kind", "cake"], "'soup', 'stew'"),
        (["--preset", "ritch"], "did you mean 'rich'"),
        (["--preset"], "--preset needs a value"),
        (["--config", "absent.toml"], "absent.toml: cannot be read"),
        (["extra"], "unexpected argument 'extra'"),
    ],
)
def test_a_mistake_is_one_line(args: list[str], expected: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read(*args)
    assert expected in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("slat = 1", "unknown key 'slat', did you mean 'salt'?"),
        ('salt = "much"', "salt = 'much': expected float"),
        ('kind = "cake"', "expected one of soup, stew"),
        ('herbs = "dill"', "expected a list"),
        ("lid = 1", "expected bool"),
        ("salt = = 1", "not a TOML file"),
    ],
)
def test_a_mistake_in_a_file_names_the_file(tmp_path: Path, text: str, expected: str) -> None:
    file = tmp_path / "dish.toml"
    file.write_text(text)
    with pytest.raises(ConfigError) as caught:
        read("--config", str(file))
    assert expected in str(caught.value)
    assert str(file) in str(caught.value)


def test_resolved_settings_are_plain_and_their_hash_tells_them_apart() -> None:
    dish = Dish(pot=Path("big"))
    assert resolved(dish)["pot"] == "big"
    assert short_hash(dish) == short_hash(Dish(pot=Path("big")))
    assert short_hash(dish) != short_hash(Dish(pot=Path("small")))
    assert short_hash(dish, ignore=("pot",)) == short_hash(Dish(), ignore=("pot",))


def test_leading_arguments_end_at_the_first_flag() -> None:
    assert leading(["a", "-", "--b", "c"]) == (["a", "-"], ["--b", "c"])
