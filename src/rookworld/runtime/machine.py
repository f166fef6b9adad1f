"""Where a training runs and in which arithmetic: settings that every training has.

And how its threads wait for each other. By default they spin, and beside other work each pass then
waits for a thread that the others keep from its core: a step takes twenty times longer. How they
wait changes no number; how many there are would, so that is left to OMP_NUM_THREADS.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from rookworld.runtime.config import Section

SPINS = "10000"
"""Rounds, some 20 µs, that a thread waits before it sleeps: about a small pass."""
BUSY = 0.5
"""Cores' worth of other work from which on threads sleep at once."""


LOOK_S = 0.1
"""How long other work is looked at. The load average of a minute still has what ended long ago,
such as an installation; threads that sleep then cost a quiet machine a third of its speed."""
STAT = Path("/proc/stat")
_to_tell: list[str] = []
# the choice precedes the settings, and beside a mistake in them it would be a second line


def busy_cores() -> float:
    """How many cores others keep busy now; where the system does not say, over the last minute."""
    try:
        begun, idle = _ticks()
        time.sleep(LOOK_S)
        ended, still_idle = _ticks()
    except (OSError, ValueError, IndexError):
        return os.getloadavg()[0]
    share = 1 - (still_idle - idle) / max(1, ended - begun)
    return share * (os.cpu_count() or 1)


def _ticks() -> tuple[int, int]:
    """Ticks of all cores since the machine began, and the idle ones among them."""
    ticks = [int(word) for word in STAT.read_text(encoding="ascii").split("\n", 1)[0].split()[1:]]
    return sum(ticks[:8]), ticks[3] + ticks[4]


def waiting(load: float, given: Mapping[str, str]) -> dict[str, str]:
    """What to set for threads that wait, beside so much other work; what is given stays."""
    if {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME"} & given.keys():
        return {}
    if load >= BUSY:
        return {"OMP_WAIT_POLICY": "passive", "KMP_BLOCKTIME": "0"}
    return {"GOMP_SPINCOUNT": SPINS, "KMP_BLOCKTIME": "1"}


def wait_politely(environment: MutableMapping[str, str] = os.environ) -> None:
    """Choose how threads wait, before torch is loaded; `chosen_wait` is a line about it.

    Processes that are started from here do the same.
    """
    _to_tell.clear()
    if "torch" in sys.modules:  # which has read the environment
        return
    load = busy_cores()
    chosen = waiting(load, environment)
    environment.update(chosen)
    if "OMP_WAIT_POLICY" in chosen:
        cores = os.cpu_count()
        _to_tell.append(
            f"other work keeps {load:.1f} of {cores} cores: threads sleep while they wait"
        )


def chosen_wait() -> str:
    """What is out of the way in how threads wait, once: for a command that begins its work."""
    return _to_tell.pop() if _to_tell else ""


@dataclass(frozen=True, kw_only=True)
class MachineSettings(Section):
    """Where passes run."""

    device: str = "auto"
    """`auto`, `cpu`, `cuda` or `cuda:N`."""
    dtype: Literal["auto", "float32", "bfloat16", "fastest"] = "auto"
    """Arithmetic of the passes; weights stay float32. `auto`: bfloat16 on CUDA; `fastest`: also on
    processors that multiply it by themselves (AVX512-BF16, AMX)."""
