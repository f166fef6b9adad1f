"""What the guard is told and what it says: health in, decisions with their events out.

Law: words alone; when they are said is the guard's business, and what follows the loop's.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

Cause = Literal["diverged_kl", "non_finite", "entropy_collapse", "format_collapse"]
Falling = Literal["train_trend", "held_out_trend"]
"""Where the reward fell."""

ENTROPY_FLOOR = 0.01
"""Mean entropy, nats per token, under which answers are becoming all alike."""


@dataclass(frozen=True, kw_only=True)
class StepHealth:
    """What a step measured, before its update is applied."""

    step: int
    loss: float
    grad_norm: float
    kl: float
    entropy: float
    reward_mean: float
    all_rewards_negative: bool = False
    open_ended: bool = True
    """Whether several answers may be right: where one is, a sure policy has not collapsed."""
    settled: bool = True
    """Whether rewards are on their final scale: while they warm up a fall says nothing."""


@dataclass(frozen=True, kw_only=True)
class EvalHealth:
    """What an evaluation on held-out rows measured."""

    step: int
    reward: float
    format: float
    error: float = math.nan
    """Standard error of the reward; NaN: not known, so a fall says nothing."""
    metric: str = "reward/greedy"
    """What the reward is called: another one's best says nothing about this one."""


@dataclass(frozen=True)
class Continue:
    """Apply the update."""


@dataclass(frozen=True)
class Skip:
    """Throw this update away and go on."""

    reason: Literal["non_finite", "grad_spike"]


@dataclass(frozen=True)
class HalveRate:
    """Apply the update; from here on the rate is halved (`Guard.lr_scale` says so already)."""

    reason: Falling


@dataclass(frozen=True)
class Restore:
    """Go back to the last good state with a lower rate and another sampling seed."""

    reason: Cause
    lr_factor: float
    recovery: int
    """Which recovery this is, from 1: fold it into the sampling seed."""


@dataclass(frozen=True)
class Stop:
    """Beyond recovery."""

    reason: Cause
    diagnosis: str


Decision = Continue | Skip | HalveRate | Restore | Stop
Event = dict[str, Any]
"""`step`, `kind` (warning, skip, rate_halved, restore, stop), `cause`, `message`, and numbers."""


@dataclass(frozen=True)
class Ruling:
    """A decision, what to log, and whether the weights measured are worth returning to.

    `sound` speaks of the weights *before* this step's update: keep them, then update.
    """

    decision: Decision
    events: tuple[Event, ...] = ()
    sound: bool = False


DIAGNOSES: Mapping[Cause, tuple[str, str]] = {
    "diverged_kl": (
        "the policy kept running away from the reference",
        "a lower --lr (1e-5 to 3e-5 is stable for small models), a higher --kl-coef or "
        "--adaptive-kl, a smaller --clip-range",
    ),
    "non_finite": (
        "the loss or its gradient kept turning into NaN or infinity",
        "a lower --lr, --dtype float32, and `rookworld check` on the model to see whether its "
        "weights are finite",
    ),
    "entropy_collapse": (
        "the policy kept collapsing to one answer per prompt",
        "a higher --entropy-coef (0.005), a lower --lr, a --temperature of 1.0, a higher --kl-coef",
    ),
    "format_collapse": (
        "the model kept forgetting the answer format on held-out rows",
        "a lower --lr, a higher --kl-coef, a longer --reward-warmup-steps, and a prompt mix with "
        "both tasks (--mix-env-ratio)",
    ),
}


def event_of(
    step: int,
    kind: str,
    cause: str,
    message: str,
    value: float | None = None,
    limit: float | None = None,
    **numbers: float,
) -> Event:
    """A line for the event log; JSON has no NaN, so a number that is none becomes null."""
    event: Event = {"step": step, "kind": kind, "cause": cause, "message": message}
    given = {"value": value, "limit": limit, **numbers}
    for name, number in given.items():
        if number is not None:
            event[name] = number if math.isfinite(number) else None
    return event


def diagnosis_of(step: int, cause: Cause, what: str, recoveries: int, lr_scale: float) -> str:
    happened, try_this = DIAGNOSES[cause]
    return (
        f"training diverged at step {step} ({cause}): {happened}. Last seen: {what}; "
        f"{recoveries} restores and a learning rate at {lr_scale:.4g} of its schedule did not "
        f"help. Try {try_this}."
    )
