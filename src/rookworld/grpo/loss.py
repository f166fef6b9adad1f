"""Policy losses, and the terms beside them, as contributions per token.

Law: a loss here is a sum of contributions [N, T] already divided by what the *whole step* holds
(`StepTotals`, over all micro-batches and ranks), so the gradient is the same however a step is cut
between whole sequences. Where the mask is false a contribution is exactly zero, whatever stands
there. Left out: value clipping, dual clipping.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from rookworld.grpo.settings import LossSettings


@dataclass(frozen=True, kw_only=True)
class StepTotals:
    """What one update averages over, counted over all micro-batches and ranks."""

    tokens: int
    """Sampled tokens."""
    sequences: int
    """Sampled sequences."""
    max_tokens: int
    """Longest completion allowed: the constant of `dr_grpo`."""
    kl_tokens: int = 0
    """Tokens that the KL is averaged over; 0: the same."""

    def __post_init__(self) -> None:
        if min(self.tokens, self.sequences, self.max_tokens) < 1:
            raise ValueError(f"a step needs tokens and sequences to average over, got {self}")


@dataclass(frozen=True)
class Batch:
    """A micro-batch of whole sequences."""

    logp: Tensor
    """[N, T] log-probabilities of the sampled ids, with gradient."""
    old_logp: Tensor
    """[N, T] the same as recorded while sampling."""
    advantages: Tensor
    """[N] or, token by token, [N, T]."""
    mask: Tensor
    """[N, T] true on sampled tokens."""

    def live(self) -> Tensor:
        return self.mask.bool()

    def per_token(self) -> Tensor:
        """Advantages in the log-probs' dtype, broadcastable to [N, T]."""
        advantages = self.advantages.to(self.logp.dtype).detach()
        return advantages.unsqueeze(-1) if advantages.dim() == 1 else advantages

    def log_ratio(self) -> Tensor:
        """log π - log μ, 0 outside the mask."""
        return torch.where(self.live(), self.logp - self.old_logp.detach(), 0.0)

    def lengths(self) -> Tensor:
        """[N, 1] sampled tokens of each sequence, at least 1."""
        return self.live().sum(-1, keepdim=True).clamp_min(1)


PolicyLoss = Callable[[Batch, StepTotals, LossSettings], tuple[Tensor, Tensor]]
"""-> (contribution [N, T], true [N, T] where the trust region holds the token back)."""


def _clipped_surrogate(
    ratio: Tensor, batch: Batch, settings: LossSettings
) -> tuple[Tensor, Tensor]:
    """-min(wA, clip(w)A) and where the clip is what counts; zero and false outside the mask."""
    low, high = 1 - settings.clip_range, 1 + settings.clip_high
    advantages = batch.per_token()
    loss = -torch.minimum(ratio * advantages, ratio.clamp(low, high) * advantages)
    beyond = ((advantages > 0) & (ratio > high)) | ((advantages < 0) & (ratio < low))
    return torch.where(batch.live(), loss, 0.0), beyond.detach() & batch.live()


def token(batch: Batch, totals: StepTotals, settings: LossSettings) -> tuple[Tensor, Tensor]:
    """Clipped surrogate, mean over all tokens of the step."""
    loss, clipped = _clipped_surrogate(batch.log_ratio().exp(), batch, settings)
    return loss / totals.tokens, clipped


def grpo(batch: Batch, totals: StepTotals, settings: LossSettings) -> tuple[Tensor, Tensor]:
    """Clipped surrogate, mean over each sequence, then over sequences."""
    loss, clipped = _clipped_surrogate(batch.log_ratio().exp(), batch, settings)
    return loss / (batch.lengths() * totals.sequences), clipped


def dr_grpo(batch: Batch, totals: StepTotals, settings: LossSettings) -> tuple[Tensor, Tensor]:
    """Clipped surrogate over a constant, so that length does not change a token's weight."""
    loss, clipped = _clipped_surrogate(batch.log_ratio().exp(), batch, settings)
    return loss / (totals.sequences * totals.max_tokens), clipped


def gspo(batch: Batch, totals: StepTotals, settings: LossSettings) -> tuple[Tensor, Tensor]:
    """Clipped surrogate on the sequence's ratio (geometric mean of its tokens' ratios).

    GSPO-token (Zheng et al. 2025): sg[sequence's ratio] · π_t / sg[π_t]. Where all tokens have the
    advantage of their sequence that is GSPO; where they have their own, each token is paid its own.
    Sequence ratios stay much nearer to 1 than token ratios: the usual clip is 3e-4, not 0.2.
    """
    lengths, log_ratio = batch.lengths(), batch.log_ratio()
    sequence = (log_ratio.sum(-1, keepdim=True) / lengths).detach()
    ratio = (sequence + log_ratio - log_ratio.detach()).exp()
    loss, clipped = _clipped_surrogate(ratio, batch, settings)
    return loss / (lengths * totals.sequences), clipped


def cispo(batch: Batch, totals: StepTotals, settings: LossSettings) -> tuple[Tensor, Tensor]:
    """-sg[min(w, 1 + clip_high)] A log π: large weights are cut, no token loses its gradient.

    Only from above: a lower bound would raise the weight of tokens the policy has left behind.
    """
    ratio = batch.log_ratio().exp().detach()
    high = 1 + settings.clip_high
    loss = -ratio.clamp(max=high) * batch.per_token() * batch.logp
    return (
        torch.where(batch.live(), loss, 0.0) / totals.tokens,
        (ratio > high) & batch.live(),
    )


LOSSES: Mapping[str, PolicyLoss] = {
    "token": token,
    "grpo": grpo,
    "dr_grpo": dr_grpo,
    "gspo": gspo,
    "cispo": cispo,
}


def policy_loss(batch: Batch, totals: StepTotals, settings: LossSettings) -> tuple[Tensor, Tensor]:
    """The loss named in `settings`: (contribution [N, T], held back [N, T])."""
    return LOSSES[settings.loss](batch, totals, settings)


def token_mean(values: Tensor, mask: Tensor, totals: StepTotals) -> Tensor:
    """Contribution [N, T] of `values` to their mean over the step's tokens (entropy, value)."""
    return torch.where(mask.bool(), values, 0.0) / totals.tokens


def kl_mean(values: Tensor, mask: Tensor, totals: StepTotals) -> Tensor:
    """The same over all tokens that are held to the reference."""
    return torch.where(mask.bool(), values, 0.0) / (totals.kl_tokens or totals.tokens)


def value_loss(values: Tensor, returns: Tensor, mask: Tensor, totals: StepTotals) -> Tensor:
    """Contribution [N, T] of ½(v - return)², mean over the step's tokens."""
    return token_mean(0.5 * (values - returns.detach()).square(), mask, totals)


def entropy_loss(entropy: Tensor, mask: Tensor, totals: StepTotals) -> Tensor:
    """Contribution [N, T] of minus the mean entropy: times the coefficient, a bonus."""
    return -token_mean(entropy, mask, totals)


@dataclass(frozen=True)
class RatioStats:
    """What the trust region did; 0-d tensors without gradient that merge over micro-batches."""

    clipped: Tensor
    """Tokens held back (a count: add over micro-batches and ranks)."""
    tokens: Tensor
    """Sampled tokens (a count)."""
    ratio_max: Tensor
    """Largest w = π/μ (take the maximum)."""
    gap: Tensor
    """Σ |log π - log μ| (add); over `tokens` it is the sampler's distance from the trainer."""

    def merge(self, other: RatioStats) -> RatioStats:
        return RatioStats(
            self.clipped + other.clipped,
            self.tokens + other.tokens,
            torch.maximum(self.ratio_max, other.ratio_max),
            self.gap + other.gap,
        )


@torch.no_grad()
def ratio_stats(batch: Batch, held_back: Tensor) -> RatioStats:
    """`RatioStats` of one micro-batch, on its device and without waiting for it."""
    log_ratio = batch.log_ratio().detach()
    live = batch.live()
    largest = torch.where(live, log_ratio, -torch.inf).amax().exp()
    return RatioStats(held_back.sum(), live.sum(), largest, log_ratio.abs().sum())
