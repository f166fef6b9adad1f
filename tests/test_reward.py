"""Rewards by hand: the pinned formula, the part scores, the shapings, running normalisation."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rookworld.runtime.errors import ConfigError
from rookworld.tasks import reward as r
from rookworld.tasks.notation import GRID_CP, MATE

CP = st.one_of(st.integers(-6000, 6000), st.integers(MATE - 30, MATE - 1))


@pytest.mark.parametrize(
    ("cp", "percent"), [(0, 50.0), (100, 59.1026), (-100, 40.8974), (1000, 97.5447), (99_999, 100)]
)
def test_win_percent(cp: int, percent: float) -> None:
    assert r.win_percent(cp) == pytest.approx(percent, abs=1e-4)


@given(st.integers(-(10**9), 10**9))
def test_win_percent_is_symmetric_and_bounded(cp: int) -> None:
    assert 0 <= r.win_percent(cp) <= 100
    assert r.win_percent(cp) + r.win_percent(-cp) == pytest.approx(100)


def test_move_quality_by_hand() -> None:
    curved, straight = r.RewardRules(), r.RewardRules(reward_shaping="linear")
    strict = r.RewardRules(p_best_scale=0.02)
    assert r.move_quality(0.0, curved) == r.move_quality(0.0, strict) == 1.0
    assert r.move_quality(0.035, curved) == pytest.approx(math.exp(-1))
    assert r.move_quality(0.1, strict) == pytest.approx(math.exp(-5))
    assert r.move_quality(0.0175, straight) == pytest.approx(0.75)
    assert r.move_quality(0.3, straight) == 0.0
    assert r.move_quality(0.01, replace(strict, reward_shaping="linear")) == pytest.approx(0.75)


@given(CP, st.sampled_from((1, -1)))
def test_an_evaluation_is_compared_on_the_grid(cp: int, sign: int) -> None:
    grid = GRID_CP[min(range(129), key=lambda i: abs(GRID_CP[i] - sign * cp))]
    if abs(cp) < 5000:
        assert r.evaluation_accuracy(grid, sign * cp) >= 0.5
    assert r.evaluation_accuracy(sign * cp, sign * cp) == 1.0


@given(st.integers(0, 128), st.integers(0, 128))
def test_any_other_grid_value_is_worth_less(said: int, true: int) -> None:
    accuracy = r.evaluation_accuracy(GRID_CP[said], GRID_CP[true])
    assert accuracy == 1.0 if said == true else 0 <= accuracy <= 0.95
    assert accuracy == pytest.approx(r.evaluation_accuracy(-GRID_CP[said], -GRID_CP[true]))


def test_mates_compare_by_sign_and_distance() -> None:
    near, far = r.evaluation_accuracy(99_998, 99_999), r.evaluation_accuracy(99_990, 99_999)
    assert 1 > near > far > 0
    assert r.evaluation_accuracy(-99_999, 99_999) == 0.0
    assert r.evaluation_accuracy(99_990, 5_000) == r.evaluation_accuracy(-5_000, -99_990) == 0.0


@pytest.mark.parametrize("true", [30, -30, 120, 500, -99_999])
def test_answering_zero_everywhere_is_worth_nothing(true: int) -> None:
    assert r.evaluation_accuracy(0, true) < 1e-9


@pytest.mark.parametrize("shaping", ["continuous", "linear"])
def test_board_similarity_starts_at_a_copy(shaping: r.Shaping) -> None:
    assert r.board_similarity(0, 2, 0, shaping) == 1.0
    assert r.board_similarity(2, 2, 0, shaping) == 0.0
    assert 0 < r.board_similarity(1, 2, 0, shaping) < 1
    assert r.board_similarity(0, 2, 1, shaping) < 1
    assert r.board_similarity(0, 0, 0, shaping) == 1.0
    assert r.board_similarity(1, 0, 0, shaping) == 0.0


def test_board_similarity_by_hand() -> None:
    floor = math.exp(-2 / 0.35)
    one_wrong = (math.exp(-1 / 0.35) - floor) / (1 - floor)
    assert r.board_similarity(1, 2, 0, "continuous") == pytest.approx(one_wrong)
    assert r.board_similarity(0, 2, 1, "continuous") == pytest.approx(math.exp(-1))
    assert r.board_similarity(1, 2, 1, "linear") == pytest.approx(0.4 * 0.4)


def test_combine_by_hand() -> None:
    parts = {"format": 1.0, "legal": 0.5, "best": 0.25}
    weights = {"format": 2.0, "legal": 1.0, "best": 4.0}
    assert r.combine(parts, weights, "continuous", right=0, progress=1.0) == pytest.approx(3.5 / 7)
    assert r.combine(parts, weights, "continuous", right=0, progress=0.5) == pytest.approx(3 / 7)
    assert r.combine(parts, weights, "continuous", right=0, progress=0.0) == pytest.approx(2.5 / 7)
    assert r.combine(parts, weights, "linear", right=0, progress=9.0) == pytest.approx(3.5 / 7)
    assert r.combine(parts, weights, "graduated", right=2, progress=1.0) == 0.6
    assert r.combine(parts, weights, "graduated", right=2, progress=0.5) == pytest.approx(0.4)
    assert r.combine(parts, weights, "binary", right=3, progress=1.0) == 0.0


@pytest.mark.parametrize("shaping", ["continuous", "linear", "graduated", "binary"])
def test_all_parts_right_is_one_in_every_shaping(shaping: r.Shaping) -> None:
    for weights in (r.RewardRules().part_weights, r.A_WEIGHTS):
        parts = dict.fromkeys(weights, 1.0)
        assert r.combine(parts, weights, shaping, right=3, progress=1.0) == 1.0


def test_default_weights_leave_the_room_that_the_hack_table_needs() -> None:
    p, a = r.RewardRules().part_weights, r.A_WEIGHTS
    assert math.fsum(p.values()) == math.fsum(a.values()) == 1.0
    assert p["format"] + p["legal"] <= r.FORMAT_ONLY
    assert p["format"] + p["legal"] + p["best"] + p["candidates"] <= 0.6
    assert a["format"] + a["flags"] + a["reward"] <= r.FORMAT_ONLY
    assert a["format"] + a["board"] + a["flags"] / 2 + a["reward"] <= r.ONE_WRONG
    assert a["format"] + a["board"] + a["flags"] <= r.ONE_WRONG
    assert p["format"] + p["legal"] + r.FORCED_BEST * p["best"] <= r.FORMAT_ONLY + 1e-9


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"p_weights": {"best": -1.0}}, "--p-weights best -1.0: give 0 or more"),
        ({"p_weights": {"bets": 1.0}}, "--p-weights bets: not one of format, legal, best"),
        *(({"p_best_scale": bad}, f"--p-best-scale {bad}") for bad in (0.0, -1.0, 2.0, math.nan)),
        ({"p_weights": {"whole": math.nan}}, "--p-weights whole nan: give a finite number"),
        ({"reward_shaping": "cubic"}, "'cubic' is unknown; choose one of continuous, graduated"),
        ({"p_weights": dict.fromkeys(r.P_WEIGHTS, 0.0)}, "--p-weights: all are 0"),
    ],
)
def test_wrong_rules_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        r.RewardRules(**settings)


def test_running_norm_by_hand() -> None:
    norm = r.RunningNorm(momentum=0.5)
    norm.update([])
    norm.update([0.0, 1.0])
    assert (norm.mean, norm.variance) == (0.5, 0.25)
    assert norm.normalise([0.0, 1.0]) == [-1.0, 1.0]
    norm.update([1.0, 1.0])
    assert (norm.mean, norm.variance) == (0.75, 0.125)


def test_running_norm_goes_on_from_its_state_and_survives_a_constant() -> None:
    norm, resumed = r.RunningNorm(), r.RunningNorm()
    norm.update([0.2, 0.2, 0.2])
    assert norm.normalise([0.2]) == pytest.approx([0.0])
    resumed.load_state_dict(norm.state_dict())
    for each in (norm, resumed):
        each.update([0.4, 0.9])
    assert resumed.state_dict() == norm.state_dict()
    with pytest.raises(ConfigError, match="momentum is 1"):
        r.RunningNorm(momentum=1.0)
