"""Rewards of a step's answers -> the advantages that its tokens are paid.

Laws: a scale is taken over all ranks' answers, however they were cut into batches; no token is paid
for what stands before it (`--credit fields`, `outlook`, `choices`); a token that learns from all of
its choices is paid for none; the value head never touches the policy's gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rookworld.grpo.advantages import (
    SCALES,
    RunningMeans,
    batch_std,
    field_advantages,
    gae,
    group_advantages,
    guide_advantages,
    moments,
    scaled_advantages,
    task_sums,
)
from rookworld.grpo.expected_value import ChoiceValues
from rookworld.grpo.kl import k1_penalty
from rookworld.grpo.settings import AdvantageSettings
from rookworld.model import sharding
from rookworld.model.precision import autocast_for
from rookworld.rl.batch import pad_stack, to_device
from rookworld.rl.forward import MicroBatch, reference_logp, states
from rookworld.rl.models import Learner
from rookworld.rl.settings import TrainSettings
from rookworld.runtime import distributed
from rookworld.tasks.registry import TASKS
from rookworld.tasks.reward import RunningNorm


def set_advantages(
    micros: Sequence[MicroBatch],
    learner: Learner,
    settings: TrainSettings,
    running: RunningMeans,
    norm: RunningNorm | None,
    kl_coef: float,
    guides: Sequence[MicroBatch] = (),
) -> dict[str, float]:
    """Rewards of all ranks' groups -> advantages of each micro-batch, and numbers about them."""
    rewards = [answer_rewards(micro, learner, settings, norm, kl_coef) for micro in micros]
    rules = settings.advantages
    centred = centred_rewards(micros, rewards, rules, running)
    deviation = step_deviation([(values, None) for values in centred])
    set_guides(guides, norm, deviation, rules)
    if rules.gae:
        return set_gae(micros, centred, learner, settings) | mean_advantage(micros)
    for micro, values, rewarded in zip(micros, centred, rewards, strict=True):
        if rules.credit != "answer":
            scaled = token_advantages(micro, rewarded, values, norm, deviation, rules)
            if rules.credit == "choices":
                set_choices(micro, scaled, values, norm, deviation, rules)
        else:
            scaled = scaled_advantages(values, deviation, rules).reshape(-1)
        micro.advantages = to_device(scaled.float(), micro.old_logp.device)
    return mean_advantage(micros)


def set_guides(
    guides: Sequence[MicroBatch],
    norm: RunningNorm | None,
    deviation: float,
    rules: AdvantageSettings,
) -> None:
    """Pay a true answer for what it is worth above those that were sampled; their pay stays."""
    for micro in guides:
        gains = [group.rewards[0] - (group.baseline or 0.0) for group in micro.groups]
        above = torch.tensor(gains, dtype=torch.float64) / (norm.deviation if norm else 1.0)
        paid = guide_advantages(above, deviation, rules)
        micro.advantages = to_device(paid.float(), micro.old_logp.device)


def centred_rewards(
    micros: Sequence[MicroBatch],
    rewards: Sequence[Tensor],
    rules: AdvantageSettings,
    running: RunningMeans,
) -> list[Tensor]:
    """Rewards less their baseline; the running means then take in the step, over all ranks."""
    tasks = [torch.tensor([group.prompt.task for group in micro.groups]) for micro in micros]
    sums = torch.zeros(len(TASKS), 2, dtype=torch.float64)
    for values, kinds in zip(rewards, tasks, strict=True):
        sums += task_sums(values, kinds, len(TASKS))
    distributed.sum_over_ranks(sums)
    centred = [
        group_advantages(values, running.at(kinds, sums), rules)
        for values, kinds in zip(rewards, tasks, strict=True)
    ]
    running.update(sums)
    return centred


def mean_advantage(micros: Sequence[MicroBatch]) -> dict[str, float]:
    """Mean over the step's tokens: far from 0, all tokens are pushed one way."""
    sums = torch.zeros(2, dtype=torch.float64)
    for micro in micros:
        mask, advantages = micro.mask(), micro.advantages
        assert advantages is not None
        spread = advantages[:, None] if advantages.dim() == 1 else advantages
        sums += moments(spread.expand_as(mask), mask)[[0, 2]].cpu()
    distributed.sum_over_ranks(sums)
    total, count = sums.tolist()
    return {"advantage/mean": total / max(1.0, count)}


def token_advantages(
    micro: MicroBatch,
    rewards: Tensor,
    centred: Tensor,
    norm: RunningNorm | None,
    deviation: float,
    rules: AdvantageSettings,
) -> Tensor:
    """[answers, tokens] advantages in which no token is paid for what stands before it."""
    found = [group.token_values for group in micro.groups]
    assert all(found), "credit by field needs groups that were collected for it"
    worths = torch.stack([one.values for one in found if one])
    paid_by = "outlook" if rules.credit == "choices" else rules.credit
    if norm is not None:
        worths = torch.tensor(norm.normalise(worths.flatten().tolist())).view_as(worths)
    stages = pad_stack([one.stages for one in found if one], micro.batch.width, 0)
    paid = field_advantages(rewards, centred, worths, stages, deviation, rules, paid_by=paid_by)
    return paid.flatten(0, 1)


def set_choices(
    micro: MicroBatch,
    advantages: Tensor,
    centred: Tensor,
    norm: RunningNorm | None,
    deviation: float,
    rules: AdvantageSettings,
) -> None:
    """Let tokens that listed a move learn from all moves; what they are paid beside it goes."""
    found = [(at, one.move_values) for at, one in enumerate(micro.groups) if one.move_values]
    if not found:
        return
    divisor = SCALES[rules.advantage_scale](centred, deviation, rules.advantage_std_floor)
    if norm is not None:
        divisor = divisor * norm.deviation
    k, tables = centred.shape[1], [one for _, one in found]
    counts = [len(one.positions) for one in tables]
    group = torch.from_numpy(np.repeat([at for at, _ in found], counts))
    sequences = group * k + torch.from_numpy(concatenated([one.completions for one in tables], int))
    places = torch.from_numpy(concatenated([one.positions for one in tables], int))
    advantages[sequences, places] = 0.0
    widths = np.array([len(one.tokens) for one in tables])
    ids = padded_table(concatenated([one.tokens for one in tables], int), widths)
    worths = padded_table(
        concatenated([one.values for one in tables], float), np.repeat(widths, counts)
    )
    lengths = torch.cat([one.lengths for one in micro.groups])
    starts, device = lengths.cumsum(0) - lengths, lengths.device
    table = torch.from_numpy(np.repeat(np.arange(len(found)), counts))
    micro.choices = ChoiceValues(
        rows=starts[to_device(sequences, device)] + to_device(places, device),
        ids=to_device(ids, device)[to_device(table, device)],
        values=to_device((worths / divisor[group]).float(), device),
        clip=rules.advantage_clip,
    )


def concatenated(parts: Sequence[Sequence[Any]], dtype: type) -> NDArray[Any]:
    """Lists one behind the other."""
    return np.concatenate([np.asarray(part, dtype=dtype) for part in parts])


def padded_table(values: NDArray[Any], widths: NDArray[np.int64]) -> Tensor:
    """Lines of various widths, one behind the other, as a table with zeros at the right."""
    there = np.arange(widths.max()) < widths[:, None]
    table = np.zeros(there.shape, dtype=values.dtype)
    table[there] = values
    return torch.from_numpy(table)


def answer_rewards(
    micro: MicroBatch,
    learner: Learner,
    settings: TrainSettings,
    norm: RunningNorm | None,
    kl_coef: float,
) -> Tensor:
    """[groups, K] float64 on the CPU: verdicts, normalised if asked, less the KL if it is k1."""
    rows = [group.rewards for group in micro.groups]
    if norm is not None:
        rows = [norm.normalise(row) for row in rows]
    rewards = torch.tensor(rows, dtype=torch.float64)
    if settings.kl.kl_type == "k1_reward" and kl_coef > 0:
        batch = micro.batch
        grid = batch.grid(reference_logp(micro, learner, settings))
        old = batch.grid(micro.old_logp)
        penalty = k1_penalty(old, grid, batch.grid(torch.ones_like(micro.old_logp)))
        rewards -= kl_coef * penalty.double().cpu().view_as(rewards)
    return rewards


def step_deviation(parts: Sequence[tuple[Tensor, Tensor | None]]) -> float:
    """Standard deviation over everything all ranks hold."""
    total = torch.zeros(3, dtype=torch.float64)
    for values, mask in parts:
        total += moments(values, mask).cpu()
    distributed.sum_over_ranks(total)
    return batch_std(*total.tolist())


def set_gae(
    micros: Sequence[MicroBatch],
    centred: Sequence[Tensor],
    learner: Learner,
    settings: TrainSettings,
) -> dict[str, float]:
    """Token-level advantages by the value head, scaled over the step; how much the head explains.

    The last token is paid the reward less its baseline: a head that starts at 0 is none.
    """
    assert learner.value_head is not None
    rules = settings.advantages
    raw, off = list[Tensor](), torch.zeros(2, 3, dtype=torch.float64)
    missing = sharding.missing_passes(learner.model, len(micros))
    for micro, values in zip(micros, centred, strict=True):
        with torch.no_grad(), autocast_for(settings.compute.dtype, micro.old_logp.device):
            hidden = states(micro.batch, learner.model, learner.graphs, micro.known_outputs())
            predicted = learner.value_head(hidden)
        grid = micro.batch.grid(predicted.float())
        terminal = values.reshape(-1).to(grid)
        mask = micro.mask()
        advantages, micro.returns = gae(grid, terminal, mask, rules.gamma, rules.gae_lambda)
        raw.append(advantages)
        # what the reward turned out to be, without the head's own opinion
        coming, _ = gae(torch.zeros_like(grid), terminal, mask, rules.gamma, 1.0)
        off += torch.stack([moments(coming - grid, mask), moments(coming, mask)]).cpu()
    with torch.no_grad():
        sharding.idle_passes(learner.model, missing)
    deviation = step_deviation(
        [(values, micro.mask()) for values, micro in zip(raw, micros, strict=True)]
    )
    for micro, values in zip(micros, raw, strict=True):
        micro.advantages = scaled_tokens(values, micro.mask(), deviation, rules)
    distributed.sum_over_ranks(off)
    left, whole = (batch_std(*line) for line in off.tolist())
    return {"value/explained_variance": 1 - (left / whole) ** 2 if whole > 0 else 0.0}


def scaled_tokens(
    values: Tensor, mask: Tensor, deviation: float, rules: AdvantageSettings
) -> Tensor:
    """`scaled_advantages` along tokens; a sequence's own deviation must not see its padding."""
    if rules.advantage_scale != "group":
        return scaled_advantages(values, deviation, rules)
    count = mask.sum(-1, keepdim=True).clamp_min(1)
    away = torch.where(mask, values - values.sum(-1, keepdim=True) / count, 0.0)
    own = (away.square().sum(-1, keepdim=True) / count).sqrt()
    scaled = values / own.clamp_min(max(rules.advantage_std_floor, 1e-8))
    return scaled_advantages(scaled, 1.0, replace(rules, advantage_scale="none"))
