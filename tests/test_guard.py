"""The guard as a table of stories: numbers in, decisions and events out."""

from __future__ import annotations

import json
import math
import random
import statistics
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from rookworld.grpo.decisions import (
    DIAGNOSES,
    Continue,
    Decision,
    EvalHealth,
    HalveRate,
    Restore,
    Ruling,
    Skip,
    StepHealth,
    Stop,
)
from rookworld.grpo.guard import LIMITS, Guard, Limits
from rookworld.grpo.settings import GuardSettings
from rookworld.runtime.errors import ConfigError

WELL = StepHealth(step=0, loss=0.1, grad_norm=1.0, kl=0.05, entropy=0.8, reward_mean=0.5)
NAN, INF = math.nan, math.inf


def run(guard: Guard, *changes: dict[str, float]) -> list[Ruling]:
    return [
        guard.check_step(replace(WELL, step=step, **change))  # type: ignore[arg-type]
        for step, change in enumerate(changes)
    ]


def decisions(
    *changes: dict[str, float], settings: GuardSettings | None = None, limits: Limits = LIMITS
) -> list[Decision]:
    guard = Guard(settings or GuardSettings(), limits)
    return [ruling.decision for ruling in run(guard, *changes)]


def names(
    *changes: dict[str, float], settings: GuardSettings | None = None, limits: Limits = LIMITS
) -> list[str]:
    found = decisions(*changes, settings=settings, limits=limits)
    return [type(decision).__name__ for decision in found]


FINE: dict[str, float] = {}
SKIP_4 = ["Skip"] * 4


@pytest.mark.parametrize(
    ("story", "expected"),
    [
        ([FINE] * 3, ["Continue"] * 3),
        ([{"loss": NAN}, FINE], ["Skip", "Continue"]),
        ([{"grad_norm": INF}], ["Skip"]),
        ([{"kl": NAN}], ["Skip"]),
        ([{"entropy": NAN}], ["Skip"]),
        ([{"reward_mean": NAN}], ["Skip"]),
        ([{"loss": NAN}] * 5, [*SKIP_4, "Restore"]),
        ([*[{"loss": NAN}] * 4, FINE, *[{"loss": NAN}] * 4], [*SKIP_4, "Continue", *SKIP_4]),
        ([{"loss": NAN}] * 20, [*SKIP_4, "Restore"] * 3 + [*SKIP_4, "Stop"]),
        ([{"kl": 0.85}], ["Continue"]),
        ([{"kl": 0.9}], ["Restore"]),
        ([{"kl": 3.0}] * 4, ["Restore"] * 3 + ["Stop"]),
        ([{"kl": INF}], ["Restore"]),
        ([{"kl": INF, "loss": INF, "grad_norm": NAN}], ["Restore"]),
        ([FINE, *[{"entropy": 0.001}] * 5], [*["Continue"] * 5, "Restore"]),
        ([FINE, *[{"entropy": 0.001}] * 4, FINE, {"entropy": 0.001}], ["Continue"] * 7),
        ([{"entropy": 0.002}] * 9, ["Continue"] * 9),
        ([FINE, *[{"entropy": 0.0, "open_ended": False}] * 9], ["Continue"] * 10),
        ([*[FINE] * 10, {"grad_norm": 25.0}, FINE], [*["Continue"] * 10, "Skip", "Continue"]),
        ([FINE, {"grad_norm": 25.0}], ["Continue"] * 2),
        ([*[{"grad_norm": 0.0}] * 10, FINE], ["Continue"] * 11),
        ([{"all_rewards_negative": True}], ["Continue"]),
    ],
)
def test_stories(story: list[dict[str, float]], expected: list[str]) -> None:
    assert names(*story) == expected


def test_rules_can_be_switched_off() -> None:
    off = GuardSettings(kl_divergence_threshold=0)
    limits = Limits(entropy_floor=0, grad_spike_factor=0, format_drop=0)
    wild: dict[str, float] = {"kl": 99.0, "entropy": 0.0, "grad_norm": 1e9}
    assert names(*[FINE] * 12, *[wild] * 9, settings=off, limits=limits) == ["Continue"] * 21
    guard = Guard(off, limits)
    for step, validity in enumerate((1.0, 0.0)):
        health = EvalHealth(step=step, reward=0.5, format=validity)
        assert guard.check_eval(health).decision == Continue()


def test_a_lasting_change_of_gradient_level_is_accepted_in_the_end() -> None:
    found = names(*[FINE] * 20, *[{"grad_norm": 30.0}] * 20)
    assert "Skip" in found
    assert found[-5:] == ["Continue"] * 5


def test_a_restore_names_its_cause_and_cuts_the_rate_for_good() -> None:
    guard = Guard(GuardSettings(recovery_lr_factor=0.1, max_recoveries=2))
    first, calm, second = run(guard, {"kl": 2.0}, FINE, {"kl": 2.0})
    assert first.decision == Restore("diverged_kl", 0.1, 1)
    assert calm.decision == Continue()
    assert second.decision == Restore("diverged_kl", 0.1, 2)
    assert guard.lr_scale == pytest.approx(0.01)
    (event,) = first.events
    assert (event["step"], event["kind"], event["cause"]) == (0, "restore", "diverged_kl")
    assert (event["value"], event["recovery"], event["lr_scale"]) == (2.0, 1, 0.1)


@pytest.mark.parametrize(
    ("cause", "bad"),
    [
        ("diverged_kl", {"kl": 5.0}),
        ("non_finite", {"loss": NAN}),
        ("entropy_collapse", {"entropy": 1e-4}),
    ],
)
def test_the_end_is_a_diagnosis_that_names_cause_and_remedy(
    cause: str, bad: dict[str, float]
) -> None:
    guard = Guard(
        GuardSettings(max_recoveries=1, max_consecutive_nans=2), Limits(entropy_patience=2)
    )
    guard.check_step(WELL)
    rulings = [guard.check_step(replace(WELL, step=7, **bad)) for _ in range(4)]  # type: ignore[arg-type]
    last = next(r for r in rulings if isinstance(r.decision, Stop))
    assert isinstance(last.decision, Stop)
    text = last.decision.diagnosis
    assert last.decision.reason == cause
    assert f"step 7 ({cause})" in text
    assert "Try a" in text
    assert "--lr" in text
    assert "\n" not in text
    assert last.events[-1]["kind"] == "stop"


def test_lost_format_on_held_out_rows_restores_then_stops() -> None:
    guard = Guard(GuardSettings(max_recoveries=1))
    found = [
        guard.check_eval(EvalHealth(step=step, reward=0.5, format=validity)).decision
        for step, validity in enumerate((0.90, 0.99, 0.95, NAN, 0.93, 0.93))
    ]
    assert [type(decision).__name__ for decision in found] == [
        *["Continue"] * 4,
        "Restore",
        "Stop",
    ]
    assert isinstance(found[-1], Stop)
    assert found[-1].reason == "format_collapse"
    assert set(DIAGNOSES) == {"diverged_kl", "non_finite", "entropy_collapse", "format_collapse"}


def noisy_rewards(seed: int, steps: int, fall_at: int | None = None) -> list[float]:
    """Mean reward of 8 prompts x 8 answers a step; from `fall_at` on it sinks by 0.2 in 40."""
    chance = random.Random(seed)
    rewards = []
    for step in range(steps):
        sunk = 0.0 if fall_at is None else 0.2 * min(1.0, max(0, step - fall_at) / 40)
        prompts = (chance.gauss(0.5 - sunk, 0.25) for _ in range(8))
        rewards.append(statistics.fmean(prompts) + chance.gauss(0.0, 0.3 / 8))
    return rewards


def halvings(rewards: Sequence[float], **changes: Any) -> list[int]:
    """Steps at which the rate was halved; the loss is noise too."""
    guard, chance = Guard(GuardSettings()), random.Random(7)
    found = []
    for step, reward in enumerate(rewards):
        health = replace(WELL, step=step, reward_mean=reward, loss=chance.gauss(0, 1), **changes)
        if guard.check_step(health).decision == HalveRate("train_trend"):
            found.append(step)
    return found


def test_noise_of_small_steps_is_no_fall() -> None:
    """Less than one run of 1,000 steps in a hundred may have its rate halved by chance."""
    assert sum(bool(halvings(noisy_rewards(seed, 1000))) for seed in range(120)) <= 1


def test_a_real_fall_of_the_training_reward_halves_the_rate_once() -> None:
    for seed in range(10):
        (step,) = halvings(noisy_rewards(seed, 400, fall_at=200))
        assert 210 < step < 260


def test_a_fall_halves_the_rate_for_good_and_says_how_sure_it_is() -> None:
    guard = Guard(GuardSettings(), Limits(trend_window=4))
    before = [{"reward_mean": 0.5 + 0.01 * (step % 2)} for step in range(8)]
    fall, *_ = run(guard, *before, {"reward_mean": 0.2}, {"reward_mean": 0.2})[-2:]
    assert fall.decision == Continue()
    rulings = run(guard, {"reward_mean": 0.21}, {"reward_mean": 0.2})
    assert rulings[-1].decision == HalveRate("train_trend")
    assert guard.lr_scale == 0.5
    (event,) = rulings[-1].events
    assert (event["kind"], event["cause"]) == ("rate_halved", "train_trend")
    assert (event["lr_scale"], event["limit"]) == (0.5, 5.0)
    assert event["value"] > 5
    off = Guard(GuardSettings(), Limits(trend_window=4, trend_errors=0))
    decisions = [r.decision for r in run(off, *before, *[{"reward_mean": 0.2}] * 8)]
    assert decisions == [Continue()] * 16


def test_rewards_that_warm_up_are_no_fall() -> None:
    """Content begins to count during the warm-up, which lowers every reward."""
    assert halvings(noisy_rewards(0, 400, fall_at=200), settled=False) == []


def evaluated(*rewards: float, error: float = 0.01) -> list[Decision]:
    guard = Guard(GuardSettings())
    return [
        guard.check_eval(EvalHealth(step=step, reward=reward, error=error, format=1.0)).decision
        for step, reward in enumerate(rewards)
    ]


def test_held_out_reward_clearly_under_its_best_halves_the_rate_once() -> None:
    halved = HalveRate("held_out_trend")
    assert evaluated(0.5, 0.6, 0.55, 0.52) == [*[Continue()] * 3, halved]
    assert evaluated(0.6, 0.52, 0.52, 0.53, 0.44) == [Continue(), halved, *[Continue()] * 2, halved]
    assert evaluated(0.5, 0.6, 0.55, 0.52, error=0.02) == [Continue()] * 4
    assert evaluated(0.6, 0.1, error=NAN) == [Continue()] * 2


def test_a_guard_saved_by_an_earlier_version_goes_on() -> None:
    guard = Guard(GuardSettings())
    guard.check_step(WELL)
    state = guard.state_dict() | {"losses": [0.1], "train_trend": {"last": [], "streak": 0}}
    again = Guard(GuardSettings())
    again.load_state_dict(state)
    assert again.state_dict() == guard.state_dict()


def test_a_warning_is_said_once_when_it_begins() -> None:
    near: dict[str, float] = {"kl": 0.85}
    poor: dict[str, float] = {"all_rewards_negative": True}
    rulings = run(Guard(GuardSettings()), FINE, near, near, FINE, near, poor, poor)
    causes = [[event["cause"] for event in ruling.events] for ruling in rulings]
    again = ["kl_near_limit"]
    assert causes == [[], again, [], [], again, ["rewards_negative"], []]
    assert all(event["kind"] == "warning" for ruling in rulings for event in ruling.events)


def test_only_healthy_weights_are_worth_returning_to() -> None:
    rulings = run(
        Guard(GuardSettings()),
        FINE,
        {"kl": 0.85},
        {"entropy": 0.001},
        {"loss": NAN},
        {"kl": 2.0},
        FINE,
    )
    assert [ruling.sound for ruling in rulings] == [True, False, False, False, False, True]


def test_the_threshold_follows_training_when_asked() -> None:
    slow: list[dict[str, float]] = [{"kl": 0.1 + 0.04 * step} for step in range(30)]
    assert "Restore" in names(*slow)
    following = GuardSettings(adaptive_threshold=True)
    assert "Restore" not in names(*slow, settings=following)
    assert names(*slow, {"kl": 3.6}, settings=following)[-1] == "Restore"


def test_a_resumed_guard_decides_as_one_that_never_stopped() -> None:
    settings, limits = GuardSettings(max_recoveries=9), Limits(trend_window=2, trend_errors=2)
    story: list[dict[str, float]] = [
        *({"reward_mean": 0.5 - 0.02 * step} for step in range(6)),
        *[{"loss": NAN}] * 3,
        {"kl": 0.85},
        *[{"entropy": 0.001}] * 3,
        *[FINE] * 8,
        {"grad_norm": 99.0},
        {"kl": 4.0},
        *[{"loss": NAN}] * 6,
    ]
    whole = Guard(settings, limits)
    expected = run(whole, *story)
    for cut in range(len(story)):
        first, second = Guard(settings, limits), Guard(settings, limits)
        found = run(first, *story[:cut])
        second.load_state_dict(json.loads(json.dumps(first.state_dict(), allow_nan=False)))
        found += [
            second.check_step(replace(WELL, step=cut + i, **change))  # type: ignore[arg-type]
            for i, change in enumerate(story[cut:])
        ]
        assert found == expected
        assert second.state_dict() == whole.state_dict()


def test_events_are_strict_json() -> None:
    for ruling in run(Guard(GuardSettings()), {"kl": INF}, {"loss": NAN}, {"kl": 0.85}):
        json.dumps(ruling.events, allow_nan=False)


@pytest.mark.parametrize(
    "wrong",
    [{"recovery_lr_factor": 0.0}, {"recovery_lr_factor": 2.0}, {"max_consecutive_nans": 0}],
)
def test_impossible_settings_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=r"give more than|must"):
        GuardSettings(**wrong)  # type: ignore[arg-type]


def test_a_skip_says_why() -> None:
    assert decisions({"loss": NAN}) == [Skip("non_finite")]
    (event,) = run(Guard(GuardSettings()), {"loss": NAN, "grad_norm": INF})[0].events
    assert event["message"] == "update skipped: loss, grad_norm not finite, 1 in a row"


def test_a_model_that_never_had_the_format_cannot_lose_it() -> None:
    guard = Guard(GuardSettings())
    guard.check_eval(EvalHealth(step=0, reward=-0.1, format=0.10))
    ruling = guard.check_eval(EvalHealth(step=10, reward=-0.1, format=0.02))
    assert isinstance(ruling.decision, Continue)


def test_steps_with_one_right_answer_neither_begin_nor_end_a_warning() -> None:
    guard, low = Guard(GuardSettings()), replace(WELL, entropy=0.001)
    sure = replace(WELL, entropy=0.0, open_ended=False)
    rulings = [guard.check_step(health) for health in (WELL, sure, low, sure, low)]
    assert [len(ruling.events) for ruling in rulings] == [0, 0, 1, 0, 0]
    assert [ruling.sound for ruling in rulings] == [True, True, False, False, False]
