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
from typing import Generic, NamedTuple, Protocol, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rookworld.model.inference import InferenceWeights, prefill
from rookworld.model.kernels.dispatch import on_side_stream
from rookworld.model.sampling.decode_batch import DecodeBatch, Mask, Shape, round_up

BATCHES_KEPT = 6
"""Batches whose buffers (and graph) stay allocated for a later call of the same shape."""
BYTES_KEPT = 2 << 30
"""Captured batches beyond those stay while all are this small: answers that end one by one meet
many shapes, and capturing one again costs as much as dozens of its steps."""

PREFILL_TOKENS = {"cpu": 1152, "cuda": 1 << 16}
"""Tokens prefilled at once: on the CPU few enough for the activations to stay in its cache."""
PREFILL_CAPTURED = 1 << 13
"""Tokens up to which a prefill is captured; beyond them the host keeps ahead of the GPU."""

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
"""Names of <malloc.h>."""

Ids = NDArray[np.int64]

T = TypeVar("T")


class _RecentlyUsed(Generic[T]):
    """What was made for the last keys: a few, and more while they are small.

    The least recently used goes first.
    """

    def __init__(
        self, make: Callable[[Shape], T], cost: Callable[[Shape], int], budget: int
    ) -> None:
        self.make, self.cost, self.budget = make, cost, budget
        self.values: OrderedDict[Shape, T] = OrderedDict()

    def __getitem__(self, shape: Shape) -> T:
        if shape not in self.values:
            room = self.budget - self.cost(shape)
            while len(self.values) >= BATCHES_KEPT and self._spent() > room:
                self.values.popitem(last=False)
            self.values[shape] = self.make(shape)
        self.values.move_to_end(shape)
        return self.values[shape]

    def _spent(self) -> int:
        return sum(self.cost(shape) for shape in self.values)


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
        # Buffers are kept because fresh pages cost a tenth of a short decode.
        self.batches = _RecentlyUsed(lambda shape: DecodeBatch(weights, shape), lambda _: 1, 0)

    def batch(self, shape: Shape) -> DecodeBatch:
        batch = self.batches[shape]
        batch.cache.restart_own()
        return batch

    def start(self, batch: DecodeBatch, prompts: Sequence[Ids], mask: Mask | None) -> None:
        batch.choose(prefill_batch(batch, prompts), mask)

    def step(self, batch: DecodeBatch, slot: int, mask: Mask | None) -> None:
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


class _CapturedBatch(NamedTuple):
    """What is kept for a shape of batch."""

    batch: DecodeBatch
    step: torch.cuda.CUDAGraph
    starts: dict[int, _CapturedPrefill | None]
    """By the tokens of the longest prompt, rounded up; None: met once, or too many to capture."""


class GraphDecoder:
    """A captured step and captured starts per shape of batch, and its buffers, for later calls.

    A start that does not come back is not worth its capture; a step comes back for every token.
    """

    check_every, steps_ahead = 4, 1
    compact_at = 0.5

    def __init__(self, weights: InferenceWeights) -> None:
        from rookworld.model.kernels.triton_step import advance, draw

        self.weights, self.advance, self.draw = weights, advance, draw
        self.pool = torch.cuda.graph_pool_handle()
        self.made = _RecentlyUsed(self._make, self._bytes, BYTES_KEPT)

    def batch(self, shape: Shape) -> DecodeBatch:
        return self.made[round_shape(shape)].batch

    def step(self, batch: DecodeBatch, slot: int, mask: Mask | None) -> None:
        self.made[batch.shape].step.replay()

    def start(self, batch: DecodeBatch, prompts: Sequence[Ids], mask: Mask | None) -> None:
        groups, longest = batch.shape.groups, round_up(len(prompts[-1]), 16)
        tokens = min(longest, self.weights.config.n_positions)
        starts = self.made[batch.shape].starts
        if groups * tokens > PREFILL_CAPTURED or tokens not in starts:
            starts[tokens] = None
            self.draw(batch, prefill_batch(batch, prompts))
            return
        given = pad_prompts(prompts, groups, tokens)
        start = starts[tokens] or self._capture_start(batch, *given)
        starts[tokens] = start
        start.ids.copy_(given[0])
        start.lengths.copy_(given[1])
        start.graph.replay()

    def _bytes(self, shape: Shape) -> int:
        """Of a batch's keys and values."""
        config, slots = self.weights.config, shape.groups * shape.prefix + shape.rows * shape.new
        return 2 * slots * config.n_layer * config.n_embd * self.weights.dtype.itemsize

    def _make(self, shape: Shape) -> _CapturedBatch:
        """A batch and the graph of its step; what the warm-up writes at index 1 is forgotten."""
        batch = DecodeBatch(self.weights, shape)
        batch.cache.resize_own(shape.new)
        batch.index.fill_(1)
        return _CapturedBatch(batch, self._capture(lambda: self.advance(batch), [batch.index]), {})

    def _capture_start(self, batch: DecodeBatch, ids: Tensor, lengths: Tensor) -> _CapturedPrefill:
        ids, lengths = ids.to(self.weights.device), lengths.to(self.weights.device)

        def run() -> None:
            logits = prefill(self.weights, batch.cache, 0, ids, lengths)
            self.draw(batch, logits.repeat_interleave(batch.shape.width, 0))

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


def round_shape(shape: Shape) -> Shape:
    """`shape` rounded up, so that a few graphs serve calls of many sizes."""
    return shape._replace(
        groups=_round_steps(shape.groups),
        prefix=round_up(shape.prefix, 64),
        new=round_up(shape.new, 16),
    )


def _round_steps(count: int) -> int:
    """The next of 1, 2, 3, 4, 6, 8, 12, 16, 24 …"""
    power = 1 << (count - 1).bit_length()
    return power * 3 // 4 if power >= 4 and count <= power * 3 // 4 else power
