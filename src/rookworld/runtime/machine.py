"""Where a training runs and in which arithmetic: settings that every training has."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from rookworld.runtime.config import Section


@dataclass(frozen=True, kw_only=True)
class MachineSettings(Section):
    """Where passes run."""

    device: str = "auto"
    """`auto`, `cpu`, `cuda` or `cuda:N`."""
    dtype: Literal["auto", "float32", "bfloat16", "fastest"] = "auto"
    """Arithmetic of the passes; weights stay float32. `auto`: bfloat16 on CUDA; `fastest`: also on
    processors that multiply it by themselves (AVX512-BF16, AMX)."""
