"""Learning from everything a token could have been, where the worth of each is known.

The gradient of the mean worth is the policy gradient without the noise of the draw. Law: it is that
of the mean by enumeration. Left out: a trust region; after the first update of a rollout these rows
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
    """Rows of a pass that chose between known things; worths are advantages."""

    rows: Tensor
    """[n] which of the pass's rows."""
    ids: Tensor
    """[n, things]."""
    worths: Tensor
    """[n, things] above that of any other id; 0 where there are fewer."""
    clip: float = 0.0
    """How far a worth may be from the mean of its row; 0: as far as it is."""


def expected_value(hidden: Tensor, head: Tensor, draw: Draw, choices: ChoiceValues) -> Tensor:
    """[n] mean worth of what the rows of `choices` may draw."""
    logits = F.linear(hidden[choices.rows], head)
    part = draw.rows(choices.rows)
    scores = truncated_logits(logits, part.temperature, part.top_k, part.top_p)
    drawn = scores.log_softmax(-1).gather(-1, choices.ids).exp()
    worths = choices.worths
    if choices.clip > 0:
        mean = (drawn.detach() * worths).sum(-1, keepdim=True)
        others = (-mean).clamp(-choices.clip, choices.clip)
        worths = (worths - mean).clamp(-choices.clip, choices.clip) - others
    return (drawn * worths).sum(-1)
