"""One GRPO update: batches with their advantages in, gradients and their numbers out.

Laws: the gradient is the same however a step is cut into batches or ranks, and the same as that of
every prompt computed K times (shared prefix). Nothing here decides: the guard does.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from rookworld.grpo import loss as losses
from rookworld.grpo.kl import ESTIMATORS, TokenStats
from rookworld.grpo.list_targets import distillation_kl
from rookworld.grpo.loss import Batch, RatioStats, StepTotals
from rookworld.model import sharding
from rookworld.model.gpt2 import GPT2
from rookworld.model.precision import autocast_for
from rookworld.rl.batch import to_device
from rookworld.rl.forward import MicroBatch, expected_values, policy_stats, states
from rookworld.rl.models import Learner
from rookworld.rl.scratch import StepScratch
from rookworld.rl.settings import TrainSettings
from rookworld.runtime import distributed
from rookworld.tasks.registry import TASKS


def step_totals(micros: Sequence[MicroBatch], longest: int) -> StepTotals | None:
    """Tokens and answers that count, over all ranks; None when nothing does."""
    counts = torch.zeros(3, dtype=torch.float64)
    for micro in micros:
        tokens, sequences = micro.counts()
        beside = micro.anchor or micro.guide
        counts += torch.tensor([0, 0, tokens] if beside else [tokens, sequences, tokens])
    distributed.sum_over_ranks(counts)
    tokens, sequences, held = (int(count) for count in counts.tolist())
    if tokens == 0 or sequences == 0:
        return None
    return StepTotals(tokens=tokens, sequences=sequences, max_tokens=longest, kl_tokens=held)


VALUE_COEF = 0.5
"""Weight of the value loss, whose gradient never reaches the policy."""


@dataclass(frozen=True)
class Coefs:
    """What parts of the objective weigh at this step."""

    kl: float
    distill: float


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
    distill_loss: float
    kl_of_tasks: Mapping[str, float] = field(default_factory=dict)
    """Mean of the exact KL over the tokens of each task that had any, by its letter."""

    @property
    def kl_worst(self) -> float:
        """The KL of the task that is furthest away: what the coefficient, the guard and the reset
        of the reference go by. In a mean over tokens the long answers of one task would hide it.
        """
        if not math.isfinite(self.kl):
            return self.kl
        return max(self.kl_of_tasks.values(), default=self.kl)

    def total(self, coefs: Coefs, settings: TrainSettings) -> float:
        weighted = 0.0 if settings.kl.kl_type == "k1_reward" else coefs.kl * self.kl_loss
        value = VALUE_COEF * self.value
        distill = coefs.distill * self.distill_loss
        return self.policy + weighted + value + distill - settings.loss.entropy_coef * self.entropy


NOTHING = Gradient(
    policy=math.nan,
    kl_loss=math.nan,
    value=math.nan,
    entropy=math.nan,
    kl=math.nan,
    ratio=RatioStats(*(torch.zeros(()) for _ in range(4))),
    norm=math.nan,
    distill_loss=math.nan,
)
"""Of a step without an answer to learn from: not a number anywhere, so the guard refuses it."""


def gradient(
    micros: Sequence[MicroBatch],
    learner: Learner,
    totals: StepTotals,
    settings: TrainSettings,
    coefs: Coefs,
    scratch: StepScratch,
) -> Gradient:
    """Backward through every batch; gradients are left on the parameters, summed over ranks."""
    device = learner.model.device
    sums = torch.zeros(5 + 2 * len(TASKS), dtype=torch.float64, device=device)
    ratio = RatioStats(*(torch.zeros((), device=device) for _ in range(4)))
    missing = sharding.missing_passes(learner.model, len(micros))
    for micro in micros:
        objective, measured, micro_ratio = micro_objective(micro, learner, totals, settings, coefs)
        objective.backward()  # type: ignore[no-untyped-call]
        sums += measured
        ratio = ratio.merge(micro_ratio)
    sharding.idle_passes(learner.model, missing)
    distill_loss = distributed.sum_over_ranks(distill(scratch, learner, settings, coefs.distill))
    scratch.distill_loss = None  # that of a further update is another
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
    own = learner.model.parameters()  # the value head's norm must not clip the policy's gradient
    norm = sharding.total_norm([p.grad for p in own if p.grad is not None])
    policy, kl_loss, value, entropy, kl, *by_task = sums.tolist()
    apart = dict(zip(TASKS, zip(by_task[::2], by_task[1::2], strict=True), strict=True))
    kl_of_tasks = {letter: total / count for letter, (total, count) in apart.items() if count}
    distilled = float(distill_loss)
    return Gradient(policy, kl_loss, value, entropy, kl, ratio, float(norm), distilled, kl_of_tasks)


def micro_objective(
    micro: MicroBatch,
    learner: Learner,
    totals: StepTotals,
    settings: TrainSettings,
    coefs: Coefs,
) -> tuple[Tensor, Tensor, RatioStats]:
    """A batch's share of what is minimised, and of what a `Gradient` tells about it, in one row."""
    # true for one update: it changes the weights that these were computed with
    known, micro.activations = micro.known_outputs(), None
    with autocast_for(settings.compute.dtype, learner.model.device):
        hidden = states(micro.batch, learner.model, learner.graphs, known)
        stats = policy_stats(micro, hidden, learner, settings)
        worths = expected_values(micro, hidden, learner)
    assert stats.kl is not None
    by_task = kl_by_task(micro, stats.kl.detach())
    kl_loss, kl = (part.sum() for part in kl_terms(micro, stats, totals, settings))
    if micro.anchor:
        nothing = torch.zeros_like(kl)
        measured = torch.stack([nothing, kl_loss, nothing, nothing, kl]).detach().double()
        return coefs.kl * kl_loss, torch.cat([measured, by_task]), RatioStats(*[nothing] * 4)
    if micro.guide:
        policy = guide_loss(micro, stats, totals, settings)
        nothing = torch.zeros_like(kl)
        measured = torch.stack([policy, kl_loss, nothing, nothing, kl]).detach().double()
        both = policy + coefs.kl * kl_loss if coefs.kl > 0 else policy
        return both, torch.cat([measured, by_task]), RatioStats(*[nothing] * 4)
    parts, ratio = loss_terms(micro, stats, hidden, learner, totals, settings)
    policy, value, entropy = (part.sum() for part in parts)
    if worths is not None:
        worth = losses.token_mean(micro.batch.grid(worths), micro.mask(), totals).sum()
        # its level says nothing, as that of a ratio times an advantage does not
        policy = policy - (worth - worth.detach())
    objective = policy + VALUE_COEF * value
    if settings.loss.entropy_coef != 0:
        objective = objective + settings.loss.entropy_coef * entropy
    if settings.kl.kl_type != "k1_reward" and coefs.kl > 0:
        objective = objective + coefs.kl * kl_loss
    measured = torch.stack([policy, kl_loss, value, -entropy, kl]).detach().double()
    return objective, torch.cat([measured, by_task]), ratio


def guide_loss(
    micro: MicroBatch, stats: TokenStats, totals: StepTotals, settings: TrainSettings
) -> Tensor:
    """The policy loss of true answers, as if the policy of the first update had sampled them."""
    assert micro.advantages is not None
    if not micro.passed:
        micro.old_logp, micro.passed = stats.logp.detach(), True
    batch = micro.batch
    answers = Batch(
        batch.grid(stats.logp), batch.grid(micro.old_logp), micro.advantages, micro.mask()
    )
    return losses.policy_loss(answers, totals, settings.loss)[0].sum()


def kl_by_task(micro: MicroBatch, kl: Tensor) -> Tensor:
    """[2 x tasks] the exact KL's sum and its count of tokens, task by task."""
    mask, k = micro.mask(), micro.batch.answers
    of_answers = torch.where(mask, micro.batch.grid(kl), 0.0).double().sum(-1)
    both = torch.stack([of_answers, mask.double().sum(-1)], 1)
    task = torch.tensor([group.prompt.task for group in micro.groups]).repeat_interleave(k)
    sums = torch.zeros(len(TASKS), 2, dtype=torch.float64, device=kl.device)
    return sums.index_add_(0, to_device(task, kl.device), both).flatten()


def distill(scratch: StepScratch, learner: Learner, settings: TrainSettings, coef: float) -> Tensor:
    """Backward through the step's distillation batches, unless that was done; this rank's loss.

    Nothing here waits for the device, so it may be begun while completions are scored.
    """
    if scratch.distill_loss is not None:
        return scratch.distill_loss
    batches = scratch.distill_batches or []
    rows = torch.tensor(float(sum(len(one.targets.rows) for one in batches)))
    total = max(1.0, float(distributed.sum_over_ranks(rows)))
    loss = torch.zeros((), dtype=torch.float64, device=learner.model.device)
    for one in batches:
        with autocast_for(settings.compute.dtype, learner.model.device):
            hidden = states(one.batch, learner.model, learner.graphs)
            kl = distillation_kl(hidden, learner.model.lm_head.weight, one.targets).sum() / total
        (coef * kl).backward()  # type: ignore[no-untyped-call]
        loss += kl.detach()
    scratch.distill_loss = loss
    return loss


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


def kl_terms(
    micro: MicroBatch, stats: TokenStats, totals: StepTotals, settings: TrainSettings
) -> tuple[Tensor, Tensor]:
    """Contributions [answers, tokens] of the KL that is a loss, and of the exact one."""
    assert stats.kl is not None and stats.ref_logp is not None
    rows, grid = stats.kl, micro.batch.grid
    # an estimate is of tokens that were sampled
    if settings.kl.kl_type in ESTIMATORS and not micro.guide:
        estimate = ESTIMATORS[settings.kl.kl_type](stats.logp, stats.ref_logp)
        # tokens come from the sampler's policy, which after the first update is an older one
        rows = (stats.logp - micro.old_logp).detach().exp() * estimate
    mask = micro.mask()
    exact = losses.kl_mean(grid(stats.kl.detach()), mask, totals)
    return losses.kl_mean(grid(rows), mask, totals), exact


def loss_terms(
    micro: MicroBatch,
    stats: TokenStats,
    hidden: Tensor,
    learner: Learner,
    totals: StepTotals,
    settings: TrainSettings,
) -> tuple[list[Tensor], RatioStats]:
    """Contributions [answers, tokens] of policy, value and entropy."""
    assert micro.advantages is not None
    batch, mask = micro.batch, micro.mask()
    sampled = Batch(batch.grid(stats.logp), batch.grid(micro.old_logp), micro.advantages, mask)
    policy, held_back = losses.policy_loss(sampled, totals, settings.loss)
    entropy = losses.entropy_loss(batch.grid(stats.entropy), mask, totals)
    value = torch.zeros((), device=hidden.device)
    if learner.value_head is not None and micro.returns is not None:
        predicted = learner.value_head(hidden)
        value = losses.value_loss(batch.grid(predicted), micro.returns, mask, totals)
    return [policy, value, entropy], losses.ratio_stats(sampled, held_back)
