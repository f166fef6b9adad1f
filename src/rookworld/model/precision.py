"""Arithmetic of a pass: weights stay float32, products may be bfloat16.

bfloat16 masters round small updates away, which is why earlier runs at 1e-6 learnt nothing.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch


def resolve_dtype(dtype: str, device: torch.device) -> str:
    """`float32` or `bfloat16`, whatever was asked for.

    `auto` is bfloat16 on CUDA and float32 elsewhere; `fastest` is bfloat16 also on processors that
    multiply it by themselves (AVX512-BF16, AMX), which takes them half the time.
    """
    if dtype not in ("auto", "fastest"):
        return dtype
    quick = device.type == "cuda" or (dtype == "fastest" and _multiplies_bfloat16())
    return "bfloat16" if quick else "float32"


def _multiplies_bfloat16() -> bool:
    able = torch.cpu.get_capabilities()
    return bool(able.get("avx512_bf16") or able.get("amx_bf16"))


def matrix_dtype(dtype: str, device: torch.device) -> torch.dtype:
    """What a sampler's copy of the matrices is kept in: it multiplies as the passes do."""
    return torch.bfloat16 if resolve_dtype(dtype, device) == "bfloat16" else torch.float32


def autocast_for(dtype: str, device: torch.device) -> AbstractContextManager[Any]:
    """The context a forward pass runs in."""
    if resolve_dtype(dtype, device) == "float32":
        return nullcontext()
    return torch.autocast(device.type, dtype=torch.bfloat16)
