"""Where a training runs and in which arithmetic: settings that every training has.

And how its threads wait for each other. By default they spin, and beside other work each pass then
waits for a thread that the others keep from its core: a step takes twenty times longer. How they
wait changes no number; how many there are would, so that is left to OMP_NUM_THREADS.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from typing import Literal

from rookworld.runtime.config import Section

SPINS = "10000"
"""Rounds, some 20 µs, that a thread waits before it sleeps: about a small pass."""
BUSY = 0.5
"""Cores' worth of other work from which on threads sleep at once."""


def waiting(load: float, given: Mapping[str, str]) -> dict[str, str]:
    """What to set for threads that wait, beside so much other work; what is given stays."""
    if {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME"} & given.keys():
        return {}
    if load >= BUSY:
        return {"OMP_WAIT_POLICY": "passive", "KMP_BLOCKTIME": "0"}
    return {"GOMP_SPINCOUNT": SPINS, "KMP_BLOCKTIME": "1"}


def wait_politely(environment: MutableMapping[str, str] = os.environ) -> str | None:
    """Choose how threads wait, before torch is loaded; a line about it if that is out of the way.

    Processes that are started from here do the same.
    """
    if "torch" in sys.modules:  # which has read the environment
        return None
    load = os.getloadavg()[0]
    chosen = waiting(load, environment)
    environment.update(chosen)
    if "OMP_WAIT_POLICY" not in chosen:
        return None
    return f"other work keeps {load:.1f} of {os.cpu_count()} cores: threads sleep while they wait"


@dataclass(frozen=True, kw_only=True)
class MachineSettings(Section):
    """Where passes run."""

    device: str = "auto"
    """`auto`, `cpu`, `cuda` or `cuda:N`."""
    dtype: Literal["auto", "float32", "bfloat16", "fastest"] = "auto"
    """Arithmetic of the passes; weights stay float32. `auto`: bfloat16 on CUDA; `fastest`: also on
    processors that multiply it by themselves (AVX512-BF16, AMX)."""
