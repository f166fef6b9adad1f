"""Numbers with bounds, as types: a setting `steps: Count` is refused below 1, by its flag."""

from __future__ import annotations

import typing
from dataclasses import dataclass
from math import inf
from typing import Annotated, Any

from rookworld.runtime.errors import ConfigError


@dataclass(frozen=True)
class Bounds:
    """Where a number may lie: never at infinity, and NaN lies nowhere."""

    lowest: float
    highest: float = inf
    lowest_allowed: bool = True
    said: str = ""
    """What is allowed, where there is more to say than the numbers."""

    def hold(self, value: float) -> bool:
        inside = self.lowest <= value <= self.highest and -inf < value < inf
        return inside and (self.lowest_allowed or value != self.lowest)

    def allowed(self, value: float) -> str:
        if not -inf < value < inf:  # isfinite() cannot take every int
            return "give a finite number"
        wide = self.highest in (MOST, LARGE, inf)  # a slip of the keyboard, not worth mentioning
        if value > self.highest and (wide or self.said or self.lowest == -LARGE):
            return f"give {self.highest:,} or less"
        if self.said:
            return self.said
        if not self.lowest_allowed:
            return f"give more than {self.lowest}" + (
                "" if wide else f" and at most {self.highest}"
            )
        return f"give {self.lowest} " + ("or more" if wide else f"to {self.highest}")


MOST = 10**9
"""No step, row or node count is meant to be larger; beyond it is a slip of the keyboard."""
LARGE = 1e6
"""The same of rates, weights and ranges, whose products must stay finite in single precision."""

Count = Annotated[int, Bounds(1, MOST, said="must be positive")]
Few = Annotated[int, Bounds(1, 2**16, said="must be positive")]
Many = Annotated[int, Bounds(1, 2**20, said="must be positive")]
Whole = Annotated[int, Bounds(0, MOST)]
Seed = Annotated[int, Bounds(0, 2**64 - 1)]  # what torch takes
FromZero = Annotated[float, Bounds(0, LARGE)]
Positive = Annotated[float, Bounds(0, LARGE, lowest_allowed=False)]
Share = Annotated[float, Bounds(0, 1)]
PositiveShare = Annotated[float, Bounds(0, 1, lowest_allowed=False)]


def bounds_of(hint: Any) -> Bounds | None:
    """The bounds in a type, also in one of the types that `A | None` allows."""
    if typing.get_origin(hint) is Annotated:
        return next((one for one in hint.__metadata__ if isinstance(one, Bounds)), None)
    return next(filter(None, map(bounds_of, typing.get_args(hint))), None)


def check_bounds(name: str, value: Any, bounds: Bounds) -> None:
    """Refuse a number, or one of several, beyond its bounds; None is a number not given."""
    if value is None:
        return
    for number in value if isinstance(value, tuple) else (value,):
        if not bounds.hold(number):
            allowed = bounds.allowed(number)
            raise ConfigError(f"--{name.replace('_', '-')} {number}: {allowed}")
