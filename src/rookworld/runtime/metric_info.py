"""What every metric is called, counts in, and should do: the one table that all readers ask.

Law: a metric is in a table here, or in its task's `shown_metrics`, if and only if docs/metrics.md
or docs/evaluation.md explains it. A key that ends in `/` stands for a family (`match/ends/<how>`).
`tasks.registry.metric_info` looks in all of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

HELD_OUT_REWARDS = ("reward/greedy", "reward/sampled")
"""The held-out reward by which evaluations are compared: the first that was measured."""


class Unit(NamedTuple):
    """How numbers of a kind are written."""

    places: int
    suffix: str = ""
    """What stands behind a number; ` %` also says that 1 is written as 100."""


UNITS = {
    "share": Unit(1, " %"),
    "win probability": Unit(1, " %"),
    "reward": Unit(3),
    "reward error": Unit(4),
    "pawns": Unit(2),
    "plies": Unit(1),
    "Elo": Unit(0),
    "rating": Unit(0),
    "nats": Unit(4),
    "ratio": Unit(2),
    "rate": Unit(7),
    "tokens": Unit(1),
    "count": Unit(0),
    "s": Unit(2, " s"),
    "MB": Unit(0, " MB"),
}


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric; a share of which more is better if nothing else is said."""

    label: str
    """What people read: whole, and no other metric's."""
    unit: str = "share"
    better: Literal["up", "down", "none"] = "up"
    """Which way it improves; `none` where a change says nothing."""
    headline: bool = False
    """Whether it is among the few that a short table has."""

    @property
    def is_share(self) -> bool:
        """Whether it counts successes, so that its interval is that of a share."""
        return self.unit == "share"

    @property
    def in_percent(self) -> bool:
        return UNITS[self.unit].suffix == " %"

    def number(self, value: float, sign: str = "") -> str:
        """A value without its unit; `sign` is "+" where one always stands."""
        return f"{100 * value if self.in_percent else value:{sign}.{UNITS[self.unit].places}f}"

    def text(self, value: float) -> str:
        """A value with its unit."""
        return self.number(value) + UNITS[self.unit].suffix


def look_up(name: str, table: Mapping[str, Metric]) -> Metric:
    """A metric by its name or its family's; an unknown one is a share."""
    if name in table:
        return table[name]
    family = next((key for key in table if key.endswith("/") and name.startswith(key)), "")
    rest = name.removeprefix(family).replace("_", " ")
    if not family:
        return Metric(rest)
    return Metric(f"{table[family].label} {rest}", table[family].unit, table[family].better)


STEP_METRICS = {
    "reward/mean": Metric("Reward", unit="reward"),
    "reward/std": Metric("Deviation of rewards", unit="reward", better="none"),
    "reward/max": Metric("Best reward", unit="reward"),
    "reward/at_full_weight": Metric("Reward at full weight", unit="reward"),
    "reward/warmup": Metric("Warm-up of rewards", better="none"),
    "reward/flat_groups": Metric("Groups without spread", better="down"),
    "reward/invalid_groups": Metric("Groups without a reward", better="down"),
    "advantage/mean": Metric("Mean advantage", unit="ratio", better="none"),
    "value/explained_variance": Metric("Explained by the value head", unit="ratio"),
    "kl/exact": Metric("KL", unit="nats", better="none"),
    "kl/coef": Metric("Weight of the KL", unit="ratio", better="none"),
    "kl/left_out": Metric("Answers masked for their KL", better="down"),
    "policy/entropy": Metric("Entropy", unit="nats", better="none"),
    "policy/ratio_max": Metric("Largest ratio", unit="ratio", better="none"),
    "policy/clipped": Metric("Tokens clipped", better="none"),
    "sampler/logp_gap": Metric("Sampler against trainer", unit="nats", better="down"),
    "loss/total": Metric("Loss", unit="nats", better="none"),
    "loss/policy": Metric("Policy loss", unit="nats", better="none"),
    "loss/kl": Metric("KL term", unit="nats", better="none"),
    "distill/loss": Metric("Self-distillation", unit="nats", better="down"),
    "loss/value": Metric("Value loss", unit="nats", better="down"),
    "distill/coef": Metric("Weight of self-distillation", unit="ratio", better="none"),
    "grad/norm": Metric("Gradient norm", unit="ratio", better="none"),
    "lr": Metric("Learning rate", unit="rate", better="none"),
    "tokens/mean_length": Metric("Tokens an answer", unit="tokens", better="none"),
    "tokens/truncated": Metric("Answers cut off", better="down"),
    "guide/share": Metric("Groups guided", better="down"),
    "guide/prob": Metric("Probability of a guide's token"),
    "guide/solved/": Metric("Prompts solved,"),
    "time/step_s": Metric("Step", unit="s", better="down"),
    "time/sample_s": Metric("Sampling", unit="s", better="down"),
    "time/score_s": Metric("Scoring", unit="s", better="down"),
    "time/update_s": Metric("Update", unit="s", better="down"),
    "mem/peak_mb": Metric("Peak memory", unit="MB", better="down"),
    "guard/skipped": Metric("Updates skipped", unit="count", better="down"),
    "guard/recoveries": Metric("States restored", unit="count", better="down"),
    "reward/sampled": Metric("Reward of sampled answers", unit="reward", headline=True),
    "reward/greedy": Metric("Reward of greedy answers", unit="reward", headline=True),
}
"""Of a step and of its rewards; those by task are made from the registry."""
SUITE_METRICS = {
    "mate1/accuracy": Metric("Mate in one", headline=True),
    "mate1/strict": Metric("Mate in one, the expected move"),
    "puzzles/solved": Metric("Puzzles solved"),
    "puzzles/rating": Metric("Puzzle rating", unit="rating"),
    "selfplay/legal_plies": Metric("Legal plies in self-play", unit="plies"),
    "selfplay/illegal": Metric("Illegal moves in self-play", better="down"),
    "selfplay/illegal_published": Metric("1 / legal plies", better="down"),
    "world/plies": Metric("Plies in its own world", unit="plies"),
    "world/faithful": Metric("Walks that follow the rules"),
    "world/exact": Metric("Predictions right in its own world"),
    "match/score": Metric("Score of the match"),
    "match/elo": Metric("Elo difference", unit="Elo"),
    "match/normalised_elo": Metric("Normalised Elo difference", unit="Elo"),
    "match/replaced": Metric("Moves of the match that replace an illegal one", better="down"),
    "match/forfeits": Metric("Games lost by an illegal move", better="down"),
    "puzzles/solved/": Metric("Puzzles solved,"),
    "selfplay/ends/": Metric("Self-play ends:", better="none"),
    "world/ends/": Metric("Walk ends:", better="none"),
    "match/ends/": Metric("Match ends:", better="none"),
    "passk/": Metric("One of k right, k ="),
}
"""Of the suites of an evaluation."""
