"""A step in numbers: what metrics.jsonl, train.log and rollouts.jsonl say of it.

Law: numbers are over all ranks, so they do not depend on how many there are; names are stable.
"""

from __future__ import annotations

import math
import resource
import time
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from rookworld.data.rows import row_record
from rookworld.evaluation.evaluate import Evaluation
from rookworld.evaluation.statistics import Z95
from rookworld.grpo.decisions import EvalHealth
from rookworld.grpo.schedule import ramp
from rookworld.rl.forward import MicroBatch
from rookworld.rl.settings import TrainSettings
from rookworld.rl.state import State
from rookworld.rl.update import Coefs, Gradient
from rookworld.rollout.collector import Collected
from rookworld.rollout.types import Group
from rookworld.runtime import distributed
from rookworld.runtime.errors import RookworldError
from rookworld.tasks.registry import TASKS

Metrics = dict[str, float]


class Clock:
    """Seconds by name since the last lap."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.seconds: dict[str, float] = {}
        self.began = self.last = time.perf_counter()

    def mark(self, name: str) -> None:
        """Bill the time until the device is done to `name`."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self.lap(name)

    def lap(self, name: str) -> None:
        """Bill the host's time to `name`; what the device has still to do is billed later."""
        now = time.perf_counter()
        self.seconds[name] = self.seconds.get(name, 0.0) + now - self.last
        self.last = now

    def metrics(self) -> Metrics:
        named = {f"time/{name}_s": value for name, value in self.seconds.items()}
        return named | {"time/step_s": time.perf_counter() - self.began}


def all_rewards(groups: Sequence[Group]) -> list[float]:
    """Rewards of every rank's samples, in rank order."""
    mine = [reward for group in groups for reward in group.rewards]
    return distributed.gather_floats(mine)


def reward_metrics(collected: Collected) -> Metrics:
    """Means over all ranks: of the reward, by task, and of every part; NaN without any answer."""
    sums: dict[str, list[float]] = {}

    def add(name: str, values: Iterable[float], count: int) -> None:
        if count:
            sums[name] = [math.fsum(values), float(count)]

    totals = [reward for group in collected.groups for reward in group.rewards]
    add("reward/mean", totals, len(totals))
    add("square", (total**2 for total in totals), len(totals))
    for letter in TASKS:
        judged = [v for g in collected.groups if g.prompt.letter == letter for v in g.verdicts]
        add(f"reward/{letter}", (one.total for one in judged), len(judged))
        for part in judged[0].parts if judged else ():
            add(f"reward/{letter}/{part}", (one.parts[part] for one in judged), len(judged))
    means = {"reward/mean": math.nan} | distributed.mean_by_name(sums)
    square = means.pop("square", math.nan)
    means["reward/std"] = max(0.0, square - means["reward/mean"] ** 2) ** 0.5
    means["reward/flat_groups"] = collected.flat / collected.seen
    means["reward/invalid_groups"] = collected.invalid / collected.seen
    return means | {"reward/max": max(all_rewards(collected.groups), default=math.nan)}


def warmup_metrics(collected: Collected, step: int, warmup_steps: int) -> Metrics:
    """How far rewards have warmed up, and what they would be had they; nothing without a warm-up.

    Beside a warm-up the mean reward rises by itself: only the other shows whether answers improve.
    """
    if warmup_steps == 0:
        return {}
    whole = [one.at_full_weight for group in collected.groups for one in group.verdicts]
    sums = {"reward/at_full_weight": [math.fsum(whole), float(len(whole))]}
    return distributed.mean_by_name(sums) | {"reward/warmup": ramp(step, warmup_steps)}


def update_metrics(
    state: State, found: Gradient, coefs: Coefs, rate: float, settings: TrainSettings
) -> Metrics:
    tokens = max(1.0, float(found.ratio.tokens))
    distill = {}
    if settings.distill.distill_coef > 0:
        distill = {"distill/loss": found.distill_loss, "distill/coef": coefs.distill}
    by_task = {f"kl/{letter}": kl for letter, kl in found.kl_of_tasks.items()}
    return (
        distill
        | by_task
        | {
            "kl/exact": found.kl,
            "kl/coef": coefs.kl,
            "policy/ratio_max": float(found.ratio.ratio_max),
            "policy/clipped": float(found.ratio.clipped) / tokens,
            "policy/entropy": found.entropy,
            "loss/total": found.total(coefs, settings),
            "loss/policy": found.policy,
            "loss/kl": found.kl_loss,
            "loss/value": found.value,
            "grad/norm": found.norm,
            "lr": rate,
            "sampler/logp_gap": float(found.ratio.gap) / tokens,
            "guard/skipped": float(state.guard.skipped),
            "guard/recoveries": float(state.guard.recoveries),
            "mem/peak_mb": peak_memory_mb(state.learner.model.device),
        }
    )


def token_metrics(collected: Collected, micros: Sequence[MicroBatch]) -> Metrics:
    """Means over all answers of all ranks; of those left out, over those in a batch."""
    cut = [not done for group in collected.groups for done in group.finished]
    lengths = [group.lengths for group in collected.groups]
    length = int(torch.cat(lengths).sum()) if lengths else 0
    learning = [micro for micro in micros if not (micro.anchor or micro.guide)]
    answers = sum(micro.batch.count for micro in learning)
    left_out = answers - sum(micro.counts()[1] for micro in learning)
    return distributed.mean_by_name(
        {
            "tokens/mean_length": [float(length), float(len(cut))],
            "tokens/truncated": [float(sum(cut)), float(len(cut))],
            "kl/left_out": [float(left_out), float(answers)],
        }
    )


def guide_metrics(collected: Collected, micros: Sequence[MicroBatch]) -> Metrics:
    """Over all ranks: how many groups are guided, how likely their truths are token by token, and
    how many prompts of each class were solved."""
    guides = [micro for micro in micros if micro.guide]
    sums = {"guide/share": [float(len(collected.guides)), float(len(collected.groups))]}
    if guides:
        likely = torch.cat([micro.old_logp for micro in guides]).exp()
        sums["guide/prob"] = [float(likely.sum()), float(len(likely))]
    by_class = {f"guide/solved/{kind}": n / of for kind, (n, of) in collected.solved.items()}
    return distributed.mean_by_name(sums) | by_class


def peak_memory_mb(device: torch.device) -> float:
    """Of a GPU, the most that was taken from it since this was asked last; of a CPU, ever."""
    if device.type == "cuda":
        peak = torch.cuda.max_memory_reserved(device)
        torch.cuda.reset_peak_memory_stats(device)
        return peak / 2**20
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def held_out_health(step: int, evaluation: Evaluation, metric: str) -> EvalHealth:
    """What an evaluation says to the guard, and about which checkpoint is best."""
    found = evaluation.estimates
    if found and metric not in found:
        raise RookworldError(
            f"--select-by {metric}: the evaluation has no such metric, but {', '.join(found)}"
        )
    formats = [found[name].value for letter in TASKS if (name := f"{letter}/format") in found]
    valid = min(formats, default=math.nan)
    if metric not in found:
        return EvalHealth(step=step, reward=math.nan, format=valid, metric=metric)
    one = found[metric]
    # an interval of no width comes from a single row, or from rows that are all alike
    error = (one.high - one.low) / (2 * Z95) or math.nan
    return EvalHealth(step=step, reward=one.value, format=valid, error=error, metric=metric)


def log_line(step: int, metrics: Metrics) -> str:
    """One line of train.log: what a person watches."""
    tasks = " ".join(
        f"{letter} {metrics[f'reward/{letter}']:.3f}"
        for letter in TASKS
        if f"reward/{letter}" in metrics
    )
    if metrics.get("reward/warmup", 1.0) < 1:
        tasks += f"; {metrics['reward/at_full_weight']:.3f} at full weight"
    return (
        f"Step {step} reward {metrics['reward/mean']:.3f} ({tasks}) KL {metrics['kl/exact']:.4f} "
        f"entropy {metrics['policy/entropy']:.3f} norm {metrics['grad/norm']:.2f} "
        f"lr {metrics['lr']:.2e} {metrics['time/step_s']:.2f} s"
    )


def rollout_record(step: int, group: Group) -> dict[str, Any]:
    """A prompt with its answers, as `rollouts.jsonl` keeps them."""
    truth = row_record(group.prompt.row)
    answers = [
        {"text": text, "reward": verdict.total, "parts": verdict.parts, "reason": verdict.reason}
        for text, verdict in zip(group.texts, group.verdicts, strict=True)
    ]
    return {"step": step, "task": group.prompt.letter, "truth": truth, "answers": answers}
