"""Arithmetic of a pass: weights stay float32, products may be bfloat16.

bfloat16 masters round small updates away, which is why earlier runs at 1e-6 learnt nothing.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch


def passes_in(dtype: str, device: torch.device) -> AbstractContextManager[Any]:
    """The context a forward pass runs in; `auto` is bfloat16 on CUDA and float32 elsewhere."""
    if dtype == "auto":
        dtype = "bfloat16" if device.type == "cuda" else "float32"
    if dtype == "float32":
        return nullcontext()
    return torch.autocast(device.type, dtype=torch.bfloat16)
