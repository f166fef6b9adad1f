"""What the page is about: one model, or a run with its checkpoints.

Laws: a checkpoint is found by its name among those that are there, never by a path; nothing that
leads out of the run's folder, by whatever link, is listed, opened or followed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rookworld.runtime.errors import DataError, ModelError
from rookworld.runtime.run_folder import STREAMS

WEIGHTS = "model.safetensors"
READ = (*STREAMS, "config.json", "origin.json", "paired.json", "DONE")
"""What is read of a run besides its checkpoints."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A model to ask: `source` is what `load_answerer` takes."""

    name: str
    source: str

    @property
    def step(self) -> int | None:
        """The step after which it was saved; of a final or lone model its name says enough."""
        number = self.name.removeprefix("step-")
        return int(number) if number.isdecimal() else None

    @property
    def stamp(self) -> tuple[str, int]:
        """Changes when other weights take its place."""
        file = Path(self.source) / WEIGHTS
        return self.source, file.stat().st_mtime_ns if file.exists() else 0


@dataclass(frozen=True)
class Subject:
    """A model, or the folder of a run."""

    name: str
    model: str = ""
    run: Path | None = None

    def checkpoints(self) -> list[Checkpoint]:
        """What can be asked now, in the order of training; a run that trains gets more of them."""
        if self.run is None:
            return [Checkpoint("model", self.model)]
        root = self.run
        steps = sorted((root / "checkpoints").glob("step-*"), key=lambda one: one.name.zfill(20))
        folders = [one for one in (*steps, root / "final") if (one / WEIGHTS).is_file()]
        return [Checkpoint(one.name, str(one)) for one in folders if stays_inside(one, root)]

    def checkpoint(self, name: str = "") -> Checkpoint:
        """The one of this name; without a name the last."""
        found = {one.name: one for one in self.checkpoints()}
        if not found:
            raise ModelError(f"{self.name} has no checkpoint yet: it will when it has saved one")
        if name and name not in found:
            raise DataError(f"no checkpoint {name[:80]!r}: there are {', '.join(found)}")
        return found[name] if name else list(found.values())[-1]


def stays_inside(path: Path, root: Path) -> bool:
    """Whether a file or folder, and each file right in it, is where it seems to be."""
    home = root.resolve()
    return all(one.resolve().is_relative_to(home) for one in (path, *path.glob("*")))


def find_subject(sources: Sequence[str]) -> Subject:
    """What is meant by the words of a command: at most one, by default the embedded model."""
    if len(sources) > 1:
        raise DataError(f"web: one model or run at a time, not {' '.join(sources)}")
    source = sources[0] if sources else "nano"
    folder = Path(source)
    marks = ("checkpoints", "final", "metrics.jsonl")
    is_run = folder.is_dir() and not (folder / WEIGHTS).exists()
    if not (is_run and any((folder / mark).exists() for mark in marks)):
        return Subject(folder.name, source)
    for name in READ:
        if not stays_inside(folder / name, folder):
            raise DataError(f"{folder / name} leads out of the run: copy it there to have it shown")
    return Subject(folder.resolve().name, run=folder)
