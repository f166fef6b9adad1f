"""How a batch takes one step: run as it stands, or captured once as a CUDA graph and replayed.

Law: both do what `DecodeBatch` says; a graph reads live weights (or the copy that
`InferenceWeights.refresh` writes in place), so the next replay sees an update of the model. A
capture that fails raises: a sampler that quietly ran ten times slower would go unnoticed.
"""

from __future__ import annotations

import ctypes
import sys
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rookworld.model.inference import InferenceWeights, prefill
from rookworld.model.kernels.dispatch import on_side_stream
from rookworld.model.sampling.decode_batch import (
    DecodeBatch,
    GrowingBatch,
    Mask,
    Shape,
    round_up,
)
from rookworld.model.sampling.kv_cache import KVArena, Room

BATCHES_KEPT = 6
"""Batches of the CPU whose buffers stay allocated for a later call of the same shape."""
GRAPHS_KEPT = 128
"""Captured steps that stay; they share one block of keys and values and one of everything else."""

PREFILL_TOKENS = {"cpu": 1152, "cuda": 1 << 16}
"""Tokens prefilled at once: on the CPU few enough for the activations to stay in its cache."""
PREFILL_CAPTURED = 1 << 13
"""Tokens up to which a prefill is captured; beyond them the host keeps ahead of the GPU."""

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
"""Names of <malloc.h>."""

Ids = NDArray[np.int64]


class Decoder(Protocol):
    check_every: int
    """how many tokens pass before the host looks at the device"""
    steps_ahead: int
    """how many the device is given to do meanwhile; what ends in them is seen at the next look"""
    compact_at: float
    """rows are compacted when no more than this fraction of them is left"""

    def batch(self, shape: Shape) -> DecodeBatch:
        """A batch of at least `shape`, ready to begin."""
        ...

    def groups_at_once(self, room: Room) -> int:
        """How many groups like that one there is memory for."""
        ...

    def compact(self, batch: DecodeBatch, groups: Tensor, columns: Tensor) -> DecodeBatch:
        """A smaller batch with some `groups` [n] of one, each with some `columns` [n, width]."""
        ...

    def start(self, batch: DecodeBatch, prompts: Sequence[Ids], mask: Mask | None) -> None:
        """Fill the prefix from `prompts`, shortest first; draw and record a token for every row."""
        ...

    def step(self, batch: DecodeBatch, slot: int, mask: Mask | None) -> None:
        """Feed every row's last token at own `slot`, draw and record the next."""
        ...


class EagerDecoder:
    """Every operation launched by the host; the only way with a constraint, and on the CPU."""

    compact_at = 0.75
    steps_ahead = 0

    def __init__(self, weights: InferenceWeights) -> None:
        self.check_every = 1 if weights.device.type == "cpu" else 8
        keep_freed_pages()
        self.weights = weights
        # Buffers are kept because fresh pages cost a tenth of a short decode.
        self.batches: OrderedDict[Shape, GrowingBatch] = OrderedDict()

    def groups_at_once(self, room: Room) -> int:
        return room.groups

    def batch(self, shape: Shape) -> GrowingBatch:
        if shape not in self.batches:
            if len(self.batches) >= BATCHES_KEPT:
                self.batches.popitem(last=False)
            self.batches[shape] = GrowingBatch(self.weights, shape)
        self.batches.move_to_end(shape)
        batch = self.batches[shape]
        batch.cache.restart_own()
        return batch

    def compact(self, batch: DecodeBatch, groups: Tensor, columns: Tensor) -> DecodeBatch:
        shape = batch.shape._replace(groups=len(groups), width=columns.shape[1])
        smaller = self.batch(shape)
        assert isinstance(batch, GrowingBatch)
        smaller.receive(batch, groups, columns)
        return smaller

    def start(self, batch: DecodeBatch, prompts: Sequence[Ids], mask: Mask | None) -> None:
        batch.choose(prefill_batch(batch, prompts), mask)

    def step(self, batch: DecodeBatch, slot: int, mask: Mask | None) -> None:
        assert isinstance(batch, GrowingBatch)
        batch.cache.make_room_for(slot)
        batch.choose(batch.logits(slot), mask, slot + 1)


def keep_freed_pages() -> None:
    """Let glibc reuse freed blocks of up to 32 MiB, its limit, and hand none back to the system.

    Otherwise it fetches the temporaries of prefills and passes anew, page by page, which was a
    tenth of a prefill and a twentieth of a training step. Elsewhere this does nothing.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None:
        mallopt(M_MMAP_THRESHOLD, 32 << 20)
        mallopt(M_TRIM_THRESHOLD, (2 << 30) - 1)


def prefill_batch(batch: DecodeBatch, prompts: Sequence[Ids]) -> Tensor:
    """Fill the prefix, a budget of tokens at a time; the rows' logits for their first token."""
    weights, device = batch.weights, batch.weights.device
    budget = PREFILL_TOKENS.get(device.type, 1 << 14)
    logits = torch.zeros(batch.shape.groups, weights.config.vocab_size, device=device)
    first = 0
    while first < len(prompts):
        # Sorted by length, so the longest that fits decides how many do.
        size = 1
        while first + size < len(prompts) and (size + 1) * len(prompts[first + size]) <= budget:
            size += 1
        taken = prompts[first : first + size]
        ids, lengths = (one.to(device) for one in pad_prompts(taken, size, len(taken[-1])))
        logits[first : first + size] = prefill(weights, batch.cache, first, ids, lengths)
        first += size
    return logits.repeat_interleave(batch.shape.width, 0)


def pad_prompts(prompts: Sequence[Ids], rows: int, tokens: int) -> tuple[Tensor, Tensor]:
    """Ids [rows, tokens] and lengths; rows without a prompt have one token."""
    lines, lengths = np.zeros((rows, tokens), dtype=np.int64), np.ones(rows, dtype=np.int64)
    for line, ids in enumerate(prompts):
        lines[line, : len(ids)], lengths[line] = ids, len(ids)
    return torch.from_numpy(lines), torch.from_numpy(lengths)


class _CapturedPrefill(NamedTuple):
    """A captured prefill and first choice, for prompts of up to so many tokens."""

    ids: Tensor
    lengths: Tensor
    graph: torch.cuda.CUDAGraph


class _Captured(NamedTuple):
    """What is kept for a shape of batch."""

    step: torch.cuda.CUDAGraph
    starts: dict[int, _CapturedPrefill | None]
    """By the tokens of the longest prompt, rounded up; None: met once, or too many to capture."""


class ArenaDecoder:
    """Every kernel of a step launched by the host, on batches cut from one block of memory.

    Slots for prompts and answers are as many as any request has asked for, so that requests of
    many lengths are of few shapes.
    """

    check_every, steps_ahead = 4, 1
    compact_at = 0.5

    def __init__(self, weights: InferenceWeights) -> None:
        self.weights = weights
        self.arena = KVArena(weights.config, weights.dtype, weights.device)
        self.most_bytes: int | None = None
        """What keys and values may take; a larger request is sampled in parts."""
        self.prefix = self.new = 0
        self.batches: dict[int, DecodeBatch] = {}
        """By their width before anything is done."""

    def forget(self) -> None:
        """Let go of everything that was cut from the arena."""
        self.batches.clear()

    def _take_lengths(self, room: Room) -> Room:
        """`room` with slots for the longest prompt and answer that ever were."""
        prefix, new = max(self.prefix, round_up(room.prefix, 64)), round_up(room.new, 16)
        new = max(self.new, new)
        if (prefix, new) != (self.prefix, self.new):
            self.forget()
            self.prefix, self.new = prefix, new
        return room._replace(prefix=prefix, new=new)

    def groups_at_once(self, room: Room) -> int:
        if self.most_bytes is None:
            return room.groups
        most = self.most_bytes // self.arena.group_bytes(self._take_lengths(room))
        return max(
            size for size in range(1, max(1, most) + 1) if round_groups(size) <= max(1, most)
        )

    def batch(self, shape: Shape) -> DecodeBatch:
        rounded = shape.room._replace(groups=round_groups(shape.groups))
        room = self._take_lengths(rounded)
        found = self.batches.get(room.width)
        if found is None or len(found.group_places) < room.groups:
            found = self._make(room)
        found.resize(shape._replace(groups=room.groups, prefix=room.prefix, new=room.new))
        return found

    def _make(self, room: Room) -> DecodeBatch:
        """A batch over all memory there is, or over more."""
        self.forget()
        if self.arena.groups(room) < room.groups:
            self.arena.grow(room)
        room = room._replace(groups=self.arena.groups(room))
        made = DecodeBatch(self.weights, Shape(*room), self.arena.cut(room))
        self.batches[room.width] = made
        return made

    def compact(self, batch: DecodeBatch, groups: Tensor, columns: Tensor) -> DecodeBatch:
        count = round_groups(len(groups))
        batch.keep(batch.shape._replace(groups=count, width=columns.shape[1]), groups, columns)
        return batch

    def start(self, batch: DecodeBatch, prompts: Sequence[Ids], mask: Mask | None) -> None:
        from rookworld.model.kernels.triton_step import draw

        draw(batch, prefill_batch(batch, prompts))

    def step(self, batch: DecodeBatch, slot: int, mask: Mask | None) -> None:
        from rookworld.model.kernels.triton_step import advance

        advance(batch)


class GraphDecoder(ArenaDecoder):
    """A captured step and captured starts per shape of batch.

    A start that does not come back is not worth its capture; a step comes back for every token.
    """

    def __init__(self, weights: InferenceWeights) -> None:
        super().__init__(weights)
        self.pool = torch.cuda.graph_pool_handle()
        self.captured: OrderedDict[tuple[int, Shape], _Captured] = OrderedDict()

    def forget(self) -> None:
        super().forget()
        self.captured.clear()
        # the memory of a pool goes with its last graph, and then nothing may be captured into it
        self.pool = torch.cuda.graph_pool_handle()

    def step(self, batch: DecodeBatch, slot: int, mask: Mask | None) -> None:
        self._of(batch).step.replay()

    def start(self, batch: DecodeBatch, prompts: Sequence[Ids], mask: Mask | None) -> None:
        groups, longest = batch.shape.groups, round_up(len(prompts[-1]), 16)
        tokens = min(longest, self.weights.config.n_positions)
        starts = self._of(batch).starts
        if groups * tokens > PREFILL_CAPTURED or tokens not in starts:
            starts[tokens] = None
            super().start(batch, prompts, mask)
            return
        given = pad_prompts(prompts, groups, tokens)
        start = starts[tokens] or self._capture_start(batch, *given)
        starts[tokens] = start
        start.ids.copy_(given[0])
        start.lengths.copy_(given[1])
        start.graph.replay()

    def _of(self, batch: DecodeBatch) -> _Captured:
        """What is captured for a batch as it is, which is captured now if it was not."""
        # rows of one shape lie elsewhere in a cache of another width
        key = (batch.cache.own_keys.shape[3], batch.shape)
        if key not in self.captured:
            if len(self.captured) >= GRAPHS_KEPT:
                self.captured.popitem(last=False)
            state = [batch.index, batch.last, batch.rows.done]
            graph = self._capture(lambda: super(GraphDecoder, self).step(batch, 0, None), state)
            self.captured[key] = _Captured(graph, {})
        self.captured.move_to_end(key)
        return self.captured[key]

    def _capture_start(self, batch: DecodeBatch, ids: Tensor, lengths: Tensor) -> _CapturedPrefill:
        from rookworld.model.kernels.triton_step import draw

        ids, lengths = ids.to(self.weights.device), lengths.to(self.weights.device)

        def run() -> None:
            logits = prefill(self.weights, batch.cache, 0, ids, lengths)
            draw(batch, logits.repeat_interleave(batch.shape.width, 0))

        state = [batch.index, batch.last, batch.rows.done, *batch.outputs()]
        return _CapturedPrefill(ids, lengths, self._capture(run, state))

    def _capture(self, run: Callable[[], None], state: Sequence[Tensor]) -> torch.cuda.CUDAGraph:
        """The graph of `run`; what the warm-up does to `state` is undone."""
        before = [one.clone() for one in state]
        with on_side_stream(self.weights.device):
            for _ in range(3):
                run()
                for one, kept in zip(state, before, strict=True):
                    one.copy_(kept)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self.pool):
            run()
        return graph


def round_groups(count: int) -> int:
    """The next of 1, 2, 3, 4, 6, 8, 12, 16, 24 …: a few graphs serve batches of many sizes."""
    power = 1 << (count - 1).bit_length()
    return power * 3 // 4 if power >= 4 and count <= power * 3 // 4 else power
