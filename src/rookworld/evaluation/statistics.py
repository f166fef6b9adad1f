"""Numbers with their doubt: shares, means, paired differences, Elo, puzzle ratings, pass@k.

The law: an estimate depends on its metric and its values alone. Resampling draws from a fixed seed,
and the order of the values does not matter. Every interval is 95 %. A share whose values are all 0
or 1 gets Wilson's interval, which stays honest at 0 % and 100 %; one whose values lie between, and
what is no share by its unit, gets a bootstrap of the mean.

Left out on purpose: corrections for looking at many metrics at once; whoever compares thirty of
them should expect one or two p-values below 0.05 by chance.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rookworld.runtime.metric_info import look_up
from rookworld.tasks.registry import all_metrics

Values = NDArray[np.float64]

Z95 = 1.959963984540054
RESAMPLES = 1_000
SIGN_FLIPS = 9_999
RATINGS = np.arange(0.0, 4_000.5, 1.0)
"""Ratings that a fit may find; all puzzles solved, or none, ends at an edge."""
ELO_LIMIT = 1_200.0
"""Elo differences end here: beyond it a score says less than one point in a thousand games."""
_CHI2_95 = Z95**2
_SEED = 20_250_120
_BLOCK = 1_000_000


@dataclass(frozen=True, slots=True)
class Estimate:
    """A value, how many observations it comes from, and its 95 % interval."""

    value: float
    n: int
    low: float
    high: float

    def to_json(self) -> dict[str, float | int]:
        """The object that `eval.jsonl` and `--json` hold for a metric."""
        return {"value": self.value, "n": self.n, "low": self.low, "high": self.high}


@dataclass(frozen=True, slots=True)
class PairedDifference:
    """Mean of after - before on the same rows, its 95 % interval, and a two-sided p-value."""

    difference: float
    low: float
    high: float
    p: float
    n: int

    def to_json(self) -> dict[str, float | int]:
        """The object that `--json` holds for a metric of two models."""
        return {
            "difference": self.difference,
            "low": self.low,
            "high": self.high,
            "p": self.p,
            "n": self.n,
        }


def known(values: Iterable[float | None]) -> Values:
    """The values as an array, NaN where a metric does not apply."""
    return np.array([math.nan if value is None else value for value in values], dtype=np.float64)


def estimate(values: Values, *, of_share: bool = True) -> Estimate | None:
    """Mean of the values that are not NaN with its interval; None if there are none."""
    values = values[~np.isnan(values)]
    if not values.size:
        return None
    if of_share and np.isin(values, (0.0, 1.0)).all():
        return share(int(values.sum()), values.size)
    return mean_estimate(values)


def mean_estimate(values: Values) -> Estimate:
    """A mean of counts; never read as a share, even if all of them are 0 or 1."""
    return Estimate(float(values.mean()), values.size, *bootstrap_interval(values))


def estimates(rows: Mapping[str, Values]) -> dict[str, Estimate]:
    """One estimate per metric; metrics without a value are left out."""
    table = all_metrics()
    found = {
        name: estimate(values, of_share=look_up(name, table).is_share)
        for name, values in rows.items()
    }
    return {name: one for name, one in found.items() if one is not None}


def share(successes: float, n: int) -> Estimate:
    """A share of `n` with Wilson's interval."""
    value = successes / n
    low, high = wilson_interval(value, n)
    return Estimate(value, n, low, high)


def wilson_interval(value: float, n: float) -> tuple[float, float]:
    """Wilson's interval of a share of `n` independent observations."""
    weight = _CHI2_95 / n
    centre = (value + weight / 2) / (1 + weight)
    half = Z95 / (1 + weight) * math.sqrt(value * (1 - value) / n + weight / (4 * n))
    # rounding may miss the value itself by 1e-17 at 0 and 1
    return min(max(centre - half, 0.0), value), max(min(centre + half, 1.0), value)


def bootstrap_interval(values: Values) -> tuple[float, float]:
    """Percentile interval of the mean over resampled rows."""
    # Sorted, so that the same values in another order draw the same resamples.
    values = np.sort(values)
    rng = np.random.default_rng(_SEED)
    means = np.empty(RESAMPLES)
    block = max(1, _BLOCK // values.size)
    for start in range(0, RESAMPLES, block):
        count = min(block, RESAMPLES - start)
        drawn = rng.integers(values.size, size=(count, values.size))
        means[start : start + count] = values[drawn].mean(axis=1)
    low, high = np.quantile(means, (0.025, 0.975))
    return float(low), float(high)


def paired_difference(before: Values, after: Values) -> PairedDifference | None:
    """Compare two models on the rows where both have a value; None if there are none.

    p is exact (McNemar) for shares, otherwise from random sign flips of the differences.
    """
    both = ~(np.isnan(before) | np.isnan(after))
    differences = after[both] - before[both]
    if not differences.size:
        return None
    low, high = bootstrap_interval(differences)
    if np.isin(differences, (-1.0, 0.0, 1.0)).all():
        p = _sign_test(int((differences > 0).sum()), int((differences < 0).sum()))
    else:
        p = _sign_flip_test(differences)
    return PairedDifference(float(differences.mean()), low, high, p, differences.size)


def _sign_test(gains: int, losses: int) -> float:
    """Two-sided binomial probability of a split as uneven as this, at even odds."""
    n, fewer = gains + losses, min(gains, losses)
    tail = math.fsum(math.exp(_log_choose(n, k) - n * math.log(2)) for k in range(fewer + 1))
    return min(1.0, 2 * tail)


def _log_choose(n: int, k: int) -> float:
    return math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1)


def _sign_flip_test(differences: Values) -> float:
    differences = np.sort(differences[differences != 0])
    if not differences.size:
        return 1.0
    rng = np.random.default_rng(_SEED)
    observed = abs(differences.sum()) * (1 - 1e-12)
    extreme = 0
    block = max(1, _BLOCK // differences.size)
    for start in range(0, SIGN_FLIPS, block):
        count = min(block, SIGN_FLIPS - start)
        signs = rng.integers(2, size=(count, differences.size)) * 2 - 1
        extreme += int((abs(signs @ differences) >= observed).sum())
    return (extreme + 1) / (SIGN_FLIPS + 1)


def match_score(pairs: Values) -> Estimate:
    """Score per game of a match from the mean scores of its pairs of games.

    The two games of a pair share an opening and are not independent, so the pair is the
    observation; Wilson's interval with the number of games that would have the same variance.
    """
    score, games = float(pairs.mean()), 2 * pairs.size
    variance = float(pairs.var(ddof=1)) / pairs.size if pairs.size > 1 else 0.0
    effective = score * (1 - score) / variance if variance else games
    low, high = wilson_interval(score, min(effective, 4.0 * games))
    return Estimate(score, games, low, high)


def elo_difference(score: Estimate) -> Estimate:
    """The Elo difference that a score stands for, with its interval."""
    value, low, high = (_elo(part) for part in (score.value, score.low, score.high))
    return Estimate(value, score.n, low, high)


def _elo(score: float) -> float:
    if score <= 0 or score >= 1:
        return math.copysign(ELO_LIMIT, score - 0.5)
    elo = 400 * math.log10(score / (1 - score))
    return max(-ELO_LIMIT, min(ELO_LIMIT, elo))


def rating(ratings: Values, solved: Values) -> Estimate:
    """The rating at which these puzzles would be solved like this, by maximum likelihood.

    A puzzle of rating r is solved with probability 1 / (1 + 10^((r - rating) / 400)); the interval
    holds every rating whose likelihood ratio to the best is not refused at 5 %.
    """
    # log(1 + e^±x) without overflow, for every candidate rating [R, 1] and puzzle [1, n]
    odds = (RATINGS[:, None] - ratings[None, :]) * (math.log(10) / 400)
    likelihood = -np.logaddexp(0.0, np.where(solved[None, :] > 0.5, -odds, odds)).sum(axis=1)
    likely = RATINGS[2 * (likelihood.max() - likelihood) <= _CHI2_95]
    best = float(RATINGS[int(likelihood.argmax())])
    return Estimate(best, ratings.size, float(likely[0]), float(likely[-1]))


def pass_at_k(n: int, correct: int, k: int) -> float:
    """Unbiased chance that one of `k` answers is right, when `correct` of `n` sampled ones were."""
    if n - correct < k:
        return 1.0
    return 1.0 - math.comb(n - correct, k) / math.comb(n, k)


# --- courses over the steps of a run ---


def moving_mean(values: Values, window: int) -> Values:
    """Mean of each value and the up to `window - 1` before it, what is not finite left out."""
    padded = np.concatenate([np.full(window, math.nan), values])
    windows = np.lib.stride_tricks.sliding_window_view(padded, window)[1:]
    finite = np.isfinite(windows)
    total, count = np.where(finite, windows, 0.0).sum(axis=1), finite.sum(axis=1)
    return np.where(count > 0, total / np.maximum(count, 1), math.nan)


def slope(x: Values, y: Values) -> float:
    """Least-squares slope of y over x; 0 where either does not change."""
    centred = x - x.mean()
    spread = float(centred @ centred)
    # less the first value: rounding would give a constant course a slope
    return float(centred @ (y - y[0])) / spread if spread else 0.0
