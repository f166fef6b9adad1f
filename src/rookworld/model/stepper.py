"""How a batch takes one step: run as it stands, or captured once as a CUDA graph and replayed.

Law: both do what `Batch` says; a graph reads live weights (or the copy that `Weights.refresh`
writes in place), so an update of the model is seen by the next replay. A capture that fails raises:
a sampler that quietly ran ten times slower would go unnoticed.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Generic, Literal, Protocol, TypeVar

import torch

from .batch import Batch, Mask, Shape
from .decoder import Weights
from .kernels import have_triton

Kernels = Literal["torch", "triton"]

BATCHES_KEPT = 6
"""Batches whose buffers (and graph) stay allocated for a later call of the same shape."""
BYTES_KEPT = 2 << 30
"""Captured batches beyond those stay while all are this small: answers that end one by one meet
many shapes, and capturing one again costs as much as dozens of its steps."""


Key = tuple[Shape, bool, bool]
"""What a batch is made for: its shape, and whether rows are truncated and random."""


T = TypeVar("T")


class _Kept(Generic[T]):
    """What was made for the last keys: a few, and more while they are small.

    The least recently used goes first.
    """

    def __init__(
        self, make: Callable[[Shape, bool, bool], T], cost: Callable[[Shape], int], budget: int
    ) -> None:
        self.make, self.cost, self.budget = make, cost, budget
        self.values: OrderedDict[Key, T] = OrderedDict()

    def __getitem__(self, key: Key) -> T:
        if key not in self.values:
            room = self.budget - self.cost(key[0])
            while len(self.values) >= BATCHES_KEPT and self._spent() > room:
                self.values.popitem(last=False)
            self.values[key] = self.make(*key)
        self.values.move_to_end(key)
        return self.values[key]

    def _spent(self) -> int:
        return sum(self.cost(shape) for shape, *_ in self.values)


class Stepper(Protocol):
    look_every: int
    """how many tokens pass between two looks of the host at the device"""
    shrink_at: float
    """rows are compacted when no more than this fraction of them is left"""

    def batch(self, shape: Shape, truncated: bool, random: bool) -> Batch:
        """A batch of at least `shape`, ready to begin."""
        ...

    def step(self, batch: Batch, slot: int, mask: Mask | None) -> None:
        """Feed every row's last token at own `slot`, draw and record the next."""
        ...


class Eager:
    """Every operation launched by the host; the only way with a constraint, and on the CPU."""

    shrink_at = 0.75

    def __init__(self, weights: Weights) -> None:
        self.look_every = 1 if weights.device.type == "cpu" else 8
        keep_freed_pages()
        # Buffers are kept because fresh pages cost a tenth of a short decode.
        self.batches = _Kept(lambda *key: Batch(weights, *key), lambda _: 1, 0)

    def batch(self, shape: Shape, truncated: bool, random: bool) -> Batch:
        batch = self.batches[shape, truncated, random]
        batch.cache.restart_own()
        return batch

    def step(self, batch: Batch, slot: int, mask: Mask | None) -> None:
        batch.cache.make_room_for(slot)
        batch.choose(batch.logits(slot), mask, slot + 1)


def keep_freed_pages() -> None:
    """Free a block of nearly 32 MiB: from then on glibc reuses what is below that size.

    Otherwise it may hand the temporaries of a prefill back to the system and fetch them anew,
    which was a tenth of a prefill. Elsewhere this does nothing.
    """
    torch.empty(31 << 20, dtype=torch.uint8)


class Graphed:
    """One captured step per shape of batch, buffers and graph reused by later calls."""

    look_every = 12
    shrink_at = 0.5

    def __init__(self, weights: Weights, kernels: Kernels, compiled: bool = False) -> None:
        self.weights = weights
        self.advance = _advance(kernels)
        if compiled:
            self.advance = torch.compile(self.advance, dynamic=False, fullgraph=True)
        self.pool = torch.cuda.graph_pool_handle()
        self.captured = _Kept(self._capture, self._bytes, BYTES_KEPT)

    def batch(self, shape: Shape, truncated: bool, random: bool) -> Batch:
        return self.captured[roomy(shape), truncated, random][0]

    def step(self, batch: Batch, slot: int, mask: Mask | None) -> None:
        rules = batch.rows.rules
        self.captured[batch.shape, rules.truncated, rules.random][1].replay()

    def _bytes(self, shape: Shape) -> int:
        """Of a batch's keys and values."""
        config, slots = self.weights.config, shape.groups * shape.prefix + shape.rows * shape.new
        return 2 * slots * config.n_layer * config.n_embd * self.weights.dtype.itemsize

    def _capture(
        self, shape: Shape, truncated: bool, random: bool
    ) -> tuple[Batch, torch.cuda.CUDAGraph]:
        """A batch and the graph of its step; what the warm-up writes at index 1 is forgotten."""
        batch = Batch(self.weights, shape, truncated, random)
        batch.cache.resize_own(shape.new)
        side: torch.cuda.Stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                batch.index.fill_(1)
                self.advance(batch)
            batch.index.fill_(1)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self.pool):
            self.advance(batch)
        return batch, graph


def _advance(kernels: Kernels) -> Callable[[Batch], None]:
    if kernels == "triton":
        from .triton_step import advance

        return advance
    return advance_torch


def advance_torch(batch: Batch) -> None:
    """One step whose slot is read from the device, so that it is the same for every token."""
    batch.choose(batch.logits(batch.index - 1))


def roomy(shape: Shape) -> Shape:
    """`shape` rounded up, so that a few graphs serve calls of many sizes."""
    return Shape(
        _round_steps(shape.groups),
        shape.width,
        -(-shape.prefix // 64) * 64,
        -(-shape.new // 16) * 16,
    )


def _round_steps(count: int) -> int:
    """The next of 1, 2, 3, 4, 6, 8, 12, 16, 24 …"""
    power = 1 << (count - 1).bit_length()
    return power * 3 // 4 if power >= 4 and count <= power * 3 // 4 else power


def best_kernels() -> Kernels:
    return "triton" if have_triton() else "torch"
