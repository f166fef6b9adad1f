"""LOOP: GRPO, the one there is.

Laws: a run stopped anywhere and resumed gives the bits of one that never stopped (CPU); what the
guard decides, all ranks do. The mathematics is in `grpo`, the samples in `rollout`, one step's
update in `rl.step`, what is kept from step to step in `rl.state`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from rookworld.grpo.decisions import Continue, Restore, Ruling
from rookworld.model.checkpoint import mark_sound
from rookworld.model.run_checkpoints import (
    begin_run,
    checkpoint_folder,
    cut_back,
    due,
    finish_run,
    held,
    last_sound_checkpoint,
)
from rookworld.rl.collect import collect_groups
from rookworld.rl.metrics import Clock
from rookworld.rl.run_log import Evaluate, Hooks, evaluated, is_best, log_events, log_step
from rookworld.rl.scratch import StepScratch
from rookworld.rl.settings import TrainSettings
from rookworld.rl.state import State, new_state, restore, resume, save, with_credit
from rookworld.rl.step import learn, refused, stop_if_told
from rookworld.runtime import distributed
from rookworld.runtime.processes import Interrupted, interruptible, refuse_unguarded_scripts
from rookworld.runtime.run_folder import Run, origin
from rookworld.tasks.task import Judge, Row


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
    with held(run), interruptible() as asked_to_stop, distributed.answering():
        if not resume(state, run, settings, hooks.say):
            begin(state, run, settings, evaluate, hooks)
        while state.step < settings.steps:
            clock, scratch = Clock(device), StepScratch()
            collected = collect_groups(state, settings, judge, clock, scratch)
            metrics, ruling = learn(state, collected, scratch, settings, clock)
            if ruling.sound and distributed.rank() == 0:
                mark_sound(checkpoint_folder(run, state.step))
            state.step += 1
            log_step(run, state.step, collected.groups, metrics, ruling, settings, hooks)
            if apply_decision(run, state, ruling, hooks):
                evaluate_and_save(run, state, settings, evaluate, asked_to_stop, hooks)
        return finish_run(run, state.learner.whole, state.tokenizer, state.step)


def begin(
    state: State, run: Run, settings: TrainSettings, evaluate: Evaluate, hooks: Hooks
) -> None:
    """A new run: its settings, the model before training, and a state to return to."""
    begin_run(run, settings, origin(settings.seed, settings.engine), hooks.say)
    _, improved = assess(run, state, settings, evaluate, hooks)
    save(run, state, settings, best=improved)


def evaluate_and_save(
    run: Run,
    state: State,
    settings: TrainSettings,
    evaluate: Evaluate,
    asked_to_stop: Callable[[], bool],
    hooks: Hooks,
) -> None:
    """What is due after a step; a user's wish to stop is heard here."""
    ruling, improved = Ruling(Continue()), False
    if due(state.step, settings.evaluation.eval_every, settings.steps):
        ruling, improved = assess(run, state, settings, evaluate, hooks)
    if not apply_decision(run, state, ruling, hooks):
        return
    stopping = distributed.any_rank(asked_to_stop())
    if improved or stopping or due(state.step, settings.save_every, settings.steps):
        save(run, state, settings, best=improved)
    if stopping:
        raise Interrupted(f"stopped after step {state.step}; --resume goes on from there")


def assess(
    run: Run, state: State, settings: TrainSettings, evaluate: Evaluate, hooks: Hooks
) -> tuple[Ruling, bool]:
    """Held-out evaluation: what the guard makes of it, and whether it is the best yet."""
    model = state.learner.whole
    health = evaluated(run, state.step, model, state.tokenizer, settings, evaluate, hooks)
    ruling = state.guard.check_eval(health)
    log_events(run, ruling, hooks)
    improved = is_best(health, state.best, state.best_by) and not refused(ruling)
    if improved:
        state.best, state.best_by = health.reward, health.metric
    return ruling, improved


def apply_decision(run: Run, state: State, ruling: Ruling, hooks: Hooks) -> bool:
    """Carry out a restore or a stop; whether the run goes on from where it is."""
    stop_if_told(ruling)
    if not isinstance(ruling.decision, Restore):
        return True
    restore(state, last_sound_checkpoint(run), recovering=True)
    distributed.barrier()
    if distributed.rank() == 0:
        cut_back(run, state.step)
        hooks.say(f"restored the state after step {state.step}")
    return False
