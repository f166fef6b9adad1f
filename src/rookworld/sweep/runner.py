"""Many trainings, each in its own process and run folder, side by side and resumable.

Laws: killed at any moment and started again, a sweep ends with the trials it would have had; any
number of processes on one storage share its trials, and none is run twice; every trial that does
not finish has a cause from a closed list. `sweep.json` in the folder always tells the whole study.
No torch here: trainings load it, the sweep does not.
"""

from __future__ import annotations

import os
import shlex
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from rookworld.report.run_reader import SWEEP_FILE
from rookworld.report.sweep_summary import SweepSummary, read_sweep, summarize
from rookworld.runtime.atomic_files import write_json
from rookworld.runtime.config import require
from rookworld.runtime.errors import ConfigError
from rookworld.runtime.processes import interruptible
from rookworld.sweep.space import (
    Params,
    SweepFile,
    built_in_sweeps,
    flags,
    read_sweep_file,
    sweep_path,
)
from rookworld.sweep.trial import Outcome, Training, evaluations, finished, outcome_of

if TYPE_CHECKING:
    from rookworld.sweep.study import Claim, TrialQueue

TRAINER = (sys.executable, "-m", "rookworld", "train")
LOOK_EVERY_S = 0.1
"""Between looks at the trainings of this process."""
ASK_EVERY_S = 1.0
"""Between questions to the storage while it has nothing to give."""
HEARTBEAT_EVERY_S = 60.0
MOST_ATTEMPTS = 2
"""How often a trial that was killed from outside is started in all."""


@dataclass(frozen=True, kw_only=True)
class SweepSettings:
    """Many trainings from a TOML file; see docs/sweeps.md."""

    file: Path | None = None
    """The sweep: its search, its space and what all trials share; a file, or by name r4, grid-432
    or random-48."""
    out: Path | None = None
    """Folder of the sweep; default: runs/ and the file's name."""
    storage: str | None = None
    """Optuna storage that several processes or machines may share: sqlite:///…, postgresql://…,
    mysql://… or journal://FILE; default: a SQLite file in the folder."""
    parallel: int = 1
    """Trainings at a time."""
    gpus: str = "auto"
    """GPUs to spread trainings over: `auto`, `none`, or numbers such as 0,1,2."""
    timeout_s: float = 0.0
    """Longest time a trial may take; 0: any."""
    trials: int | None = None
    """Trials of a random or TPE search, instead of the file's number."""
    set: tuple[str, ...] = ()
    """KEY=VALUE laid over the file's [train], such as steps=20."""
    keep_models: Literal["none", "best", "all"] = "best"
    """Whose checkpoints and final model stay on disk; curves and samples always do."""
    stale_after_s: float = 600.0
    """Silence after which a trial of another machine is taken over."""
    dry_run: bool = False
    """Print the trials, one line each, and stop."""

    def __post_init__(self) -> None:
        require(self.parallel > 0, f"--parallel {self.parallel}: must be positive")
        require(self.timeout_s >= 0, f"--timeout-s {self.timeout_s}: must not be negative")
        least = 3 * HEARTBEAT_EVERY_S
        require(
            self.stale_after_s >= least,
            f"--stale-after-s {self.stale_after_s:g}: at least {least:g}, three heartbeats",
        )

    @property
    def folder(self) -> Path:
        return self.out or Path("runs") / self.source.stem

    @property
    def source(self) -> Path:
        """The file or name that is given; there is no usual one, as a sweep takes hours."""
        if self.file is None:
            raise ConfigError(
                f"sweep: name a file, or a built-in sweep: {', '.join(built_in_sweeps())}"
            )
        return self.file

    def read(self) -> SweepFile:
        """The sweep that is meant."""
        return read_sweep_file(sweep_path(self.source), self.set, self.trials)


class SweepInterrupted(KeyboardInterrupt):
    """Asked to stop; trainings have written checkpoints and the same command goes on."""


@dataclass(frozen=True)
class SweepHooks:
    """What the surface wants to hear of."""

    on_trial: Callable[[int, Params, Outcome], None] = lambda number, params, outcome: None
    on_progress: Callable[[int, int], None] = lambda ended, planned: None
    say: Callable[[str], None] = lambda line: None


# --- plan ---------------------------------------------------------------------------------------


def plan(settings: SweepSettings) -> Iterator[str]:
    """One line a trial: its number and the command that it runs."""
    sweep = settings.read()
    for number in range(sweep.planned):
        if sweep.sampler == "tpe":
            space = ", ".join(f"{name} in {one}" for name, one in sweep.space.items())
            yield f"{number:04d}  chosen by TPE when it starts: {space}"
        else:
            found = command(sweep, sweep.params(number), trial_folder(settings.folder, number))
            yield f"{number:04d}  {shlex.join(['rookworld', 'train', *found])}"


def command(sweep: SweepFile, params: Params, folder: Path) -> list[str]:
    """The flags of a trial's training."""
    return ["--preset", sweep.preset, *flags(sweep.settings(params)), "--out", str(folder)]


def trial_folder(folder: Path, number: int) -> Path:
    return folder / "trials" / f"{number:04d}"


# --- running ------------------------------------------------------------------------------------


@dataclass
class RunningTrial:
    """A trial that this process runs, and the slot it takes."""

    claim: Claim
    slot: int
    training: Training
    attempt: int = 1
    reported: set[int] = field(default_factory=set)
    """Steps whose evaluation the study knows."""
    pruned: bool = False
    timed_out: bool = False
    last_heartbeat: float = field(default_factory=time.monotonic)
    earlier_seconds: float = 0.0
    """Of earlier attempts."""

    @property
    def seconds(self) -> float:
        return self.earlier_seconds + self.training.seconds


@dataclass
class Sweep:
    """One process's share of a sweep."""

    settings: SweepSettings
    sweep: SweepFile
    queue: TrialQueue
    hooks: SweepHooks
    trainer: Sequence[str]
    active: list[RunningTrial] = field(default_factory=list)
    waiting: tuple[int, ...] = ()
    """Trials of other processes that were last spoken of."""
    ask_after: float = 0.0

    def run(self, asked_to_stop: Callable[[], bool]) -> None:
        """Until every trial of the study has ended, here or elsewhere."""
        while not asked_to_stop():
            self.fill()
            if not self.active:
                if self.queue.complete():
                    return
                self.say_what_runs_elsewhere()
                time.sleep(ASK_EVERY_S)
            time.sleep(LOOK_EVERY_S)
            for one in list(self.active):
                self.watch(one)
        self.stop_all()
        raise SweepInterrupted

    def fill(self) -> None:
        """Start trials until every slot is taken or none is left."""
        if time.monotonic() < self.ask_after:
            return
        free = [n for n in range(self.settings.parallel) if n not in [a.slot for a in self.active]]
        while free:
            claim = self.queue.claim()
            if claim is None:
                self.ask_after = time.monotonic() + ASK_EVERY_S
                return
            folder = trial_folder(self.settings.folder, claim.number)
            if (folder / "DONE").exists():
                # its sweep was killed after the training had ended: only the entry is missing
                self.end(claim, finished(folder, self.sweep.metric), 0.0)
                continue
            slot = free.pop(0)
            self.active.append(RunningTrial(claim, slot, self.start(claim, slot)))

    def start(self, claim: Claim, slot: int) -> Training:
        folder = trial_folder(self.settings.folder, claim.number)
        arguments = [*self.trainer, *command(self.sweep, claim.params, folder), "--resume"]
        return Training(arguments, folder, self.environment(slot), claim.lock)

    def environment(self, slot: int) -> dict[str, str]:
        found = {}
        if gpus := gpu_names(self.settings.gpus):
            found["CUDA_VISIBLE_DEVICES"] = gpus[slot % len(gpus)]
        if self.settings.parallel > 1 and "OMP_NUM_THREADS" not in os.environ:
            share = max(1, (os.cpu_count() or 1) // self.settings.parallel)
            found["OMP_NUM_THREADS"] = str(share)
        return found

    def watch(self, one: RunningTrial) -> None:
        """See how a trial is doing, and end it if it is time."""
        if one.training.has_ended():
            self.judge(one)
            return
        if time.monotonic() - one.last_heartbeat > HEARTBEAT_EVERY_S:
            one.last_heartbeat = time.monotonic()
            if not self.queue.heartbeat(one.claim):
                self.abandon(one)
                return
        if 0 < self.settings.timeout_s < one.seconds and not one.timed_out:
            one.timed_out = True
            one.training.stop(at_once=True)
        if self.sweep.prune and not (one.pruned or one.timed_out):
            self.consider_pruning(one)

    def abandon(self, one: RunningTrial) -> None:
        """Another process has taken the trial over: it would end twice."""
        self.hooks.say(f"trial {one.claim.number} was taken over by another process; stopped here")
        one.training.stop(at_once=True)
        one.training.process.wait()
        self.active.remove(one)
        one.claim.lock.release()

    def consider_pruning(self, one: RunningTrial) -> None:
        values = dict(evaluations(one.training.folder, self.sweep.metric))
        new = values.keys() - one.reported
        for step in sorted(new):
            one.reported.add(step)
            one.claim.report(step, values[step])
        if new and one.claim.hopeless():
            one.pruned = True
            one.training.stop(at_once=True)

    def judge(self, one: RunningTrial) -> None:
        """End a trial whose training has ended, or start it once more."""
        training = one.training
        outcome = outcome_of(training.process.returncode, training.folder, self.sweep.metric)
        if one.timed_out:
            limit = self.settings.timeout_s
            outcome = Outcome("failed", cause="timeout", message=f"took more than {limit:g} s")
        elif one.pruned and outcome.state != "done":
            outcome = Outcome("pruned")
        if outcome.cause == "killed" and one.attempt < MOST_ATTEMPTS:
            self.hooks.say(f"trial {one.claim.number}: {outcome.message}; started again")
            one.attempt, one.earlier_seconds = one.attempt + 1, one.seconds
            one.training = self.start(one.claim, one.slot)
            return
        self.active.remove(one)
        self.end(one.claim, outcome, one.seconds)

    def end(self, claim: Claim, outcome: Outcome, seconds: float) -> None:
        self.queue.finish(claim, outcome, seconds)
        records = write_sweep(self.settings.folder, self.sweep, self.queue)
        drop_models(self.settings, self.sweep, records, claim.number)
        self.hooks.on_trial(claim.number, claim.params, outcome)
        ended = sum(one["state"] != "running" for one in records)
        self.hooks.on_progress(ended, self.sweep.planned)

    def say_what_runs_elsewhere(self) -> None:
        others = tuple(self.queue.open_numbers())
        if others and others != self.waiting:
            shown = ", ".join(map(str, others[:8])) + (" …" if len(others) > 8 else "")
            self.hooks.say(f"waiting for trials that run elsewhere: {shown}")
        self.waiting = others

    def stop_all(self) -> None:
        """Every training writes a checkpoint; the trials stay open for the next sweep."""
        for one in self.active:
            one.training.stop()
        while any(not one.training.has_ended() for one in self.active):
            time.sleep(0.1)
        for one in self.active:
            self.queue.finish(one.claim, Outcome("interrupted"), 0.0)
        self.active.clear()


def run_sweep(
    settings: SweepSettings, hooks: SweepHooks | None = None, trainer: Sequence[str] = TRAINER
) -> SweepSummary:
    """Run what is left of a sweep, alone or beside others; the whole study's summary."""
    sweep = settings.read()
    try:
        from rookworld.sweep.study import TrialQueue
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"`rookworld sweep` needs {error.name}: pip install 'rookworld[sweep]'"
        ) from None
    settings.folder.mkdir(parents=True, exist_ok=True)
    queue = TrialQueue(sweep, settings.folder, settings.storage, settings.stale_after_s)
    write_sweep(settings.folder, sweep, queue)
    try:
        with interruptible() as asked_to_stop:
            Sweep(settings, sweep, queue, hooks or SweepHooks(), trainer).run(asked_to_stop)
    finally:
        write_sweep(settings.folder, sweep, queue)
    return summarize(read_sweep(settings.folder))


def write_sweep(folder: Path, sweep: SweepFile, queue: TrialQueue) -> list[dict[str, Any]]:
    """Write `sweep.json`; the trials in it."""
    records = queue.records()
    write_json(folder / SWEEP_FILE, {**sweep.plain(), "planned": sweep.planned, "trials": records})
    return records


def drop_models(
    settings: SweepSettings, sweep: SweepFile, records: Sequence[dict[str, Any]], number: int
) -> None:
    """Delete the weights that --keep-models does not ask for, of the trial that ended last."""
    if settings.keep_models == "all":
        return
    sign = -1 if sweep.direction == "minimize" else 1
    done = [one for one in records if one["state"] == "done"]
    here = [one for one in done if trial_folder(settings.folder, one["number"]).is_dir()]
    best = max(here, key=lambda one: (sign * one["value"], -one["number"]), default=None)
    kept = best["number"] if best is not None and settings.keep_models == "best" else None
    beaten = [one["number"] for one in here if one["number"] != kept]
    for old in {number, *beaten} - {kept}:
        for name in ("checkpoints", "final"):
            shutil.rmtree(trial_folder(settings.folder, old) / name, ignore_errors=True)


def gpu_names(wanted: str) -> tuple[str, ...]:
    """GPUs to hand out; none means that trainings choose for themselves."""
    if wanted == "none":
        return ("",)
    if wanted != "auto":
        return tuple(part.strip() for part in wanted.split(",") if part.strip())
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return tuple(part for part in visible.split(",") if part)
    cards = Path("/proc/driver/nvidia/gpus")
    return tuple(str(n) for n in range(len(list(cards.iterdir())))) if cards.is_dir() else ()
