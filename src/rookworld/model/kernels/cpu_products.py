"""Products of matrices by oneDNN, which on a CPU is a tenth faster than what torch takes.

Law: `linear` is torch's, and gelu_tanh of it where asked for, up to the order of additions. For
every size that it meets oneDNN compiles a program of half a megabyte; trainings meet ever new
sizes, so few are kept.
"""

from __future__ import annotations

import os
from functools import cache

import torch
from torch import Tensor

PROGRAMS_KEPT = 128
"""A step of training, bf16, asks for some sixty. By default a thousand are kept, twice over."""
CAPACITIES = ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY")
"""Of oneDNN, and of what torch has before it; read when they are first asked for anything."""

for name in CAPACITIES:
    os.environ.setdefault(name, str(PROGRAMS_KEPT))


@cache
def multiplies(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether matrices there can be left to oneDNN."""
    there: bool = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    if device.type != "cpu" or not there:
        return False
    if not hasattr(torch.ops.mkldnn, "_reorder_linear_weight"):
        return False
    if dtype is torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return dtype is torch.float32


def pack(weight: Tensor) -> Tensor:
    """`weight` [out, in] in oneDNN's own blocked layout: a third faster for few rows."""
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous())
    return packed


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, gelu: bool = False) -> Tensor:
    """x @ weight.T + bias, or gelu_tanh of that; a weight that lies transposed needs no packing."""
    kind, how = ("gelu", "tanh") if gelu else ("none", "")
    out: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, kind, [], how)
    return out
