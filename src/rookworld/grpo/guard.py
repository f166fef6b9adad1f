"""The guard: from a step's numbers, whether to go on, skip, restore, slow down, or stop.

It decides and the loop obeys. Rules, first that fits: a loss or gradient that is not finite skips
the update, several in a row restore; a KL over its limit restores; entropy under its floor for a
while restores; a gradient-norm spike skips. At an evaluation, lost format validity restores. A
reward that fell by more than its noise can explain halves the learning rate; the loss is no
evidence, since it measures no progress. A restore too many stops the run with a diagnosis that
names one of four causes and what to try.

Laws: pure numbers in, decisions out; no clock, no chance, so a resumed run decides the same. What
the guard has learnt (recoveries, rate cuts) is for good: it is saved with a checkpoint but never
rolled back by a restore, or a run could recover for ever. NaN fits no comparison, so it is asked
for first. Left out: raising the rate again.
"""

from __future__ import annotations

import copy
import math
import statistics
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from rookworld.grpo.decisions import (
    ENTROPY_FLOOR,
    Cause,
    Continue,
    EvalHealth,
    Event,
    Falling,
    HalveRate,
    Restore,
    Ruling,
    Skip,
    StepHealth,
    Stop,
    diagnosis_of,
    event_of,
)
from rookworld.grpo.kl import AdaptiveThreshold
from rookworld.grpo.settings import GuardSettings

KL_WARN_SHARE = 0.8
"""Share of the KL limit from which the guard warns."""
KL_ACT_SHARE = 0.9
"""Share of the KL limit from which it restores: before the limit is reached, not after."""
SPIKE_WINDOW = 20
"""Gradient norms a spike is compared with; half of them must be known."""
FORMAT_MASTERED = 0.5
"""Held-out format validity from which its loss is a collapse."""
ENTROPY_SHARE = 0.1
"""A run that starts with little entropy has this share of it as its floor."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """When the guard acts, besides what a user sets."""

    entropy_floor: float = ENTROPY_FLOOR
    """Least mean entropy, nats per token, or a tenth of the first if that is less; 0 = off."""
    entropy_patience: int = 5
    """Steps in a row under the floor that make a collapse."""
    format_drop: float = 0.05
    """Fall of held-out format validity below its best that makes a collapse; 0 = off."""
    grad_spike_factor: float = 20.0
    """A gradient norm this many times the running median is skipped; 0 = off."""
    trend_errors: float = 5.0
    """Standard errors by which a reward must have fallen to halve the rate; 0 = off. Asked at every
    step, so 2 would be noise; at 5, 1 in 1,000 runs of 1,000 steps is halved by chance."""
    trend_window: int = 30
    """Steps of training reward that are compared with as many before them; at least 2."""


LIMITS = Limits()


@dataclass
class Memory:
    """All the guard remembers, as plain values: what `state_dict` saves."""

    recoveries: int = 0
    skipped: int = 0
    lr_scale: float = 1.0
    nans: int = 0
    low_entropy: int = 0
    first_entropy: float | None = None
    best_format: float | None = None
    warned: list[str] = field(default_factory=list)
    grad_norms: list[float] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)
    """Training rewards of two windows."""
    best_reward: list[float] = field(default_factory=list)
    """Best held-out reward and its standard error; empty before the first."""
    best_metric: str = ""
    """What that reward is called."""

    def forget_recent(self) -> None:
        """What belongs to a state that is gone does not count against the restored one."""
        self.nans = self.low_entropy = 0
        self.warned, self.rewards, self.best_reward = [], [], []


class Guard:
    """Feeds on `StepHealth` and `EvalHealth`; remembers what it needs to judge the next."""

    def __init__(self, settings: GuardSettings, limits: Limits = LIMITS) -> None:
        self.settings = settings
        self.limits = limits
        self._kl = AdaptiveThreshold(settings.kl_divergence_threshold)
        self._memory = Memory()

    @property
    def lr_scale(self) -> float:
        """Product of every rate cut so far: multiply the scheduled rate by it."""
        return self._memory.lr_scale

    @property
    def recoveries(self) -> int:
        """Restores so far."""
        return self._memory.recoveries

    @property
    def skipped(self) -> int:
        """Updates skipped so far."""
        return self._memory.skipped

    def state_dict(self) -> dict[str, Any]:
        """Plain JSON."""
        return {**asdict(self._memory), "kl": self._kl.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        known = {one.name for one in fields(Memory)}
        values = {name: value for name, value in state.items() if name in known}
        self._memory = Memory(**copy.deepcopy(values))
        self._kl.load_state_dict(state["kl"])

    # --- judging ---

    @property
    def kl_limit(self) -> float:
        """The KL threshold in force (0 = none)."""
        return self._kl.limit if self.settings.adaptive_threshold else self._kl.base

    @property
    def entropy_floor(self) -> float:
        """The entropy floor in force (0 = none)."""
        first = self._memory.first_entropy
        floor = self.limits.entropy_floor
        return floor if first is None else min(floor, ENTROPY_SHARE * first)

    def check_step(self, health: StepHealth) -> Ruling:
        """Judge a step whose gradient is known and whose update is not yet applied."""
        kl_breached = self._over(health.kl, KL_ACT_SHARE)
        measured = (health.loss, health.grad_norm, health.entropy, health.reward_mean, health.kl)
        # An infinite KL is a breach that needs no second look; NaN says nothing but "broken".
        if not all(map(math.isfinite, measured)) and not (kl_breached and health.kl == math.inf):
            return self._non_finite(health)
        self._memory.nans = 0
        if kl_breached:
            limit = KL_ACT_SHARE * self.kl_limit
            what = (
                f"KL to the reference is {health.kl:.4g} nats per token, over 90 % of its "
                f"threshold {self.kl_limit:.4g}"
            )
            return self._restore(health.step, "diverged_kl", what, health.kl, limit)
        events = self._warnings(health)
        if health.open_ended and self._entropy_collapsed(health.entropy):
            floor = self.entropy_floor
            what = (
                f"entropy is {health.entropy:.4g} nats per token, floor {floor:.4g}, "
                f"for {self._memory.low_entropy} steps"
            )
            return self._restore(health.step, "entropy_collapse", what, health.entropy, floor)
        spike = self._spike(health)
        if spike is not None:
            return Ruling(Skip("grad_spike"), (*events, spike))
        return self._continue(health, events)

    def check_eval(self, health: EvalHealth) -> Ruling:
        """Judge an evaluation on held-out rows; one without numbers says nothing."""
        memory, drop = self._memory, self.limits.format_drop
        if not (math.isfinite(health.reward) and math.isfinite(health.format)):
            return Ruling(Continue())
        best = health.format if memory.best_format is None else memory.best_format
        # a model that never had the format cannot lose it: there a fall is chance
        if best >= FORMAT_MASTERED and 0 < drop < best - health.format:
            what = f"held-out format validity is {health.format:.4g}, best was {best:.4g}"
            return self._restore(health.step, "format_collapse", what, health.format, best - drop)
        memory.best_format = max(best, health.format)
        return self._held_out_trend(health)

    def _over(self, kl: float, share: float) -> bool:
        return self.kl_limit > 0 and kl >= share * self.kl_limit

    def _non_finite(self, health: StepHealth) -> Ruling:
        self._memory.nans += 1
        names = ("loss", "grad_norm", "kl", "entropy", "reward_mean")
        bad = [name for name in names if not math.isfinite(getattr(health, name))]
        what = f"{', '.join(bad)} not finite, {self._memory.nans} in a row"
        limit = self.settings.max_consecutive_nans
        if self._memory.nans >= limit:
            return self._restore(
                health.step, "non_finite", what, float(self._memory.nans), float(limit)
            )
        self._memory.skipped += 1
        event = event_of(health.step, "skip", "non_finite", f"update skipped: {what}")
        return Ruling(Skip("non_finite"), (event,))

    def _entropy_collapsed(self, entropy: float) -> bool:
        memory = self._memory
        if memory.first_entropy is None:
            memory.first_entropy = entropy
        memory.low_entropy = memory.low_entropy + 1 if entropy < self.entropy_floor else 0
        return memory.low_entropy >= self.limits.entropy_patience

    def _spike(self, health: StepHealth) -> Event | None:
        """Every norm is remembered, spikes too: a lasting change of level becomes the level."""
        known = self._memory.grad_norms
        self._memory.grad_norms = [*known, health.grad_norm][-SPIKE_WINDOW:]
        factor = self.limits.grad_spike_factor
        if len(known) < SPIKE_WINDOW // 2:
            return None
        limit = factor * statistics.median(known)
        if limit <= 0 or health.grad_norm <= limit:
            return None
        self._memory.skipped += 1
        message = f"update skipped: gradient norm {health.grad_norm:.4g}, limit {limit:.4g}"
        return event_of(health.step, "skip", "grad_spike", message, health.grad_norm, limit)

    def _warnings(self, health: StepHealth) -> tuple[Event, ...]:
        """One event when a condition begins; silence while it lasts."""
        near, floor, mean = KL_WARN_SHARE * self.kl_limit, self.entropy_floor, health.reward_mean
        watched = health.open_ended and self._memory.first_entropy is not None
        kl_near = f"KL {health.kl:.4g} is over 80 % of its threshold {self.kl_limit:.4g}"
        low = f"entropy {health.entropy:.4g} is under its floor {floor:.4g}"
        negative = f"all rewards of the step are negative, mean {mean:.4g}"
        conditions: dict[str, tuple[bool, str, float, float]] = {
            "kl_near_limit": (self._over(health.kl, KL_WARN_SHARE), kl_near, health.kl, near),
            "entropy_low": (watched and health.entropy < floor, low, health.entropy, floor),
            "rewards_negative": (health.all_rewards_negative, negative, mean, 0.0),
        }
        now = {cause for cause, (holds, *_) in conditions.items() if holds}
        if not health.open_ended:  # says nothing about entropy, good or bad
            now |= {"entropy_low"} & set(self._memory.warned)
        begun = now - set(self._memory.warned)
        self._memory.warned = sorted(now)
        return tuple(event_of(health.step, "warning", c, *conditions[c][1:]) for c in sorted(begun))

    def _continue(self, health: StepHealth, events: tuple[Event, ...]) -> Ruling:
        self._kl.accept(health.kl)
        sound = not {"kl_near_limit", "entropy_low"} & set(self._memory.warned)
        ruling = self._train_trend(health)
        return Ruling(ruling.decision, (*events, *ruling.events), sound)

    # --- answering ---

    def _train_trend(self, health: StepHealth) -> Ruling:
        """Halve the rate when the last window of rewards is clearly under the one before it."""
        memory, window = self._memory, self.limits.trend_window
        memory.rewards = [*memory.rewards, health.reward_mean][-2 * window :]
        if not health.settled:
            memory.rewards = []
        if len(memory.rewards) < 2 * window:
            return Ruling(Continue())
        before, after = memory.rewards[:window], memory.rewards[window:]
        # floats at once: `statistics.variance` adds fractions, a millisecond a step
        means = [math.fsum(part) / window for part in (before, after)]
        away = (r - m for part, m in zip((before, after), means, strict=True) for r in part)
        error = math.sqrt(math.fsum(r * r for r in away) / (window - 1) / window)
        ruling = self._halve_if_fallen(health.step, means[0] - means[1], error, "train_trend")
        if isinstance(ruling.decision, HalveRate):
            memory.rewards = []
        return ruling

    def _held_out_trend(self, health: EvalHealth) -> Ruling:
        """Halve the rate when the held-out reward is clearly under its best."""
        memory, now = self._memory, [health.reward, health.error]
        comparable = memory.best_reward and memory.best_metric == health.metric
        if not comparable or health.reward >= memory.best_reward[0]:
            memory.best_reward, memory.best_metric = now, health.metric
            return Ruling(Continue())
        best, its_error = memory.best_reward
        error = math.hypot(its_error, health.error)
        ruling = self._halve_if_fallen(health.step, best - health.reward, error, "held_out_trend")
        if isinstance(ruling.decision, HalveRate):
            memory.best_reward = now
        return ruling

    def _halve_if_fallen(self, step: int, fallen: float, error: float, reason: Falling) -> Ruling:
        limit = self.limits.trend_errors
        # an error that is not known (NaN) fits no comparison
        if not (limit > 0 and fallen > 0 and fallen > limit * error):
            return Ruling(Continue())
        self._memory.lr_scale *= 0.5
        where = "training" if reason == "train_trend" else "held-out"
        sure = fallen / error if error > 0 else math.inf
        message = (
            f"{where} reward fell by {fallen:.4g}, {sure:.3g} standard errors: "
            f"learning rate halved, now {self.lr_scale:.4g} of its schedule"
        )
        event = event_of(step, "rate_halved", reason, message, sure, limit, lr_scale=self.lr_scale)
        return Ruling(HalveRate(reason), (event,))

    def _restore(self, step: int, cause: Cause, what: str, value: float, limit: float) -> Ruling:
        if self.recoveries >= self.settings.max_recoveries:
            diagnosis = diagnosis_of(step, cause, what, self.recoveries, self.lr_scale)
            return Ruling(
                Stop(cause, diagnosis), (event_of(step, "stop", cause, diagnosis, value, limit),)
            )
        self._memory.recoveries += 1
        self._memory.lr_scale *= self.settings.recovery_lr_factor
        self._memory.forget_recent()
        message = (
            f"{what}: last good state restored (recovery {self.recoveries} of "
            f"{self.settings.max_recoveries}), rate now {self.lr_scale:.4g} of its schedule"
        )
        numbers = {"recovery": self.recoveries, "lr_scale": self.lr_scale}
        event = event_of(step, "restore", cause, message, value, limit, **numbers)
        decision = Restore(cause, self.settings.recovery_lr_factor, self.recoveries)
        return Ruling(decision, (event,))
