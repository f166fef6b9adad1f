"""Small passes of a model as CUDA graphs: recorded once a size, then one launch each way.

Laws: a replay is the pass that was recorded, on the inputs and the weights of the moment; gradients
are added to the parameters' `.grad`, as autograd does it. A pass of GPT-2 over ten thousand tokens
takes the GPU half the time that the host needs to launch it; larger ones are not worth the memory.
A recording that fails raises: training that quietly ran at half its speed would go unnoticed.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from .gpt2 import GPT2

Run = Callable[..., Tensor]
"""(model, x, *others) -> what a pass finds; nothing in it may wait for the device."""

LARGEST = 16 << 20
"""Numbers in the stream of a pass (tokens x width) beyond which the host keeps ahead by itself."""
SEEN_BEFORE = 2
"""Passes of a size that run as they are before one is recorded; they also load its kernels."""
GRAPHS_KEPT = 8
"""Sizes recorded, the first to return; the others go on as they are."""


class PassGraphs:
    """The recorded passes of one model, which must stay where it is."""

    def __init__(self, model: GPT2, pool: Any) -> None:
        self.model, self.pool = model, pool
        self.twin = twin_of(model)
        self.learns = any(parameter.requires_grad for parameter in model.parameters())
        self.seen: Counter[Hashable] = Counter()
        self.kept: dict[Hashable, PassGraph] = {}

    def __call__(self, size: Hashable, run: Run, x: Tensor, *others: Tensor) -> Tensor:
        """`run(model, x, *others)`; `size` tells apart whatever the run depends on beside them."""
        key = (size, x.shape, *_autocast().values())
        self.seen[key] += 1
        if key not in self.kept:
            rare = self.seen[key] <= SEEN_BEFORE or len(self.kept) >= GRAPHS_KEPT
            if rare or x.numel() > LARGEST:
                return run(self.model, x, *others)
            self.settle_gradients()
            with torch.cuda.device(x.device):
                self.kept[key] = PassGraph(run, self.twin, x, others, self.pool, self.learns)
        graph = self.kept[key]
        if not (self.learns and torch.is_grad_enabled()):
            return graph.forward(x, others)
        self.settle_gradients()
        # without embeddings to learn nothing else would say that a gradient is wanted
        x = x if x.requires_grad else x.detach().requires_grad_()
        found: Tensor = _Replay.apply(graph, x, *others)  # type: ignore[no-untyped-call]
        return found

    def settle_gradients(self) -> None:
        """Let parameters and their twins have their gradients in one place, whatever is in it."""
        empty = []
        for parameter, twin in zip(self.model.parameters(), self.twin.parameters(), strict=True):
            if not parameter.requires_grad:
                continue
            if twin.grad is None:
                twin.grad = torch.zeros_like(twin)
            if parameter.grad is None:
                empty.append(twin.grad)
            elif parameter.grad is not twin.grad:
                twin.grad.copy_(parameter.grad)
            parameter.grad = twin.grad
        if empty:
            torch._foreach_zero_(empty)


def twin_of(model: GPT2) -> GPT2:
    """The same weights in a module of its own.

    A parameter's place in a graph of autograd belongs to the stream that first asked for it, and
    recordings have a stream of their own.
    """
    own = {id(p): nn.Parameter(p.detach(), p.requires_grad) for p in model.parameters()}
    return copy.deepcopy(model, own)


class PassGraph:
    """One recorded pass, and the way back through it."""

    def __init__(
        self, run: Run, model: GPT2, x: Tensor, others: Sequence[Tensor], pool: Any, learns: bool
    ) -> None:
        self.x = x.detach().clone().requires_grad_(learns)
        self.others = [other.clone() for other in others]
        self.there, self.back = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
        # no cache: what it kept would belong to the recording and be used beside it
        cast = torch.autocast("cuda", **_autocast(), cache_enabled=False)
        with torch.set_grad_enabled(learns), torch.cuda.graph(self.there, pool=pool), cast:
            found = run(model, self.x, *self.others)
        self.found = found.detach()
        if learns:
            self.slope = torch.zeros_like(found)
            plain = torch.autocast("cuda", enabled=False)
            with torch.cuda.graph(self.back, pool=pool), plain:
                found.backward(self.slope)  # type: ignore[no-untyped-call]

    @torch.no_grad()
    def forward(self, x: Tensor, others: Sequence[Tensor]) -> Tensor:
        self.x.copy_(x)
        for mine, other in zip(self.others, others, strict=True):
            mine.copy_(other)
        self.there.replay()
        return self.found.clone()

    @torch.no_grad()
    def backward(self, slope: Tensor) -> Tensor:
        """Add to the parameters' gradients; returns that of `x`."""
        self.slope.copy_(slope)
        self.back.replay()
        assert self.x.grad is not None
        return self.x.grad


class _Replay(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, graph: PassGraph, x: Tensor, *others: Tensor) -> Tensor:
        ctx.graph, ctx.others = graph, len(others)
        return graph.forward(x, others)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor | None, ...]:
        return (None, ctx.graph.backward(slope), *[None] * ctx.others)


def _autocast() -> dict[str, Any]:
    """Whether products are rounded on a GPU, and to what."""
    rounds = torch.is_autocast_enabled("cuda")
    return {"enabled": rounds, "dtype": torch.get_autocast_dtype("cuda")}
