"""The policy gradient over all choices of a token, where the advantage of each is known.

The gradient of the expected value has no noise of sampling. Law: it is that of the mean by
enumeration. Left out: a trust region; after the first update of a rollout these rows
are held by the KL alone.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor

from rookworld.grpo.kl import Draw
from rookworld.model.sampling.token_choice import truncated_logits


@dataclass(frozen=True)
class ChoiceValues:
    """Rows of a pass at tokens whose alternatives have known values, which are advantages."""

    rows: Tensor
    """[n] which of the pass's rows."""
    ids: Tensor
    """[n, choices]."""
    values: Tensor
    """[n, choices] above that of any other id; 0 where there are fewer."""
    clip: float = 0.0
    """How far a value may be from the mean of its row; 0: no limit."""


def expected_value(hidden: Tensor, head: Tensor, draw: Draw, choices: ChoiceValues) -> Tensor:
    """[n] expected value of what the rows of `choices` may sample."""
    logits = F.linear(hidden[choices.rows], head)
    part = draw.rows(choices.rows)
    scores = truncated_logits(logits, part.temperature, part.top_k, part.top_p)
    drawn = scores.log_softmax(-1).gather(-1, choices.ids).exp()
    values = choices.values
    if choices.clip > 0:
        mean = (drawn.detach() * values).sum(-1, keepdim=True)
        others = (-mean).clamp(-choices.clip, choices.clip)
        values = (values - mean).clamp(-choices.clip, choices.clip) - others
    return (drawn * values).sum(-1)
