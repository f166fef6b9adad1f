"""The run folder: training writes it, everything else only reads it.

Laws: a file is whole or absent; a JSON line is appended in one write; readers tolerate a
half-written last line; after a resume no line is missing or double, because the JSONL files are cut
back to the checkpoint's step.
"""

from __future__ import annotations

import json
import math
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from importlib.metadata import version
from pathlib import Path
from typing import Any

from rookworld import __version__
from rookworld.runtime.atomic_files import write_text
from rookworld.runtime.errors import ConfigError, RookworldError
from rookworld.runtime.run_lock import locked

STREAMS = ("metrics.jsonl", "events.jsonl", "rollouts.jsonl", "eval.jsonl", "probes.jsonl")
FIRST_ROWS = "eval-rows.npz"
"""What the first evaluation found row by row, for a table that pairs the last with it."""
PAIRED = "paired.json"
"""How the last evaluation differs from the first, metric by metric, paired row by row."""
MATCH = "match.json"
"""Games of the model after training against the one before, if some were played."""
ROUNDS = "rounds.jsonl"
"""What makes a folder an evolution: a line for each of its rounds, which are runs themselves."""
FILES = (*STREAMS, FIRST_ROWS, PAIRED, MATCH, "train.log", "DONE")
FOLDERS = ("checkpoints", "final", "tensorboard")


def read_json(path: Path) -> Any:
    """A JSON file of a run or model folder; a missing or broken one is the user's to know."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise RookworldError(f"{path}: no such file") from None
    except (OSError, ValueError, RecursionError) as error:
        raise RookworldError(f"{path}: cannot be read ({error})") from None


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """The whole JSON objects of a JSONL file; a line cut off by a crash is passed over."""
    if not path.exists():
        return
    with path.open(encoding="utf-8", errors="replace") as file:
        for line in file:
            try:
                value = json.loads(line)
            except (ValueError, RecursionError):
                continue
            if isinstance(value, dict):
                yield value


def finite(value: Any) -> Any:
    """JSON knows no NaN: non-finite numbers become their names, so that every reader can parse."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, Mapping):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return value


def append_record(path: Path, record: Mapping[str, Any]) -> None:
    """Add one JSON line to a file."""
    append_text(path, json.dumps(finite(dict(record))) + "\n")


def append_text(path: Path, text: str) -> None:
    try:
        # one unbuffered write, so that a crash leaves at most one cut-off line
        with path.open("ab", buffering=0) as file:
            file.write(text.encode())
    except OSError as error:
        raise RookworldError(f"{path}: cannot be written ({error.strerror})") from None


def refuse_target(folder: Path) -> None:
    """Refuse a folder that cannot be made, before anything else is done; nothing is made here."""
    try:
        there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    except OSError as error:
        raise RookworldError(
            f"{folder}: cannot be made ({error.strerror}); choose another --out"
        ) from None
    reason = "a file is in the way" if not there.is_dir() else "it may not be written to"
    if not (there.is_dir() and os.access(there, os.W_OK)):
        raise RookworldError(f"{folder}: cannot be made ({there}: {reason}); choose another --out")


class Run:
    """One run folder, open for writing."""

    def __init__(self, folder: Path, *, make: bool = True) -> None:
        self.folder = folder
        if not make:
            return
        try:
            (folder / "checkpoints").mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise RookworldError(
                f"{folder}: cannot be made ({error.strerror}); choose another --out"
            ) from None

    def append(self, stream: str, record: Mapping[str, Any]) -> None:
        """Add one JSON line to a stream such as `metrics.jsonl`."""
        append_record(self.folder / stream, record)

    def note(self, line: str) -> None:
        """Add a line to `train.log`."""
        self._add("train.log", line + "\n")

    def _add(self, name: str, text: str) -> None:
        append_text(self.folder / name, text)

    def cut_back(self, step: int, keep: Sequence[str] = ()) -> None:
        """Drop the lines of every stream (but `keep`) that belong to steps after `step`."""
        for name in STREAMS:
            path = self.folder / name
            if path.exists() and name not in keep:
                kept = [r for r in read_lines(path) if _until(r, step)]
                write_text(path, "".join(json.dumps(record) + "\n" for record in kept))
        log = self.folder / "train.log"
        if log.exists():
            lines = log.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True)
            write_text(log, "".join(line for line in lines if _log_step(line) <= step))

    def in_use(self) -> AbstractContextManager[None]:
        """Nobody else trains in the folder meanwhile."""
        return locked(self.folder / ".lock", "training")

    def trained(self) -> bool:
        """Whether a new run would destroy work; a run that saved its beginning alone has none."""
        names = {path.name for path in (self.folder / "checkpoints").glob("[!.]*")}
        metrics = self.folder / "metrics.jsonl"
        logged = metrics.is_file() and metrics.stat().st_size > 0
        return logged or self.done or bool(names - {"best", "step-000000"})

    def clear(
        self,
        say: Callable[[str], None] = lambda line: None,
        *,
        overwrite: bool = False,
        resume: bool = False,
    ) -> None:
        """Make room for a new run; the work of an earlier one is deleted only to `overwrite`.

        What no run has left is named and kept.
        """
        self.refuse_occupied(overwrite=overwrite, resume=resume)
        if self.trained():
            say(f"{self.folder}: replaces an earlier run")
        elif resume:
            say(f"{self.folder}: no run to resume; a new one begins")
        for name in FILES:
            (self.folder / name).unlink(missing_ok=True)
        for name in FOLDERS:
            shutil.rmtree(self.folder / name, ignore_errors=True)
        (self.folder / "checkpoints").mkdir(parents=True)

    def refuse_occupied(self, *, overwrite: bool = False, resume: bool = False) -> None:
        """What would be lost by a new run is named, unless it is to be overwritten."""
        self._refuse_to_lose()
        if self.trained() and not overwrite:
            found = "no whole checkpoint to resume from" if resume else "an earlier run is here"
            remedy = "" if resume else "--resume goes on with it, "
            raise ConfigError(
                f"{self.folder}: {found}; {remedy}--overwrite deletes it and starts over, "
                "another --out leaves it alone"
            )

    def _refuse_to_lose(self) -> None:
        if _is_settings(self.folder / "config.json"):
            return
        inside = [path for name in FOLDERS for path in sorted((self.folder / name).glob("*"))]
        lost = [path for name in FILES if (path := self.folder / name).exists()] + inside
        if lost:
            raise ConfigError(
                f"{self.folder} holds {lost[0].relative_to(self.folder)}, which training there "
                "would delete, and is no run's folder: choose another --out or move it"
            )

    def finish(self) -> None:
        """Say that everything else has been written."""
        write_text(self.folder / "DONE", "done\n")

    @property
    def done(self) -> bool:
        return (self.folder / "DONE").exists()


def _is_settings(path: Path) -> bool:
    """Whether a file holds a run's settings: a model has a `config.json` too."""
    try:
        return "steps" in json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, TypeError):
        return False


def _until(record: dict[str, Any], step: int) -> bool:
    """Whether a line belongs to a step up to this one; a step that is no number is nobody's."""
    at = record.get("step", 0)
    return isinstance(at, int | float) and at <= step


def _log_step(line: str) -> int:
    words = line.split()
    return int(words[1]) if len(words) > 1 and words[0] == "Step" and words[1].isdecimal() else 0


def origin(seed: int, engine: str | None = None) -> dict[str, Any]:
    """Where a run came from: enough to repeat it."""
    return {
        "version": __version__,
        "commit": _commit(),
        "argv": sys.argv,
        "seed": seed,
        "machine": f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores",
        "python": platform.python_version(),
        "torch": version("torch"),
        "engine": engine,
    }


def _commit() -> str | None:
    try:
        found = subprocess.run(
            ["git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"],
            capture_output=True,
            text=True,
            timeout=5,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return found.stdout.strip() or None
