"""A run's life on disk, the same for every trainer: begun, saved, gone on from, cut back, finished.

Laws: rank 0 looks, writes and decides, the others follow; nothing that came after a checkpoint
outlives going back to it, but the events that say so.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from torch import Tensor

from rookworld.model.checkpoint import (
    Checkpoint,
    drop_after,
    last_sound,
    load_checkpoint,
    mark_best,
    newest_step,
    prune,
    refuse_another_kind,
    save_checkpoint,
    step_of,
)
from rookworld.model.gpt2 import GPT2
from rookworld.model.tokenizer import Tokenizer
from rookworld.runtime import distributed
from rookworld.runtime.atomic_files import write_json, write_text
from rookworld.runtime.config import resolved
from rookworld.runtime.run_folder import Run, read_lines

EVENTS = "events.jsonl"


def due(step: int, every: int, last: int) -> bool:
    """Whether what happens every so many steps, and at the last, happens now."""
    return step == last or (every > 0 and step % every == 0)


def checkpoint_folder(run: Run, step: int) -> Path:
    return run.folder / "checkpoints" / f"step-{step:06d}"


def held(run: Run) -> AbstractContextManager[None]:
    """No other process trains in the folder meanwhile; rank 0 holds it for all ranks."""
    return distributed.held_by_first(run.in_use())


def begin_run(
    run: Run, settings: Any, about: Mapping[str, Any], say: Callable[[str], None]
) -> None:
    """Clear the folder, and write down the settings and where the run comes from."""

    def write() -> None:
        run.clear(say, overwrite=settings.overwrite, resume=settings.resume)
        write_json(run.folder / "config.json", resolved(settings))
        write_json(run.folder / "origin.json", about)

    distributed.barrier()  # every rank has seen the folder: none makes it again while it is cleared
    distributed.by_first(write)


def resumable(run: Run, command: str, model: GPT2, say: Callable[[str], None]) -> Checkpoint | None:
    """The newest whole checkpoint, the same on all ranks; None: there is nothing to go on from."""
    step = int(distributed.by_first(lambda: newest_step(run.folder, say)))
    if step < 0:
        return None
    checkpoint = load_checkpoint(checkpoint_folder(run, step))
    refuse_another_kind(checkpoint, command, model)
    return checkpoint


def resume_run(
    run: Run, settings: Any, checkpoint: Checkpoint, steps: int, say: Callable[[str], None]
) -> None:
    """Go on to `steps` from a checkpoint that every rank has taken its state from."""
    distributed.barrier()
    if distributed.rank() == 0:
        cut_back(run, checkpoint.step)
        cut_events(run, int(checkpoint.state.get("events", 0)))
        write_json(run.folder / "config.json", resolved(settings))
        if checkpoint.step < steps:
            (run.folder / "DONE").unlink(missing_ok=True)
        say(f"resumed after step {checkpoint.step}")
    distributed.barrier()


def last_sound_checkpoint(run: Run) -> Checkpoint:
    """What a recovery returns to; on a network disk other ranks may see older marks."""
    step = int(distributed.by_first(lambda: step_of(last_sound(run.folder))))
    return load_checkpoint(checkpoint_folder(run, step))


def cut_back(run: Run, step: int) -> None:
    """Drop checkpoints and lines of later steps; events stay."""
    drop_after(run.folder, step)
    run.cut_back(step, keep=(EVENTS,))


def cut_events(run: Run, count: int) -> None:
    """Keep the first `count` events.

    By number, not by step: a restore goes back in steps, and its event must outlive it.
    """
    path = run.folder / EVENTS
    if path.exists():
        kept = list(read_lines(path))[:count]
        write_text(path, "".join(json.dumps(event) + "\n" for event in kept))


def save_run(
    run: Run,
    model: GPT2,
    tokenizer: Tokenizer,
    tensors: Mapping[str, Tensor],
    state: Mapping[str, Any],
    *,
    keep: int,
    best: bool = False,
) -> None:
    """Write the checkpoint of `state["step"]`; keep the last few and the best."""
    if distributed.rank() == 0:
        plain = {**state, "events": sum(1 for _ in read_lines(run.folder / EVENTS))}
        folder = checkpoint_folder(run, state["step"])
        save_checkpoint(folder, model, tokenizer, tensors, plain)
        if best:
            mark_best(folder)
        prune(run.folder, keep)
    distributed.barrier()


def finish_run(run: Run, model: GPT2, tokenizer: Tokenizer, step: int) -> Path:
    """Write the final model, and then that the run is done."""
    final = run.folder / "final"
    if distributed.rank() == 0:
        save_checkpoint(final, model, tokenizer, {}, {"step": step})
        run.finish()
    distributed.barrier()
    return final
