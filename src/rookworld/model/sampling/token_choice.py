"""Logits to tokens: temperature, then top-k, then top-p, renormalised; or greedy, row by row.

Laws: log-prob and entropy are those of the distribution the token was drawn from, for a greedy row
(temperature 0) those of the plain softmax. Sampling and training see the same distribution, because
both ask this module: an importance ratio between a truncated and a plain softmax is not 1 where it
should be. A setting is a number for all rows or a tensor with one value per row. Nothing here waits
for the device. Left out: penalties, min-p, typical sampling.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from rookworld.model.sampling.counter_rng import exponential_noise, fold


@dataclass(frozen=True)
class Rows:
    """What sampling must know of each row, a tensor [rows] each."""

    keys: Tensor
    """int64, the row's randomness"""
    limits: Tensor
    """int64, its maximum of new tokens"""
    done: Tensor
    """bool"""
    temperature: Tensor
    """float32, 1 where greedy"""
    top_k: Tensor
    """int64, 0 keeps all"""
    top_p: Tensor
    """float32, 1 keeps all"""
    greedy: Tensor
    """bool"""

    @classmethod
    def idle(cls, rows: int, device: torch.device) -> Rows:
        def full(dtype: torch.dtype, value: int) -> Tensor:
            return torch.full((rows,), value, dtype=dtype, device=device)

        return cls(
            keys=full(torch.int64, 0),
            limits=full(torch.int64, 0),
            done=full(torch.bool, 1),
            temperature=full(torch.float32, 1),
            top_k=full(torch.int64, 0),
            top_p=full(torch.float32, 1),
            greedy=full(torch.bool, 1),
        )

    def receive(self, other: Rows) -> None:
        """Copy `other`'s rows to the front; what lies behind them is done."""
        self.done.fill_(True)
        for name, theirs in vars(other).items():
            getattr(self, name)[: len(theirs)].copy_(theirs)

    def take(self, rows: Tensor) -> Rows:
        """Some rows, in that order."""
        return Rows(**{name: value[rows] for name, value in vars(self).items()})


def choose(
    logits: Tensor, rows: Rows, index: Tensor, *, truncated: bool, random: bool
) -> tuple[Tensor, ...]:
    """Token, log-prob and entropy, each [rows], from `logits` [rows, vocabulary].

    `index` is how many tokens each row has so far, which with the rows' keys makes the noise. No
    row has a top-k or top-p unless `truncated`, and all are greedy unless `random`.
    """
    if truncated:
        scores = truncated_logits(logits, rows.temperature, rows.top_k, rows.top_p)
    else:
        scores = logits.float() / rows.temperature[:, None]
    log_p = torch.log_softmax(scores, -1)
    p = log_p.exp()
    if random:
        # Where greedy, nobody waits and the most probable token wins.
        waits = exponential_noise(fold(rows.keys, index), logits.shape[-1])
        token = (p / waits.masked_fill_(rows.greedy[:, None], 1.0)).argmax(-1)
    else:
        token = p.argmax(-1)
    logp = log_p.gather(-1, token[:, None])[:, 0]
    # A token cut off has p = 0 and log p = -inf, whose product must be 0.
    entropy = log_p.clamp_min_(-1e4).mul_(p).sum(-1).neg_()
    return token, logp, entropy


def _per_row(setting: Tensor, logits: Tensor) -> Tensor:
    """`setting` [rows…] with trailing axes added until it broadcasts against logits [rows…, V]."""
    return setting.reshape(*setting.shape, *[1] * (logits.dim() - setting.dim()))


def truncated_logits(
    logits: Tensor,
    temperature: Tensor | float = 1.0,
    top_k: Tensor | int = 0,
    top_p: Tensor | float = 1.0,
    keep: Tensor | None = None,
) -> Tensor:
    """Scores [..., V] in fp32 whose softmax is the sampling distribution; -inf where cut off.

    Temperature 0 keeps the most likely token alone. `top_k` 0 and `top_p` 1 cut nothing; the
    nucleus is the smallest set with probability ≥ top_p among what top-k left, never empty.
    Equal scores rank by token id. `keep` [...] are ids that stay whatever their rank: a sampled
    token on the edge of its nucleus must not get probability 0 from the trainer's rounding.
    """
    scores = logits.float()
    if isinstance(temperature, Tensor):
        greedy = _per_row(temperature == 0, scores)
        scores = scores / _per_row(temperature.to(scores), scores).masked_fill(greedy, 1.0)
    else:
        greedy = None
        scores = scores / temperature if temperature else scores
        top_k = top_k if temperature else 1
    if greedy is None and _cuts_nothing(top_k, top_p):
        return scores
    kept = _keep_mask(scores.detach(), top_k, top_p, greedy)
    if keep is not None:
        kept = kept.scatter(-1, keep.unsqueeze(-1), True)
    return scores.masked_fill(~kept, -torch.inf)


def _cuts_nothing(top_k: Tensor | int, top_p: Tensor | float) -> bool:
    if isinstance(top_k, Tensor) or isinstance(top_p, Tensor):
        return False
    return top_k <= 0 and top_p >= 1


def _keep_mask(
    scores: Tensor, top_k: Tensor | int, top_p: Tensor | float, greedy: Tensor | None
) -> Tensor:
    """True [..., V] for the tokens that top-k and then top-p leave."""
    size = scores.shape[-1]
    # Plain numbers stay plain: turned into tensors they would be copied to the device, which
    # waits for it and cannot be part of a captured graph.
    k: Tensor | int
    if isinstance(top_k, Tensor):
        k = _per_row(top_k.masked_fill(top_k <= 0, size), scores)
    else:
        k = top_k if top_k > 0 else size
    p = _per_row(top_p, scores) if isinstance(top_p, Tensor) else top_p
    ranked, order = scores.sort(dim=-1, descending=True, stable=True)
    rank = torch.arange(size, device=scores.device)
    first = rank == 0
    within = (rank < k).expand_as(scores)
    if greedy is not None:
        within = within & (first | ~greedy)
    probability = ranked.masked_fill(~within, -torch.inf).softmax(-1)
    # A rounded cumulative sum reaches 1 before the tail ends, so p = 1 is asked for by name.
    before = F.pad(probability.cumsum(-1)[..., :-1], (1, 0))
    within = within & ((before < p) | (p >= 1) | first)
    return torch.zeros_like(within).scatter(-1, order, within)


def entropy_of(log_probs: Tensor) -> Tensor:
    """Entropy [...] in nats of `log_probs` [..., V]; tokens cut off count nothing."""
    # 0 · -inf is NaN forwards and backwards, so the log is replaced before the product.
    finite = log_probs.masked_fill(log_probs == -torch.inf, 0.0)
    return -(log_probs.exp() * finite).sum(-1)
