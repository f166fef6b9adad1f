"""One step's update: advantages, gradients, the guard's decision, new weights.

Laws: before the first update KL is 0, every ratio is 1 and the sampler's log-probabilities are the
trainer's, or nothing is trained; gradients that the guard refuses are never applied.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from rookworld.grpo.decisions import Restore, Ruling, Skip, StepHealth, Stop
from rookworld.grpo.loss import StepTotals
from rookworld.grpo.schedule import lr_multiplier
from rookworld.model import sharding
from rookworld.model.precision import resolve_dtype
from rookworld.rl import credit, forward, update
from rookworld.rl.collect import coefs_at, prepare_distill
from rookworld.rl.forward import MicroBatch
from rookworld.rl.metrics import (
    Clock,
    Metrics,
    all_rewards,
    guide_metrics,
    reward_metrics,
    token_metrics,
    update_metrics,
    warmup_metrics,
)
from rookworld.rl.scratch import StepScratch
from rookworld.rl.settings import TrainSettings
from rookworld.rl.state import State, sampling
from rookworld.rl.update import Gradient
from rookworld.rollout.collector import Collected
from rookworld.runtime.errors import Diverged, RookworldError

REFERENCE_PATIENCE = 20
"""Steps that KL must stay above --ref-reset-kl before the reference is reset."""
KL_AT_START, GAP_AT_START = 1e-4, {"float32": 1e-3, "bfloat16": 0.08}
"""Largest KL, and mean |log π - log μ|, before the first update; bfloat16 rounds log-probs."""


def learn(
    state: State,
    collected: Collected,
    scratch: StepScratch,
    settings: TrainSettings,
    clock: Clock,
) -> tuple[Metrics, Ruling]:
    """Gradients of the step, judged by the guard, applied if it says so."""
    coefs = coefs_at(state, settings)
    micros, totals, paid = prepare_batches(state, collected, scratch, settings, coefs.kl)
    prepare_distill(state, settings, scratch)
    rewards = reward_metrics(collected)
    warmup = settings.rewards.reward_warmup_steps
    rulings: list[Ruling] = []
    found = update.NOTHING
    for _ in range(settings.optimizer.updates_per_rollout):
        if totals is not None:
            found = update.gradient(micros, state.learner, totals, settings, coefs, scratch)
            if state.step == 0 and not rulings:
                check_start(found, settings, state.learner.model.device)
        health = StepHealth(
            step=state.step + 1,
            loss=found.total(coefs, settings),
            grad_norm=found.norm,
            kl=found.kl_worst,
            entropy=found.entropy,
            reward_mean=rewards["reward/mean"],
            all_rewards_negative=rewards["reward/max"] < 0,
            open_ended=settings.mix_env_ratio < 1,
            settled=state.step >= warmup,
        )
        rulings.append(state.guard.check_step(health))
        apply_gradient(state, rulings[-1], settings, found.norm)
        if refused(rulings[-1]):
            break
    state.learner.refresh()
    state.usual.update(collected.tally)
    state.control.observe(state.step, found.kl_worst)
    if not refused(rulings[-1]):
        follow_reference(state, found.kl_worst, settings)
    clock.mark("update")
    metrics = rewards | update_metrics(state, found, coefs, lr_at(state, settings), settings)
    metrics |= paid | token_metrics(collected, micros)
    metrics |= warmup_metrics(collected, state.step, warmup)
    if settings.sampling.guide > 0:
        metrics |= guide_metrics(collected, micros)
    metrics |= clock.metrics()
    return metrics, merge_decisions(rulings, invalid_rewards(collected, state.step + 1))


def prepare_batches(
    state: State,
    collected: Collected,
    scratch: StepScratch,
    settings: TrainSettings,
    kl_coef: float,
) -> tuple[list[MicroBatch], StepTotals | None, Metrics]:
    """Batches with their advantages, what they are averaged over (None: nothing), numbers."""
    norm = state.norm if settings.rewards.reward_norm else None
    micros = forward.prepare(
        collected.groups, state.learner, settings, state.tokenizer.eos, scratch
    )
    guides = list[MicroBatch]()
    if settings.sampling.guide > 0:
        guides = forward.prepare_guides(
            collected.guides, state.learner, settings, state.tokenizer.eos
        )
    paid = credit.set_advantages(
        micros, state.learner, settings, state.running, norm, kl_coef, guides
    )
    micros += guides
    if norm is not None:
        norm.update(all_rewards(collected.groups))
    if kl_coef > 0 and settings.kl.kl_type != "k1_reward":
        eos = state.tokenizer.eos
        anchors = forward.prepare(collected.anchors, state.learner, settings, eos)
        micros += [replace(micro, anchor=True) for micro in anchors]
    longest = max(s.max_new_tokens for s in sampling(settings.sampling, state.tokenizer).values())
    totals = update.step_totals(micros, longest)
    if totals is None and collected.invalid < collected.seen:
        raise Diverged(
            f"--kl-collect-cap {settings.kl.kl_collect_cap} left out every sample of step "
            f"{state.step + 1}; raise it, or lower --lr"
        )
    return micros, totals, paid


def refused(ruling: Ruling) -> bool:
    return isinstance(ruling.decision, Skip | Restore | Stop)


def stop_if_told(ruling: Ruling) -> None:
    """Raise what the guard gives up with."""
    if isinstance(ruling.decision, Stop):
        raise Diverged(ruling.decision.diagnosis)


def merge_decisions(rulings: Sequence[Ruling], events: Sequence[dict[str, Any]]) -> Ruling:
    """The rulings of a step as one: `sound` is the first's, since later weights are not saved."""
    happened = (*events, *(event for ruling in rulings for event in ruling.events))
    return Ruling(rulings[-1].decision, happened, rulings[0].sound)


def invalid_rewards(collected: Collected, step: int) -> list[dict[str, Any]]:
    """An event for groups with a reward that is no number: they teach nothing."""
    if not collected.invalid:
        return []
    message = f"{collected.invalid} of {collected.seen} groups left out: a reward is not finite"
    return [{"step": step, "kind": "warning", "cause": "invalid_reward", "message": message}]


def check_start(found: Gradient, settings: TrainSettings, device: torch.device) -> None:
    """Before the first update policy, sampler and reference are one model, or something is off."""
    gap = float(found.ratio.gap / found.ratio.tokens)
    dtype = resolve_dtype(settings.compute.dtype, device)
    if not found.kl <= KL_AT_START:
        raise RookworldError(
            f"before the first update KL to the reference is {found.kl:.3g}, not 0: policy and "
            "reference differ (dropout, other weights or another precision); nothing was trained"
        )
    if not gap <= GAP_AT_START[dtype]:
        raise RookworldError(
            f"before the first update the sampler's log-probabilities are {gap:.3g} nats a token "
            f"off the trainer's (limit {GAP_AT_START[dtype]}): ratios would be wrong; "
            "nothing was trained"
        )


def apply_gradient(state: State, ruling: Ruling, settings: TrainSettings, norm: float) -> None:
    """Clip and step, unless the guard refuses; gradients are gone afterwards."""
    parameters = state.learner.parameters()
    if not refused(ruling):
        rate = lr_at(state, settings)
        for group in (group for one in state.optimizers for group in one.param_groups):
            group["lr"] = group.get("own_lr", rate)
        if norm > settings.optimizer.clip_norm:
            factor = settings.optimizer.clip_norm / norm
            own = state.learner.model.parameters()
            gradients = [sharding.local(p.grad) for p in own if p.grad is not None]
            torch._foreach_mul_(gradients, factor)
        for optimizer in state.optimizers:
            optimizer.step()
        # a fused step changes weights without counting it, and samplers ask for the count
        torch.autograd.graph.increment_version(parameters)
    for parameter in parameters:
        parameter.grad = None


def lr_at(state: State, settings: TrainSettings) -> float:
    return settings.optimizer.lr * lr_factor(state.step, settings) * state.guard.lr_scale


def lr_factor(step: int, settings: TrainSettings) -> float:
    """The schedule's share of --lr."""
    rules = settings.optimizer
    return lr_multiplier(
        rules.lr_schedule, step, settings.steps, rules.lr_warmup_steps, rules.lr_final
    )


def follow_reference(state: State, kl: float, settings: TrainSettings) -> None:
    """Move the reference to the policy when it is time, or when KL stays high."""
    state.kl_high = state.kl_high + 1 if kl > settings.reference.ref_reset_kl > 0 else 0
    stayed_high = state.kl_high >= REFERENCE_PATIENCE
    every = settings.reference.ref_sync_every
    if not (stayed_high or (every > 0 and (state.step + 1) % every == 0)):
        return
    sharding.copy_weights(state.learner.model, state.learner.reference)
    state.control.restart()
    if stayed_high:
        # moments gathered against the old reference point the wrong way
        for optimizer in state.optimizers:
            optimizer.state.clear()
    state.kl_high = 0
