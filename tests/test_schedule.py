"""Schedules at their ends, in the middle, and past the last step."""

from __future__ import annotations

import pytest

from rookworld.grpo.schedule import FALLS, SCHEDULES, lr_multiplier, ramp, warmup


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("constant", [1, 1, 1, 1]),
        ("linear", [1, 0.55, 0.1, 0.1]),
        ("cosine", [1, 0.55, 0.1, 0.1]),
    ],
)
def test_start_middle_last_step_and_beyond(name: str, expected: list[float]) -> None:
    found = [lr_multiplier(name, step, steps=111, warmup_steps=10) for step in (10, 60, 110, 500)]
    assert found == pytest.approx(expected)
    assert SCHEDULES[name](0.25) == pytest.approx(
        {"constant": 1, "linear": 0.75}.get(name, 0.8536), abs=1e-4
    )


@pytest.mark.parametrize("name", ["linear", "cosine"])
def test_a_rate_ends_at_its_share(name: str) -> None:
    found = [lr_multiplier(name, step, steps=21, final=0.02) for step in (0, 10, 20)]
    assert found == pytest.approx([1, 0.51, 0.02])
    assert lr_multiplier("constant", 20, steps=21, final=0.02) == 1


def test_warm_up_is_a_line_that_never_stands_still() -> None:
    found = [lr_multiplier("cosine", step, steps=50, warmup_steps=4) for step in range(5)]
    assert found == pytest.approx([0.25, 0.5, 0.75, 1.0, 1.0])
    assert warmup(0, 0) == 1


@pytest.mark.parametrize("steps", [1, 2, 5])
def test_a_run_shorter_than_its_warm_up_is_no_error(steps: int) -> None:
    rates = [lr_multiplier("cosine", step, steps, warmup_steps=5) for step in range(steps)]
    assert all(0 < rate <= 1 for rate in rates)
    assert lr_multiplier("linear", 0, steps=1) == 1


def test_a_ramp_starts_from_nothing() -> None:
    assert [ramp(step, 4) for step in range(6)] == [0, 0.25, 0.5, 0.75, 1, 1]
    assert ramp(0, 0) == 1


def test_what_falls_ends_at_nothing_behind_the_last_step() -> None:
    parts = [0, 1 / 3, 2 / 3, 5 / 6, 1]
    assert [FALLS["constant"](part) for part in parts] == [1, 1, 1, 1, 1]
    assert [FALLS["late"](part) for part in parts] == pytest.approx([1, 1, 1, 0.5, 0])
