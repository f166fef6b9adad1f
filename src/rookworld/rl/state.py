"""What a run holds: how it is built from settings, saved, and restored.

Laws: everything that the next step depends on is in `State`, so a checkpoint of it continues bit by
bit (CPU); what a checkpoint says is independent of the number of processes. What the guard has
learnt, and the best model so far, survive a restore.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from rookworld.data.sources import load_positions
from rookworld.grpo.advantages import RunningMeans
from rookworld.grpo.guard import Guard
from rookworld.grpo.kl import KLControl
from rookworld.model import sharding
from rookworld.model.checkpoint import (
    Checkpoint,
    below,
    optimizer_tensors,
    restore_optimizers,
)
from rookworld.model.gpt2 import GPT2Config
from rookworld.model.precision import matrix_dtype
from rookworld.model.run_checkpoints import resumable, resume_run, save_run
from rookworld.model.sampling.sampler import Sampling, sampler_for
from rookworld.model.tokenizer import Tokenizer
from rookworld.model.weights import load_model, resolve_folder
from rookworld.rl.memory import claim_memory
from rookworld.rl.models import (
    Learner,
    hold_still,
    make_optimizers,
    new_learner,
    record_passes,
)
from rookworld.rl.self_distill import Distiller
from rookworld.rl.settings import SamplingSettings, TrainSettings
from rookworld.rollout.prompts import Prompts
from rookworld.rollout.token_values import move_tokens
from rookworld.runtime.errors import ConfigError, RookworldError
from rookworld.runtime.run_folder import Run
from rookworld.tasks.policy import POLICY
from rookworld.tasks.prefix_value import RunningUsual
from rookworld.tasks.registry import TASKS
from rookworld.tasks.reward import RunningNorm
from rookworld.tasks.task import Row

MOMENTS = ("optimizer", "muon")
"""What the moments of AdamW and Muon are called in a checkpoint."""


@dataclass
class State:
    """Everything a checkpoint holds."""

    learner: Learner
    tokenizer: Tokenizer
    optimizers: list[torch.optim.Optimizer]
    """By the names of `MOMENTS`."""
    prompts: Prompts
    control: KLControl
    guard: Guard
    running: RunningMeans = field(default_factory=RunningMeans)
    norm: RunningNorm = field(default_factory=RunningNorm)
    usual: RunningUsual = field(default_factory=RunningUsual)
    """How good analyses have been lately, with credit by field."""
    step: int = 0
    best: float | None = None
    """Best held-out value so far of the metric that runs are selected by."""
    best_by: str = ""
    """That metric; a value of another one is no best."""
    kl_high: int = 0
    """Steps in a row with KL above --ref-reset-kl."""
    distiller: Distiller | None = None
    """Of self-distillation, with --distill-coef."""

    def plain(self) -> dict[str, Any]:
        """What is not a tensor."""
        return {
            "step": self.step,
            "position": self.prompts.position,
            "control": self.control.state_dict(),
            "guard": self.guard.state_dict(),
            "running": self.running.state_dict(),
            "norm": self.norm.state_dict(),
            "usual": self.usual.state_dict(),
            "best": self.best,
            "best_by": self.best_by,
            "kl_high": self.kl_high,
        }

    def load_plain(self, state: dict[str, Any], *, recovering: bool) -> None:
        """Go on from `plain()`; a recovery keeps what the guard and the best model know."""
        self.step, self.prompts.position = int(state["step"]), int(state["position"])
        self.control.load_state_dict(state["control"])
        self.running.load_state_dict(state["running"])
        self.norm.load_state_dict(state["norm"])
        self.usual.load_state_dict(state.get("usual", {}))  # runs of earlier versions have none
        self.kl_high = int(state["kl_high"])
        if not recovering:
            # before there was a choice it was the sampled reward
            self.best, self.best_by = state["best"], state.get("best_by", "reward/sampled")
            self.guard.load_state_dict(state["guard"])


# --- built from settings ------------------------------------------------------------------------


def new_state(settings: TrainSettings, rows: Sequence[Row], device: torch.device) -> State:
    folder = resolve_folder(settings.model)
    tokenizer = Tokenizer.load(folder)
    claim_memory(settings, device)
    learner = new_learner(folder, settings, device)
    fits(learner.model.config, settings, tokenizer)
    hold_still(learner.model, settings.optimizer.trained)
    learner.model.recompute = learner.memory.recompute
    if settings.compute.graphs and device.type == "cuda" and not settings.compute.shard:
        record_passes(learner)
    if device.type == "cuda":
        # the sampler of training and evaluation, kept as long as its model
        sampler = sampler_for(learner.whole, matrix_dtype(settings.compute.dtype, device))
        sampler.limit_cache(learner.memory.cache_bytes)
    asked = settings.distill.distill_coef > 0
    distiller = new_distiller(rows, learner, tokenizer, settings) if asked else None
    return State(
        learner,
        tokenizer,
        make_optimizers(learner, settings),
        Prompts(
            rows,
            tokenizer,
            settings.mix_env_ratio,
            settings.seed,
            by_class=settings.sampling.guide > 0,
        ),
        KLControl(settings.kl),
        Guard(settings.guard),
        distiller=distiller,
    )


def new_distiller(
    rows: Sequence[Row],
    learner: Learner,
    tokenizer: Tokenizer,
    settings: TrainSettings,
) -> Distiller:
    """Of the positions of --distill-data, or else of the analysis rows."""
    own = (row.fen for row in POLICY.select(rows))
    named = settings.distill.distill_data
    fens = load_positions(named) if named else tuple(own)
    return Distiller(fens, learner, tokenizer, settings)


def fits(shape: GPT2Config, settings: TrainSettings, tokenizer: Tokenizer) -> None:
    """Refuse a model that is too short for an answer or whose tokenizer does not suit it."""
    if shape.vocab_size < tokenizer.vocab_size:
        raise ConfigError(
            f"--model {settings.model}: {shape.vocab_size} embeddings for a tokenizer of "
            f"{tokenizer.vocab_size}; this tokenizer belongs to another model"
        )
    longest = max(one.max_new_tokens for one in sampling(settings.sampling, tokenizer).values())
    if longest >= shape.n_positions:
        raise ConfigError(
            f"--max-new-tokens {longest}: the model has only {shape.n_positions} positions"
        )
    paid = settings.advantages
    if paid.credit == "choices" and not paid.gae and not move_tokens(tokenizer)[0]:
        raise ConfigError(
            f"--credit choices: the tokenizer of {settings.model} spells moves in pieces, and a "
            "choice between moves has to be one token; take --credit outlook"
        )

    if settings.distill.distill_coef > 0 and not move_tokens(tokenizer)[0]:
        raise ConfigError(
            f"--distill-coef {settings.distill.distill_coef}: the tokenizer of {settings.model} "
            "spells moves in pieces, and lists are compared move by move; leave it out"
        )


def with_credit(settings: TrainSettings, tokenizer: Tokenizer) -> TrainSettings:
    """`--credit auto` decided."""
    if settings.advantages.credit != "auto":
        return settings
    may = settings.choices_allowed and move_tokens(tokenizer)[0]
    return settings.but(credit="choices" if may else "fields")


def sampling(settings: SamplingSettings, tokenizer: Tokenizer) -> dict[str, Sampling]:
    """How each task is sampled."""
    made = {}
    for letter, task in TASKS.items():
        temperature, top_p = settings.of_task(letter)
        longest = settings.max_new_tokens or task.new_tokens[tokenizer.style]
        made[letter] = Sampling(
            temperature=temperature,
            top_k=settings.top_k,
            top_p=top_p,
            max_new_tokens=longest,
        )
    return made


# --- checkpoints --------------------------------------------------------------------------------


def save(run: Run, state: State, settings: TrainSettings, *, best: bool = False) -> None:
    """Write a checkpoint (rank 0), keep the last few and the best."""
    tensors = optimizer_tensors(state.optimizers, MOMENTS)
    tensors |= {f"reference.{n}": t for n, t in state.learner.reference.named_parameters()}
    if state.learner.value_head is not None:
        tensors |= {f"value.{n}": t for n, t in state.learner.value_head.named_parameters()}
    if state.distiller is not None:
        tensors |= {f"distill.{n}": t for n, t in state.distiller.tensors().items()}
    tensors = sharding.whole_tensors(tensors)
    model, plain = state.learner.whole, state.plain()
    save_run(run, model, state.tokenizer, tensors, plain, keep=settings.keep, best=best)


def resume(state: State, run: Run, settings: TrainSettings, say: Callable[[str], None]) -> bool:
    """Go on from the newest whole checkpoint; whether there was one."""
    if not settings.resume:
        return False
    checkpoint = resumable(run, "train --backend native", state.learner.whole, say)
    if checkpoint is None:
        return False
    restore(state, checkpoint, recovering=False)
    resume_run(run, settings, checkpoint, settings.steps, say)
    return True


def restore(state: State, checkpoint: Checkpoint, *, recovering: bool) -> None:
    """Put a checkpoint's weights, moments, reference and counters back."""
    learner = state.learner
    saved = load_model(checkpoint.folder)
    for model in {learner.model, learner.whole}:
        sharding.copy_weights(saved, model)
    load_named(learner.reference, checkpoint, "reference")
    if learner.value_head is not None:
        load_named(learner.value_head, checkpoint, "value")
    restore_optimizers(state.optimizers, checkpoint.tensors, MOMENTS)
    if state.distiller is not None:
        state.distiller.restore(dict(below(checkpoint.tensors, "distill")))
    state.load_plain(checkpoint.state, recovering=recovering)


def load_named(module: nn.Module, checkpoint: Checkpoint, prefix: str) -> None:
    sharding.give_back(module)
    for name, parameter in module.named_parameters():
        saved: Tensor | None = checkpoint.tensors.get(f"{prefix}.{name}")
        if saved is None or saved.shape != parameter.shape:
            raise RookworldError(
                f"{checkpoint.folder}: no {prefix}.{name} of shape {list(parameter.shape)} in it; "
                "resume with the run's own --model and --gae"
            )
        sharding.assign(parameter, saved)
