"""Advantages by hand, and the laws of baselines, scales, filters and GAE."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from rookworld.grpo.advantages import (
    BASELINES,
    SCALES,
    RunningMeans,
    batch_std,
    flat_groups,
    gae,
    group_advantages,
    moments,
    reward_tensor,
    scaled_advantages,
    task_sums,
    valid_groups,
)
from rookworld.grpo.settings import AdvantageSettings

FOUR = [0.0, 0.2, 0.4, 1.0]  # mean 0.4, variance 0.14


def rewards_of(*groups: list[float]) -> Tensor:
    return torch.tensor(groups, dtype=torch.float64)


def close(actual: Tensor, expected: list[float] | list[list[float]]) -> None:
    torch.testing.assert_close(actual, torch.tensor(expected, dtype=torch.float64))


@pytest.mark.parametrize(
    ("baseline", "expected"),
    [
        ("group_mean", [-0.4, -0.2, 0.0, 0.6]),
        ("rloo", [-1.6 / 3, -0.8 / 3, 0.0, 0.8]),
        ("ema", [-0.3, -0.1, 0.1, 0.7]),
        # s² = 0.14 / 4 = 0.035, (0.4 - 0.3)² = 0.01: weight 7/9 of the way from 0.4 to 0.3
        ("adaptive", [r - (0.4 - 0.1 * 7 / 9) for r in FOUR]),
    ],
)
def test_four_rewards_four_advantages(baseline: Any, expected: list[float]) -> None:
    running = torch.tensor([0.3], dtype=torch.float64)
    out = group_advantages(rewards_of(FOUR), running, AdvantageSettings(baseline_type=baseline))
    close(out, [expected])


def test_every_baseline_and_scale_is_tested_by_hand() -> None:
    assert set(BASELINES) == {"group_mean", "rloo", "ema", "adaptive"}
    assert set(SCALES) == {"none", "group", "batch"}


@pytest.mark.parametrize(
    ("scale", "divisor"), [("none", 1.0), ("group", math.sqrt(0.14)), ("batch", 0.5)]
)
def test_scales_by_hand(scale: Any, divisor: float) -> None:
    centred = rewards_of(FOUR) - 0.4
    out = scaled_advantages(centred, 0.5, AdvantageSettings(advantage_scale=scale))
    close(out, [[(r - 0.4) / divisor for r in FOUR]])


@pytest.mark.parametrize("scale", ["group", "batch"])
def test_the_floor_keeps_noise_small(scale: Any) -> None:
    centred = rewards_of([1e-6, -1e-6])
    settings = AdvantageSettings(advantage_scale=scale, advantage_std_floor=0.05)
    assert scaled_advantages(centred, 1e-6, settings).abs().max() == pytest.approx(2e-5)
    still = scaled_advantages(
        rewards_of([0, 0]), 0.0, AdvantageSettings(advantage_scale=scale, advantage_std_floor=0)
    )
    assert still.tolist() == [[0, 0]]


def test_the_clip_comes_after_the_scale() -> None:
    out = scaled_advantages(rewards_of([-3, 0.5, 3]), 0.5, AdvantageSettings(advantage_clip=2.0))
    assert out.tolist() == [[-2, 1, 2]]


def test_advantages_of_a_group_sum_to_zero() -> None:
    rewards = torch.rand(50, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    scales: tuple[Any, ...] = tuple(SCALES)
    for scale in scales:
        settings = AdvantageSettings(advantage_scale=scale)
        centred = group_advantages(rewards, torch.zeros(50), settings)
        assert scaled_advantages(centred, 0.3, settings).sum(-1).abs().max() < 1e-12


def test_adaptive_lies_between_its_two_ends() -> None:
    running = torch.tensor([0.9, 0.9, 0.9], dtype=torch.float64)
    rewards = rewards_of([0.2, 0.2], [0.0, 1.8], [0.9, 0.9])
    baseline = BASELINES["adaptive"](rewards, running)[:, 0]
    close(baseline, [0.2, 0.9, 0.9])


def test_rloo_refuses_a_lone_sample() -> None:
    with pytest.raises(ValueError, match="at least 2 samples a group, got 1"):
        group_advantages(rewards_of([1.0]), torch.zeros(1), AdvantageSettings(baseline_type="rloo"))


# --- filters ------------------------------------------------------------------------------------


def test_flat_is_by_spread_not_by_mean_and_a_lone_winner_stays() -> None:
    noise = 0.1 + 0.2  # 0.30000000000000004
    rewards = rewards_of(
        [1, 1, 1, 1], [0, 0, 0, 1], [0.3, noise, 0.3, 0.3], [0.9, 0.9, 0.9, 0.901], [-1, -1, -1, -1]
    )
    assert flat_groups(rewards).tolist() == [True, False, True, False, True]
    assert flat_groups(rewards, tolerance=0.01).tolist() == [True, False, True, True, True]


def test_a_missing_reward_drops_its_group_and_no_other() -> None:
    rewards = reward_tensor([[0.1, 0.2], [None, 0.3], [math.nan, 1.0], [math.inf, 0.0]])
    assert valid_groups(rewards).tolist() == [True, False, False, False]
    kept = rewards[valid_groups(rewards)]
    close(group_advantages(kept, torch.zeros(1), AdvantageSettings()), [[-0.05, 0.05]])


@pytest.mark.parametrize("baseline", BASELINES)
def test_a_reward_that_is_no_number_is_refused(baseline: Any) -> None:
    poisoned = reward_tensor([[0.1, 0.2], [None, 0.3]])
    with pytest.raises(ValueError, match=r"group 1 .* \(1 of 2 groups\); drop such groups"):
        group_advantages(poisoned, torch.zeros(2), AdvantageSettings(baseline_type=baseline))


def test_groups_of_different_size_are_refused() -> None:
    with pytest.raises(ValueError, match=r"differ in size: \[1, 2\]"):
        reward_tensor([[0.1, 0.2], [0.3]])


# --- what spans ranks ---------------------------------------------------------------------------


def test_batch_std_is_the_same_from_the_sums_of_two_ranks() -> None:
    values = torch.randn(6, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    total = moments(values[:2]) + moments(values[2:])
    expected = values.std(correction=0).item()
    assert batch_std(*total.tolist()) == pytest.approx(expected, abs=1e-12)
    assert batch_std(0.0, 0.0, 0.0) == 0


def test_moments_count_only_what_the_mask_shows() -> None:
    values = torch.tensor([[1.0, 2.0, math.nan]])
    mask = torch.tensor([[True, True, False]])
    assert moments(values, mask).tolist() == [3, 5, 2]


def test_running_means_by_hand() -> None:
    running = RunningMeans(momentum=0.9)
    tasks = torch.tensor([0, 1, 0])
    sums = task_sums(rewards_of([1, 0], [0.2, 0.4], [0, 0]), tasks, 3)
    assert sums.tolist() == [[1, 4], [pytest.approx(0.6), 2], [0, 0]]
    close(running.at(tasks, sums), [0.25, 0.3, 0.25])
    running.update(sums)
    assert running.state_dict() == {"0": 0.25, "1": pytest.approx(0.3)}
    later = task_sums(rewards_of([1, 1]), torch.tensor([0]), 3)
    close(running.at(torch.tensor([0]), later), [0.25])
    running.update(later)
    assert running.means[0] == pytest.approx(0.9 * 0.25 + 0.1)
    assert running.means[1] == pytest.approx(0.3)


def test_running_means_survive_json_exactly() -> None:
    running = RunningMeans()
    running.update(task_sums(rewards_of([0.1, 1 / 3]), torch.tensor([1]), 2))
    again = RunningMeans()
    again.load_state_dict(json.loads(json.dumps(running.state_dict())))
    assert again.means == running.means


# --- tokens -------------------------------------------------------------------------------------


def test_gae_by_hand() -> None:
    values = torch.tensor([[0.5, 0.2, 0.8], [0.1, 0.3, math.nan]], dtype=torch.float64)
    mask = torch.tensor([[True, True, True], [True, True, False]])
    advantages, returns = gae(values, torch.tensor([1.0, 0.0]), mask, gamma=0.9, lam=0.5)
    third = 1.0 - 0.8
    second = 0.9 * 0.8 - 0.2 + 0.45 * third
    first = 0.9 * 0.2 - 0.5 + 0.45 * second
    last = 0.0 - 0.3
    before = 0.9 * 0.3 - 0.1 + 0.45 * last
    close(advantages, [[first, second, third], [before, last, 0]])
    close(returns, [[first + 0.5, second + 0.2, 1.0], [before + 0.1, 0.0, 0.0]])


def test_gae_with_lambda_1_is_reward_minus_value() -> None:
    values = torch.rand(4, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    mask = torch.arange(6) < torch.tensor([[6], [1], [3], [0]])
    rewards = torch.tensor([1.0, -0.5, 0.25, 7.0], dtype=torch.float64)
    advantages, returns = gae(values, rewards, mask, gamma=1.0, lam=1.0)
    torch.testing.assert_close(advantages, (rewards[:, None] - values) * mask)
    torch.testing.assert_close(returns, rewards[:, None] * mask)


def test_gae_carries_no_gradient_and_refuses_nan() -> None:
    values = torch.rand(1, 3, requires_grad=True)
    mask = torch.ones(1, 3, dtype=torch.bool)
    assert not any(out.requires_grad for out in gae(values, torch.ones(1), mask))
    with pytest.raises(ValueError, match="not a finite number"):
        gae(values, torch.tensor([math.nan]), mask)
