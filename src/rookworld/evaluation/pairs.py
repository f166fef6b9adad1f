"""Matches as pairs of games: what their scores are worth, and when enough has been played.

The two games of a pair share an opening and are not independent, so the pair is the observation: it
scores 0, ¼, ½, ¾ or 1 (the pentanomial). Normalised Elo measures a score by its spread in a game,
so it does not shrink as draws become frequent.

The sequential test compares two Elo differences by the likelihood ratio of the counts, each at the
distribution nearest to what was seen that has the score of its Elo (Van den Bergh's test). The law:
stopped at the bounds of Wald it errs as often as `alpha` and `beta` say, and more rarely where it
is looked at so seldom that the ratio leaps far beyond them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

from rookworld.evaluation.statistics import Z95, Estimate, Values
from rookworld.runtime.config import require

SCORES = np.array([0.0, 0.25, 0.5, 0.75, 1.0])
"""What a pair can score a game."""
NORMALISED = 800 / math.log(10)
"""Elo of a score of one standard deviation a game, for small differences."""
_UNSEEN = 1e-3
"""Count of an outcome that did not occur, so that none is held to be impossible."""
_HALVINGS = 45


def pair_counts(pairs: Values) -> NDArray[np.int64]:
    """How many pairs scored 0, ¼, ½, ¾ and 1."""
    return np.bincount(np.rint(4 * pairs).astype(np.int64), minlength=len(SCORES))


def normalised_elo(pairs: Values) -> Estimate | None:
    """The score above a half in standard deviations of a game; None where none is seen."""
    deviation = float(pairs.std(ddof=1)) if pairs.size > 1 else 0.0
    if not deviation:
        return None
    # a game has twice the variance of the mean of two
    value = NORMALISED * (float(pairs.mean()) - 0.5) / (math.sqrt(2) * deviation)
    half = NORMALISED * Z95 / math.sqrt(2 * pairs.size)
    return Estimate(value, 2 * pairs.size, value - half, value + half)


def superiority(pairs: Values) -> float:
    """Likelihood that the first player is the stronger one (LOS)."""
    lead = float(pairs.mean()) - 0.5
    error = float(pairs.std(ddof=1)) / math.sqrt(pairs.size) if pairs.size > 1 else 0.0
    if not error:
        return 0.5 + 0.5 * float(np.sign(lead))
    return NormalDist().cdf(lead / error)


def elo_score(elo: float) -> float:
    """The score that an Elo difference stands for."""
    return 1 / (1 + 10 ** (-elo / 400))


@dataclass(frozen=True)
class SequentialTest:
    """Whether the difference is `low` or `high` Elo, decided as soon as the games allow."""

    low: float
    high: float
    alpha: float = 0.05
    """How often `high` is accepted where `low` is true."""
    beta: float = 0.05
    """How often `low` is accepted where `high` is true."""

    def __post_init__(self) -> None:
        require(self.low < self.high, f"sprt {self.low} {self.high}: the first must be lower")
        for name in ("alpha", "beta"):
            value = getattr(self, name)
            require(0 < value < 0.5, f"{name} is {value}: give more than 0 and less than 0.5")

    @property
    def bounds(self) -> tuple[float, float]:
        """Where the log-likelihood ratio accepts `low`, and where `high`."""
        return math.log(self.beta / (1 - self.alpha)), math.log((1 - self.beta) / self.alpha)

    def ratio(self, counts: NDArray[np.int64]) -> NDArray[np.float64]:
        """The log-likelihood ratio of `high` to `low`, for counts [..., 5]."""
        return likelihood(counts, elo_score(self.high)) - likelihood(counts, elo_score(self.low))

    def accepted(self, counts: NDArray[np.int64]) -> float | None:
        """The Elo difference that is accepted; None while neither is."""
        ratio = float(self.ratio(counts))
        lowest, highest = self.bounds
        return self.low if ratio <= lowest else self.high if ratio >= highest else None


def likelihood(counts: NDArray[np.int64], score: float) -> NDArray[np.float64]:
    """Log-likelihood of counts [..., 5] where the mean score is known, up to a constant.

    Of all distributions with that mean the likeliest has p_i = share_i / (1 + t (score_i - mean));
    t is the one at which they sum to 1.
    """
    seen = np.maximum(counts.astype(np.float64), _UNSEEN)
    shares = seen / seen.sum(-1, keepdims=True)
    away = SCORES - score
    low = np.full(shares.shape[:-1], -1 / away.max())
    high = np.full(shares.shape[:-1], -1 / away.min())
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        falling = (shares * away / (1 + middle[..., None] * away)).sum(-1)
        low, high = np.where(falling > 0, middle, low), np.where(falling > 0, high, middle)
    weights: NDArray[np.float64] = np.log1p(((low + high) / 2)[..., None] * away)
    found: NDArray[np.float64] = -(seen * weights).sum(-1)
    return found
