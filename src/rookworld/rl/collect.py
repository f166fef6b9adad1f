"""The first half of a step: groups of sampled, judged answers, and what a GPU does meanwhile.

Laws: which answers are asked for is a function of settings and step; what is done while others
score them changes nothing but the time.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch

from rookworld.grpo.schedule import FALLS, ramp
from rookworld.model.activation_reuse import ActivationStore
from rookworld.model.precision import matrix_dtype
from rookworld.rl import forward, update
from rookworld.rl.metrics import Clock
from rookworld.rl.scratch import StepScratch
from rookworld.rl.settings import TrainSettings
from rookworld.rl.state import State, sampling
from rookworld.rl.update import Coefs
from rookworld.rollout.collector import Collected, Collector, collect
from rookworld.rollout.types import Completions
from rookworld.runtime import distributed
from rookworld.tasks.engine_pool import usable_cores
from rookworld.tasks.scorer import Workers, workers
from rookworld.tasks.task import Judge


def collect_groups(
    state: State,
    settings: TrainSettings,
    judge: Judge | None,
    clock: Clock,
    scratch: StepScratch,
) -> Collected:
    """Sampled and judged groups of this step."""
    # a recovery samples anew: the answers that led astray are not asked for again
    seed = settings.seed + 1_000_003 * state.guard.recoveries
    scorers = scoring_workers(settings, state.learner.whole.device)
    activations = activations_for(state, settings)
    scratch.activations = None if activations is None or activations.full else activations
    collector = Collector(
        state.learner.whole,
        state.tokenizer,
        sampling(settings.sampling, state.tokenizer),
        settings.sampling.k_samples,
        seed,
        settings.rewards,
        judge,
        by_field=settings.advantages.credit != "answer" and not settings.advantages.gae,
        by_choice=settings.advantages.credit == "choices" and not settings.advantages.gae,
        usual=state.usual.now,
        activations=activations,
        dtype=matrix_dtype(settings.compute.dtype, state.learner.whole.device),
        workers=scorers,
        clock=clock.lap,
    )
    if may_look_ahead(state, settings):
        # its loss is a mean over ranks: whether this is done must not depend on a rank's cores
        collector = replace(collector, idle=partial(distill_ahead, state, settings, scratch))
        if scorers is not None:
            collector = replace(
                collector, meanwhile=partial(reference_ahead, state, settings, scratch)
            )
    progress = ramp(state.step, settings.rewards.reward_warmup_steps)
    return collect(
        collector,
        state.prompts,
        settings.batch_size,
        state.step,
        progress,
        flat_tries=settings.sampling.flat_tries,
        guide=settings.sampling.guide,
    )


def reference_ahead(
    state: State, settings: TrainSettings, scratch: StepScratch, answers: Sequence[Completions]
) -> None:
    """Compute the reference's states while others score: they do not depend on the scores."""
    forward.reference_ahead(state.learner, settings, state.tokenizer.eos, scratch, answers)


def distill_ahead(state: State, settings: TrainSettings, scratch: StepScratch) -> None:
    """Have the device begin the step's gradient with self-distillation meanwhile."""
    if state.distiller is not None and scratch.distill_loss is None:
        prepare_distill(state, settings, scratch)
        coef = coefs_at(state, settings).distill
        update.distill(scratch, state.learner, settings, coef)


def prepare_distill(state: State, settings: TrainSettings, scratch: StepScratch) -> None:
    """Make the step's distillation batches, if there are any and they are not made."""
    if state.distiller is not None and scratch.distill_batches is None:
        helpers = scoring_workers(settings, state.learner.whole.device)
        scratch.distill_batches = state.distiller.batches(state.step, helpers)


def may_look_ahead(state: State, settings: TrainSettings) -> bool:
    """Whether there is something to do while answers are scored: a GPU then does nothing.

    Not while policy and reference are one model: both must see the same packs for KL to be 0; nor
    in shares, which must take as many passes on every rank.
    """
    idle = state.learner.reference.device.type == "cuda"
    return idle and not settings.compute.shard and not state.learner.one_model


def activations_for(state: State, settings: TrainSettings) -> ActivationStore | None:
    """Where a CPU's sampler keeps what it computes; no more of it than a pass may hold."""
    if state.learner.whole.device.type != "cpu":
        return None
    most = state.learner.memory.micro_tokens if may_reuse_activations(state, settings) else 0
    return ActivationStore(settings.sampling.k_samples, most)


def may_reuse_activations(state: State, settings: TrainSettings) -> bool:
    """Whether the update may take over what the sampler computed.

    Not while policy and reference are one model: both must see the same packs for KL to be 0.
    Recomputed blocks, and those in shares, make their own.
    """
    learner = state.learner
    own = learner.gathered is None and not learner.memory.recompute
    return own and not learner.one_model


def scoring_workers(settings: TrainSettings, device: torch.device) -> Workers | None:
    """Processes that score beside a GPU; on a CPU they would take the cores from the sampler."""
    count = settings.compute.score_workers
    if count is None:
        cores = min(usable_cores(), (os.cpu_count() or 1) // distributed.local_world_size())
        count = min(8, cores // 2) if device.type == "cuda" else 0
    return workers(count) if count > 0 else None


def coefs_at(state: State, settings: TrainSettings) -> Coefs:
    """What the KL and self-distillation weigh at this step."""
    share = FALLS[settings.distill.distill_schedule](state.step / settings.steps)
    return Coefs(state.control.coef_at(state.step), share * settings.distill.distill_coef)
