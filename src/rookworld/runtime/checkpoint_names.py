"""Where a run keeps its checkpoints: by step, `best`, `final`.

Names alone, so that whoever looks for a model need not load what reads and writes one.
"""

from __future__ import annotations

import re
from pathlib import Path

from rookworld.runtime.errors import ModelError

NUMBERED = re.compile(r"step-(\d{6}|[1-9]\d{6,})", re.ASCII)


def step_of(checkpoint: Path) -> int:
    return int(checkpoint.name.removeprefix("step-"))


def saved_checkpoints(folder: Path) -> list[Path]:
    """A run's numbered checkpoints, oldest first; what others have put beside them is theirs."""
    found = (folder / "checkpoints").glob("step-*")
    numbered = (path for path in found if NUMBERED.fullmatch(path.name) and path.is_dir())
    return sorted(numbered, key=step_of)


def model_of_run(source: str, checkpoint: str = "") -> str:
    """The model folder of a run's checkpoint: `final`, `best` or a step; empty is the last one.

    What is no run stays as it is.
    """
    folder = Path(source)
    saved = saved_checkpoints(folder)
    named = {str(step_of(path)): path for path in saved}
    kept = {"best": folder / "checkpoints" / "best", "final": folder / "final"}
    named |= {name: path for name, path in kept.items() if saved and path.is_dir()}
    if not checkpoint:
        return str(named.get("final", saved[-1])) if saved else source
    if checkpoint not in named:
        there = ", ".join(named) or "none, it is no run's folder"
        raise ModelError(f"{source}: no checkpoint {checkpoint!r}; there are {there}")
    return str(named[checkpoint])
