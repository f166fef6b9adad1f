"""Logits to tokens: temperature, top-k, top-p or greedy per row, and what the choice was worth.

Law: log-prob and entropy are those of the distribution the token was drawn from, after temperature
and truncation; for a greedy row (temperature 0) those of the plain softmax.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
from torch import Tensor

from rookworld.model.sampling.counter_rng import fold, waiting_times
from rookworld.model.sampling.token_choice import truncated_logits


@dataclass(frozen=True)
class Rules:
    """How each row draws: tensors over rows, and which of them matter at all."""

    temperature: Tensor
    """[rows] float32, 1 where greedy"""
    top_k: Tensor
    """[rows] int64, 0 keeps all"""
    top_p: Tensor
    """[rows] float32, 1 keeps all"""
    greedy: Tensor
    """[rows] bool"""
    truncated: bool
    """some row has a top-k or top-p"""
    random: bool
    """some row is not greedy"""

    def tensors(self) -> dict[str, Tensor]:
        named = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: value for name, value in named.items() if isinstance(value, Tensor)}

    def take(self, rows: Tensor) -> Rules:
        """The rules of `rows`, in that order."""
        taken = {name: value[rows] for name, value in self.tensors().items()}
        return Rules(**taken, truncated=self.truncated, random=self.random)


def choose(logits: Tensor, rules: Rules, keys: Tensor, index: Tensor) -> tuple[Tensor, ...]:
    """Token, log-prob and entropy, each [rows], from `logits` [rows, vocabulary].

    `keys` are the rows' keys, `index` how many tokens each row has so far: together the noise.
    """
    if rules.truncated:
        scores = truncated_logits(logits, rules.temperature, rules.top_k, rules.top_p)
    else:
        scores = logits.float() / rules.temperature[:, None]
    log_p = torch.log_softmax(scores, -1)
    p = log_p.exp()
    if rules.random:
        # Where greedy, nobody waits and the most probable token wins.
        waits = waiting_times(fold(keys, index), logits.shape[-1])
        token = (p / waits.masked_fill_(rules.greedy[:, None], 1.0)).argmax(-1)
    else:
        token = p.argmax(-1)
    logp = log_p.gather(-1, token[:, None])[:, 0]
    # A token cut off has p = 0 and log p = -inf, whose product must be 0.
    entropy = log_p.clamp_min_(-1e4).mul_(p).sum(-1).neg_()
    return token, logp, entropy
