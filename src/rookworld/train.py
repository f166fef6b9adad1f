"""LOOP: GRPO, the one there is.

Laws: before the first update KL is 0, every ratio is 1 and the sampler's log-probabilities are the
trainer's, or training refuses to start; a run stopped anywhere and resumed gives the bits of one
that never stopped (CPU); what the guard decides, all ranks do. The loop reads as a table of
contents; the mathematics is in `grpo`, the gradient in `update`, the samples in `rollout`.
"""

from __future__ import annotations

import copy
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn

from rookworld import distributed, update
from rookworld.answers import NEW_TOKENS
from rookworld.checkpoint import (
    Checkpoint,
    drop_after,
    last_sound,
    load_checkpoint,
    mark_best,
    mark_sound,
    newest_checkpoint,
    optimizer_tensors,
    prune,
    restore_optimizer,
    save_checkpoint,
)
from rookworld.config import resolved
from rookworld.errors import ConfigError, Diverged, RookworldError
from rookworld.evaluate import Evaluation
from rookworld.grpo.advantages import RunningMeans
from rookworld.grpo.guard import (
    EvalHealth,
    Guard,
    GuardSettings,
    Restore,
    Ruling,
    Skip,
    StepHealth,
    Stop,
)
from rookworld.grpo.kl import KLControl, KLSettings
from rookworld.grpo.schedule import lr_multiplier, ramp
from rookworld.model.gpt2 import GPT2
from rookworld.model.sampling import Sampling
from rookworld.model.tokenizer import Tokenizer
from rookworld.model.weights import load_model, resolve_folder
from rookworld.rollout import LETTERS, Collected, Collector, Group, Prompts, collect
from rookworld.runs import Run, origin, write_json
from rookworld.settings import TrainSettings
from rookworld.tasks.reward import RewardRules, RunningNorm
from rookworld.tasks.task import EnvironmentRow, Judge, PolicyRow
from rookworld.update import Gradient, Learner, Micro

REFERENCE_PATIENCE = 20
"""Steps that KL must stay above --ref-reset-kl before the reference is reset."""
KL_AT_START, GAP_AT_START = 1e-4, {"float32": 1e-3, "bfloat16": 0.08}
"""Largest KL, and mean |log π - log μ|, before the first update; bfloat16 rounds log-probs."""

Metrics = dict[str, float]
Evaluate = Callable[[GPT2, Tokenizer], Evaluation]


@dataclass(frozen=True)
class Hooks:
    """What the surface wants to hear of."""

    on_step: Callable[[int, Metrics], None] = lambda step, metrics: None
    on_eval: Callable[[int, Evaluation], None] = lambda step, evaluation: None
    on_event: Callable[[dict[str, Any]], None] = lambda event: None
    on_samples: Callable[[int, Sequence[Group]], None] = lambda step, groups: None
    say: Callable[[str], None] = lambda line: None


@dataclass
class State:
    """Everything a checkpoint holds."""

    learner: Learner
    tokenizer: Tokenizer
    optimizer: torch.optim.Optimizer
    prompts: Prompts
    control: KLControl
    guard: Guard
    running: RunningMeans = field(default_factory=RunningMeans)
    norm: RunningNorm = field(default_factory=RunningNorm)
    step: int = 0
    best: float | None = None
    """Best held-out reward so far."""
    kl_high: int = 0
    """Steps in a row with KL above --ref-reset-kl."""

    def plain(self) -> dict[str, Any]:
        """What is not a tensor."""
        return {
            "step": self.step,
            "position": self.prompts.position,
            "control": self.control.state_dict(),
            "guard": self.guard.state_dict(),
            "running": self.running.state_dict(),
            "norm": self.norm.state_dict(),
            "best": self.best,
            "kl_high": self.kl_high,
        }

    def load_plain(self, state: dict[str, Any], *, keep_guard: bool) -> None:
        self.step, self.prompts.position = int(state["step"]), int(state["position"])
        self.control.load_state_dict(state["control"])
        self.running.load_state_dict(state["running"])
        self.norm.load_state_dict(state["norm"])
        self.best, self.kl_high = state["best"], int(state["kl_high"])
        if not keep_guard:
            self.guard.load_state_dict(state["guard"])


class Interrupted(Exception):
    """Ctrl-C or SIGTERM; a checkpoint has been written."""


def train(
    settings: TrainSettings,
    rows: Sequence[PolicyRow | EnvironmentRow],
    evaluate: Evaluate,
    judge: Judge | None = None,
    hooks: Hooks | None = None,
) -> Path:
    """Train, writing a run folder; returns the folder of the final model."""
    hooks = hooks or Hooks()
    device = distributed.start(settings.device)
    run = Run(settings.out)
    state = new_state(settings, rows, device)
    if not resume(state, run, settings, hooks):
        begin(state, run, settings, evaluate, hooks)
    with interruptible() as asked_to_stop:
        while state.step < settings.steps:
            began = Clock(device)
            collected = gather(state, settings, judge, began)
            metrics, ruling = learn(state, collected, settings, began)
            if ruling.sound and distributed.rank() == 0:
                mark_sound(checkpoint_folder(run, state.step))
            state.step += 1
            report(run, state, collected, metrics, ruling, settings, hooks)
            if not obey(run, state, ruling, settings, hooks):
                continue
            if due(state.step, settings.eval_every, settings.steps):
                assess(run, state, settings, evaluate, hooks)
            if due(state.step, settings.save_every, settings.steps):
                save(run, state, settings)
            if asked_to_stop():
                save(run, state, settings)
                raise Interrupted(f"stopped after step {state.step}; --resume goes on from there")
    return finish(run, state)


def due(step: int, every: int, last: int) -> bool:
    return step == last or (every > 0 and step % every == 0)


# --- state --------------------------------------------------------------------------------------


def new_state(
    settings: TrainSettings, rows: Sequence[PolicyRow | EnvironmentRow], device: torch.device
) -> State:
    folder = resolve_folder(settings.model)
    tokenizer = Tokenizer.load(folder)
    model = load_model(folder, device)
    fits(model, settings, tokenizer)
    reference = copy.deepcopy(model).to(reference_device(settings, device)).requires_grad_(False)
    value_head = new_value_head(model) if settings.gae else None
    learner = Learner(model, reference, value_head)
    if settings.compile:
        for block in model.h:
            block.compile(dynamic=True)
    optimizer = torch.optim.AdamW(
        learner.parameters(),
        lr=settings.lr,
        betas=(0.9, 0.95),
        weight_decay=settings.weight_decay,
        fused=device.type == "cuda",
    )
    return State(
        learner,
        tokenizer,
        optimizer,
        Prompts(rows, tokenizer, settings.mix_env_ratio, settings.seed),
        KLControl(kl_settings(settings)),
        Guard(guard_settings(settings)),
    )


def fits(model: GPT2, settings: TrainSettings, tokenizer: Tokenizer) -> None:
    """A model whose vocabulary is not its tokenizer's, or too short for an answer, is refused."""
    if model.config.vocab_size < tokenizer.vocab_size:
        raise ConfigError(
            f"--model {settings.model}: {model.config.vocab_size} embeddings for a tokenizer of "
            f"{tokenizer.vocab_size}; this tokenizer belongs to another model"
        )
    longest = max(sampling(settings, tokenizer)[letter].max_new_tokens for letter in LETTERS)
    if longest >= model.config.n_positions:
        raise ConfigError(
            f"--max-new-tokens {longest}: the model has only {model.config.n_positions} positions"
        )


def reference_device(settings: TrainSettings, device: torch.device) -> torch.device:
    """Where the reference lives; a device that is not there falls back to the policy's."""
    if settings.ref_device is None:
        return device
    wanted = torch.device(distributed.pick_device(settings.ref_device))
    if wanted.type == "cuda" and (wanted.index or 0) >= torch.cuda.device_count():
        raise ConfigError(
            f"--ref-device {settings.ref_device}: {torch.cuda.device_count()} CUDA devices here"
        )
    return wanted


def new_value_head(model: GPT2) -> nn.Linear:
    """Predicts nothing at first, so that the first advantages are the rewards themselves."""
    head = nn.Linear(model.config.n_embd, 1).to(model.device)
    nn.init.zeros_(head.weight)
    nn.init.zeros_(head.bias)
    return head


def kl_settings(settings: TrainSettings) -> KLSettings:
    return KLSettings(
        coef=settings.kl_coef,
        adaptive=settings.adaptive_kl,
        target=settings.target_kl,
        coef_min=settings.kl_coef_min,
        coef_max=settings.kl_coef_max,
        warmup_steps=settings.kl_warmup_steps,
        warmup_factor=settings.kl_warmup_factor,
    )


def guard_settings(settings: TrainSettings) -> GuardSettings:
    return GuardSettings(
        kl_divergence_threshold=settings.kl_divergence_threshold,
        adaptive_threshold=settings.adaptive_threshold,
        entropy_floor=settings.entropy_floor,
        max_consecutive_nans=settings.max_consecutive_nans,
        max_recoveries=settings.max_recoveries,
        recovery_lr_factor=settings.recovery_lr_factor,
    )


def reward_rules(settings: TrainSettings) -> RewardRules:
    return RewardRules(
        shaping=settings.reward_shaping,
        p_malformed=settings.p_malformed,
        a_malformed=settings.a_malformed,
    )


def sampling(settings: TrainSettings, tokenizer: Tokenizer) -> dict[str, Sampling]:
    """How each task is sampled."""
    made = {}
    for letter in LETTERS:
        temperature, top_p = update.sampling_of(letter, settings)
        longest = settings.max_new_tokens or NEW_TOKENS[tokenizer.style][letter]
        made[letter] = Sampling(
            temperature=temperature, top_k=settings.top_k, top_p=top_p, max_new_tokens=longest
        )
    return made


# --- one step -----------------------------------------------------------------------------------


class Clock:
    """Seconds by name since the last mark; waits for the device, or its time is billed later."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.seconds: dict[str, float] = {}
        self.began = self.last = time.perf_counter()

    def mark(self, name: str) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        now = time.perf_counter()
        self.seconds[name] = self.seconds.get(name, 0.0) + now - self.last
        self.last = now

    def metrics(self) -> Metrics:
        named = {f"time/{name}_s": value for name, value in self.seconds.items()}
        return named | {"time/step_s": time.perf_counter() - self.began}


def gather(state: State, settings: TrainSettings, judge: Judge | None, clock: Clock) -> Collected:
    """Sampled and judged groups of this step."""
    # a recovery samples anew: the answers that led astray are not asked for again
    seed = settings.seed + 1_000_003 * state.guard.recoveries
    collector = Collector(
        state.learner.model,
        state.tokenizer,
        sampling(settings, state.tokenizer),
        settings.k_samples,
        seed,
        reward_rules(settings),
        judge,
        clock.mark,
    )
    progress = ramp(state.step, settings.reward_warmup_steps)
    return collect(
        collector,
        state.prompts,
        settings.batch_size,
        state.step,
        progress,
        flat_tries=settings.flat_tries,
    )


def learn(
    state: State, collected: Collected, settings: TrainSettings, clock: Clock
) -> tuple[Metrics, Ruling]:
    """Gradients of the step, judged by the guard, applied if it says so."""
    kl_coef = state.control.coef_at(state.step)
    norm = state.norm if settings.reward_norm else None
    micros = update.prepare(collected.groups, state.learner, settings, state.tokenizer.eos)
    update.set_advantages(micros, state.learner, settings, state.running, norm, kl_coef)
    if norm is not None:
        norm.update(all_rewards(collected.groups))
    longest = max(s.max_new_tokens for s in sampling(settings, state.tokenizer).values())
    totals = update.totals_of(micros, longest)
    rewards = reward_metrics(collected)
    if totals is None:
        raise Diverged(
            f"--kl-collect-cap {settings.kl_collect_cap} left out every sample of step "
            f"{state.step}; raise it, or lower --lr"
        )
    ruling = Ruling(Skip("non_finite"))
    for number in range(settings.updates_per_rollout):
        found = update.gradient(micros, state.learner, totals, settings, kl_coef)
        if state.step == 0 and number == 0:
            check_start(found, settings, state.learner.model.device)
        health = StepHealth(
            step=state.step,
            loss=found.total(kl_coef, settings),
            grad_norm=found.norm,
            kl=found.kl,
            entropy=found.entropy,
            reward_mean=rewards["reward/mean"],
            all_rewards_negative=rewards["reward/max"] < 0,
        )
        ruling = state.guard.check_step(health)
        apply(state, ruling, settings, found.norm)
        if isinstance(ruling.decision, Skip | Restore | Stop):
            break
    state.control.observe(state.step, found.kl)
    follow_reference(state, found.kl, settings)
    clock.mark("update")
    metrics = rewards | update_metrics(state, found, kl_coef, settings)
    metrics |= token_metrics(collected, micros) | clock.metrics()
    return metrics, ruling


def all_rewards(groups: Sequence[Group]) -> list[float]:
    """Rewards of every rank's samples, in rank order."""
    mine = [reward for group in groups for reward in group.rewards]
    return distributed.gather_floats(mine)


def check_start(found: Gradient, settings: TrainSettings, device: torch.device) -> None:
    """Before the first update policy, sampler and reference are one model, or something is off."""
    gap = float(found.ratio.gap / found.ratio.tokens)
    dtype = settings.dtype
    if dtype == "auto":
        dtype = "bfloat16" if device.type == "cuda" else "float32"
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
    if not isinstance(ruling.decision, Skip | Restore | Stop):
        rate = lr_at(state, settings)
        for group in state.optimizer.param_groups:
            group["lr"] = rate
        if norm > settings.clip_norm:
            factor = settings.clip_norm / norm
            torch._foreach_mul_([p.grad for p in parameters if p.grad is not None], factor)
        state.optimizer.step()
    for parameter in parameters:
        parameter.grad = None


def lr_at(state: State, settings: TrainSettings) -> float:
    schedule = lr_multiplier(
        settings.lr_schedule, state.step, settings.steps, settings.lr_warmup_steps
    )
    return settings.lr * schedule * state.guard.lr_scale


def follow_reference(state: State, kl: float, settings: TrainSettings) -> None:
    """Move the reference to the policy when it is time, or when KL stays high."""
    state.kl_high = state.kl_high + 1 if kl > settings.ref_reset_kl > 0 else 0
    stayed_high = state.kl_high >= REFERENCE_PATIENCE
    every = settings.ref_sync_every
    if not (stayed_high or (every > 0 and (state.step + 1) % every == 0)):
        return
    copy_weights(state.learner.model, state.learner.reference)
    if stayed_high:
        # moments gathered against the old reference point the wrong way
        state.optimizer.state.clear()
    state.kl_high = 0


@torch.no_grad()
def copy_weights(source: nn.Module, target: nn.Module) -> None:
    for theirs, mine in zip(source.parameters(), target.parameters(), strict=True):
        mine.copy_(theirs)


# --- numbers ------------------------------------------------------------------------------------


def reward_metrics(collected: Collected) -> Metrics:
    """Means over all ranks: of the reward, by task, and of every part."""
    sums: dict[str, list[float]] = {}

    def add(name: str, value: float) -> None:
        entry = sums.setdefault(name, [0.0, 0.0])
        entry[0] += value
        entry[1] += 1

    for group in collected.groups:
        letter = group.prompt.letter
        for verdict in group.verdicts:
            add("reward/mean", verdict.total)
            add("square", verdict.total**2)
            add(f"reward/{letter}", verdict.total)
            for part, value in verdict.parts.items():
                add(f"reward/{letter}/{part}", value)
    means = distributed.mean_by_name(sums)
    square = means.pop("square")
    means["reward/std"] = max(0.0, square - means["reward/mean"] ** 2) ** 0.5
    means["reward/flat_groups"] = collected.flat / collected.seen
    largest = max(all_rewards(collected.groups))
    return means | {"reward/max": largest}


def update_metrics(
    state: State, found: Gradient, kl_coef: float, settings: TrainSettings
) -> Metrics:
    tokens = float(found.ratio.tokens)
    return {
        "kl/exact": found.kl,
        "kl/coef": kl_coef,
        "policy/ratio_max": float(found.ratio.ratio_max),
        "policy/clipped": float(found.ratio.clipped) / tokens,
        "policy/entropy": found.entropy,
        "loss/total": found.total(kl_coef, settings),
        "loss/policy": found.policy,
        "loss/kl": found.kl_loss,
        "loss/value": found.value,
        "grad/norm": found.norm,
        "lr": lr_at(state, settings),
        "sampler/logp_gap": float(found.ratio.gap) / tokens,
        "guard/skipped": float(state.guard.skipped),
        "guard/recoveries": float(state.guard.recoveries),
        "mem/peak_mb": peak_memory_mb(state.learner.model.device),
    }


def token_metrics(collected: Collected, micros: Sequence[Micro]) -> Metrics:
    lengths = [float(n) for group in collected.groups for n in group.lengths.tolist()]
    cut = [not done for group in collected.groups for done in group.finished]
    left_out = [float(not kept) for micro in micros for kept in micro.kept.tolist()]
    named = {
        "tokens/mean_length": lengths,
        "tokens/truncated": [float(value) for value in cut],
        "kl/left_out": left_out,
    }
    return distributed.mean_by_name({n: [sum(v), float(len(v))] for n, v in named.items()})


def peak_memory_mb(device: torch.device) -> float:
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**20
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def log_line(step: int, metrics: Metrics) -> str:
    """One line of train.log: what a person watches."""
    tasks = " ".join(
        f"{letter} {metrics[f'reward/{letter}']:.3f}"
        for letter in LETTERS
        if f"reward/{letter}" in metrics
    )
    return (
        f"Step {step} reward {metrics['reward/mean']:.3f} ({tasks}) KL {metrics['kl/exact']:.4f} "
        f"entropy {metrics['policy/entropy']:.3f} norm {metrics['grad/norm']:.2f} "
        f"lr {metrics['lr']:.2e} {metrics['time/step_s']:.2f} s"
    )


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
        run.append("events.jsonl", event)
        hooks.on_event(event)


def rollout_record(step: int, group: Group) -> dict[str, Any]:
    """A prompt with its answers, as `rollouts.jsonl` keeps them."""
    row = group.prompt.row
    truth: dict[str, Any] = {"fen": row.fen}
    if isinstance(row, PolicyRow):
        truth |= {"moves": list(row.moves), "cp": list(row.cp)}
    else:
        truth |= {"move": row.move, "next_fen": row.next_fen, "kind": row.kind}
    answers = [
        {"text": text, "reward": verdict.total, "parts": verdict.parts, "reason": verdict.reason}
        for text, verdict in zip(group.texts, group.verdicts, strict=True)
    ]
    return {"step": step, "task": group.prompt.letter, "truth": truth, "answers": answers}


# --- beginning, checking, ending ----------------------------------------------------------------


def begin(
    state: State, run: Run, settings: TrainSettings, evaluate: Evaluate, hooks: Hooks
) -> None:
    """A new run: its settings, the model before training, and a state to return to."""
    if distributed.rank() == 0:
        run.clear()
        write_json(run.folder / "config.json", resolved(settings))
        write_json(run.folder / "origin.json", origin(settings.seed, settings.engine))
    distributed.barrier()
    assess(run, state, settings, evaluate, hooks)
    save(run, state, settings)


def assess(
    run: Run, state: State, settings: TrainSettings, evaluate: Evaluate, hooks: Hooks
) -> None:
    """Held-out evaluation by rank 0; all ranks hear what the guard makes of it."""
    numbers = [0.0, 0.0]
    if distributed.rank() == 0:
        evaluation = evaluate(state.learner.model, state.tokenizer)
        run.append("eval.jsonl", {"step": state.step, **evaluation.to_json()})
        hooks.on_eval(state.step, evaluation)
        shown = evaluation.estimates
        formats = [shown[n].value for n in ("P/format", "A/format") if n in shown]
        reward = shown["reward/sampled" if "reward/sampled" in shown else "reward/greedy"].value
        numbers = [reward, min(formats)]
    reward, valid = distributed.from_first(numbers)
    ruling = state.guard.check_eval(EvalHealth(step=state.step, reward=reward, format=valid))
    if distributed.rank() == 0:
        log_events(run, ruling, hooks)
    if not obey(run, state, ruling, settings, hooks):
        return
    if state.best is None or reward > state.best:
        state.best = reward
        if state.step > 0:
            save(run, state, settings)
        if distributed.rank() == 0 and state.step > 0:
            mark_best(checkpoint_folder(run, state.step))


def obey(run: Run, state: State, ruling: Ruling, settings: TrainSettings, hooks: Hooks) -> bool:
    """Carry out a restore or a stop; whether the run goes on from where it is."""
    if isinstance(ruling.decision, Stop):
        raise Diverged(ruling.decision.diagnosis)
    if not isinstance(ruling.decision, Restore):
        return True
    distributed.barrier()
    restore(state, load_checkpoint(last_sound(run.folder)), keep_guard=True)
    distributed.barrier()
    if distributed.rank() == 0:
        drop_after(run.folder, state.step)
        run.cut_back(state.step, keep=("events.jsonl",))
    hooks.say(f"restored the state after step {state.step}")
    return False


def checkpoint_folder(run: Run, step: int) -> Path:
    return run.folder / "checkpoints" / f"step-{step:06d}"


def save(run: Run, state: State, settings: TrainSettings) -> None:
    """Write a checkpoint (rank 0), keep the last few and the best."""
    if distributed.rank() == 0:
        tensors = optimizer_tensors(state.optimizer, "optimizer")
        tensors |= {f"reference.{n}": t for n, t in state.learner.reference.named_parameters()}
        if state.learner.value_head is not None:
            tensors |= {f"value.{n}": t for n, t in state.learner.value_head.named_parameters()}
        folder = checkpoint_folder(run, state.step)
        save_checkpoint(folder, state.learner.model, state.tokenizer, tensors, state.plain())
        prune(run.folder, settings.keep)
    distributed.barrier()


def resume(state: State, run: Run, settings: TrainSettings, hooks: Hooks) -> bool:
    """Go on from the newest whole checkpoint; whether there was one."""
    newest = newest_checkpoint(run.folder, hooks.say) if settings.resume else None
    if newest is None:
        return False
    restore(state, load_checkpoint(newest), keep_guard=False)
    if distributed.rank() == 0:
        run.cut_back(state.step)
    hooks.say(f"resumed after step {state.step}")
    return True


def restore(state: State, checkpoint: Checkpoint, *, keep_guard: bool) -> None:
    """Put a checkpoint's weights, moments, reference and counters back."""
    learner = state.learner
    copy_weights(load_model(checkpoint.folder, learner.model.device), learner.model)
    load_named(learner.reference, checkpoint.tensors, "reference")
    if learner.value_head is not None:
        load_named(learner.value_head, checkpoint.tensors, "value")
    state.optimizer.state.clear()
    restore_optimizer(state.optimizer, checkpoint.tensors, "optimizer")
    state.load_plain(checkpoint.state, keep_guard=keep_guard)


@torch.no_grad()
def load_named(module: nn.Module, tensors: dict[str, Tensor], prefix: str) -> None:
    for name, parameter in module.named_parameters():
        parameter.copy_(tensors[f"{prefix}.{name}"])


def finish(run: Run, state: State) -> Path:
    final = run.folder / "final"
    if distributed.rank() == 0:
        save_checkpoint(final, state.learner.model, state.tokenizer, {}, {"step": state.step})
        run.finish()
    distributed.barrier()
    return final


@contextmanager
def interruptible() -> Iterator[Callable[[], bool]]:
    """Ctrl-C and SIGTERM end the run after the step; a second one ends it at once."""
    asked: list[int] = []

    def ask(number: int, frame: FrameType | None) -> None:
        if asked:
            raise KeyboardInterrupt
        asked.append(number)

    kept = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield lambda: distributed.any_rank(bool(asked))
    finally:
        for number, handler in kept.items():
            signal.signal(number, handler)
