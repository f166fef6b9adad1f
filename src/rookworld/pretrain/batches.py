"""The rows of a supervised step: which, in what order, flipped or not, cut into passes.

Laws: every row comes once an epoch, in an order that is a function of (seed, epoch), so a resumed
run sees what an uninterrupted one would; rows of like length share a pass; nothing here waits for
the GPU. Left out: packing several rows into one sequence (rows of a task have nearly one length).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from rookworld.model.tokenizer import Tokenizer
from rookworld.pretrain import dataset
from rookworld.pretrain.dataset import TokenizedRows
from rookworld.pretrain.settings import PretrainSettings
from rookworld.rollout import symmetry
from rookworld.rollout.symmetry import Symmetry
from rookworld.runtime import distributed
from rookworld.runtime.errors import ConfigError

WIDTH_STEP, START_STEP = 16, 8


@dataclass
class Source:
    """Packed rows on the device and how many of them each step takes."""

    packed: TokenizedRows
    tensors: dict[str, Tensor]
    per_step: int
    longest: int
    """Tokens of the longest row."""
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
class SupervisedBatch:
    """One forward pass: rows of like length, on the device."""

    tokens: Tensor
    fields: Tensor
    prompts: Tensor
    choices: Tensor
    shares: Tensor
    start: int
    """At most the shortest prompt's length: no target lies before it."""


def sources_on_device(
    sources: Sequence[tuple[TokenizedRows, float]], settings: PretrainSettings, device: torch.device
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
        symmetric = not bool((packed.fields == dataset.STATE).any())
        placed.append(Source(packed, on_device(packed, device), count, longest, symmetric))
    return placed


def on_device(packed: TokenizedRows, device: torch.device) -> dict[str, Tensor]:
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
    makers = [(settings.flip, symmetry.colour_flip), (settings.mirror, symmetry.left_right_mirror)]
    made = [make(tokenizer) for wanted, make in makers if wanted]
    return [
        (one, {name: torch.from_numpy(getattr(one, name)).to(device) for name in names})
        for one in made
    ]


def to_device(array: NDArray[Any], device: torch.device) -> Tensor:
    """An array on the device; from pinned memory, or the copy would wait for the GPU to be idle."""
    tensor = torch.from_numpy(array)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor


def step_batches(
    step: int,
    tokenizer: Tokenizer,
    sources: Sequence[Source],
    symmetries: Sequence[tuple[Symmetry, dict[str, Tensor]]],
    settings: PretrainSettings,
    device: torch.device,
) -> Iterator[SupervisedBatch]:
    """This rank's rows of the step, as passes of rows of like length."""
    rows = [
        rows_of_step(len(source.packed), source.per_step, step, settings.seed) for source in sources
    ]
    picks = Picks(
        np.repeat(np.arange(len(sources)), [source.per_step for source in sources]),
        np.concatenate(rows),
        np.concatenate([s.packed.lengths[r] for s, r in zip(sources, rows, strict=True)]),
        np.concatenate([s.packed.prompts[r] for s, r in zip(sources, rows, strict=True)]),
        np.random.default_rng((settings.seed, step, 1)).random((2, sum(map(len, rows)))),
    )
    mine = np.arange(len(picks.rows))[distributed.rank() :: distributed.world_size()]
    for chosen in cut(picks.lengths, mine, settings.micro_tokens):
        yield make_batch(chosen, picks, sources, symmetries, tokenizer)


def rows_of_step(count: int, per_step: int, step: int, seed: int) -> NDArray[np.int64]:
    """The rows a step takes from a source: every row once an epoch, a new order each epoch."""
    places = np.arange(step * per_step, (step + 1) * per_step)
    epochs = places // count
    rows = np.empty_like(places)
    for epoch in np.unique(epochs).tolist():
        inside = epochs == epoch
        rows[inside] = _shuffled(count, seed, epoch)[places[inside] % count]
    return rows


@lru_cache(maxsize=64)
def _shuffled(count: int, seed: int, epoch: int) -> NDArray[np.int64]:
    """A permutation; those in use are kept, one or two a source."""
    return np.random.default_rng((seed, epoch, count)).permutation(count)


def cut(
    lengths: NDArray[np.int16], mine: NDArray[np.int64], budget: int
) -> Iterator[NDArray[np.int64]]:
    """Rows sorted by length, cut where a pass would be too large or too uneven."""
    order = mine[np.argsort(lengths[mine], kind="stable")]
    ordered = lengths[order].tolist()
    start = 0
    for place in range(1, len(order) + 1):
        if place == len(order):
            yield order[start:place]
            return
        longest = ordered[place]
        uneven = longest > 1.3 * ordered[start]
        if uneven or (place - start + 1) * longest > budget:
            yield order[start:place]
            start = place


def make_batch(
    chosen: NDArray[np.int64],
    picks: Picks,
    sources: Sequence[Source],
    symmetries: Sequence[tuple[Symmetry, dict[str, Tensor]]],
    tokenizer: Tokenizer,
) -> SupervisedBatch:
    """The chosen rows of all sources as one batch, symmetries applied at random."""
    numbers = np.unique(picks.sources[chosen]).tolist()
    longest = max(sources[number].longest for number in numbers)
    width = even_width(int(picks.lengths[chosen].max()), longest)
    parts: dict[str, list[Tensor]] = {}
    for number in numbers:
        places = chosen[picks.sources[chosen] == number]
        source = sources[number]
        device = source.tensors["tokens"].device
        rows = to_device(picks.rows[places], device)
        batch = {name: tensor[rows] for name, tensor in source.tensors.items()}
        if source.symmetric:
            for (kind, table), random in zip(symmetries, picks.chance, strict=False):
                wanted = to_device(random[places] < 0.5, device)
                transform(batch, kind, table, wanted, tokenizer)
        batch["tokens"] = fit(batch["tokens"].long(), width, tokenizer.eos)
        batch["fields"] = fit(batch["fields"].long(), width, dataset.PROMPT)
        for name, tensor in batch.items():
            parts.setdefault(name, []).append(tensor)
    joined = {name: torch.cat(tensors) for name, tensors in parts.items()}
    # rounded, so that few shapes are compiled; tokens of a prompt are no targets
    shortest = int(picks.prompts[chosen].min())
    return SupervisedBatch(**joined, start=max(1, shortest - shortest % START_STEP))


def even_width(width: int, longest: int) -> int:
    """A little wider, so that a run has few shapes: code is compiled anew for each."""
    return min(-(-width // WIDTH_STEP) * WIDTH_STEP, longest)


def fit(tensor: Tensor, width: int, fill: int) -> Tensor:
    """Rows cut or padded to `width`."""
    short = width - tensor.shape[1]
    return F.pad(tensor, (0, short), value=fill) if short > 0 else tensor[:, :width]


def transform(
    batch: dict[str, Tensor],
    kind: Symmetry,
    table: dict[str, Tensor],
    wanted: Tensor,
    tokenizer: Tokenizer,
) -> None:
    """Apply a symmetry to the wanted rows (`symmetry.apply_symmetry`, on the device)."""
    tokens, choices = batch["tokens"].long(), batch["choices"]
    if kind.needs_no_castling:
        wanted = wanted & (tokens[:, symmetry.CASTLING] == tokenizer.token(" -"))
    moved = table["renamed"][table["bare"][tokens]]
    board = moved[:, symmetry.BOARD][:, table["squares"]]
    board[:, 8::8] = table["slashed"][board[:, 8::8]]
    moved[:, symmetry.BOARD] = board
    batch["tokens"] = torch.where(wanted[:, None], moved, tokens)
    batch["choices"] = torch.where(wanted[:, None], table["renamed"][choices], choices)
