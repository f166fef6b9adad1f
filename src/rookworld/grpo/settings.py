"""How GRPO is computed: settings that the functions of this room read. No torch here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from rookworld.runtime.bounds import Count, FromZero, Positive, PositiveShare, Share, Whole
from rookworld.runtime.config import Section, require

KLType = Literal["forward", "reverse", "symmetric", "k2", "k3", "k1_reward"]
Credit = Literal["auto", "answer", "fields", "outlook", "choices"]
TOKEN_LOSSES = ("token", "cispo")
"""Losses that are a mean over all tokens of a step."""


@dataclass(frozen=True, kw_only=True)
class LossSettings(Section):
    """The policy loss and its trust region."""

    loss: Literal["token", "grpo", "dr_grpo", "gspo", "cispo"] = "token"
    """Policy loss (docs/training.md); change it to compare with a paper's."""
    clip_range: Positive = 0.2
    """Trust region of the ratio, below 1 and, without --clip-range-high, above. Narrow it when
    several updates a batch make training unstable; gspo needs about 3e-4."""
    clip_range_high: Positive | None = None
    """Trust region above 1; default: --clip-range, or 0.28 where that is left at 0.2 (DAPO). Raise
    it when entropy falls too fast."""
    entropy_coef: FromZero = 0.0
    """Weight of the entropy bonus; 0.005 or so when answers become all alike."""

    @property
    def clip_high(self) -> float:
        if self.clip_range_high is not None:
            return self.clip_range_high
        return 0.28 if self.clip_range == LossSettings.clip_range else self.clip_range


@dataclass(frozen=True, kw_only=True)
class KLSettings(Section):
    """How strongly the policy is held to the reference."""

    kl_coef: FromZero = 0.02
    """Weight of the KL to the reference (where it starts, with --adaptive-kl). Raise it when what
    the model knew is lost, lower it when rewards do not rise."""
    kl_type: KLType = "forward"
    """forward: Σ π (log π − log ref), reverse: Σ ref (log ref − log π), symmetric: their mean, all
    exact; k2: ½x² of the sampled token; k3: for comparison; k1_reward: x taken off the reward."""
    adaptive_kl: bool = False
    """Raise the weight ×1.5 above 1.5·target; lower it below target/1.5, once that was reached. For
    runs so long that no fixed weight suits all of them."""
    target_kl: Positive = 0.05
    """KL that --adaptive-kl aims at, nats per token."""
    kl_coef_min: FromZero | None = None
    """Least adaptive weight; default: a tenth of --kl-coef."""
    kl_coef_max: FromZero = 1.0
    """Greatest adaptive weight."""
    kl_warmup_steps: Whole = 0
    """Steps during which the weight is multiplied by --kl-warmup-factor: room for the first steps
    of a model that has to learn its format."""
    kl_warmup_factor: FromZero = 0.0
    """That factor; 0: no penalty during the warm-up."""
    kl_collect_cap: FromZero = 0.0
    """Leave out samples whose mean KL to the reference is above this, when a few strange answers
    spoil a run; 0: none."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            not self.adaptive_kl or self.kl_coef > 0 or bool(self.kl_coef_min),
            "--adaptive-kl with --kl-coef 0: nothing times 1.5 is nothing; give it a --kl-coef",
        )
        require(
            self.kl_coef_min is None or self.kl_coef_min <= self.kl_coef_max,
            f"--kl-coef-min {self.kl_coef_min} is above --kl-coef-max {self.kl_coef_max}",
        )


@dataclass(frozen=True, kw_only=True)
class AdvantageSettings(Section):
    """How rewards become advantages."""

    baseline_type: Literal["group_mean", "rloo", "ema", "adaptive"] = "group_mean"
    """What is subtracted from a reward: the group's mean, that of the others, a running mean of the
    task, or a mixture; change it where groups are small."""
    advantage_scale: Literal["none", "group", "batch"] = "batch"
    """What the difference is divided by: nothing, the group's or the step's deviation. `group` is
    the GRPO paper's, `none` Dr. GRPO's."""
    advantage_std_floor: FromZero = 0.02
    """Least deviation to divide by: noise must not become gradient. Raise it when groups are nearly
    all alike."""
    advantage_clip: FromZero = 5.0
    """Advantages are clipped to ± this; 0: not. Lower it when single answers cause spikes."""
    credit: Credit = "fields"
    """What a token is paid for: the whole answer; `fields`, what comes after the move or field
    before it (the same mean gradient, less noise); `outlook`, what it changes itself; `choices`,
    the same, and where a move is listed every move is paid, not only the one that was drawn;
    `auto`, by choices where tokenizer, loss and KL allow it, else by fields."""
    gae: bool = False
    """Token-level advantages by a value head, in place of the baseline: to compare with PPO."""
    gamma: Share = 1.0
    """Discount along tokens (--gae)."""
    gae_lambda: Share = 0.95
    """GAE's λ: nearer to 1 trusts rewards, nearer to 0 the value head."""


@dataclass(frozen=True, kw_only=True)
class GuardSettings(Section):
    """When a run is restored or given up."""

    kl_divergence_threshold: FromZero = 1.0
    """KL, nats per token, at 90 % of which the guard restores the last good state; 0: never. Raise
    it when a run that learns well is restored."""
    adaptive_threshold: bool = False
    """Let that threshold follow training (3 × running median, at most 4 × the set value)."""
    recovery_lr_factor: PositiveShare = 0.5
    """Learning-rate factor of every recovery, for good; smaller when one recovery is not enough."""
    max_consecutive_nans: Count = 5
    """Non-finite steps in a row that lead to a recovery."""
    max_recoveries: Whole = 3
    """Recoveries before the run is given up with exit code 3."""
