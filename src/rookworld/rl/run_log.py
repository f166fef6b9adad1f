"""What a run writes down and shows: steps, events, evaluations.

Law: rank 0 writes; what an evaluation found, all ranks know.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from rookworld.evaluation.evaluate import Evaluation
from rookworld.grpo.decisions import EvalHealth, Ruling
from rookworld.model.gpt2 import GPT2
from rookworld.model.run_checkpoints import EVENTS, due
from rookworld.model.tokenizer import Tokenizer
from rookworld.rl.before_after import keep_difference
from rookworld.rl.metrics import Metrics, held_out_health, log_line, rollout_record
from rookworld.rl.settings import TrainSettings
from rookworld.rollout.types import Group
from rookworld.runtime import distributed
from rookworld.runtime.run_folder import Run

Evaluate = Callable[[GPT2, Tokenizer], Evaluation]


@dataclass(frozen=True)
class Hooks:
    """What the surface wants to hear of."""

    on_step: Callable[[int, Metrics], None] = lambda step, metrics: None
    on_eval: Callable[[int, Evaluation], None] = lambda step, evaluation: None
    on_event: Callable[[dict[str, Any]], None] = lambda event: None
    on_samples: Callable[[int, Sequence[Group]], None] = lambda step, groups: None
    say: Callable[[str], None] = lambda line: None


def log_step(
    run: Run,
    step: int,
    groups: Sequence[Group],
    metrics: Metrics,
    ruling: Ruling,
    settings: TrainSettings,
    hooks: Hooks,
) -> None:
    """Write a step down and show it."""
    if distributed.rank() != 0:
        return
    run.append("metrics.jsonl", {"step": step, **metrics})
    run.note(log_line(step, metrics))
    hooks.on_step(step, metrics)
    log_events(run, ruling, hooks)
    if due(step, settings.sample_every, settings.steps) or step == 1:
        hooks.on_samples(step, groups)
        for group in groups[:4]:
            run.append("rollouts.jsonl", rollout_record(step, group))


def log_events(run: Run, ruling: Ruling, hooks: Hooks) -> None:
    """Write down what the guard saw."""
    if distributed.rank() == 0:
        for event in ruling.events:
            run.append(EVENTS, event)
            hooks.on_event(event)


def evaluated(
    run: Run,
    step: int,
    model: GPT2,
    tokenizer: Tokenizer,
    settings: TrainSettings,
    evaluate: Evaluate,
    hooks: Hooks,
) -> EvalHealth:
    """Held-out evaluation by rank 0, written down: what the guard wants to know of it."""
    metric, numbers = settings.evaluation.select_by, [math.nan] * 3
    if distributed.rank() == 0:
        evaluation = evaluate(model, tokenizer)
        run.append("eval.jsonl", {"step": step, **evaluation.to_json()})
        for probe in evaluation.probes:
            run.append("probes.jsonl", {"step": step, **probe})
        keep_difference(run, step, evaluation, settings)
        hooks.on_eval(step, evaluation)
        seen = held_out_health(step, evaluation, metric)
        numbers = [seen.reward, seen.format, seen.error]
    reward, valid, error = distributed.from_first(numbers)
    return EvalHealth(step=step, reward=reward, format=valid, error=error, metric=metric)


def is_best(health: EvalHealth, best: float | None, best_by: str) -> bool:
    """Whether an evaluation is better than all before by the same metric."""
    known = best if best_by == health.metric else None
    return math.isfinite(health.reward) and (known is None or health.reward > known)
