"""What changes with the step alone: learning rate, warm-ups, what falls away.

Law: a schedule is a function of numbers, so a resumed run is at the same point as one that never
stopped. Steps count from 0. Left out: restarts, per-group rates.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

Schedule = Callable[[float], float]
"""(progress after warm-up, 0 … 1) -> share of the way down that is left, 1 … 0."""


def constant(progress: float) -> float:
    """No way down at all."""
    return 1.0


def linear(progress: float) -> float:
    """A straight line."""
    return 1.0 - progress


def cosine(progress: float) -> float:
    """Half a cosine."""
    return 0.5 * (1.0 + math.cos(math.pi * progress))


SCHEDULES: Mapping[str, Schedule] = {"constant": constant, "linear": linear, "cosine": cosine}


def warmup(step: int, warmup_steps: int) -> float:
    """Linear warm-up of a rate: 1/n at step 0, 1 from step n - 1 on; never 0."""
    return min(1.0, (step + 1) / warmup_steps) if warmup_steps > 0 else 1.0


def ramp(step: int, warmup_steps: int) -> float:
    """Progress of a warm-up that starts from nothing: 0 at step 0, 1 from step n on."""
    return min(1.0, step / warmup_steps) if warmup_steps > 0 else 1.0


FALLS: Mapping[str, Schedule] = {
    "constant": constant,
    "late": lambda progress: min(1.0, 3.0 * (1.0 - progress)),
}
"""What falls to nothing behind the last step, over the last third, if at all."""


def lr_multiplier(
    name: str, step: int, steps: int, warmup_steps: int = 0, final: float = 0.1
) -> float:
    """Multiplier of the peak rate: linear warm-up, then the schedule down to `final`.

    It is there at the last step.
    """
    if step < warmup_steps:
        return warmup(step, warmup_steps)
    span = max(1, steps - 1 - warmup_steps)
    left = SCHEDULES[name](min(1.0, (step - warmup_steps) / span))
    return final + (1.0 - final) * left
