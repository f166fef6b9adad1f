"""LOOP: supervised training from rows, the one there is.

Laws: the loss is on completion tokens only; what a step computes does not depend on how it is cut
into passes or ranks; data order is a function of (seed, step), so a resumed run is bit-exact on the
CPU. Masters are float32, passes may be bfloat16. Left out: packing several rows into one sequence
(rows of a task have nearly one length, so there is little to gain).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from rookworld import distributed, packing
from rookworld.checkpoint import (
    load_checkpoint,
    newest_checkpoint,
    optimizer_tensors,
    prune,
    restore_optimizer,
    save_checkpoint,
)
from rookworld.config import resolved
from rookworld.errors import ConfigError, Diverged
from rookworld.model.gpt2 import GPT2, GPT2Config
from rookworld.model.precision import passes_in
from rookworld.model.tokenizer import Tokenizer
from rookworld.model.weights import load_model
from rookworld.packing import Packed, Symmetry
from rookworld.runs import Run, origin, write_json
from rookworld.settings import PretrainSettings

Say = Callable[[str], None]
OnStep = Callable[[int, dict[str, float]], None]
MAX_SKIPPED = 50
"""Updates without finite gradients after which there is nothing to wait for."""


@dataclass
class Source:
    """Packed rows on the device and how many of them each step takes."""

    packed: Packed
    tensors: dict[str, Tensor]
    per_step: int
    symmetric: bool
    """Analysis rows may be flipped; environment rows may not (the move counter breaks it)."""


@dataclass(frozen=True)
class Picks:
    """The rows of one step over all sources, in one order."""

    sources: NDArray[np.int64]
    rows: NDArray[np.int64]
    lengths: NDArray[np.int16]
    prompts: NDArray[np.int16]
    chance: NDArray[np.float64]
    """[2, rows] in 0…1: below a half the colour flip, the mirror."""


@dataclass
class Micro:
    """One forward pass: rows of like length, on the device."""

    tokens: Tensor
    fields: Tensor
    prompts: Tensor
    choices: Tensor
    shares: Tensor
    start: int
    """The shortest prompt's length: no target lies before it."""


@dataclass
class State:
    """Everything a checkpoint holds."""

    model: GPT2
    tokenizer: Tokenizer
    optimizers: list[torch.optim.Optimizer]
    matrices: list[tuple[nn.Parameter, nn.Parameter, slice]]
    """Block matrices as Muon sees them: (view, parameter, rows of it)."""
    step: int = 0


def pretrain(
    settings: PretrainSettings,
    sources: Sequence[tuple[Packed, float]],
    tokenizer: Tokenizer,
    *,
    evaluate: Callable[[GPT2, Tokenizer], dict[str, Any]] | None = None,
    on_step: OnStep = lambda step, metrics: None,
    say: Say = lambda line: None,
) -> Path:
    """Train, writing a run folder; returns the folder of the final model."""
    device = distributed.start(settings.device)
    state = new_state(settings, tokenizer, device)
    run = Run(settings.out)
    resume(state, run, settings, say)
    loaded = place(sources, settings, device)
    symmetries = symmetry_tables(tokenizer, settings, device)
    passes = compiled(state.model, settings, device)
    window: list[dict[str, Tensor]] = []
    began = time.perf_counter()
    while state.step < settings.steps:
        set_rates(state, settings)
        window.append(update(state, passes, loaded, symmetries, settings, device))
        state.step += 1
        if state.step % settings.log_every == 0 or state.step == settings.steps:
            metrics = summarise(window, state, settings, time.perf_counter() - began)
            check_finite(metrics)
            if distributed.rank() == 0:
                run.append("metrics.jsonl", {"step": state.step, **metrics})
                run.note(log_line(state.step, metrics))
            on_step(state.step, metrics)
            window, began = [], time.perf_counter()
        if due(state.step, settings.save_every, settings.steps):
            save(run, state, settings)
            began = time.perf_counter()
        if due(state.step, settings.eval_every, settings.steps) and evaluate is not None:
            record(run, state, evaluate)
            began = time.perf_counter()
    return finish(run, state)


def due(step: int, every: int, last: int) -> bool:
    return step == last or (every > 0 and step % every == 0)


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
    optimizers, matrices = make_optimizers(model, settings)
    return State(model, tokenizer, optimizers, matrices)


def make_optimizers(
    model: GPT2, settings: PretrainSettings
) -> tuple[list[torch.optim.Optimizer], list[tuple[nn.Parameter, nn.Parameter, slice]]]:
    """Muon for block matrices (query, key and value apart) and AdamW for the rest, or AdamW."""
    matrices = [
        (nn.Parameter(weight.data[rows]), weight, rows)
        for name, weight in model.named_parameters()
        if settings.optimizer == "muon" and name.startswith("h.") and weight.ndim == 2
        for rows in _thirds(name, weight)
    ]
    taken = {id(weight) for _, weight, _ in matrices}
    rest = [weight for weight in model.parameters() if id(weight) not in taken]
    fused = model.device.type == "cuda"
    adam = torch.optim.AdamW(
        [
            {"params": [w for w in rest if w.ndim == 2], "weight_decay": settings.weight_decay},
            {"params": [w for w in rest if w.ndim < 2], "weight_decay": 0.0},
        ],
        lr=settings.lr_other,
        betas=(0.9, 0.95),
        fused=fused,
    )
    if not matrices:
        return [adam], []
    muon = torch.optim.Muon(
        [view for view, _, _ in matrices],
        lr=settings.lr,
        weight_decay=settings.weight_decay,
        adjust_lr_fn="match_rms_adamw",
    )
    return [adam, muon], matrices


def _thirds(name: str, weight: Tensor) -> list[slice]:
    """Rows that are one matrix: three for the fused query, key and value."""
    if not name.endswith("c_attn.weight"):
        return [slice(0, weight.shape[0])]
    width = weight.shape[1]
    return [slice(start, start + width) for start in range(0, 3 * width, width)]


def set_rates(state: State, settings: PretrainSettings) -> None:
    """Linear warm-up, then a cosine to `lr_final` of the peak."""
    factor = rate_factor(state.step, settings)
    for optimizer, peak in zip(state.optimizers, (settings.lr_other, settings.lr), strict=False):
        for group in optimizer.param_groups:
            group["lr"] = peak * factor


def rate_factor(step: int, settings: PretrainSettings) -> float:
    if step < settings.lr_warmup_steps:
        return (step + 1) / settings.lr_warmup_steps
    left = max(1, settings.steps - settings.lr_warmup_steps)
    turned = 0.5 * (1 + math.cos(math.pi * (step - settings.lr_warmup_steps) / left))
    return settings.lr_final + (1 - settings.lr_final) * turned


def place(
    sources: Sequence[tuple[Packed, float]], settings: PretrainSettings, device: torch.device
) -> list[Source]:
    """Sources on the device, each with its rows a step (at least one, summing to the batch)."""
    total = sum(share for _, share in sources)
    rows = settings.rows_on(device.type)
    wanted = [max(1, round(rows * share / total)) for _, share in sources]
    wanted[int(np.argmax(wanted))] += rows - sum(wanted)
    if min(wanted) < 1:
        raise ConfigError(f"--batch-size {rows} is too small for {len(sources)} sources")
    placed = []
    for (packed, _), count in zip(sources, wanted, strict=True):
        longest = int(packed.lengths.max())
        if longest > settings.n_positions:
            raise ConfigError(
                f"a row of {longest} tokens does not fit --n-positions {settings.n_positions}"
            )
        symmetric = not bool((packed.fields[:100] == packing.STATE).any())
        placed.append(Source(packed, on_device(packed, device), count, symmetric))
    return placed


def on_device(packed: Packed, device: torch.device) -> dict[str, Tensor]:
    small = {"tokens": np.int32, "fields": np.uint8, "prompts": np.int64, "choices": np.int64}
    arrays = {name: getattr(packed, name).astype(kind) for name, kind in small.items()}
    shares = packed.shares.astype(np.float32)
    arrays["shares"] = shares / np.maximum(shares.sum(-1, keepdims=True), 1)
    return {name: torch.from_numpy(array).to(device) for name, array in arrays.items()}


def symmetry_tables(
    tokenizer: Tokenizer, settings: PretrainSettings, device: torch.device
) -> list[tuple[Symmetry, dict[str, Tensor]]]:
    """The symmetries in use as tensors: colour flip first, mirror second."""
    if not (settings.flip or settings.mirror):
        return []
    if tokenizer.style != "compact":
        raise ConfigError("--flip and --mirror need the chess tokenizer; use --no-flip --no-mirror")
    names = ("squares", "renamed", "bare", "slashed")
    makers = [(settings.flip, packing.colour_flip), (settings.mirror, packing.left_right_mirror)]
    made = [make(tokenizer) for wanted, make in makers if wanted]
    return [
        (one, {name: torch.from_numpy(getattr(one, name)).to(device) for name in names})
        for one in made
    ]


def compiled(model: GPT2, settings: PretrainSettings, device: torch.device) -> GPT2:
    """The model with its block compiled: every layer shares the code, so it is compiled once."""
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
    for micro in step_batches(state, sources, symmetries, settings, device):
        with passes_in(settings.dtype, device):
            loss, counts = micro_loss(model, micro, table)
        loss.backward()  # type: ignore[no-untyped-call]
        sums += torch.stack([loss.detach(), *counts])
    distributed.sum_over_ranks(sums)
    parameters = [p for p in state.model.parameters() if p.grad is not None]
    distributed.sum_gradients(parameters)
    norm = scale_gradients(parameters, sums[1], settings.clip_norm)
    for view, weight, rows in state.matrices:
        view.grad = None if weight.grad is None else weight.grad[rows]
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
    return sent(np.array(weights, dtype=np.float32), device)


def sent(array: NDArray[Any], device: torch.device) -> Tensor:
    """An array on the device; from pinned memory, or the copy would wait for the GPU to be idle."""
    tensor = torch.from_numpy(array)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor


def step_batches(
    state: State,
    sources: Sequence[Source],
    symmetries: Sequence[tuple[Symmetry, dict[str, Tensor]]],
    settings: PretrainSettings,
    device: torch.device,
) -> Iterator[Micro]:
    """This rank's rows of the step, as passes of rows of like length."""
    rows = [
        rows_of_step(len(source.packed), source.per_step, state.step, settings.seed)
        for source in sources
    ]
    picks = Picks(
        np.repeat(np.arange(len(sources)), [source.per_step for source in sources]),
        np.concatenate(rows),
        np.concatenate([s.packed.lengths[r] for s, r in zip(sources, rows, strict=True)]),
        np.concatenate([s.packed.prompts[r] for s, r in zip(sources, rows, strict=True)]),
        np.random.default_rng((settings.seed, state.step, 1)).random((2, sum(map(len, rows)))),
    )
    mine = np.arange(len(picks.rows))[distributed.rank() :: distributed.world_size()]
    for chosen in cut(picks.lengths, mine, settings.micro_tokens):
        yield gather(chosen, picks, sources, symmetries, state.tokenizer)


def rows_of_step(count: int, per_step: int, step: int, seed: int) -> NDArray[np.int64]:
    """The rows a step takes from a source: every row once an epoch, a new order each epoch."""
    places = np.arange(step * per_step, (step + 1) * per_step)
    epochs = places // count
    rows = np.empty_like(places)
    for epoch in np.unique(epochs).tolist():
        inside = epochs == epoch
        rows[inside] = _shuffled(count, seed, epoch)[places[inside] % count]
    return rows


@lru_cache(maxsize=8)
def _shuffled(count: int, seed: int, epoch: int) -> NDArray[np.int64]:
    """A permutation; the epochs in use are kept, a handful over all sources."""
    return np.random.default_rng((seed, epoch, count)).permutation(count)


def cut(
    lengths: NDArray[np.int16], mine: NDArray[np.int64], budget: int
) -> Iterator[NDArray[np.int64]]:
    """Rows sorted by length, cut where a pass would be too large or too uneven."""
    order = mine[np.argsort(lengths[mine], kind="stable")]
    start = 0
    for place in range(1, len(order) + 1):
        if place == len(order):
            yield order[start:place]
            return
        longest = int(lengths[order[place]])
        uneven = longest > 1.3 * lengths[order[start]]
        if uneven or (place - start + 1) * longest > budget:
            yield order[start:place]
            start = place


def gather(
    chosen: NDArray[np.int64],
    picks: Picks,
    sources: Sequence[Source],
    symmetries: Sequence[tuple[Symmetry, dict[str, Tensor]]],
    tokenizer: Tokenizer,
) -> Micro:
    """The chosen rows of all sources as one batch, symmetries applied at random."""
    width = int(picks.lengths[chosen].max())
    parts: dict[str, list[Tensor]] = {}
    for number in np.unique(picks.sources[chosen]).tolist():
        places = chosen[picks.sources[chosen] == number]
        source = sources[number]
        device = source.tensors["tokens"].device
        rows = sent(picks.rows[places], device)
        batch = {name: tensor[rows] for name, tensor in source.tensors.items()}
        if source.symmetric:
            for (symmetry, table), random in zip(symmetries, picks.chance, strict=False):
                wanted = sent(random[places] < 0.5, device)
                transform(batch, symmetry, table, wanted, tokenizer)
        batch["tokens"] = fit(batch["tokens"].long(), width, tokenizer.eos)
        batch["fields"] = fit(batch["fields"].long(), width, packing.PROMPT)
        for name, tensor in batch.items():
            parts.setdefault(name, []).append(tensor)
    joined = {name: torch.cat(tensors) for name, tensors in parts.items()}
    return Micro(**joined, start=int(picks.prompts[chosen].min()))


def fit(tensor: Tensor, width: int, fill: int) -> Tensor:
    """Rows cut or padded to `width`."""
    short = width - tensor.shape[1]
    return F.pad(tensor, (0, short), value=fill) if short > 0 else tensor[:, :width]


def transform(
    batch: dict[str, Tensor],
    symmetry: Symmetry,
    table: dict[str, Tensor],
    wanted: Tensor,
    tokenizer: Tokenizer,
) -> None:
    """Apply a symmetry to the wanted rows (`packing.apply_symmetry`, on the device)."""
    tokens, choices = batch["tokens"].long(), batch["choices"]
    if symmetry.needs_no_castling:
        wanted = wanted & (tokens[:, packing.CASTLING] == tokenizer.token(" -"))
    moved = table["renamed"][table["bare"][tokens]]
    board = moved[:, packing.BOARD][:, table["squares"]]
    board[:, 8::8] = table["slashed"][board[:, 8::8]]
    moved[:, packing.BOARD] = board
    batch["tokens"] = torch.where(wanted[:, None], moved, tokens)
    batch["choices"] = torch.where(wanted[:, None], table["renamed"][choices], choices)


def micro_loss(model: GPT2, micro: Micro, table: Tensor) -> tuple[Tensor, list[Tensor]]:
    """Weighted negative log-likelihood, summed; and (weight, first moves right, first moves)."""
    hidden = model(micro.tokens[:, :-1])
    before = micro.start - 1
    logits = model.logits(hidden[:, before:]).float()
    targets, fields = micro.tokens[:, micro.start :], micro.fields[:, micro.start :]
    logp = logits.log_softmax(-1)
    surprise = -logp.gather(-1, targets[..., None]).squeeze(-1)
    place = torch.arange(len(targets), device=targets.device)
    first = micro.prompts - micro.start
    spread = -(logp[place, first].gather(-1, micro.choices) * micro.shares).sum(-1)
    soft = micro.shares.sum(-1) > 0
    surprise[place, first] = torch.where(soft, spread, surprise[place, first])
    weights = table[fields]
    opening = fields[place, first] == packing.FIRST_MOVE
    right = (logits[place, first].argmax(-1) == targets[place, first]) & opening
    return (surprise * weights).sum(), [weights.sum(), right.sum().float(), opening.sum().float()]


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
    if distributed.rank() == 0:
        tensors: dict[str, Tensor] = {}
        for number, optimizer in enumerate(state.optimizers):
            tensors |= optimizer_tensors(optimizer, f"optimizer{number}")
        folder = run.folder / "checkpoints" / f"step-{state.step:06d}"
        save_checkpoint(folder, state.model, state.tokenizer, tensors, {"step": state.step})
        prune(run.folder, settings.keep)
    distributed.barrier()


def resume(state: State, run: Run, settings: PretrainSettings, say: Say) -> None:
    """Go on from the newest whole checkpoint, or write down how this run begins."""
    newest = newest_checkpoint(run.folder, say) if settings.resume else None
    if newest is None:
        if distributed.rank() == 0:
            run.clear()
            write_json(run.folder / "config.json", resolved(settings))
            write_json(run.folder / "origin.json", origin(settings.seed))
        return
    checkpoint = load_checkpoint(newest)
    saved = load_model(str(newest), state.model.device)
    # in place, since Muon's views share the storage of the parameters
    with torch.no_grad():
        for mine, theirs in zip(state.model.parameters(), saved.parameters(), strict=True):
            mine.copy_(theirs)
    for number, optimizer in enumerate(state.optimizers):
        restore_optimizer(optimizer, checkpoint.tensors, f"optimizer{number}")
    state.step = checkpoint.step
    if distributed.rank() == 0:
        run.cut_back(state.step)
    say(f"resumed from {newest}")


def finish(run: Run, state: State) -> Path:
    final = run.folder / "final"
    if distributed.rank() == 0:
        save_checkpoint(final, state.model, state.tokenizer, {}, {"step": state.step})
        run.finish()
    distributed.barrier()
    return final
