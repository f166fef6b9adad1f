"""One trial: a training in its own process and run folder, watched until it ends.

Laws: a trial that ends badly has one cause of a closed list, with a line that says more; a trial
that was interrupted can be started again and goes on from its last checkpoint; its lock is held by
the training itself, so that a trial whose sweep was killed is not taken for abandoned while it
still runs.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal, get_args

from rookworld.report.analysis import eval_value
from rookworld.report.run_reader import Record, read_run
from rookworld.runtime.run_folder import read_lines
from rookworld.runtime.run_lock import Lock

Cause = Literal[
    "diverged_kl",
    "non_finite",
    "entropy_collapse",
    "format_collapse",
    "out_of_memory",
    "timeout",
    "engine",
    "data",
    "model",
    "settings",
    "disk",
    "killed",
    "bug",
]
CAUSES: Final[tuple[Cause, ...]] = get_args(Cause)
STDERR, STDOUT = "sweep-stderr.log", "sweep-stdout.log"
GRACE_S: Final = 30.0
"""How long a training that was asked to stop may take to write its checkpoint."""
INTERRUPTED, DIVERGED, MISTAKE = 130, 3, 2
_MEMORY_WORDS = (
    "out of memory",
    "outofmemoryerror",
    "memoryerror",
    "can't allocate memory",
    "cannot allocate memory",
    "bad_alloc",
)
_MISTAKES: tuple[tuple[Cause, tuple[str, ...]], ...] = (
    ("disk", ("no space left", "cannot be written", "cannot be made", "read-only file system")),
    ("engine", ("stockfish", "engine", "uci")),
    ("model", ("--model", "tokenizer", "weights", "safetensors")),
    ("data", ("--data", "rows", "parquet", "jsonl", "held-out", "not a position")),
)
"""Words by which a one-line mistake (exit code 2) is told apart; anything else is `settings`."""


@dataclass(frozen=True)
class Outcome:
    """How a trial ended."""

    state: Literal["done", "pruned", "failed", "interrupted"]
    value: float | None = None
    cause: Cause | None = None
    message: str = ""


class Training:
    """A running training."""

    def __init__(
        self, command: Sequence[str], folder: Path, environment: Mapping[str, str], lock: Lock
    ) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / STDERR).open("ab") as errors, (folder / STDOUT).open("ab") as output:
            self.process = subprocess.Popen(
                list(command),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=errors,
                env={**os.environ, **environment},
                pass_fds=(lock.fileno(),),
                start_new_session=True,
            )
        self.started = time.monotonic()
        self._stopping: float | None = None

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.started

    def has_ended(self) -> bool:
        """Whether it has; one that was asked to stop and does not is killed."""
        if self.process.poll() is not None:
            return True
        if self._stopping is not None and time.monotonic() - self._stopping > GRACE_S:
            self._signal(signal.SIGKILL)
        return False

    def stop(self, *, at_once: bool = False) -> None:
        """Ask it to stop: after its step, with a checkpoint, or at once."""
        if self._stopping is None or at_once:
            self._signal(signal.SIGKILL if at_once else signal.SIGTERM)
            self._stopping = time.monotonic()

    def _signal(self, number: int) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, number)


def evaluations(folder: Path, metric: str) -> list[tuple[int, float]]:
    """Held-out values after training began, as (step, value)."""
    lines = read_lines(folder / "eval.jsonl")
    found = [(int(line["step"]), eval_value(line, metric)) for line in lines]
    return [(step, value) for step, value in found if step > 0 and value == value]


def outcome_of(code: int, folder: Path, metric: str) -> Outcome:
    """What a training that ended by itself amounts to."""
    if code == 0:
        return finished(folder, metric)
    cause, message = failure(code, read_run(folder).events, folder / STDERR)
    return Outcome("failed", cause=cause, message=message)


def finished(folder: Path, metric: str) -> Outcome:
    """A training that says it is done, judged by its last evaluation."""
    if not (folder / "DONE").exists():
        return Outcome("failed", cause="bug", message="exit code 0, but the run is not done")
    values = evaluations(folder, metric)
    if values:
        return Outcome("done", value=values[-1][1])
    measured = [name for one in read_lines(folder / "eval.jsonl") for name in one if name != "step"]
    if metric in measured:
        return Outcome("failed", cause="non_finite", message=f"{metric} is not a number")
    known = ", ".join(dict.fromkeys(measured)) or "nothing"
    return Outcome("failed", cause="settings", message=f"no {metric} was evaluated, but {known}")


def failure(code: int, events: Sequence[Record], errors: Path) -> tuple[Cause, str]:
    """The cause of an exit code other than 0, and a line that says more."""
    text = errors.read_text(encoding="utf-8", errors="replace") if errors.exists() else ""
    lines = [line for line in text.splitlines() if line.strip()]
    last = lines[-1].strip().removeprefix("rookworld: ") if lines else f"exit code {code}"
    if any(word in text[-20_000:].lower() for word in _MEMORY_WORDS):
        return "out_of_memory", last
    if code == DIVERGED:
        return _divergence(events, last), last
    if code == MISTAKE:
        return _mistake(last), last
    if code == INTERRUPTED or -code in (signal.SIGKILL, signal.SIGTERM, signal.SIGINT):
        how = "interrupted" if code == INTERRUPTED else f"ended by {signal.Signals(-code).name}"
        return "killed", f"{how} from outside (the kernel does so when memory runs out)"
    if code < 0:
        return "bug", f"ended by {signal.Signals(-code).name}; see {errors}"
    return "bug", f"{last}; traceback in {errors}"


def _divergence(events: Sequence[Record], message: str) -> Cause:
    named = [one.get("cause") for one in events if one.get("kind") == "stop"]
    found = (cause for cause in CAUSES if cause in named or f"({cause})" in message)
    return next(found, "diverged_kl")


def _mistake(message: str) -> Cause:
    small = message.lower()
    found = (cause for cause, words in _MISTAKES if any(word in small for word in words))
    return next(found, "settings")
