"""Whether a run is tested on what it is trained on: asked without torch, before all else."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

from rookworld.data.sources import load_positions
from rookworld.data.splits import positions_of, seen_positions
from rookworld.evaluation.evaluate import HeldOut
from rookworld.rl.settings import TrainSettings
from rookworld.tasks.task import Row


def trained_on(settings: TrainSettings, rows: Sequence[Row], held: HeldOut) -> str | None:
    """What is wrong with held-out rows if positions of theirs are trained on, None if none is."""
    asked = [row.fen for row in held.rows]
    more = load_positions(settings.distill.distill_data)
    shared, tested = seen_positions(chain(positions_of(rows, asked), more), asked)
    if not shared:
        return None
    sources = " ".join((*settings.data, *settings.distill.distill_data))
    return (
        f"{shared} of {tested} positions of --held-out {settings.evaluation.held_out} are also "
        f"in the data, {sources}: what is trained on measures nothing"
    )
