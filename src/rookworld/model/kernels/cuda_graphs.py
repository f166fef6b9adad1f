"""Small passes of a model as CUDA graphs: recorded once a size, then one launch each way.

Laws: a replay is the pass that was recorded, on the inputs and the weights of the moment; gradients
are added to the parameters' `.grad`, as autograd does it. A pass of GPT-2 over ten thousand tokens
takes the GPU half the time that the host needs to launch it. Huge ones would hold too much memory.
A recording that fails raises: training that quietly ran at half its speed would go unnoticed.
"""

from __future__ import annotations

import copy
from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from rookworld.model.gpt2 import GPT2
from rookworld.model.kernels.dispatch import on_side_stream

Run = Callable[[GPT2, Tensor, Tensor, Tensor], Tensor]
"""(model, x, heads, rows) -> the states of those rows; nothing in it may wait for the device."""

HELD_BYTES, MOST_HELD = 50, 0.2
"""Roughly what a recording holds for every number in the streams of its pass (tokens x width x
layers), and the part of the GPU's memory that it may hold: others would miss it."""
LARGEST_PASS = 16_384 * 768 * 12
"""Numbers in the streams of a pass from which on the host keeps ahead of the GPU by itself."""
SEEN_BEFORE, SOON = 2, 64
"""Passes of a size that run as they are before one is recorded, and within how many passes of all
sizes each must come back: a recording takes as long as thirty passes and must pay."""
GRAPHS_KEPT, FORGOTTEN = 8, 256
"""Sizes kept recorded; a new one takes the place of one that so many passes have not asked for."""


class PassGraphs:
    """The recorded passes of one model, which must stay where it is."""

    def __init__(self, model: GPT2, pool: Any) -> None:
        self.model, self.pool = model, pool
        self.twin = alias_of(model)
        pairs = zip(model.parameters(), self.twin.parameters(), strict=True)
        self.learning = [(own, twin) for own, twin in pairs if own.requires_grad]
        """Parameters that get a gradient, and their twins."""
        self.learns = bool(self.learning)
        self.seen: Counter[Hashable] = Counter()
        self.kept: OrderedDict[Hashable, PassGraph] = OrderedDict()
        """The one that was asked for last stands last."""
        self.passes = 0
        self.asked: dict[Hashable, int] = {}
        """When each size was last asked for, counted in passes."""

    def suit(self, tokens: int) -> bool:
        """Whether passes over so many tokens may be recorded at all."""
        config = self.model.config
        if tokens * config.n_embd * config.n_layer > LARGEST_PASS:
            return False
        held = HELD_BYTES * tokens * config.n_embd * config.n_layer
        return held <= MOST_HELD * memory_of(self.model.device)

    def __call__(
        self, size: Hashable, run: Run, x: Tensor, heads: Tensor, rows: Tensor, most: int
    ) -> Tensor:
        """`run(model, x, heads, rows)`, for at most `most` rows.

        `size` tells apart whatever the run depends on beside these and their sizes.
        """
        key = (size, x.shape, most, *_autocast().values())
        self.passes += 1
        if self.passes - self.asked.get(key, 0) > SOON:
            self.seen[key] = 0
        self.seen[key] += 1
        self.asked[key] = self.passes
        if key not in self.kept:
            if self.seen[key] <= SEEN_BEFORE or not self.has_room():
                return run(self.model, x, heads, rows)
            self.share_gradients()
            with torch.cuda.device(x.device):
                self.kept[key] = PassGraph(run, self.twin, x, heads, most, self.pool, self.learns)
        self.kept.move_to_end(key)
        graph = self.kept[key]
        if not (self.learns and torch.is_grad_enabled()):
            return graph.forward(x, heads, rows)
        self.share_gradients()
        # without embeddings to learn nothing else would say that a gradient is wanted
        x = x if x.requires_grad else x.detach().requires_grad_()
        found: Tensor = _Replay.apply(graph, x, heads, rows)  # type: ignore[no-untyped-call]
        return found

    def has_room(self) -> bool:
        """For one more; a size that has not come back for long makes way."""
        if len(self.kept) < GRAPHS_KEPT:
            return True
        oldest = next(iter(self.kept))
        if self.passes - self.asked[oldest] <= FORGOTTEN:
            return False
        del self.kept[oldest]
        return True

    def share_gradients(self) -> None:
        """Let parameters and their twins have their gradients in one place, whatever is in it."""
        empty = []
        for parameter, twin in self.learning:
            if twin.grad is None:
                twin.grad = torch.zeros_like(twin)
            if parameter.grad is None:
                empty.append(twin.grad)
            elif parameter.grad is not twin.grad:
                twin.grad.copy_(parameter.grad)
            parameter.grad = twin.grad
        if empty:
            torch._foreach_zero_(empty)


@cache
def memory_of(device: torch.device) -> int:
    """Bytes that a GPU has in all."""
    return torch.cuda.get_device_properties(device).total_memory


def alias_of(model: GPT2) -> GPT2:
    """The same weights in a module of its own.

    A parameter's place in a graph of autograd belongs to the stream that first asked for it, and
    recordings have a stream of their own.
    """
    own = {id(p): nn.Parameter(p.detach(), p.requires_grad) for p in model.parameters()}
    return copy.deepcopy(model, own)


class PassGraph:
    """One recorded pass, and the way back through it."""

    def __init__(
        self, run: Run, model: GPT2, x: Tensor, heads: Tensor, most: int, pool: Any, learns: bool
    ) -> None:
        self.x = x.detach().clone().requires_grad_(learns)
        self.heads = heads.clone()
        self.rows = heads.new_zeros(most)
        self.there, self.back = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()

        def run_pass() -> Tensor:
            # no cache: what it kept would belong to the recording and be used beside it
            with torch.autocast("cuda", **_autocast(), cache_enabled=False):
                return run(model, self.x, self.heads, self.rows)

        with torch.set_grad_enabled(learns):
            self.gradient = self.warm_up(run_pass)
            with torch.cuda.graph(self.there, pool=pool):
                found = run_pass()
        self.found = found.detach()
        if learns:
            with torch.cuda.graph(self.back, pool=pool):
                backpropagate(found, self.gradient)

    def warm_up(self, run_pass: Callable[[], Tensor]) -> Tensor:
        """Both ways once, for kernels cannot be loaded while recording; zeros like what is found.

        Going back from zeros adds zeros to the gradients.
        """
        with on_side_stream(self.x.device):
            found = run_pass()
            gradient = torch.zeros_like(found)
            if found.requires_grad:
                backpropagate(found, gradient)
            self.x.grad = None
        return gradient

    @torch.no_grad()
    def forward(self, x: Tensor, heads: Tensor, rows: Tensor) -> Tensor:
        self.x.copy_(x)
        self.heads.copy_(heads)
        # behind them stand earlier rows, whose states nobody reads
        self.rows[: len(rows)].copy_(rows)
        self.there.replay()
        return self.found[: len(rows)].clone()

    @torch.no_grad()
    def backward(self, gradient: Tensor) -> Tensor:
        """Add to the parameters' gradients; returns that of `x`."""
        self.gradient[: len(gradient)].copy_(gradient)
        self.gradient[len(gradient) :].zero_()
        self.back.replay()
        assert self.x.grad is not None
        return self.x.grad


def backpropagate(found: Tensor, gradient: Tensor) -> None:
    with torch.autocast("cuda", enabled=False):
        found.backward(gradient)  # type: ignore[no-untyped-call]


class _Replay(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, graph: PassGraph, x: Tensor, heads: Tensor, rows: Tensor) -> Tensor:
        ctx.graph = graph
        return graph.forward(x, heads, rows)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return None, ctx.graph.backward(gradient), None, None


def _autocast() -> dict[str, Any]:
    """Whether products are rounded on a GPU, and to what."""
    rounds = torch.is_autocast_enabled("cuda")
    return {"enabled": rounds, "dtype": torch.get_autocast_dtype("cuda")}
