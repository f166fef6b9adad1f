"""LOOP: GRPO, the one there is.

Laws: before the first update KL is 0, every ratio is 1 and the sampler's log-probabilities are the
trainer's, or training refuses to start; a run stopped anywhere and resumed gives the bits of one
that never stopped (CPU); what the guard decides, all ranks do. The loop reads as a table of
contents; the mathematics is in `grpo`, the gradient in `update`, the samples in `rollout`, what is
kept from step to step in `trainer_state`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from rookworld.evaluation.evaluate import Evaluation
from rookworld.grpo.decisions import Continue, EvalHealth, Restore, Ruling, Skip, StepHealth, Stop
from rookworld.grpo.loss import StepTotals
from rookworld.grpo.schedule import lr_multiplier
from rookworld.model import sharding
from rookworld.model.checkpoint import (
    drop_after,
    last_sound,
    load_checkpoint,
    mark_sound,
    save_checkpoint,
    step_of,
)
from rookworld.model.gpt2 import GPT2
from rookworld.model.precision import arithmetic
from rookworld.model.tokenizer import Tokenizer
from rookworld.rl import credit, forward, update
from rookworld.rl.forward import Micro
from rookworld.rl.metrics import (
    Clock,
    Metrics,
    all_rewards,
    held_out_health,
    log_line,
    reward_metrics,
    rollout_record,
    token_metrics,
    update_metrics,
)
from rookworld.rl.overlap import coefs_at, collect_groups, prepare_distill
from rookworld.rl.scratch import StepScratch
from rookworld.rl.settings import TrainSettings
from rookworld.rl.state import (
    EVENTS,
    State,
    checkpoint_folder,
    new_state,
    restore,
    resume,
    sampling,
    save,
    with_credit,
)
from rookworld.rl.update import Gradient
from rookworld.rollout.collector import Collected
from rookworld.rollout.types import Group
from rookworld.runtime import distributed
from rookworld.runtime.atomic_files import write_json
from rookworld.runtime.config import resolved
from rookworld.runtime.errors import Diverged, RookworldError
from rookworld.runtime.processes import Interrupted, interruptible, refuse_unguarded_scripts
from rookworld.runtime.run_folder import Run, origin
from rookworld.tasks.task import Judge, Row

REFERENCE_PATIENCE = 20
"""Steps that KL must stay above --ref-reset-kl before the reference is reset."""
KL_AT_START, GAP_AT_START = 1e-4, {"float32": 1e-3, "bfloat16": 0.08}
"""Largest KL, and mean |log π - log μ|, before the first update; bfloat16 rounds log-probs."""

Evaluate = Callable[[GPT2, Tokenizer], Evaluation]


@dataclass(frozen=True)
class Hooks:
    """What the surface wants to hear of."""

    on_step: Callable[[int, Metrics], None] = lambda step, metrics: None
    on_eval: Callable[[int, Evaluation], None] = lambda step, evaluation: None
    on_event: Callable[[dict[str, Any]], None] = lambda event: None
    on_samples: Callable[[int, Sequence[Group]], None] = lambda step, groups: None
    say: Callable[[str], None] = lambda line: None


def train(
    settings: TrainSettings,
    rows: Sequence[Row],
    evaluate: Evaluate,
    judge: Judge | None = None,
    hooks: Hooks | None = None,
) -> Path:
    """Train, writing a run folder; returns the folder of the final model."""
    refuse_unguarded_scripts()
    hooks = hooks or Hooks()
    device = distributed.start(settings.compute.device)
    run = Run(settings.out)
    state = new_state(settings, rows, device)
    settings = with_credit(settings, state.tokenizer)
    held = distributed.held_by_first(run.in_use())
    with held, interruptible() as asked_to_stop, distributed.answering():
        if not resume(state, run, settings, hooks.say):
            begin(state, run, settings, evaluate, hooks)
        while state.step < settings.steps:
            clock = Clock(device)
            scratch = StepScratch()
            collected = collect_groups(state, settings, judge, clock, scratch)
            metrics, ruling = learn(state, collected, scratch, settings, clock)
            if ruling.sound and distributed.rank() == 0:
                mark_sound(checkpoint_folder(run, state.step))
            state.step += 1
            report(run, state, collected, metrics, ruling, settings, hooks)
            if not obey(run, state, ruling, hooks):
                continue
            verdict, improved = Ruling(Continue()), False
            if due(state.step, settings.evaluation.eval_every, settings.steps):
                verdict, improved = assess(run, state, settings, evaluate, hooks)
            if not obey(run, state, verdict, hooks):
                continue
            stopping = distributed.any_rank(asked_to_stop())
            if improved or stopping or due(state.step, settings.save_every, settings.steps):
                save(run, state, settings, best=improved)
            if stopping:
                raise Interrupted(f"stopped after step {state.step}; --resume goes on from there")
        return finish(run, state)


def due(step: int, every: int, last: int) -> bool:
    return step == last or (every > 0 and step % every == 0)


# --- one step -----------------------------------------------------------------------------------


def learn(
    state: State,
    collected: Collected,
    scratch: StepScratch,
    settings: TrainSettings,
    clock: Clock,
) -> tuple[Metrics, Ruling]:
    """Gradients of the step, judged by the guard, applied if it says so."""
    coefs = coefs_at(state, settings)
    micros, totals, paid = prepared(state, collected, scratch, settings, coefs.kl)
    prepare_distill(state, settings, scratch)
    rewards = reward_metrics(collected)
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
            kl=found.kl,
            entropy=found.entropy,
            reward_mean=rewards["reward/mean"],
            all_rewards_negative=rewards["reward/max"] < 0,
            open_ended=settings.mix_env_ratio < 1,
            settled=state.step >= settings.rewards.reward_warmup_steps,
        )
        rulings.append(state.guard.check_step(health))
        apply(state, rulings[-1], settings, found.norm)
        if refused(rulings[-1]):
            break
    state.learner.refresh()
    state.usual.update(collected.tally)
    state.control.observe(state.step, found.kl)
    if not refused(rulings[-1]):
        follow_reference(state, found.kl, settings)
    clock.mark("update")
    metrics = rewards | update_metrics(state, found, coefs, lr_at(state, settings), settings)
    metrics |= paid | token_metrics(collected, micros) | clock.metrics()
    return metrics, together(rulings, left_out(collected, state.step + 1))


def prepared(
    state: State,
    collected: Collected,
    scratch: StepScratch,
    settings: TrainSettings,
    kl_coef: float,
) -> tuple[list[Micro], StepTotals | None, Metrics]:
    """Packs with their advantages, what they are averaged over (None: nothing), their numbers."""
    norm = state.norm if settings.rewards.reward_norm else None
    micros = forward.prepare(
        collected.groups, state.learner, settings, state.tokenizer.eos, scratch
    )
    paid = credit.set_advantages(micros, state.learner, settings, state.running, norm, kl_coef)
    if norm is not None:
        norm.update(all_rewards(collected.groups))
    longest = max(s.max_new_tokens for s in sampling(settings.sampling, state.tokenizer).values())
    totals = update.totals_of(micros, longest)
    if totals is None and collected.invalid < collected.seen:
        raise Diverged(
            f"--kl-collect-cap {settings.kl.kl_collect_cap} left out every sample of step "
            f"{state.step + 1}; raise it, or lower --lr"
        )
    return micros, totals, paid


def refused(ruling: Ruling) -> bool:
    return isinstance(ruling.decision, Skip | Restore | Stop)


def together(rulings: Sequence[Ruling], events: Sequence[dict[str, Any]]) -> Ruling:
    """The rulings of a step as one: `sound` is the first's, since later weights are not saved."""
    happened = (*events, *(event for ruling in rulings for event in ruling.events))
    return Ruling(rulings[-1].decision, happened, rulings[0].sound)


def left_out(collected: Collected, step: int) -> list[dict[str, Any]]:
    """An event for groups with a reward that is no number: they teach nothing."""
    if not collected.invalid:
        return []
    message = f"{collected.invalid} of {collected.seen} groups left out: a reward is not finite"
    return [{"step": step, "kind": "warning", "cause": "invalid_reward", "message": message}]


def check_start(found: Gradient, settings: TrainSettings, device: torch.device) -> None:
    """Before the first update policy, sampler and reference are one model, or something is off."""
    gap = float(found.ratio.gap / found.ratio.tokens)
    dtype = arithmetic(settings.compute.dtype, device)
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


def apply(state: State, ruling: Ruling, settings: TrainSettings, norm: float) -> None:
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
    schedule = lr_multiplier(
        settings.optimizer.lr_schedule,
        state.step,
        settings.steps,
        settings.optimizer.lr_warmup_steps,
        settings.optimizer.lr_final,
    )
    return settings.optimizer.lr * schedule * state.guard.lr_scale


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


# --- written down -------------------------------------------------------------------------------


def report(
    run: Run,
    state: State,
    collected: Collected,
    metrics: Metrics,
    ruling: Ruling,
    settings: TrainSettings,
    hooks: Hooks,
) -> None:
    """Write a step down and show it."""
    step = state.step
    if distributed.rank() != 0:
        return
    run.append("metrics.jsonl", {"step": step, **metrics})
    run.note(log_line(step, metrics))
    hooks.on_step(step, metrics)
    log_events(run, ruling, hooks)
    if due(step, settings.sample_every, settings.steps) or step == 1:
        hooks.on_samples(step, collected.groups)
        for group in collected.groups[:4]:
            run.append("rollouts.jsonl", rollout_record(step, group))


def log_events(run: Run, ruling: Ruling, hooks: Hooks) -> None:
    for event in ruling.events:
        run.append(EVENTS, event)
        hooks.on_event(event)


# --- beginning, checking, ending ----------------------------------------------------------------


def begin(
    state: State, run: Run, settings: TrainSettings, evaluate: Evaluate, hooks: Hooks
) -> None:
    """A new run: its settings, the model before training, and a state to return to."""
    distributed.barrier()  # every rank has seen the folder: none makes it again while it is cleared
    distributed.by_first(lambda: write_beginning(run, settings, hooks))
    _, improved = assess(run, state, settings, evaluate, hooks)
    save(run, state, settings, best=improved)


def write_beginning(run: Run, settings: TrainSettings, hooks: Hooks) -> None:
    run.clear(hooks.say, overwrite=settings.overwrite, resume=settings.resume)
    write_json(run.folder / "config.json", resolved(settings))
    write_json(run.folder / "origin.json", origin(settings.seed, settings.engine))


def assess(
    run: Run, state: State, settings: TrainSettings, evaluate: Evaluate, hooks: Hooks
) -> tuple[Ruling, bool]:
    """Held-out evaluation by rank 0: what the guard makes of it, and whether it is the best yet."""
    metric, numbers = settings.evaluation.select_by, [math.nan] * 3
    if distributed.rank() == 0:
        evaluation = evaluate(state.learner.whole, state.tokenizer)
        run.append("eval.jsonl", {"step": state.step, **evaluation.to_json()})
        hooks.on_eval(state.step, evaluation)
        seen = held_out_health(state.step, evaluation, metric)
        numbers = [seen.reward, seen.format, seen.error]
    reward, valid, error = distributed.from_first(numbers)
    health = EvalHealth(step=state.step, reward=reward, format=valid, error=error, metric=metric)
    ruling = state.guard.check_eval(health)
    if distributed.rank() == 0:
        log_events(run, ruling, hooks)
    known = state.best if state.best_by == metric else None
    better = math.isfinite(reward) and (known is None or reward > known)
    improved = better and not refused(ruling)
    if improved:
        state.best, state.best_by = reward, metric
    return ruling, improved


def obey(run: Run, state: State, ruling: Ruling, hooks: Hooks) -> bool:
    """Carry out a restore or a stop; whether the run goes on from where it is."""
    if isinstance(ruling.decision, Stop):
        raise Diverged(ruling.decision.diagnosis)
    if not isinstance(ruling.decision, Restore):
        return True
    # rank 0 chooses: on a network disk the others may see older marks
    step = int(distributed.by_first(lambda: step_of(last_sound(run.folder))))
    restore(state, load_checkpoint(checkpoint_folder(run, step)), recovering=True)
    distributed.barrier()
    if distributed.rank() == 0:
        drop_after(run.folder, state.step)
        run.cut_back(state.step, keep=(EVENTS,))
        hooks.say(f"restored the state after step {state.step}")
    return False


def finish(run: Run, state: State) -> Path:
    final = run.folder / "final"
    if distributed.rank() == 0:
        save_checkpoint(final, state.learner.whole, state.tokenizer, {}, {"step": state.step})
        run.finish()
    distributed.barrier()
    return final
