"""One GRPO update: packed groups in, gradients and their numbers out.

Laws: the gradient is the same however a step is cut into packs or ranks, and the same as that of
every prompt computed K times (shared prefix); logits exist only where a token was sampled; the
value head never touches the policy's gradient. Nothing here decides: the guard does.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from rookworld import distributed, sharding
from rookworld.grpo import loss as losses
from rookworld.grpo.advantages import (
    AdvantageSettings,
    RunningMeans,
    batch_std,
    field_advantages,
    gae,
    group_advantages,
    moments,
    scaled_advantages,
    task_sums,
)
from rookworld.grpo.kl import ESTIMATORS, EXACT, Draw, TokenStats, k1_penalty, k3, token_stats
from rookworld.grpo.loss import Batch, LossSettings, RatioStats, StepTotals
from rookworld.model.gpt2 import GPT2
from rookworld.model.precision import passes_in
from rookworld.rollout import LETTERS, Group, Pack, micro_packs, pack
from rookworld.settings import TrainSettings
from rookworld.tasks.reward import RunningNorm

CHUNK_VOCABULARY = 8_192
"""Vocabularies from this size on have their scores computed in chunks of rows."""
CHUNK_ROWS = 2_048


@dataclass
class Learner:
    """The models a gradient is computed with."""

    model: GPT2
    reference: GPT2
    value_head: nn.Linear | None = None
    gathered: GPT2 | None = None
    """The policy's whole weights, where `model` has only this rank's share of them."""

    @property
    def whole(self) -> GPT2:
        """The policy to sample from, to evaluate and to save."""
        return self.model if self.gathered is None else self.gathered

    def refresh(self) -> None:
        """Let `whole` follow an update."""
        if self.gathered is not None:
            sharding.gather(self.model, self.gathered)

    def parameters(self) -> list[nn.Parameter]:
        own = [p for p in self.model.parameters() if p.requires_grad]
        return own if self.value_head is None else [*own, *self.value_head.parameters()]

    @property
    def chunk(self) -> int:
        return CHUNK_ROWS if self.model.config.vocab_size >= CHUNK_VOCABULARY else 0


@dataclass
class Micro:
    """One pack with everything the loss needs beside the policy's own pass."""

    pack: Pack
    groups: list[Group]
    draw: Draw
    old_logp: Tensor
    """[rows] recorded while sampling."""
    ref_hidden: Tensor
    """[rows, width] the reference's states, on the reference's device."""
    kept: Tensor
    """[answers] false for samples beyond the KL cap."""
    advantages: Tensor | None = None
    """[answers] or [answers, tokens]."""
    returns: Tensor | None = None

    def mask(self) -> Tensor:
        """[answers, tokens] true on the sampled tokens that count."""
        sampled = self.pack.grid(torch.ones_like(self.old_logp)).bool()
        return sampled & self.kept[:, None]


def prepare(
    groups: Sequence[Group], learner: Learner, settings: TrainSettings, eos: int
) -> list[Micro]:
    """Packs of this rank's groups, with the reference's pass over each."""
    micros = []
    packs = micro_packs(groups, settings.micro_tokens)
    missing = sharding.missing_passes(learner.reference, len(packs))
    for chosen in packs:
        packed = pack(chosen, eos)
        width = packed.width
        recorded = torch.cat([_widened(group.logp, width) for group in chosen])
        old = recorded[packed.sequences, packed.places]
        kept = torch.ones(packed.count, dtype=torch.bool, device=old.device)
        micro = Micro(packed, chosen, draw_of(packed, chosen, settings), old, old, kept)
        micro.ref_hidden = reference_pass(packed, learner.reference, settings)
        if settings.kl_collect_cap > 0:
            micro.kept = within_cap(micro, learner, settings)
        micros.append(micro)
    sharding.idle_passes(learner.reference, missing)
    return micros


def _widened(logp: Tensor, width: int) -> Tensor:
    return torch.nn.functional.pad(logp, (0, width - logp.shape[1]))


def draw_of(packed: Pack, groups: Sequence[Group], settings: TrainSettings) -> Draw:
    """The distribution each row was sampled from; plain numbers where all tasks share them."""
    by_task = [sampling_of(letter, settings) for letter in LETTERS]
    used = {by_task[group.prompt.task] for group in groups}
    if len(used) == 1:
        temperature, top_p = used.pop()
        return Draw(temperature=temperature, top_k=settings.top_k, top_p=top_p)
    k = len(groups[0].lengths)
    tasks = torch.tensor([group.prompt.task for group in groups], device=packed.ids.device)
    table = torch.tensor(by_task, device=packed.ids.device)[tasks[packed.sequences // k]]
    return Draw(temperature=table[:, 0], top_k=settings.top_k, top_p=table[:, 1])


def sampling_of(letter: str, settings: TrainSettings) -> tuple[float, float]:
    """(temperature, top-p) of a task."""
    own = (
        (settings.p_temperature, settings.p_top_p)
        if letter == "P"
        else (settings.a_temperature, settings.a_top_p)
    )
    temperature = settings.temperature if own[0] is None else own[0]
    return temperature, settings.top_p if own[1] is None else own[1]


def states(packed: Pack, model: GPT2) -> Tensor:
    """[rows, width] the hidden state that predicts each sampled token."""
    hidden: Tensor = model(packed.ids, packed.positions, packed.attend, packed.sources)
    return hidden


@torch.no_grad()
def reference_pass(packed: Pack, reference: GPT2, settings: TrainSettings) -> Tensor:
    """The reference's states for each sampled token, wherever the reference lives."""
    there = reference.device
    moved: dict[str, Any] = {
        name: value.to(there) if isinstance(value, Tensor) else value
        for name, value in vars(packed).items()
    }
    with passes_in(settings.dtype, there):
        return states(Pack(**moved), reference)


def stats_of(micro: Micro, hidden: Tensor, learner: Learner, settings: TrainSettings) -> TokenStats:
    kind = settings.kl_type if settings.kl_type in EXACT else "forward"
    return token_stats(
        hidden,
        learner.model.lm_head.weight,
        micro.pack.targets,
        draw=micro.draw,
        ref_hidden=micro.ref_hidden,
        ref_head=learner.reference.lm_head.weight,
        kind=kind,
        chunk=learner.chunk,
    )


@torch.no_grad()
def reference_logp(micro: Micro, learner: Learner, settings: TrainSettings) -> Tensor:
    """[rows] the reference's log-probability of each sampled token, on the policy's device."""
    there = learner.reference.device
    temperature = micro.draw.temperature
    if isinstance(temperature, Tensor):
        temperature = temperature.to(there)
    with passes_in(settings.dtype, there):
        stats = token_stats(
            micro.ref_hidden,
            learner.reference.lm_head.weight,
            micro.pack.targets.to(there),
            draw=Draw(temperature=temperature),
            chunk=learner.chunk,
        )
    return stats.logp.to(micro.old_logp.device)


def within_cap(micro: Micro, learner: Learner, settings: TrainSettings) -> Tensor:
    """[answers] whether the sampler stayed near the reference, by the mean of e^-x - 1 + x."""
    distance = k3(micro.old_logp, reference_logp(micro, learner, settings))
    grid = micro.pack.grid(distance)
    count = micro.pack.grid(torch.ones_like(distance)).sum(-1)
    return grid.sum(-1) / count <= settings.kl_collect_cap


def set_advantages(
    micros: Sequence[Micro],
    learner: Learner,
    settings: TrainSettings,
    running: RunningMeans,
    norm: RunningNorm | None,
    kl_coef: float,
) -> None:
    """Rewards of all ranks' groups -> advantages of each micro-batch."""
    rewards = [answer_rewards(micro, learner, settings, norm, kl_coef) for micro in micros]
    rules = AdvantageSettings(
        baseline=settings.baseline_type,
        scale=settings.advantage_scale,
        std_floor=settings.advantage_std_floor,
        clip=settings.advantage_clip,
    )
    if settings.gae:
        set_gae(micros, rewards, learner, settings, rules)
        return
    tasks = [torch.tensor([group.prompt.task for group in micro.groups]) for micro in micros]
    sums = torch.zeros(len(LETTERS), 2, dtype=torch.float64)
    for values, kinds in zip(rewards, tasks, strict=True):
        sums += task_sums(values, kinds, len(LETTERS))
    distributed.sum_over_ranks(sums)
    centred = [
        group_advantages(values, running.at(kinds, sums), rules)
        for values, kinds in zip(rewards, tasks, strict=True)
    ]
    running.update(sums)
    deviation = step_deviation([(values, None) for values in centred])
    for micro, values, rewarded in zip(micros, centred, rewards, strict=True):
        if settings.credit == "fields":
            scaled = by_field(micro, rewarded, values, norm, deviation, rules)
        else:
            scaled = scaled_advantages(values, deviation, rules).reshape(-1)
        micro.advantages = scaled.to(micro.old_logp.device, torch.float32)


def by_field(
    micro: Micro,
    rewards: Tensor,
    centred: Tensor,
    norm: RunningNorm | None,
    deviation: float,
    rules: AdvantageSettings,
) -> Tensor:
    """[answers, tokens] advantages in which no token is paid for what stands before it."""
    promises = [group.promises for group in micro.groups]
    assert all(promises), "credit by field needs groups that were collected for it"
    worths = torch.stack([one.worths for one in promises if one])
    if norm is not None:
        worths = torch.tensor(norm.normalise(worths.flatten().tolist())).view_as(worths)
    width = micro.pack.width
    stages = torch.stack([_widened(one.stages, width) for one in promises if one])
    return field_advantages(rewards, centred, worths, stages, deviation, rules).flatten(0, 1)


def answer_rewards(
    micro: Micro,
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
    if settings.kl_type == "k1_reward" and kl_coef > 0:
        packed = micro.pack
        grid = packed.grid(reference_logp(micro, learner, settings))
        old = packed.grid(micro.old_logp)
        penalty = k1_penalty(old, grid, packed.grid(torch.ones_like(micro.old_logp)))
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
    micros: Sequence[Micro],
    rewards: Sequence[Tensor],
    learner: Learner,
    settings: TrainSettings,
    rules: AdvantageSettings,
) -> None:
    """Token-level advantages by the value head, scaled over the step."""
    assert learner.value_head is not None
    raw = []
    missing = sharding.missing_passes(learner.model, len(micros))
    for micro, values in zip(micros, rewards, strict=True):
        with torch.no_grad(), passes_in(settings.dtype, micro.old_logp.device):
            predicted = learner.value_head(states(micro.pack, learner.model).float()).squeeze(-1)
        grid = micro.pack.grid(predicted.float())
        terminal = values.reshape(-1).to(grid)
        advantages, micro.returns = gae(
            grid, terminal, micro.mask(), settings.gamma, settings.gae_lambda
        )
        raw.append(advantages)
    with torch.no_grad():
        sharding.idle_passes(learner.model, missing)
    deviation = step_deviation(
        [(values, micro.mask()) for values, micro in zip(raw, micros, strict=True)]
    )
    for micro, values in zip(micros, raw, strict=True):
        micro.advantages = scaled_tokens(values, micro.mask(), deviation, rules)


def scaled_tokens(
    values: Tensor, mask: Tensor, deviation: float, rules: AdvantageSettings
) -> Tensor:
    """`scaled_advantages` along tokens; a sequence's own deviation must not see its padding."""
    if rules.scale != "group":
        return scaled_advantages(values, deviation, rules)
    count = mask.sum(-1, keepdim=True).clamp_min(1)
    away = torch.where(mask, values - values.sum(-1, keepdim=True) / count, 0.0)
    own = (away.square().sum(-1, keepdim=True) / count).sqrt()
    scaled = values / own.clamp_min(max(rules.std_floor, 1e-8))
    return scaled_advantages(scaled, 1.0, replace(rules, scale="none"))


def totals_of(micros: Sequence[Micro], longest: int) -> StepTotals | None:
    """Tokens and answers that count, over all ranks; None when nothing does."""
    counts = torch.zeros(2, dtype=torch.float64)
    for micro in micros:
        mask = micro.mask()
        counts += torch.stack([mask.sum(), micro.kept.sum()]).double().cpu()
    distributed.sum_over_ranks(counts)
    tokens, sequences = (int(count) for count in counts.tolist())
    if tokens == 0 or sequences == 0:
        return None
    return StepTotals(tokens=tokens, sequences=sequences, max_tokens=longest)


@dataclass(frozen=True)
class Gradient:
    """What one gradient measured, over all ranks."""

    policy: float
    kl_loss: float
    value: float
    entropy: float
    kl: float
    ratio: RatioStats
    norm: float

    def total(self, kl_coef: float, settings: TrainSettings) -> float:
        weighted = 0.0 if settings.kl_type == "k1_reward" else kl_coef * self.kl_loss
        value = settings.value_coef * self.value
        return self.policy + weighted + value - settings.entropy_coef * self.entropy


NOTHING = Gradient(
    policy=math.nan,
    kl_loss=math.nan,
    value=math.nan,
    entropy=math.nan,
    kl=math.nan,
    ratio=RatioStats(*(torch.zeros(()) for _ in range(4))),
    norm=math.nan,
)
"""Of a step without an answer to learn from: not a number anywhere, so the guard refuses it."""


def gradient(
    micros: Sequence[Micro],
    learner: Learner,
    totals: StepTotals,
    settings: TrainSettings,
    kl_coef: float,
) -> Gradient:
    """Backward through every pack; gradients are left on the parameters, summed over ranks."""
    device = learner.model.device
    sums = torch.zeros(5, dtype=torch.float64, device=device)
    ratio = RatioStats(*(torch.zeros((), device=device) for _ in range(4)))
    missing = sharding.missing_passes(learner.model, len(micros))
    for micro in micros:
        with passes_in(settings.dtype, device):
            hidden = states(micro.pack, learner.model)
            stats = stats_of(micro, hidden, learner, settings)
        parts, micro_ratio = terms(micro, stats, hidden, learner, totals, settings)
        policy, kl_loss, value, entropy = (part.sum() for part in parts[:4])
        objective = policy + settings.value_coef * value
        if settings.entropy_coef != 0:
            objective = objective + settings.entropy_coef * entropy
        if settings.kl_type != "k1_reward" and kl_coef > 0:
            objective = objective + kl_coef * kl_loss
        objective.backward()  # type: ignore[no-untyped-call]
        measured = [policy, kl_loss, value, -entropy, parts[4].sum()]
        sums += torch.stack([part.detach().double() for part in measured])
        ratio = ratio.merge(micro_ratio)
    sharding.idle_passes(learner.model, missing)
    distributed.sum_over_ranks(sums)
    parameters = learner.parameters()
    for parameter in parameters:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    silence_key_biases(learner.model)
    # shares have been summed on their way back
    distributed.sum_gradients(p for p in parameters if sharding.local(p) is p)
    counts = distributed.sum_over_ranks(
        torch.stack([ratio.clipped, ratio.tokens, ratio.gap]).double()
    )
    ratio = RatioStats(counts[0], counts[1], distributed.max_over_ranks(ratio.ratio_max), counts[2])
    norm = sharding.total_norm([p.grad for p in parameters if p.grad is not None])
    values = sums.tolist()
    return Gradient(values[0], values[1], values[2], values[3], values[4], ratio, float(norm))


def silence_key_biases(model: GPT2) -> None:
    """Zero what is zero: a bias on the keys shifts all scores of a query alike.

    Rounding leaves something else, which Adam would blow up to steps of full size in directions
    that depend on how the step was cut.
    """
    width = model.config.n_embd
    for block in model.h:
        gradient = block.get_parameter("attn.c_attn.bias").grad
        if gradient is not None:
            sharding.local_rows(gradient, width, 2 * width).zero_()


def terms(
    micro: Micro,
    stats: TokenStats,
    hidden: Tensor,
    learner: Learner,
    totals: StepTotals,
    settings: TrainSettings,
) -> tuple[list[Tensor], RatioStats]:
    """Contributions [answers, tokens] of policy, KL loss, value, entropy, and the exact KL."""
    assert stats.kl is not None and stats.ref_logp is not None and micro.advantages is not None
    packed, mask = micro.pack, micro.mask()
    batch = Batch(packed.grid(stats.logp), packed.grid(micro.old_logp), micro.advantages, mask)
    rules = LossSettings(
        name=settings.loss,
        clip_low=settings.clip_range,
        clip_high=settings.clip_high,
        tv_delta=settings.tv_delta,
    )
    policy, held_back = losses.policy_loss(batch, totals, rules)
    if settings.kl_type in ESTIMATORS:
        estimate = ESTIMATORS[settings.kl_type](stats.logp, stats.ref_logp)
        # tokens come from the sampler's policy, which after the first update is an older one
        kl_rows = (stats.logp - micro.old_logp).detach().exp() * estimate
    else:
        kl_rows = stats.kl
    kl = losses.token_mean(packed.grid(kl_rows), mask, totals)
    exact = losses.token_mean(packed.grid(stats.kl.detach()), mask, totals)
    entropy = losses.entropy_loss(packed.grid(stats.entropy), mask, totals)
    value = torch.zeros((), device=hidden.device)
    if learner.value_head is not None and micro.returns is not None:
        predicted = learner.value_head(hidden.detach().float()).squeeze(-1)
        value = losses.value_loss(packed.grid(predicted), micro.returns, mask, totals)
    return [policy, kl, value, entropy, exact], losses.ratio_stats(batch, held_back)
