# mypy: ignore-errors
"""Kernels that start while the one before them still runs (programmatic dependent launch).

Law: a kernel launched so calls `await_previous` in every program before it reads what an earlier
kernel wrote and before it writes anything. As all of them do, whatever came before is done by then.
Until then it may compute addresses and read what was last changed before a kernel that was launched
plainly: weights, and what the tokens before this one left (every step begins with such a kernel).
Hopper and later; elsewhere nothing changes.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

HOPPER = (9, 0)


@cache
def early(device: torch.device) -> dict[str, bool]:
    """Arguments of a launch after another kernel of ours; `EARLY` is the kernels' own."""
    if device.type != "cuda" or torch.version.cuda is None:
        return {"EARLY": False}
    if torch.cuda.get_device_capability(device) < HOPPER:
        return {"EARLY": False}
    return {"EARLY": True, "launch_pdl": True}


@triton.jit
def begin(EARLY: tl.constexpr):
    """The next kernel may start; it waits by itself for what this one writes."""
    if EARLY:
        gdc_launch_dependents()


@triton.jit
def await_previous(EARLY: tl.constexpr):
    """From here on everything written by earlier kernels is there."""
    if EARLY:
        gdc_wait()
