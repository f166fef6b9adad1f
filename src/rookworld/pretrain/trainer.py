"""LOOP: supervised training from rows, the one there is.

Laws: the loss is on completion tokens only; what a step computes does not depend on how it is cut
into passes or ranks; data order is a function of (seed, step), so a resumed run is bit-exact on the
CPU. Masters are float32, passes may be bfloat16. Which rows a step takes is in `batches`.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from rookworld.grpo.schedule import lr_multiplier
from rookworld.model import sharding
from rookworld.model.checkpoint import optimizer_tensors, restore_optimizers
from rookworld.model.gpt2 import GPT2, GPT2Config
from rookworld.model.lifecycle import (
    begin_run,
    due,
    finish_run,
    resumable,
    resume_run,
    save_run,
)
from rookworld.model.optim import build_optimizers
from rookworld.model.precision import passes_in
from rookworld.model.tokenizer import Tokenizer
from rookworld.model.weights import load_model
from rookworld.pretrain import dataset
from rookworld.pretrain.batches import (
    Source,
    SupervisedBatch,
    sources_on_device,
    step_batches,
    symmetry_tables,
    to_device,
)
from rookworld.pretrain.dataset import TokenizedRows
from rookworld.pretrain.settings import PretrainSettings
from rookworld.rollout.symmetry import Symmetry
from rookworld.runtime import distributed
from rookworld.runtime.errors import ConfigError, Diverged
from rookworld.runtime.processes import Interrupted, interruptible
from rookworld.runtime.run_folder import Run, origin

Say = Callable[[str], None]
OnStep = Callable[[int, dict[str, float]], None]
SHAPE = ("n_layer", "n_embd", "n_head", "n_positions")
MOMENTS = ("optimizer0", "optimizer1")
"""What the moments of AdamW and Muon are called in a checkpoint."""
MAX_SKIPPED = 50
"""Updates without finite gradients after which there is nothing to wait for."""


@dataclass
class State:
    """Everything a checkpoint holds."""

    model: GPT2
    tokenizer: Tokenizer
    optimizers: list[torch.optim.Optimizer]
    step: int = 0


def pretrain(
    settings: PretrainSettings,
    sources: Sequence[tuple[TokenizedRows, float]],
    tokenizer: Tokenizer,
    *,
    evaluate: Callable[[GPT2, Tokenizer], dict[str, Any]] | None = None,
    on_step: OnStep = lambda step, metrics: None,
    say: Say = lambda line: None,
) -> Path:
    """Train, writing a run folder; returns the folder of the final model."""
    device = distributed.start(settings.machine.device)
    state = new_state(settings, tokenizer, device)
    settings = as_started(settings, state.model, tokenizer)
    run = Run(settings.out)
    if not resume(state, run, settings, say):
        begin_run(run, settings, origin(settings.seed), say)
    loaded = sources_on_device(sources, settings, device)
    symmetries = symmetry_tables(tokenizer, settings, device)
    if settings.repeat_weight and tokenizer.style != "compact":
        raise ConfigError("--repeat-weight needs the chess tokenizer; use --repeat-weight 0")
    passes = compiled(state.model, settings, device)
    window: list[dict[str, Tensor]] = []
    began = time.perf_counter()
    with interruptible() as asked_to_stop:
        while state.step < settings.steps:
            set_rates(state, settings)
            window.append(update(state, passes, loaded, symmetries, settings, device))
            state.step += 1
            stopping = distributed.any_rank(asked_to_stop())
            # a window cut short is told too: a resumed run begins a new one
            if stopping or due(state.step, settings.log_every, settings.steps):
                metrics = summarise(window, state, settings, time.perf_counter() - began)
                check_finite(metrics)
                if distributed.rank() == 0:
                    run.append("metrics.jsonl", {"step": state.step, **metrics})
                    run.note(log_line(state.step, metrics))
                on_step(state.step, metrics)
                window, began = [], time.perf_counter()
            if stopping or due(state.step, settings.save_every, settings.steps):
                save(run, state, settings)
                began = time.perf_counter()
            if due(state.step, settings.eval_every, settings.steps) and evaluate is not None:
                record(run, state, evaluate)
                began = time.perf_counter()
            if stopping:
                raise Interrupted(f"stopped after step {state.step}; --resume goes on from there")
    return finish_run(run, state.model, state.tokenizer, state.step)


def new_state(settings: PretrainSettings, tokenizer: Tokenizer, device: torch.device) -> State:
    if settings.model is not None:
        model = load_model(settings.model, device)
    else:
        shape = GPT2Config(
            vocab_size=tokenizer.vocab_size,
            n_positions=settings.n_positions,
            n_embd=settings.n_embd,
            n_layer=settings.n_layer,
            n_head=settings.n_head,
        )
        model = GPT2(shape).init_weights(settings.seed).to(device)
    return State(model, tokenizer, make_optimizers(model, settings))


def as_started(settings: PretrainSettings, model: GPT2, tokenizer: Tokenizer) -> PretrainSettings:
    """The settings with the shape and tokenizer that --model brings; others asked for are refused.

    What has its default was not asked for.
    """
    if settings.model is None:
        return settings
    default = PretrainSettings()
    own = {name: getattr(model.config, name) for name in SHAPE}
    for name, value in own.items():
        asked = getattr(settings, name)
        if asked not in (value, getattr(default, name)):
            flag = f"--{name.replace('_', '-')}"
            raise ConfigError(f"{flag} {asked}: --model {settings.model} has {value}; leave it out")
    other = settings.tokenizer not in (default.tokenizer, settings.model)
    if other and tokenizer.style == "compact":
        raise ConfigError(
            f"--tokenizer {settings.tokenizer}: --model {settings.model} has its own tokenizer; "
            "leave it out"
        )
    return replace(settings, tokenizer=settings.model, **own)


def make_optimizers(model: GPT2, settings: PretrainSettings) -> list[torch.optim.Optimizer]:
    """Biases and gains do not decay."""
    weights = list(model.parameters())
    return build_optimizers(
        model.named_parameters(),
        [
            {"params": [w for w in weights if w.ndim == 2]},
            {"params": [w for w in weights if w.ndim < 2], "weight_decay": 0.0},
        ],
        muon=settings.optimizer == "muon",
        lr=settings.lr,
        adam_lr=settings.lr_other,
        weight_decay=settings.weight_decay,
        fused=model.device.type == "cuda",
    )


def set_rates(state: State, settings: PretrainSettings) -> None:
    """Linear warm-up, then a cosine to `lr_final` of the peak."""
    factor = rate_factor(state.step, settings)
    for optimizer, peak in zip(state.optimizers, (settings.lr_other, settings.lr), strict=False):
        for group in optimizer.param_groups:
            group["lr"] = peak * factor


def rate_factor(step: int, settings: PretrainSettings) -> float:
    warm, final = settings.lr_warmup_steps, settings.lr_final
    return lr_multiplier("cosine", step, settings.steps, warm, final)


def compiled(model: GPT2, settings: PretrainSettings, device: torch.device) -> GPT2:
    """The model with its block compiled: layers share the code, and only the last computes less."""
    wanted = device.type == "cuda" if settings.compile is None else settings.compile
    if wanted:
        for block in model.h:
            block.compile(dynamic=False)
    return model


def update(
    state: State,
    model: GPT2,
    sources: Sequence[Source],
    symmetries: Sequence[tuple[Symmetry, dict[str, Tensor]]],
    settings: PretrainSettings,
    device: torch.device,
) -> dict[str, Tensor]:
    """One step: gradients of every pass, summed over ranks, clipped, applied."""
    sums = torch.zeros(4, device=device)
    table = field_weights(settings, device)
    for micro in step_batches(state.step, state.tokenizer, sources, symmetries, settings, device):
        with passes_in(settings.machine.dtype, device):
            loss, counts = micro_loss(model, micro, table, settings.repeat_weight)
        loss.backward()  # type: ignore[no-untyped-call]
        sums += torch.stack([loss.detach(), *counts])
    distributed.sum_over_ranks(sums)
    parameters = [p for p in state.model.parameters() if p.grad is not None]
    distributed.sum_gradients(parameters)
    norm = scale_gradients(parameters, sums[1], settings.clip_norm)
    for optimizer in state.optimizers:
        optimizer.step()
    state.model.zero_grad(set_to_none=True)
    return {
        "loss/total": sums[0] / sums[1],
        "accuracy/first_move": sums[2] / sums[3].clamp(min=1),
        "grad/norm": norm,
    }


def scale_gradients(parameters: list[nn.Parameter], total: Tensor, clip_norm: float) -> Tensor:
    """Divide by the global weight and clip; gradients that are not finite become zero.

    Done on the device: asking the host at every step would leave the GPU idle.
    """
    gradients = [p.grad for p in parameters if p.grad is not None]
    norm = torch.nn.utils.get_total_norm(gradients) / total
    factor = (clip_norm / norm.clamp(min=1e-12)).clamp(max=1.0) / total
    good = torch.isfinite(norm)
    torch._foreach_mul_(gradients, factor)
    # 0 × NaN is NaN: what is not finite is replaced, and then everything is multiplied by 0
    for gradient in gradients:
        torch.nan_to_num_(gradient, nan=0.0, posinf=0.0, neginf=0.0)
    torch._foreach_mul_(gradients, good.to(factor.dtype))
    return norm


def field_weights(settings: PretrainSettings, device: torch.device) -> Tensor:
    """Weight of a target by its field, in the order of the field numbers."""
    weights = [
        0.0,
        settings.first_move_weight,
        settings.other_move_weight,
        settings.evaluation_weight,
        settings.marker_weight,
        settings.marker_weight,
        settings.state_weight,
        settings.outcome_weight,
    ]
    return to_device(np.array(weights, dtype=np.float32), device)


def micro_loss(
    model: GPT2, micro: SupervisedBatch, table: Tensor, repeat_weight: float = 0.0
) -> tuple[Tensor, list[Tensor]]:
    """Weighted negative log-likelihood, summed; and (weight, first moves right, first moves)."""
    rows, length = micro.tokens.shape
    places = torch.arange(rows * (length - 1), device=micro.tokens.device).view(rows, length - 1)
    answers = places[:, micro.start - 1 :]
    hidden = model(micro.tokens[:, :-1], wanted=answers.flatten())
    logits = model.logits(hidden).float().view(*answers.shape, -1)
    targets, fields = micro.tokens[:, micro.start :], micro.fields[:, micro.start :]
    logp = logits.log_softmax(-1)
    surprise = -logp.gather(-1, targets[..., None]).squeeze(-1)
    place = torch.arange(len(targets), device=targets.device)
    first = micro.prompts - micro.start
    spread = -(logp[place, first].gather(-1, micro.choices) * micro.shares).sum(-1)
    soft = micro.shares.sum(-1) > 0
    surprise[place, first] = torch.where(soft, spread, surprise[place, first])
    weights = table[fields]
    opening = fields[place, first] == dataset.FIRST_MOVE
    right = (logits[place, first].argmax(-1) == targets[place, first]) & opening
    loss = (surprise * weights).sum()
    if repeat_weight > 0:
        loss = loss + repeat_weight * repetition(logp, targets, fields, first)
    return loss, [weights.sum(), right.sum().float(), opening.sum().float()]


def repetition(logp: Tensor, targets: Tensor, fields: Tensor, first: Tensor) -> Tensor:
    """Unlikelihood of naming a listed move again: −log(1 − p) over further moves, summed.

    A list of five with a repeated move is worth nothing, and its likelihood hardly shows it.
    """
    moves = dataset.CHOICES
    places = (first[:, None] + torch.arange(moves, device=first.device)).clamp(
        max=logp.shape[1] - 1
    )
    listed, kinds = targets.gather(1, places), fields.gather(1, places)
    here = logp.gather(1, places[..., None].expand(-1, -1, logp.shape[-1]))
    again = here.gather(2, listed[:, None, :].expand(-1, moves, -1)).exp()
    earlier = torch.ones(moves, moves, dtype=torch.bool, device=first.device).tril(-1)
    further = (kinds == dataset.OTHER_MOVE)[..., None] & earlier
    mass = (again * further).sum(-1).clamp(max=1 - 1e-4)
    return -torch.log1p(-mass).sum()


def summarise(
    window: Sequence[dict[str, Tensor]], state: State, settings: PretrainSettings, seconds: float
) -> dict[str, float]:
    """Means since the last line, read from the device once."""
    metrics = {name: float(torch.stack([one[name] for one in window]).mean()) for name in window[0]}
    norms = torch.stack([one["grad/norm"] for one in window])
    metrics["guard/skipped"] = float((~torch.isfinite(norms)).sum())
    metrics["lr"] = rate_factor(state.step - 1, settings) * settings.lr
    metrics["time/step_s"] = seconds / len(window)
    return metrics


def check_finite(metrics: dict[str, float]) -> None:
    if metrics["guard/skipped"] >= MAX_SKIPPED or math.isnan(metrics["loss/total"]):
        raise Diverged(
            f"the loss is {metrics['loss/total']}: lower --lr (now {metrics['lr']:.1e}); "
            "earlier checkpoints are kept"
        )


def log_line(step: int, metrics: dict[str, float]) -> str:
    return (
        f"Step {step} loss {metrics['loss/total']:.4f} "
        f"first move {metrics['accuracy/first_move']:.3f} "
        f"norm {metrics['grad/norm']:.2f} lr {metrics['lr']:.2e} {metrics['time/step_s']:.3f} s"
    )


def record(run: Run, state: State, evaluate: Callable[[GPT2, Tokenizer], dict[str, Any]]) -> None:
    """One held-out evaluation, by rank 0 while the others wait."""
    if distributed.rank() == 0:
        run.append("eval.jsonl", {"step": state.step, **evaluate(state.model, state.tokenizer)})
    distributed.barrier()


def save(run: Run, state: State, settings: PretrainSettings) -> None:
    tensors, plain = optimizer_tensors(state.optimizers, MOMENTS), {"step": state.step}
    save_run(run, state.model, state.tokenizer, tensors, plain, keep=settings.keep)


def resume(state: State, run: Run, settings: PretrainSettings, say: Say) -> bool:
    """Go on from the newest whole checkpoint; whether there was one."""
    found = resumable(run, "pretrain", state.model, say) if settings.resume else None
    if found is None:
        return False
    sharding.copy_weights(load_model(found.folder), state.model)
    restore_optimizers(state.optimizers, found.tensors, MOMENTS)
    state.step = found.step
    resume_run(run, settings, found, settings.steps, say)
    return True
