"""LOOP: supervised training from rows, the one there is.

Laws: what a step computes does not depend on how it is cut into passes or ranks; data order is a
function of (seed, step), so a resumed run is bit-exact on the CPU unless a clock makes the schedule
(`--minutes`). Masters are float32, passes may be bfloat16. What a step takes is in `corpus`.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from rookworld.grpo.schedule import cosine, lr_multiplier, warmup
from rookworld.model import sharding
from rookworld.model.checkpoint import Checkpoint, below, optimizer_tensors, restore_optimizers
from rookworld.model.gpt2 import GPT2, GPT2Config
from rookworld.model.optim import build_optimizers
from rookworld.model.prune import cut_down
from rookworld.model.run_checkpoints import (
    begin_run,
    due,
    finish_run,
    held,
    resumable,
    resume_run,
    save_run,
)
from rookworld.model.tokenizer import Tokenizer
from rookworld.model.weights import load_model
from rookworld.pretrain.corpus import Corpus, place
from rookworld.pretrain.dataset import TokenizedRows
from rookworld.pretrain.documents import Documents
from rookworld.pretrain.settings import PretrainSettings
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
    window: list[dict[str, Tensor]] = field(default_factory=list)
    """What each step since the last line of metrics.jsonl found."""
    window_s: float = 0.0
    """How long they took."""
    trained_s: float = 0.0
    """How long training took in all, without evaluations, checkpoints and first steps."""


def pretrain(
    settings: PretrainSettings,
    data: Sequence[tuple[TokenizedRows, float]] | Documents,
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
    corpus = place(data, state.model, tokenizer, settings, device)
    with held(run), interruptible() as asked_to_stop:
        if not resume(state, run, settings, say):
            begin_run(run, settings, origin(settings.seed), say)
            save(run, state, settings)
        first = state.step
        while not ended(state, settings):
            began = time.perf_counter()
            set_rates(state, settings)
            state.window.append(update(state, corpus, settings, device))
            state.step += 1
            tell_time(state, settings, began, counts=state.step > first + 1)
            state.window_s += time.perf_counter() - began
            last = state.step if ended(state, settings) else settings.steps
            if due(state.step, settings.log_every, last):
                report(run, state, settings, corpus.tokens_per_step, on_step)
            if due(state.step, settings.eval_every, last) and evaluate is not None:
                record(run, state, evaluate)
            # after everything is written down: a resumed run does not write it again
            stopping = distributed.any_rank(asked_to_stop())
            if stopping or due(state.step, settings.save_every, last):
                save(run, state, settings)
            if stopping:
                raise Interrupted(f"stopped after step {state.step}; --resume goes on from there")
        return finish_run(run, state.model, state.tokenizer, state.step)


def new_state(settings: PretrainSettings, tokenizer: Tokenizer, device: torch.device) -> State:
    if settings.model is not None:
        model = smaller(load_model(settings.model, device), settings)
    else:
        shape = GPT2Config(
            vocab_size=tokenizer.vocab_size,
            n_positions=settings.n_positions,
            n_embd=settings.n_embd,
            n_layer=settings.n_layer,
            n_head=settings.n_head,
            n_inner=settings.n_inner,
        )
        model = GPT2(shape).init_weights(settings.seed).to(device)
    return State(model, tokenizer, make_optimizers(model, settings))


def smaller(model: GPT2, settings: PretrainSettings) -> GPT2:
    """The model that --model names, cut down to the shape asked for if that is smaller."""
    asked = (
        settings.n_layer != PretrainSettings().n_layer and settings.n_layer < model.config.n_layer
    )
    if not asked and settings.n_inner in (None, model.config.inner):
        return model
    layers = settings.n_layer if asked else model.config.n_layer
    return cut_down(model, layers, settings.n_inner)


def as_started(settings: PretrainSettings, model: GPT2, tokenizer: Tokenizer) -> PretrainSettings:
    """The settings with the shape and tokenizer that --model brings; larger ones are refused.

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


def ended(state: State, settings: PretrainSettings) -> bool:
    """Whether all steps are done, or the minutes are over that stand instead of them."""
    if settings.minutes is None:
        return state.step >= settings.steps
    return state.trained_s >= 60 * settings.minutes


def tell_time(state: State, settings: PretrainSettings, began: float, *, counts: bool) -> None:
    """Let all ranks count the time of a step; the first of a process, which compiles, is free."""
    if settings.minutes is not None and counts:
        if state.model.device.type == "cuda":
            torch.cuda.synchronize(
                state.model.device
            )  # or the host would count how fast it gives orders
        (took,) = distributed.from_first([time.perf_counter() - began])
        state.trained_s += took


def set_rates(state: State, settings: PretrainSettings) -> None:
    """Linear warm-up, then a cosine to `lr_final` of the peak."""
    factor = rate_factor(state.step, settings, state.trained_s)
    for optimizer, peak in zip(state.optimizers, (settings.lr_other, settings.lr), strict=False):
        for group in optimizer.param_groups:
            group["lr"] = peak * factor


def rate_factor(step: int, settings: PretrainSettings, trained_s: float = 0.0) -> float:
    warm, final = settings.lr_warmup_steps, settings.lr_final
    if settings.minutes is None:
        return lr_multiplier("cosine", step, settings.steps, warm, final)
    gone = min(1.0, trained_s / (60 * settings.minutes))
    return min(warmup(step, warm), final + (1 - final) * cosine(gone))


def update(
    state: State, corpus: Corpus, settings: PretrainSettings, device: torch.device
) -> dict[str, Tensor]:
    """One step: gradients of every pass, summed over ranks, clipped, applied."""
    sums = torch.zeros(4, device=device)
    for loss, counts in corpus.losses(state.step):
        loss.backward()  # type: ignore[no-untyped-call]
        sums += torch.stack([loss.detach(), *counts])
    distributed.sum_over_ranks(sums)
    parameters = [p for p in state.model.parameters() if p.grad is not None]
    distributed.sum_gradients(parameters)
    norm = scale_gradients(parameters, sums[1], settings.clip_norm)
    for optimizer in state.optimizers:
        optimizer.step()
    state.model.zero_grad(set_to_none=True)
    return {"loss/total": sums[0] / sums[1], **corpus.metrics(sums), "grad/norm": norm}


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


def report(
    run: Run, state: State, settings: PretrainSettings, tokens: int, on_step: OnStep
) -> None:
    """Write down the steps since the last line and show them; `tokens` a step, 0 if they differ."""
    metrics = summarise(state, settings)
    if tokens:
        metrics["tokens/per_s"] = tokens / metrics["time/step_s"]
    if settings.minutes is not None:
        metrics["time/trained_s"] = state.trained_s
    check_finite(metrics)
    if distributed.rank() == 0:
        run.append("metrics.jsonl", {"step": state.step, **metrics})
        run.note(log_line(state.step, metrics))
    on_step(state.step, metrics)
    state.window, state.window_s = [], 0.0


def summarise(state: State, settings: PretrainSettings) -> dict[str, float]:
    """Means since the last line, read from the device once."""
    window = state.window
    metrics = {name: float(torch.stack([one[name] for one in window]).mean()) for name in window[0]}
    norms = torch.stack([one["grad/norm"] for one in window])
    metrics["guard/skipped"] = float((~torch.isfinite(norms)).sum())
    metrics["lr"] = rate_factor(state.step - 1, settings, state.trained_s) * settings.lr
    metrics["time/step_s"] = state.window_s / len(window)
    return metrics


def check_finite(metrics: dict[str, float]) -> None:
    if metrics["guard/skipped"] >= MAX_SKIPPED or math.isnan(metrics["loss/total"]):
        raise Diverged(
            f"the loss is {metrics['loss/total']}: lower --lr (now {metrics['lr']:.1e}); "
            "earlier checkpoints are kept"
        )


def log_line(step: int, metrics: dict[str, float]) -> str:
    line = f"Step {step} loss {metrics['loss/total']:.4f}"
    if "accuracy/first_move" in metrics:
        line += f" first move {metrics['accuracy/first_move']:.3f}"
    line += f" norm {metrics['grad/norm']:.2f} lr {metrics['lr']:.2e}"
    line += f" {metrics['time/step_s']:.3f} s"
    if "tokens/per_s" in metrics:
        line += f" {metrics['tokens/per_s']:,.0f} tokens/s"
    return line


def record(run: Run, state: State, evaluate: Callable[[GPT2, Tokenizer], dict[str, Any]]) -> None:
    """One held-out evaluation, by rank 0 while the others wait."""
    if distributed.rank() == 0:
        run.append("eval.jsonl", {"step": state.step, **evaluate(state.model, state.tokenizer)})
    distributed.barrier()


def save(run: Run, state: State, settings: PretrainSettings) -> None:
    tensors = optimizer_tensors(state.optimizers, MOMENTS)
    for number, found in enumerate(state.window):
        tensors |= {f"window.{number:06d}.{name}": value for name, value in found.items()}
    plain = {"step": state.step, "window_s": state.window_s, "trained_s": state.trained_s}
    save_run(run, state.model, state.tokenizer, tensors, plain, keep=settings.keep)


def resume(state: State, run: Run, settings: PretrainSettings, say: Say) -> bool:
    """Go on from the newest whole checkpoint; whether there was one."""
    found = resumable(run, "pretrain", state.model, say) if settings.resume else None
    if found is None:
        return False
    sharding.copy_weights(load_model(found.folder), state.model)
    restore_optimizers(state.optimizers, found.tensors, MOMENTS)
    state.step = found.step
    state.trained_s = float(found.state.get("trained_s", 0.0))
    restore_window(state, found)
    resume_run(run, settings, found, settings.steps, say)
    return True


def restore_window(state: State, checkpoint: Checkpoint) -> None:
    """The steps whose means were still to be written down."""
    found: dict[str, dict[str, Tensor]] = {}
    for name, value in below(checkpoint.tensors, "window"):
        number, metric = name.split(".", 1)
        found.setdefault(number, {})[metric] = value.to(state.model.device)
    state.window = [found[number] for number in sorted(found)]
    state.window_s = float(checkpoint.state.get("window_s", 0.0))
