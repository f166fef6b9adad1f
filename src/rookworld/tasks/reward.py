"""What an answer is worth: part scores in 0 … 1, weights, and the shapings that combine them.

The law: with the default rules gold earns exactly 1.0; an answer without right content at most
`FORMAT_ONLY`; a mistake as best move, or a transition with anything wrong, at most `ONE_WRONG`
whatever else is right; a right best move with wrong company at most 0.6. The limits are kept by
factors and weights, never by a ceiling: a better best move always earns more. A guess that is right
is content, and is paid; `docs/rewards.md` says how often that is.
Everything that enters a reward is a part; nothing here looks at text, at a board or at an engine.
Left out on purpose: advantages and normalisation by group, which belong to the learner.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Annotated, Final, Literal, get_args

from rookworld.runtime.bounds import LARGE, Bounds, PositiveShare, check_bounds
from rookworld.runtime.config import Section, require
from rookworld.runtime.errors import ConfigError
from rookworld.tasks.notation import GRID_CP, grid_index, is_mate

Shaping = Literal["continuous", "graduated", "linear", "binary"]

FORMAT_ONLY: Final = 0.2
"""The most that an answer can earn without any right content."""

ONE_WRONG: Final = 0.5
"""The most that an answer can earn whose best move is a mistake, or one field of whose transition
is wrong."""

MISTAKE: Final = 0.05
"""Win probability from which a move that loses it is a mistake."""

FORCED_BEST: Final = 1 / 6
"""Share of `best` that B earns by itself where every legal move has to be listed: what the default
weights leave of `FORMAT_ONLY`."""

EVAL_SCALE: Final = (0.02, 0.15)
"""Bounds of the win-probability error at which an evaluation is worth nothing."""

EVAL_STEP: Final = 0.05
"""Least cost of one grid step; where win probability is flat (mates, +20) it is the whole cost."""

SQUARE_SCALE: Final = 0.35
"""Wrong squares at which board similarity has fallen to 1/e, before the copy is subtracted."""

FIELD_SCALE: Final = 1.0
"""Wrong fields behind the board (side, castling, …) at which similarity has fallen to 1/e."""

LINEAR_WRONG: Final = 0.4
"""`linear`: where the straight line of a wrong board begins; the true one is worth 1."""

_BASE = frozenset({"format", "legal"})
_LEVELS = (FORMAT_ONLY, 0.4, 0.6, 0.8)  # by the number of content fields that are right


P_WEIGHTS: Final[dict[str, float]] = {
    "format": 0.10,  # the answer can be read
    "legal": 0.06,  # share of the expected number of moves that is listed and legal
    "best": 0.24,  # quality of B, by the win probability it loses
    "candidates": 0.05,  # how many of the true best moves are listed, beyond chance
    "evaluations": 0.07,  # accuracy of the evaluations of the true best moves
    "whole": 0.48,  # best × evaluations, so that a right B with junk beside it stays cheap
}
A_WEIGHTS: Final[Mapping[str, float]] = {
    "format": 0.08,  # the answer can be read
    "board": 0.36,  # similarity of the new FEN to the truth, against a copy of the input
    "flags": 0.04,  # terminated and truncated, half each
    "reward": 0.03,  # the reward value
    "whole": 0.49,  # board × (both flags and the reward value right)
}
"""Relative weights: a reward is divided by the sum of its task's."""

# the worst answer that can be read earns 0: what cannot be must not earn more
Penalty = Annotated[float, Bounds(-LARGE, 0)]


@dataclass(frozen=True, kw_only=True)
class RewardRules(Section):
    """What an answer is worth."""

    reward_shaping: Shaping = "continuous"
    """How the parts of an answer become a reward (docs/rewards.md); `graduated` or `binary` where
    partial credit is exploited."""
    p_malformed: Penalty = -0.3
    """Reward of an analysis that cannot be read; lower it when the format is not learnt."""
    a_malformed: Penalty = -0.3
    """Reward of an environment answer that cannot be read."""
    p_weights: tuple[tuple[str, float], ...] = tuple(P_WEIGHTS.items())
    """Weights of the parts of an analysis, as NAME WEIGHT …, of format, legal, best, candidates,
    evaluations and whole; parts not named keep theirs. Raise the part that should improve."""
    p_best_scale: PositiveShare = 0.035
    """Win probability that the best move may lose until its quality is 1/e; smaller is stricter,
    for models that already play well."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.reward_shaping not in get_args(Shaping):
            known = ", ".join(get_args(Shaping))
            raise ConfigError(
                f"reward shaping {self.reward_shaping!r} is unknown; choose one of {known}"
            )
        for name, weight in dict(self.p_weights).items():
            require(name in P_WEIGHTS, f"--p-weights {name}: not one of {', '.join(P_WEIGHTS)}")
            check_bounds(f"p_weights {name}", weight, Bounds(0, LARGE))
        # written out, so that config.json holds all of them
        object.__setattr__(self, "p_weights", tuple((P_WEIGHTS | dict(self.p_weights)).items()))
        require(
            sum(self.part_weights.values()) > 0, "--p-weights: all are 0; give one of them more"
        )

    @cached_property
    def part_weights(self) -> dict[str, float]:
        """Weight of each part of an analysis."""
        return dict(self.p_weights)


def win_percent(cp: int) -> float:
    """Winning chances of the side to move, 0 … 100; the formula is pinned."""
    cp = min(max(cp, -20_000), 20_000)  # far beyond the flat ends, and exp() cannot overflow
    return 50 + 50 * (2 / (1 + math.exp(-0.00368208 * cp)) - 1)


_GRID_WIN = tuple(win_percent(cp) / 100 for cp in GRID_CP)


def move_quality(loss: float, rules: RewardRules) -> float:
    """Worth of a move that loses `loss` of win probability (0 … 1) against the best one."""
    if rules.reward_shaping == "linear":
        return max(0.0, 1 - loss / (2 * rules.p_best_scale))
    return math.exp(-loss / rules.p_best_scale)


def evaluation_accuracy(said_cp: int, true_cp: int) -> float:
    """Linear in win probability, on the grid; 0 for what answering 0.0 everywhere would earn.

    Both sides are rounded to the grid first, so a raw and a rounded gold answer both earn 1.
    Mates have equal win probability and are told apart by sign and by distance in the grid; one
    announced where there is none earns nothing.
    """
    said, true = grid_index(said_cp), grid_index(true_cp)
    if said == true:
        return 1.0
    if is_mate(GRID_CP[said]) != is_mate(GRID_CP[true]):
        return 0.0
    scale = min(max(abs(_GRID_WIN[true] - 0.5), EVAL_SCALE[0]), EVAL_SCALE[1])
    error = abs(_GRID_WIN[said] - _GRID_WIN[true]) / scale
    return max(0.0, 1 - max(error, EVAL_STEP * abs(said - true)))


@lru_cache(maxsize=4096)
def flat_accuracy(true_cp: tuple[int, ...]) -> float:
    """The most that one evaluation for every move can be right."""
    places = sorted(map(grid_index, true_cp))
    return max(
        mean_accuracy((GRID_CP[one], cp) for cp in true_cp)
        for one in range(places[0], places[-1] + 1)
    )


def mean_accuracy(pairs: Iterable[tuple[int, int]]) -> float:
    """Mean accuracy of evaluations, said and true."""
    found = [evaluation_accuracy(said, true) for said, true in pairs]
    return math.fsum(found) / len(found)


def beyond_flat(accuracy: float, true_cp: tuple[int, ...]) -> float:
    """What an accuracy shows beyond the best single evaluation for every move; exact ones are 1.

    Where that one is exact itself, as with a single move, nothing short of it shows anything.
    """
    flat = flat_accuracy(true_cp)
    return 1.0 if accuracy == 1.0 else max(0.0, (accuracy - flat) / (1 - flat)) if flat < 1 else 0.0


def board_similarity(wrong: int, copied: int, fields_wrong: int, shaping: Shaping) -> float:
    """1 for the true FEN, 0 for anything no nearer to it than the input is.

    `wrong` squares differ from the truth, `copied` would differ in a copy of the input, and
    `fields_wrong` of the five fields behind the board differ.
    """
    if wrong and wrong >= copied:
        return 0.0
    if shaping == "linear":
        if not wrong and not fields_wrong:
            return 1.0
        squares = 1 - wrong / copied if wrong else 1.0
        return LINEAR_WRONG * squares * (1 - fields_wrong / 5)
    floor = math.exp(-copied / SQUARE_SCALE) if wrong else 0.0
    squares = (math.exp(-wrong / SQUARE_SCALE) - floor) / (1 - floor)
    return squares * math.exp(-fields_wrong / FIELD_SCALE)


def combine(
    parts: Mapping[str, float],
    weights: Mapping[str, float],
    shaping: Shaping,
    *,
    right: int,
    progress: float,
) -> float:
    """The reward of a readable answer, `right` of whose three content fields are right.

    `progress` (0 … 1) ramps the content in while the scale stays that of a finished ramp, so the
    hack table holds at every moment of the warm-up.
    """
    progress = min(max(progress, 0.0), 1.0)
    exact = all(value == 1.0 for value in parts.values())
    if shaping == "binary":
        return progress if exact else 0.0
    if shaping == "graduated":
        if parts.get("legal", 1.0) == 0.0:
            return 0.0
        level = 1.0 if exact else _LEVELS[right]
        return (1 - progress) * FORMAT_ONLY + progress * level
    paid = (
        weight * parts[name] * (1.0 if name in _BASE else progress)
        for name, weight in weights.items()
    )
    return math.fsum(paid) / math.fsum(weights.values())


class RunningNorm:
    """Rewards on a steady scale: running mean and deviation with momentum.

    The first batch sets both; later ones move them by 1 − momentum. Plain floats in and out, so a
    checkpoint can keep it.
    """

    def __init__(self, momentum: float = 0.99) -> None:
        if not 0 <= momentum < 1:
            raise ConfigError(f"reward normalisation momentum is {momentum}; give 0 ≤ momentum < 1")
        self.momentum = momentum
        self.mean = 0.0
        self.variance = 1.0
        self.batches = 0

    def update(self, rewards: Sequence[float]) -> None:
        """Take a batch into the running mean and deviation."""
        if not rewards:
            return
        mean = math.fsum(rewards) / len(rewards)
        variance = math.fsum((reward - mean) ** 2 for reward in rewards) / len(rewards)
        keep = self.momentum if self.batches else 0.0
        self.mean = keep * self.mean + (1 - keep) * mean
        self.variance = keep * self.variance + (1 - keep) * variance
        self.batches += 1

    def normalise(self, rewards: Sequence[float]) -> list[float]:
        """Rewards less the running mean, over the running deviation (at least 0.01)."""
        return [(reward - self.mean) / self.deviation for reward in rewards]

    @property
    def deviation(self) -> float:
        return max(math.sqrt(self.variance), 0.01)

    def state_dict(self) -> dict[str, float]:
        """Everything a resumed run needs."""
        return {"mean": self.mean, "variance": self.variance, "batches": float(self.batches)}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Go on from `state_dict()`."""
        self.mean, self.variance = state["mean"], state["variance"]
        self.batches = int(state["batches"])
