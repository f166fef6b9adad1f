"""Who may be handed to a Triton kernel of ours, and where kernels are warmed up for a capture."""

from __future__ import annotations

from collections.abc import Iterator
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


@contextmanager
def beside(device: torch.device) -> Iterator[None]:
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
