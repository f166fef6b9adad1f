"""The supervised loss: how likely the targets are, weighted by field."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from rookworld.model.gpt2 import GPT2
from rookworld.pretrain import dataset
from rookworld.pretrain.batches import SupervisedBatch, to_device
from rookworld.pretrain.settings import PretrainSettings


def field_weights(settings: PretrainSettings, device: torch.device) -> Tensor:
    """Weight of a target by its field, in the order of the field numbers."""
    weights = [
        0.0,
        settings.first_move_weight,
        settings.other_move_weight,
        settings.evaluation_weight,
        settings.marker_weight,
        settings.marker_weight,
        settings.state_weight,
        settings.outcome_weight,
    ]
    return to_device(np.array(weights, dtype=np.float32), device)


def micro_loss(
    model: GPT2, micro: SupervisedBatch, table: Tensor, repeat_weight: float = 0.0
) -> tuple[Tensor, list[Tensor]]:
    """Weighted negative log-likelihood, summed; and (weight, first moves right, first moves)."""
    rows, length = micro.tokens.shape
    places = torch.arange(rows * (length - 1), device=micro.tokens.device).view(rows, length - 1)
    answers = places[:, micro.start - 1 :]
    hidden = model(micro.tokens[:, :-1], rows=answers.flatten())
    logits = model.logits(hidden).float().view(*answers.shape, -1)
    targets, fields = micro.tokens[:, micro.start :], micro.fields[:, micro.start :]
    logp = logits.log_softmax(-1)
    surprise = -logp.gather(-1, targets[..., None]).squeeze(-1)
    place = torch.arange(len(targets), device=targets.device)
    first = micro.prompts - micro.start
    spread = -(logp[place, first].gather(-1, micro.choices) * micro.shares).sum(-1)
    soft = micro.shares.sum(-1) > 0
    surprise[place, first] = torch.where(soft, spread, surprise[place, first])
    weights = table[fields]
    opening = fields[place, first] == dataset.FIRST_MOVE
    right = (logits[place, first].argmax(-1) == targets[place, first]) & opening
    loss = (surprise * weights).sum()
    if repeat_weight > 0:
        loss = loss + repeat_weight * repetition(logp, targets, fields, first)
    return loss, [weights.sum(), right.sum().float(), opening.sum().float()]


def repetition(logp: Tensor, targets: Tensor, fields: Tensor, first: Tensor) -> Tensor:
    """Unlikelihood of naming a listed move again: −log(1 − p) over further moves, summed.

    A list of five with a repeated move is worth nothing, and its likelihood hardly shows it.
    """
    moves = dataset.CHOICES
    places = (first[:, None] + torch.arange(moves, device=first.device)).clamp(
        max=logp.shape[1] - 1
    )
    listed, kinds = targets.gather(1, places), fields.gather(1, places)
    here = logp.gather(1, places[..., None].expand(-1, -1, logp.shape[-1]))
    again = here.gather(2, listed[:, None, :].expand(-1, moves, -1)).exp()
    earlier = torch.ones(moves, moves, dtype=torch.bool, device=first.device).tril(-1)
    further = (kinds == dataset.OTHER_MOVE)[..., None] & earlier
    mass = (again * further).sum(-1).clamp(max=1 - 1e-4)
    return -torch.log1p(-mass).sum()
