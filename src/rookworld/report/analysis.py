"""What a training did, how it went, and what to worry about: plain numbers from its records.

Laws: pure functions of a `RunRecord`, no torch, nothing written or printed; a metric that was not
logged is left out, one that is not finite takes part in nothing. Left out on purpose: pictures
(`report`) and any judgement that needs the model itself (`evaluate`).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from rookworld.evaluation.statistics import moving_mean, slope
from rookworld.grpo.decisions import ENTROPY_FLOOR
from rookworld.report.run_reader import Record, RunRecord, Values, number
from rookworld.report.verdict import match_sentence, verdict_of
from rookworld.runtime.embedded import start_of
from rookworld.runtime.metric_info import HELD_OUT_REWARDS
from rookworld.runtime.run_folder import finite
from rookworld.tasks.registry import TASKS

WINDOW = 20
"""Steps of a moving average, and the steps that "final" speaks of."""
LOSS_WINDOW, LOSS_RISES = 10, 3
"""Loss is rising when its mean over this many steps rises this many times in a row."""
KL_WARN_SHARE = 0.8
VALIDITY_FLOOR = 0.8
KL_SHARE_LIMIT = 0.7
_LIMITS = {
    "reward/flat_groups": (
        0.7,
        "groups have no spread and teach nothing; raise --k-samples",
    ),
    "tokens/truncated": (0.1, "answers were cut off; raise --max-new-tokens"),
}
"""Shares that waste work: the most that is healthy, and what to say beyond it."""
TREND_METRICS = (
    "reward/mean",
    *(f"reward/{letter}" for letter in TASKS),
    "kl/exact",
    "policy/entropy",
    "loss/total",
    "grad/norm",
    "tokens/mean_length",
)


# --- numbers ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Trend:
    """Where a metric ended and where it was going."""

    last: float
    """Mean of the last `WINDOW` steps."""
    slope: float
    """Least-squares slope over the whole run, per 100 steps."""
    low: float
    high: float
    """Its 95 % interval."""

    @property
    def direction(self) -> str:
        """`rising`, `falling`, or `level` when the interval holds 0."""
        if self.low > 0:
            return "rising"
        return "falling" if self.high < 0 else "level"


def trend(steps: Values, values: Values) -> Trend | None:
    """Level and slope; None with fewer than four known values.

    Neighbouring steps are alike, so the interval counts only as many of them as would be
    independent at the residuals' correlation from step to step.
    """
    known = np.isfinite(values)
    x, y = steps[known], values[known]
    n = len(y)
    if n < 4 or np.ptp(x) == 0:
        return None
    centred = x - x.mean()
    spread = float(centred @ centred)
    rise = slope(x, y)
    residuals = y - y.mean() - rise * centred
    energy = float(residuals @ residuals)
    rho = float(residuals[1:] @ residuals[:-1]) / energy if energy > 0 else 0.0
    rho = min(max(rho, 0.0), 0.99)
    effective = max(n * (1 - rho) / (1 + rho), 3.0)
    error = math.sqrt(energy / (n - 2) / spread * n / effective)
    half = _t95(effective - 2) * error
    last = float(y[-WINDOW:].mean())
    return Trend(last, 100 * rise, 100 * (rise - half), 100 * (rise + half))


def _t95(freedom: float) -> float:
    """The 97.5 % point of Student's t: exact at one degree of freedom, else an expansion."""
    if freedom <= 1.5:
        return 12.706
    z = 1.959964
    first = (z**3 + z) / 4
    second = (5 * z**5 + 16 * z**3 + 3 * z) / 96
    third = (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384
    return z + first / freedom + second / freedom**2 + third / freedom**3


def kl_share(run: RunRecord, window: int = WINDOW) -> float | None:
    """How much of the last steps' loss is the KL term: Σ coef·KL / Σ (|policy| + coef·KL).

    None with credit by choice, whose policy loss has a gradient and no level.
    """
    if run.config.get("credit") == "choices":
        return None
    policy = np.abs(run.series("loss/policy")[-window:])
    penalty = np.abs(run.series("kl/coef") * run.series("loss/kl"))[-window:]
    known = np.isfinite(policy + penalty)
    total = float((policy + penalty)[known].sum())
    return float(penalty[known].sum()) / total if total > 0 else None


def held_out_metric(run: RunRecord) -> str | None:
    """The metric by which this run's evaluations are compared."""
    asked = run.config.get("select_by")
    return next((n for n in (asked, *HELD_OUT_REWARDS) if any(n in e for e in run.evals)), None)


def eval_value(record: Mapping[str, Any], metric: str) -> float:
    """The value of a metric in a line of `eval.jsonl`, NaN if it is not there."""
    found = record.get(metric)
    return number(found.get("value")) if isinstance(found, Mapping) else math.nan


# --- one run ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Analysis:
    """What a run amounts to."""

    name: str
    state: str
    steps: int
    planned: int | None
    final: dict[str, float] = field(default_factory=dict)
    """Mean over the last `WINDOW` steps, by metric."""
    trends: dict[str, Trend] = field(default_factory=dict)
    before: Record = field(default_factory=dict)
    after: Record = field(default_factory=dict)
    """First and last evaluation: metric → value, n, low, high."""
    paired: Record = field(default_factory=dict)
    """What changed between them: metric → difference, low, high, p, n, paired row by row."""
    start: str = ""
    """What the model before was, if it is an embedded one that was taught wrongly."""
    verdict: str = ""
    """What changed in a sentence."""
    match: str = ""
    """What games against the model before say, in a sentence."""
    held_out: str | None = None
    best_step: int | None = None
    best_reward: float | None = None
    """Where held-out reward was highest."""
    best_train_step: int | None = None
    """Where the moving average of the training reward was highest."""
    kl_share: float | None = None
    clipped: float | None = None
    ratio_max: float | None = None
    validity: dict[str, float] = field(default_factory=dict)
    """Share of readable answers by task over the last steps."""
    events: dict[str, int] = field(default_factory=dict)
    """Guard events by "kind: cause"."""
    time_s: dict[str, float] = field(default_factory=dict)
    """Mean seconds a step by phase."""
    hours: float = 0.0
    memory_mb: float | None = None
    warnings: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    def to_json(self) -> Record:
        """Every number under its name."""
        plain: Record = finite(asdict(self))
        return plain


def analyze(run: RunRecord) -> Analysis:
    """Everything the terminal and the page say about one run."""
    steps = run.steps
    final = {n: last for n in run.metric_names if (last := _last_mean(run.series(n))) is not None}
    trends = {n: found for n in TREND_METRICS if (found := trend(steps, run.series(n)))}
    held_out = held_out_metric(run)
    best_step, best_reward = _best_eval(run, held_out)
    planned = number(run.config.get("steps"))
    before = _estimates(run.evals[0]) if run.evals else {}
    after = _estimates(run.evals[-1]) if len(run.evals) > 1 else {}
    ratio, memory = run.series("policy/ratio_max"), run.series("mem/peak_mb")
    return Analysis(
        name=run.name,
        state=run.state,
        steps=int(steps[-1]) if len(steps) else 0,
        planned=int(planned) if math.isfinite(planned) else None,
        final=final,
        trends=trends,
        before=before,
        after=after,
        paired=run.paired,
        start=start_of(run.config.get("model")),
        verdict=verdict_of(before, after, run.paired),
        match=match_sentence(run.match),
        held_out=held_out,
        best_step=best_step,
        best_reward=best_reward,
        best_train_step=_best_train_step(run),
        kl_share=kl_share(run),
        clipped=_mean(run.series("policy/clipped")),
        ratio_max=_largest(ratio),
        validity=_validity(final),
        events=_event_counts(run.events),
        time_s=_time_by_phase(run),
        hours=float(np.nansum(run.series("time/step_s"))) / 3600,
        memory_mb=_largest(memory),
        warnings=tuple(warnings_of(run)),
        notes=run.notes,
    )


def _known(values: Values) -> Values:
    return values[np.isfinite(values)]


def _mean(values: Values) -> float | None:
    known = _known(values)
    return float(known.mean()) if known.size else None


def _largest(values: Values) -> float | None:
    known = _known(values)
    return float(known.max()) if known.size else None


def _last_mean(values: Values) -> float | None:
    return _mean(values[-WINDOW:])


def _estimates(record: Record) -> Record:
    found = {n: v for n, v in record.items() if isinstance(v, Mapping) and "value" in v}
    return {"step": int(record["step"]), **found}


def _best_eval(run: RunRecord, metric: str | None) -> tuple[int | None, float | None]:
    if metric is None:
        return None, None
    scored = [(eval_value(one, metric), int(one["step"])) for one in run.evals]
    scored = [pair for pair in scored if math.isfinite(pair[0])]
    if not scored:
        return None, None
    value, step = max(scored, key=lambda pair: (pair[0], -pair[1]))
    return step, value


def _best_train_step(run: RunRecord) -> int | None:
    smooth = moving_mean(run.series("reward/mean"), WINDOW)
    # before a whole window is known the average is mostly chance
    smooth = smooth if len(smooth) <= WINDOW else np.where(run.steps < WINDOW, math.nan, smooth)
    if not np.isfinite(smooth).any():
        return None
    return int(run.steps[int(np.nanargmax(smooth))])


def _validity(final: Mapping[str, float]) -> dict[str, float]:
    named = {task: final.get(f"reward/{task}/format") for task in TASKS}
    return {task: share for task, share in named.items() if share is not None}


def _event_counts(events: Sequence[Record]) -> dict[str, int]:
    return dict(Counter(f"{e.get('kind', 'event')}: {e.get('cause', '?')}" for e in events))


def _time_by_phase(run: RunRecord) -> dict[str, float]:
    names = [name for name in run.metric_names if name.startswith("time/")]
    means = {name[5:].removesuffix("_s"): _mean(run.series(name)) for name in names}
    return {name: mean for name, mean in means.items() if mean is not None}


# --- warnings -----------------------------------------------------------------------------------


def warnings_of(run: RunRecord) -> list[str]:
    """What deserves a look, in one line each, most serious first."""
    if not run.metrics:
        return []
    checks = (_stopped, _kl_near, _invalid, _negative, _loss_rising, _entropy_low, _kl_heavy)
    found = [check(run) for check in checks]
    return [line for line in found if line is not None] + _wasted(run)


def _stopped(run: RunRecord) -> str | None:
    stop = next((e for e in reversed(run.events) if e.get("kind") == "stop"), None)
    return str(stop.get("message", "the guard stopped the run")) if stop else None


def _kl_near(run: RunRecord) -> str | None:
    limit = number(run.config.get("kl_divergence_threshold"))
    # what the guard goes by: the task that is furthest away
    highest = np.fmax.reduce([run.series(n) for n in ("kl/exact", *(f"kl/{t}" for t in TASKS))])
    top = _largest(highest)
    if top is None or not limit > 0 or top < KL_WARN_SHARE * limit:
        return None
    step = int(run.steps[int(np.nanargmax(highest))])
    return f"KL reached {top:.3g} at step {step}, {top / limit:.0%} of its threshold {limit:.3g}"


def _invalid(run: RunRecord) -> str | None:
    shares = {}
    for task in TASKS:
        share = _last_mean(run.series(f"reward/{task}/format"))
        if share is not None and share < VALIDITY_FLOOR:
            shares[task] = share
    if not shares:
        return None
    told = ", ".join(f"{task} {share:.0%}" for task, share in shares.items())
    return f"readable answers are under {VALIDITY_FLOOR:.0%}: {told} over the last {WINDOW} steps"


def _negative(run: RunRecord) -> str | None:
    known = "reward/max" if "reward/max" in run.metric_names else "reward/mean"
    last = run.series(known)[-WINDOW:]
    count = int((last < 0).sum())
    return f"all rewards negative in {count} of the last {len(last)} steps" if count else None


def _loss_rising(run: RunRecord) -> str | None:
    losses = run.series("loss/total")
    whole = len(losses) // LOSS_WINDOW
    if whole <= LOSS_RISES:
        return None
    means = losses[-whole * LOSS_WINDOW :].reshape(whole, LOSS_WINDOW).mean(axis=1)
    rises = means[1:] > means[:-1]
    streak = 0
    while streak < len(rises) and rises[-1 - streak]:
        streak += 1
    if streak < LOSS_RISES:
        return None
    return f"loss has risen {streak} times in a row ({LOSS_WINDOW}-step means)"


def _entropy_low(run: RunRecord) -> str | None:
    floor, last = (
        number(run.config.get("entropy_floor", ENTROPY_FLOOR)),
        _last_mean(_open_ended_entropy(run)),
    )
    if last is None or not floor > 0 or last >= floor:
        return None
    return f"entropy {last:.3g} is under its floor {floor:.3g}: answers are becoming all alike"


def _open_ended_entropy(run: RunRecord) -> Values:
    """Entropy where the guard watches it: an environment answer has one right form, hence none."""
    entropy = run.series("policy/entropy")
    if number(run.config.get("mix_env_ratio")) >= 1:
        return np.full_like(entropy, math.nan)
    if run.config.get("backend") == "trl":  # P and A take turns there
        return np.where(np.isfinite(run.series("reward/P")), entropy, math.nan)
    return entropy


def _kl_heavy(run: RunRecord) -> str | None:
    share, steps = kl_share(run), len(run.series("loss/kl"))
    if share is None or share <= KL_SHARE_LIMIT or steps < WINDOW:
        return None
    return f"KL is {share:.0%} of the loss: the penalty outweighs the reward; lower --kl-coef"


def _wasted(run: RunRecord) -> list[str]:
    """What the limits on shares of groups and answers say."""
    last = {metric: _last_mean(run.series(metric)) for metric in _LIMITS}
    return [
        f"{share:.0%} of the {_LIMITS[metric][1]}"
        for metric, share in last.items()
        if share is not None and share > _LIMITS[metric][0]
    ]
