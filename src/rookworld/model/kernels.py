"""Who may be handed to a Triton kernel of ours."""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec

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
