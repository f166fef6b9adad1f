"""Intervals and tests against values worked out by hand or found in textbooks."""

from __future__ import annotations

import math

import numpy as np
import pytest

from rookworld.evaluation.statistics import (
    Estimate,
    bootstrap_interval,
    elo_difference,
    estimate,
    estimates,
    known,
    match_score,
    paired_difference,
    pass_at_k,
    rating,
    share,
)


def test_a_share_has_wilson_s_interval() -> None:
    # 15 of 50: centre (0.3 + z²/100) / (1 + z²/50), a standard worked example
    one = share(15, 50)
    assert (one.value, one.n) == (0.3, 50)
    assert one.low == pytest.approx(0.1910, abs=1e-4)
    assert one.high == pytest.approx(0.4375, abs=1e-4)


@pytest.mark.parametrize("successes", [0, 10])
def test_a_share_at_the_edge_is_not_certain(successes: int) -> None:
    one = share(successes, 10)
    assert one.low <= one.value <= one.high
    assert one.high - one.low == pytest.approx(0.2775, abs=1e-4)


def test_zeros_and_ones_are_a_share_and_nan_is_left_out() -> None:
    assert estimate(known([1.0, None, 0.0, 0.0, 1.0])) == share(2, 4)
    assert estimate(known([None, None])) is None


def test_an_error_that_happens_to_be_0_or_1_is_no_share() -> None:
    values = known([1.0, 0.0, 0.0, 1.0, 0.0, 0.0])
    found = estimates({"P/eval_mae": values, "reward/greedy": values, "P/best": values})
    low, high = bootstrap_interval(values)
    mean = Estimate(float(values.mean()), 6, low, high)
    assert found == {"P/eval_mae": mean, "reward/greedy": mean, "P/best": share(2, 6)}
    assert mean != share(2, 6)


def test_the_interval_of_a_mean_covers_it_and_ignores_the_order() -> None:
    values = np.random.default_rng(0).normal(2.0, 1.0, size=400)
    one = estimate(values)
    assert one is not None
    # ±1.96 / √400 around the sample mean
    assert one.low == pytest.approx(one.value - 0.098, abs=0.02)
    assert one.high == pytest.approx(one.value + 0.098, abs=0.02)
    again = estimate(values[::-1].copy())
    assert again is not None
    assert (again.low, again.high) == (one.low, one.high)


def test_a_paired_share_is_tested_exactly() -> None:
    before = known([0, 0, 0, 0, 0, 0, 1, 1, None])
    after = known([1, 1, 1, 1, 1, 1, 1, 0, 1])
    found = paired_difference(before, after)
    assert found is not None
    assert (found.difference, found.n) == (5 / 8, 8)
    # six gains, one loss: 2 · (1 + 7) / 2^7
    assert found.p == pytest.approx(16 / 128)


def test_a_paired_mean_is_tested_by_sign_flips() -> None:
    noise = np.random.default_rng(1).normal(size=60)
    same = paired_difference(noise, noise)
    assert same is not None and same.p == 1.0 and same.difference == 0.0
    better = paired_difference(noise, noise + 0.5 + noise[::-1] / 10)
    assert better is not None and better.p < 0.001 and better.low > 0.3
    # four differences of one sign: 2 of 16 sign patterns are as extreme
    few = paired_difference(np.zeros(4), np.array([0.1, 0.2, 0.3, 0.4]))
    assert few is not None and few.p == pytest.approx(2 / 16, abs=0.02)


def test_a_score_of_three_quarters_is_191_elo() -> None:
    score = match_score(np.array([0.5, 1.0, 0.75, 0.75]))
    assert (score.value, score.n) == (0.75, 8)
    elo = elo_difference(score)
    assert elo.value == pytest.approx(190.8, abs=0.1)
    assert elo.low < elo.value < elo.high


def test_a_lost_match_has_an_upper_bound() -> None:
    elo = elo_difference(match_score(np.zeros(10)))
    assert elo.value == elo.low == -1200.0
    assert -400 < elo.high < -200


def test_the_rating_of_even_results_is_that_of_the_puzzles() -> None:
    ratings = np.full(100, 1500.0)
    solved = np.arange(100) % 2 == 0
    found = rating(ratings, solved.astype(np.float64))
    assert found.value == 1500.0
    # Fisher information of n even games: n · (ln 10 / 400)² / 4
    assert found.high - 1500 == pytest.approx(1.96 * 400 / math.log(10) / 5, rel=0.03)


def test_the_rating_of_nothing_solved_is_bounded_from_above_only() -> None:
    found = rating(np.array([1000.0, 1200.0]), np.zeros(2))
    assert found.low == found.value == 0.0
    assert found.high < 1500


def test_pass_at_k_by_hand() -> None:
    assert pass_at_k(4, 1, 1) == pytest.approx(1 / 4)
    assert pass_at_k(4, 1, 2) == pytest.approx(1 - 3 / 6)
    assert pass_at_k(4, 2, 3) == 1.0
    assert pass_at_k(4, 0, 4) == 0.0


def test_json_has_the_four_names() -> None:
    assert Estimate(0.5, 4, 0.1, 0.9).to_json() == {"value": 0.5, "n": 4, "low": 0.1, "high": 0.9}
