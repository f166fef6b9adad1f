"""Distance from the reference model: exact KL, its estimators, its coefficient, its threshold.

Names follow the flags: `forward` is D(π‖ref) = Σ π (log π - log ref), `reverse` is D(ref‖π),
`symmetric` their mean; x = log π - log ref of the sampled token. All in nats per token.
Laws: each is checked against enumeration on a small vocabulary. Exact KL and k2 have, in
expectation, the gradient of D(π‖ref) of each token behind its prefix; what a token does to the
prefixes met later is not in it. Only k1, as a part of the reward, has the gradient of D(π‖ref)
between sequences; as a loss its expected gradient is zero, so it is never one. k3 has another
gradient and is here for comparison. The exact KL compares the models themselves, at
temperature 1 and uncut, so its unit does not move with the sampling settings.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from rookworld.grpo.settings import KLSettings
from rookworld.grpo.token_stats import PlainTokenStats
from rookworld.model.kernels.dispatch import on_one_gpu
from rookworld.model.sampling.token_choice import entropy_of, truncated_logits

ExactKL = Callable[[Tensor, Tensor], Tensor]
"""(log π [..., V], log ref [..., V]) -> KL [...]."""

KLEstimator = Callable[[Tensor, Tensor], Tensor]
"""(log π [...], log ref [...]) of the sampled tokens -> a loss per token [...]."""


# --- exact, from whole distributions ------------------------------------------------------------


def forward_kl(log_pi: Tensor, log_ref: Tensor) -> Tensor:
    """D(π‖ref) = Σ π (log π - log ref)."""
    return (log_pi.exp() * (log_pi - log_ref)).sum(-1)


def reverse_kl(log_pi: Tensor, log_ref: Tensor) -> Tensor:
    """D(ref‖π) = Σ ref (log ref - log π)."""
    return (log_ref.exp() * (log_ref - log_pi)).sum(-1)


def symmetric_kl(log_pi: Tensor, log_ref: Tensor) -> Tensor:
    """Mean of both directions: ½ Σ (π - ref)(log π - log ref)."""
    return 0.5 * ((log_pi.exp() - log_ref.exp()) * (log_pi - log_ref)).sum(-1)


EXACT: Mapping[str, ExactKL] = {
    "forward": forward_kl,
    "reverse": reverse_kl,
    "symmetric": symmetric_kl,
}
"""What the fast paths are held to: `token_stats.py` (CPU) and the Triton kernel of scores write the
same formulas again, with their gradients."""


# --- estimated, from the sampled tokens ---------------------------------------------------------


def k2(logp: Tensor, ref_logp: Tensor) -> Tensor:
    """½x² as a loss: unbiased gradient of D(π‖ref) for tokens sampled from π.

    When tokens come from an older policy, multiply by the detached ratio π/μ.
    """
    return 0.5 * (logp - ref_logp.detach()).square()


def k3(logp: Tensor, ref_logp: Tensor) -> Tensor:
    """e^-x - 1 + x as a loss: the gradient of D(ref‖π), unbounded; for comparison only."""
    x = logp - ref_logp.detach()
    return torch.exp(-x) - 1 + x


ESTIMATORS: Mapping[str, KLEstimator] = {"k2": k2, "k3": k3}

KL_TYPES = (*EXACT, *ESTIMATORS, "k1_reward")
"""Every name `--kl-type` takes."""


def k1_penalty(logp: Tensor, ref_logp: Tensor, mask: Tensor) -> Tensor:
    """Σ x over each sequence [N], detached: subtract coefficient × this from its reward.

    Summed, not averaged: only the whole sequence's x makes the policy gradient that of the KL.
    """
    return torch.where(mask.bool(), (logp - ref_logp).detach(), 0.0).sum(-1)


# --- one pass from hidden states ----------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class TokenStats:
    """What a loss needs of each row, all [rows] in fp32; the last two only with a reference."""

    logp: Tensor
    """Log-probability of the row's id under the sampling distribution."""
    entropy: Tensor
    """Entropy of the sampling distribution, nats."""
    kl: Tensor | None = None
    """Exact KL between the models."""
    ref_logp: Tensor | None = None
    """The reference's log-probability of the id, cut to the tokens the policy may sample."""


@dataclass(frozen=True, kw_only=True)
class Draw:
    """How tokens were drawn; each a number for all rows or a tensor [rows]."""

    temperature: Tensor | float = 1.0
    top_k: Tensor | int = 0
    top_p: Tensor | float = 1.0

    @property
    def plain(self) -> bool:
        """Whether tokens were drawn from the model's own distribution."""
        return self.uncut and not isinstance(self.temperature, Tensor) and self.temperature == 1

    @property
    def uncut(self) -> bool:
        """Whether any token could be drawn, whatever the temperatures above 0."""
        cuts = (self.top_k, self.top_p)
        whole = not any(isinstance(one, Tensor) for one in cuts) and cuts == (0, 1)
        return whole and (isinstance(self.temperature, Tensor) or self.temperature > 0)

    def rows(self, which: slice | Tensor) -> Draw:
        """The settings of some rows."""
        temperature, top_k, top_p = self.temperature, self.top_k, self.top_p
        return Draw(
            temperature=temperature[which] if isinstance(temperature, Tensor) else temperature,
            top_k=top_k[which] if isinstance(top_k, Tensor) else top_k,
            top_p=top_p[which] if isinstance(top_p, Tensor) else top_p,
        )


def stats_from_logits(
    logits: Tensor, ids: Tensor, draw: Draw, ref_logits: Tensor | None = None, kind: str = "forward"
) -> TokenStats:
    """`TokenStats` of rows whose logits [rows, V] (and the reference's) are at hand."""
    logits = logits.float()
    if draw.plain and kind == "forward" and ref_logits is not None:
        return _plain_stats(logits, ref_logits.detach().float().to(logits.device), ids)
    index = ids.unsqueeze(-1)
    scores = logits
    if not draw.plain:
        scores = truncated_logits(logits, draw.temperature, draw.top_k, draw.top_p, keep=ids)
    drawn = scores.log_softmax(-1)
    stats = TokenStats(logp=drawn.gather(-1, index).squeeze(-1), entropy=entropy_of(drawn))
    if ref_logits is None:
        return stats
    reference = ref_logits.detach().float().to(logits.device)
    log_ref = ref_drawn = reference.log_softmax(-1)
    if not draw.plain:
        # The reference keeps the policy's tokens: x is then 0 when the models agree, and never
        # infinite because the two nuclei differ.
        scaled = truncated_logits(reference, _no_greedy(draw.temperature))
        ref_drawn = scaled.masked_fill(scores.detach() == -torch.inf, -torch.inf).log_softmax(-1)
    log_pi = drawn if draw.plain else logits.log_softmax(-1)
    return replace(
        stats,
        kl=EXACT[kind](log_pi, log_ref),
        ref_logp=ref_drawn.gather(-1, index).squeeze(-1),
    )


def _plain_stats(logits: Tensor, ref_logits: Tensor, ids: Tensor) -> TokenStats:
    apply: Callable[..., tuple[Tensor, ...]] = PlainTokenStats.apply
    logp, entropy, kl, ref_logp = apply(logits, ref_logits, ids)
    return TokenStats(logp=logp, entropy=entropy, kl=kl, ref_logp=ref_logp)


def _no_greedy(temperature: Tensor | float) -> Tensor | float:
    """Temperature 0 cuts instead of scaling; the cut is already in the policy's scores."""
    if isinstance(temperature, Tensor):
        return temperature.masked_fill(temperature == 0, 1.0)
    return temperature or 1.0


def token_stats(
    hidden: Tensor,
    head: Tensor,
    ids: Tensor,
    *,
    draw: Draw | None = None,
    ref_hidden: Tensor | None = None,
    ref_head: Tensor | None = None,
    kind: str = "forward",
    chunk: int = 0,
) -> TokenStats:
    """`TokenStats` of `ids` [rows] from hidden states [rows, d] and an output head [V, d].

    With `chunk` > 0 only chunk × V scores live at a time, recomputed in the backward pass: needed
    for 50k tokens, a waste for 2k. The product follows the caller's dtype or autocast; everything
    after it is fp32. The reference's product runs on the reference's device, without gradient.
    On a GPU draws that cut nothing off go through two kernels of their own; a tensor of
    temperatures must then be above 0.
    """
    settings = draw or Draw()
    compared = ref_hidden is not None and ref_head is not None
    if ref_hidden is not None and ref_head is not None and settings.uncut:
        tensors = (hidden, head, ref_hidden, ref_head)
        if len(hidden) > 0 and on_one_gpu(*tensors):
            return _stats_in_triton(ids, *tensors, settings.temperature, kind)

    def rows(start: int, states: Tensor) -> tuple[Tensor, ...]:
        stop = start + len(states)
        reference = _reference_logits(ref_hidden, ref_head, start, stop)
        part = settings.rows(slice(start, stop))
        stats = stats_from_logits(F.linear(states, head), ids[start:stop], part, reference, kind)
        found = (stats.logp, stats.entropy, stats.kl, stats.ref_logp)
        return tuple(tensor for tensor in found if tensor is not None)

    columns = _in_chunks(rows, hidden, chunk)
    logp, entropy = columns[:2]
    kl, ref_logp = columns[2:] if compared else (None, None)
    return TokenStats(logp=logp, entropy=entropy, kl=kl, ref_logp=ref_logp)


def _stats_in_triton(
    ids: Tensor,
    hidden: Tensor,
    head: Tensor,
    ref_hidden: Tensor,
    ref_head: Tensor,
    temperature: Tensor | float,
    kind: str,
) -> TokenStats:
    from rookworld.model.kernels.triton_scores import FusedTokenStats

    cast = torch.is_autocast_enabled(hidden.device.type)
    dtype = torch.get_autocast_dtype(hidden.device.type) if cast else hidden.dtype
    apply: Callable[..., tuple[Tensor, ...]] = FusedTokenStats.apply
    rows: Tensor | None = None
    if isinstance(temperature, Tensor):
        rows = temperature.float().contiguous()
    elif temperature != 1:
        rows = torch.full((len(ids),), temperature, device=hidden.device)
    # kernels go to the current device, which need not be the tensors'
    with torch.cuda.device(hidden.device):
        logp, entropy, kl, ref_logp = apply(
            hidden, head, ids, ref_hidden, ref_head, dtype, rows, kind
        )
    return TokenStats(logp=logp, entropy=entropy, kl=kl, ref_logp=ref_logp)


@torch.no_grad()
def _reference_logits(
    hidden: Tensor | None, head: Tensor | None, start: int, stop: int
) -> Tensor | None:
    if hidden is None or head is None:
        return None
    return F.linear(hidden[start:stop], head)


def _in_chunks(
    rows: Callable[[int, Tensor], tuple[Tensor, ...]], hidden: Tensor, chunk: int
) -> tuple[Tensor, ...]:
    """`rows(start, states)` over pieces of `hidden`, each recomputed in the backward pass."""
    if chunk <= 0 or len(hidden) == 0:
        return rows(0, hidden)
    pieces: list[tuple[Tensor, ...]] = [
        checkpoint(rows, i * chunk, states, use_reentrant=False, preserve_rng_state=False)
        for i, states in enumerate(torch.split(hidden, chunk))
    ]
    return tuple(torch.cat(column) for column in zip(*pieces, strict=True))


# --- control ------------------------------------------------------------------------------------


class KLControl:
    """The coefficient in force: fixed, or ×1.5 above 1.5·target and ÷1.5 below target/1.5.

    A policy starts as its reference, so the coefficient is not lowered before the KL has once
    reached its target: else it would be at its floor before there is anything to hold.
    """

    STEP = 1.5
    FLOOR_SHARE = 0.1
    """Least adaptive weight as a share of where it starts."""

    def __init__(self, settings: KLSettings) -> None:
        self.settings = settings
        self.coef = settings.kl_coef
        self.reached = False

    @property
    def coef_min(self) -> float:
        least = self.settings.kl_coef_min
        return self.FLOOR_SHARE * self.settings.kl_coef if least is None else least

    def restart(self) -> None:
        """The reference has become the policy: the KL begins at 0 again."""
        self.reached = False

    def coef_at(self, step: int) -> float:
        """Coefficient to use at `step` (from 0)."""
        warming = step < self.settings.kl_warmup_steps
        return self.coef * (self.settings.kl_warmup_factor if warming else 1.0)

    def observe(self, step: int, kl: float) -> None:
        """Take in a step's measured KL; warm-up steps and non-finite values teach nothing."""
        settings = self.settings
        if not settings.adaptive_kl or step < settings.kl_warmup_steps or not math.isfinite(kl):
            return
        self.reached = self.reached or kl >= settings.target_kl
        if kl > self.STEP * settings.target_kl:
            self.coef *= self.STEP
        elif self.reached and kl < settings.target_kl / self.STEP:
            self.coef /= self.STEP
        self.coef = min(max(self.coef, self.coef_min), settings.kl_coef_max)

    def state_dict(self) -> dict[str, float]:
        return {"coef": self.coef, "reached": float(self.reached)}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        self.coef, self.reached = float(state["coef"]), bool(state.get("reached", 0.0))


class AdaptiveThreshold:
    """A limit that follows training: `multiple` × median of the last accepted values.

    Never under the limit that was set, never over `ceiling` times it; so a KL that grows slowly
    while learning is no alarm, a jump is, and the limit cannot run away with the policy.
    """

    def __init__(
        self, base: float, multiple: float = 3.0, ceiling: float = 4.0, window: int = 50
    ) -> None:
        self.base = base
        self.multiple = multiple
        self.ceiling = ceiling
        self.window = window
        self.accepted: list[float] = []

    @property
    def limit(self) -> float:
        follows = self.multiple * statistics.median(self.accepted) if self.accepted else 0.0
        return min(max(self.base, follows), self.ceiling * self.base)

    def accept(self, value: float) -> None:
        """Remember a value of a step that was found healthy."""
        self.accepted = [*self.accepted, value][-self.window :]

    def state_dict(self) -> dict[str, list[float]]:
        return {"accepted": list(self.accepted)}

    def load_state_dict(self, state: Mapping[str, list[float]]) -> None:
        self.accepted = [float(value) for value in state["accepted"]]
