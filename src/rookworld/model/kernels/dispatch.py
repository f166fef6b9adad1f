"""Which tensors go to a Triton kernel of ours, and where kernels are warmed up for a capture."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from importlib.util import find_spec

import torch
from torch import Tensor, nn


def on_one_gpu(*tensors: Tensor) -> bool:
    """Whether all lie there as they are (what is cut into shares does not), and Triton is there."""
    here = tensors[0].device
    if here.type != "cuda" or not have_triton():
        return False
    return all(type(t) in (Tensor, nn.Parameter) and t.device == here for t in tensors)


@cache
def have_triton() -> bool:
    """It comes with every CUDA build of torch for Linux, and with none for other systems."""
    return find_spec("triton") is not None


def add_norm(x: Tensor, delta: Tensor | None, norm: nn.LayerNorm) -> tuple[Tensor, Tensor]:
    """(x + delta, its norm as autocast rounds it); of `x` itself where there is no `delta`.

    On CUDA one Triton kernel each way; plain torch takes several, each through the whole stream.
    """
    if _suits_triton(x, norm):
        from rookworld.model.kernels.triton_norm import AddNorm

        # kernels go to the current device, which need not be the tensors'
        with torch.cuda.device(x.device):
            apply: Callable[..., tuple[Tensor, Tensor]] = AddNorm.apply
            dtype = torch.get_autocast_dtype("cuda")
            return apply(x, delta, norm.weight, norm.bias, norm.eps, dtype)
    if delta is not None:
        x = x + delta
    return x, norm(x)


def _suits_triton(x: Tensor, norm: nn.LayerNorm) -> bool:
    """Whether the stream is float32 among products of bf16; a compiler fuses by itself."""
    if x.device.type != "cuda" or x.dtype is not torch.float32 or torch.compiler.is_compiling():
        return False
    return torch.is_autocast_enabled("cuda") and on_one_gpu(x, norm.weight, norm.bias)


@contextmanager
def on_side_stream(device: torch.device) -> Iterator[None]:
    """Run on a stream beside the current one, after what it has to do and before what follows.

    Kernels cannot be loaded while a graph is captured, so what is to be captured runs here first.
    """
    current, side = torch.cuda.current_stream(device), _side_stream(device)
    side.wait_stream(current)
    with torch.cuda.stream(side):
        yield
    current.wait_stream(side)


@cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    """One for all: each stream that multiplies has a workspace of its own."""
    stream: torch.cuda.Stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    return stream
