"""Which trials exist, who runs them and how they ended: an Optuna study behind a few verbs.

Laws: a trial's number is given out once, by the storage, to however many processes share it; a
trial that nobody runs any more is taken up again under its own number, so that a killed sweep and
an undisturbed one end with the same trials. Who still runs one is known by its lock where folders
are shared, otherwise by its heartbeat. Only this module knows Optuna.
"""

from __future__ import annotations

import json
import os
import platform
import time
import uuid
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import optuna
import sqlalchemy.exc
from optuna.samplers import BaseSampler, TPESampler
from optuna.storages import BaseStorage, JournalStorage, RDBStorage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import FrozenTrial, Trial, TrialState

from rookworld.report.run_reader import Record
from rookworld.runtime.atomic_files import write_text
from rookworld.runtime.config import require
from rookworld.runtime.errors import ConfigError, RookworldError
from rookworld.runtime.run_folder import finite
from rookworld.runtime.run_lock import Lock
from rookworld.sweep.space import Choices, Params, Range, SweepFile, split
from rookworld.sweep.trial import Outcome

SETTLE_S = 2.0
"""How long a claim on another machine's trial must stand before it counts."""
UNOWNED_S = 30.0
"""How old a trial without an owner must be before it is taken for abandoned."""
_STATES = {
    TrialState.COMPLETE: "done",
    TrialState.PRUNED: "pruned",
    TrialState.FAIL: "failed",
    TrialState.RUNNING: "running",
    TrialState.WAITING: "running",
}

optuna.logging.set_verbosity(optuna.logging.ERROR)


@dataclass
class Claim:
    """A trial that this process runs, and the lock that says so."""

    number: int
    params: Params
    trial: Trial
    lock: Lock

    def report(self, step: int, value: float) -> None:
        """Say how the trial is doing; the study hears of a step once, restarts included."""
        if step not in self.trial.storage.get_trial(self.trial._trial_id).intermediate_values:
            self.trial.report(value, step)

    def hopeless(self) -> bool:
        """Whether earlier trials did clearly better at this point."""
        return self.trial.should_prune()


class TrialQueue:
    """The trials of one sweep, as this process sees them in the shared study."""

    def __init__(self, sweep: SweepFile, folder: Path, url: str | None, stale_after_s: float):
        self.sweep, self.folder, self.stale_after_s = sweep, folder, stale_after_s
        self.folder_id = _folder_id(folder)
        pruner = (
            optuna.pruners.MedianPruner(n_startup_trials=sweep.prune_after)
            if sweep.prune
            else optuna.pruners.NopPruner()
        )
        self.study = _open_patiently(
            lambda: optuna.create_study(
                study_name=sweep.name,
                storage=open_storage(url, folder),
                sampler=NumberedTpe(sweep) if sweep.sampler == "tpe" else Numbered(sweep),
                pruner=pruner,
                direction=sweep.direction,
                load_if_exists=True,
            ),
            url,
        )
        self._refuse_another_sweep()

    def _refuse_another_sweep(self) -> None:
        """A study goes on only with the file that it began with."""
        first = self.study.user_attrs.get("sweep")
        if first is None:
            self.study.set_user_attr("sweep", self.sweep.fingerprint)
        elif first != self.sweep.fingerprint:
            raise ConfigError(
                f"the study {self.sweep.name!r} in this storage was begun with other settings "
                f"({first}, now {self.sweep.fingerprint}); use another --out or --storage"
            )

    # --- claiming ---

    def claim(self) -> Claim | None:
        """A trial to run: an abandoned one, then a new one; None if there is none now."""
        trials = self._trials()
        for frozen in trials:
            if frozen.state == TrialState.RUNNING:
                claim = self._adopt(frozen)
                if claim is not None:
                    return claim
        return self._ask() if len(trials) < self.sweep.planned else None

    def _ask(self) -> Claim | None:
        trial = self.study.ask()
        if trial.number >= self.sweep.planned:
            # another process asked for the last one in the same moment; a longer sweep takes it up
            return None
        lock = Lock.take(self._lock_path(trial.number))
        if lock is None:
            raise RookworldError(
                f"{self._lock_path(trial.number)}: held by another process although the trial is "
                "new; does another study use this folder? choose another --out"
            )
        return self._claim(trial, lock)

    def _adopt(self, frozen: FrozenTrial) -> Claim | None:
        owner = frozen.user_attrs.get("owner") or {}
        here = owner.get("folder") == self.folder_id
        if not here and not self._abandoned(frozen, owner):
            return None
        lock = Lock.take(self._lock_path(frozen.number))
        if lock is None:
            return None
        if not (here or self._outlast(frozen)) or self._now(frozen._trial_id).state.is_finished():
            lock.release()
            return None
        return self._claim(Trial(self.study, frozen._trial_id), lock)

    def _abandoned(self, frozen: FrozenTrial, owner: dict[str, Any]) -> bool:
        """Whether the process that runs a trial in another folder has gone silent."""
        if owner:
            return time.time() - float(owner["beat"]) > self.stale_after_s
        started = frozen.datetime_start
        return started is not None and time.time() - started.timestamp() > UNOWNED_S

    def _outlast(self, frozen: FrozenTrial) -> bool:
        """Claim another folder's trial: of several that try, the last to write keeps it."""
        mine = self._owner()
        self.study._storage.set_trial_user_attr(frozen._trial_id, "owner", mine)
        time.sleep(SETTLE_S)
        return bool(self._now(frozen._trial_id).user_attrs.get("owner") == mine)

    def _now(self, trial_id: int) -> FrozenTrial:
        """A trial as the storage has it at this moment."""
        return self.study._storage.get_trial(trial_id)

    def _claim(self, trial: Trial, lock: Lock) -> Claim:
        trial.set_user_attr("owner", self._owner())
        params = {
            name: _decode(suggest(trial, name, one), name) for name, one in self.sweep.space.items()
        }
        return Claim(trial.number, params, trial, lock)

    def _owner(self) -> dict[str, Any]:
        return {
            "folder": self.folder_id,
            "host": platform.node(),
            "pid": os.getpid(),
            "beat": time.time(),
        }

    def holds(self, claim: Claim) -> bool:
        """Whether a claim stands: a process silent for too long may have lost its trial."""
        now = self._now(claim.trial._trial_id)
        owner = now.user_attrs.get("owner") or {}
        mine = self._owner()
        same = all(owner.get(key) == mine[key] for key in ("folder", "host", "pid"))
        return same and not now.state.is_finished()

    def heartbeat(self, claim: Claim) -> bool:
        """Say that this process still runs the trial; False if it does not any more."""
        if not self.holds(claim):
            return False
        claim.trial.set_user_attr("owner", self._owner())
        return True

    def _lock_path(self, number: int) -> Path:
        return self.folder / "locks" / f"{number:04d}"

    # --- ending ---

    def finish(self, claim: Claim, outcome: Outcome, seconds: float) -> None:
        """Write down how a trial ended; an interrupted one stays open for whoever comes next."""
        if outcome.state != "interrupted" and self.holds(claim):
            claim.trial.set_user_attr("seconds", round(seconds, 1))
            if outcome.cause is not None:
                claim.trial.set_user_attr("cause", outcome.cause)
                claim.trial.set_user_attr("message", outcome.message)
            if outcome.state == "done":
                self.study.tell(claim.trial, outcome.value)
            else:
                pruned = outcome.state == "pruned"
                self.study.tell(claim.trial, state=TrialState.PRUNED if pruned else TrialState.FAIL)
        claim.lock.release()

    def open_numbers(self) -> list[int]:
        """Trials that some process runs, or that nobody has taken up again yet."""
        return [one.number for one in self._trials() if not one.state.is_finished()]

    def complete(self) -> bool:
        trials = self._trials()
        return len(trials) >= self.sweep.planned and all(one.state.is_finished() for one in trials)

    def _trials(self) -> list[FrozenTrial]:
        found = self.study.get_trials(deepcopy=False)
        return [one for one in found if one.number < self.sweep.planned]

    def records(self) -> list[Record]:
        """Every trial as `sweep.json` holds it."""
        return [self._record(one) for one in self._trials()]

    def _record(self, one: FrozenTrial) -> Record:
        record: Record = finite(
            {
                "number": one.number,
                "state": _STATES[one.state],
                "value": one.value if one.state == TrialState.COMPLETE else None,
                **{name: one.user_attrs.get(name) for name in ("cause", "message", "seconds")},
                "host": (one.user_attrs.get("owner") or {}).get("host"),
                "folder": f"trials/{one.number:04d}",
                "params": {name: _decode(value, name) for name, value in one.params.items()},
            }
        )
        return record


# --- Optuna's side ------------------------------------------------------------------------------


def open_storage(url: str | None, folder: Path) -> BaseStorage:
    """SQLite in the folder by default; a journal file, or any database SQLAlchemy knows."""
    if url is None:
        url = f"sqlite:///{(folder / 'study.db').resolve()}"
    if url.startswith("journal://"):
        path = Path(url.removeprefix("journal://"))
        path.parent.mkdir(parents=True, exist_ok=True)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            return JournalStorage(JournalFileBackend(str(path)))
    if url.startswith("grpc://"):
        return _proxy(url)
    # SQLite lets one write at a time: wait for the others rather than fail
    patience = {"connect_args": {"timeout": 60}} if url.startswith("sqlite") else None
    return RDBStorage(url, engine_kwargs=patience)


def _proxy(url: str) -> BaseStorage:
    """Optuna's server before a database: machines that reach it need no driver and no password."""
    host, _, port = url.removeprefix("grpc://").rstrip("/").partition(":")
    require(bool(host) and port.isdecimal(), f"--storage {url}: not like grpc://HOST:PORT")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        proxy = optuna.storages.GrpcStorageProxy(host=host, port=int(port))
    proxy.wait_server_ready(timeout=20)
    return proxy


def _open_patiently(open_study: Callable[[], optuna.Study], url: str | None) -> optuna.Study:
    """Two processes that make the tables at once get in each other's way: try a few times."""
    for attempt in range(5):
        try:
            return open_study()
        except (
            optuna.exceptions.StorageInternalError,
            sqlalchemy.exc.SQLAlchemyError,
            ImportError,
        ) as error:
            hopeless = isinstance(error, ImportError | sqlalchemy.exc.ArgumentError)
            if attempt == 4 or hopeless:
                raise RookworldError(
                    f"--storage {without_password(url)}: {reason(error)}"
                ) from None
            time.sleep(0.5 * (attempt + 1))
    raise AssertionError("the last attempt returns or raises")


def without_password(url: str | None) -> str:
    """A storage's name for others to read: without its password."""
    try:
        return sqlalchemy.make_url(url or "study.db").render_as_string(hide_password=True)
    except sqlalchemy.exc.ArgumentError:
        return url or "study.db"


def reason(error: Exception) -> str:
    """What went wrong with a storage, in one line; Optuna does not say which module it misses."""
    missing = error.__cause__
    if isinstance(missing, ModuleNotFoundError):
        package = {"psycopg": "psycopg[binary]", "MySQLdb": "mysqlclient"}.get(missing.name or "")
        advice = f': pip install "{package}"' if package else ""
        return f"{missing}{advice}"
    return str(error).splitlines()[0]


def _folder_id(folder: Path) -> str:
    """A name that two processes share if, and only if, they share the folder itself."""
    path = folder / "folder-id"
    lock = _wait_for(folder / "locks" / "folder")
    if not path.exists():
        write_text(path, uuid.uuid4().hex + "\n")
    found = path.read_text(encoding="utf-8").strip()
    lock.release()
    return found


def _wait_for(path: Path) -> Lock:
    while (lock := Lock.take(path)) is None:
        time.sleep(0.05)
    return lock


def suggest(trial: Trial, name: str, one: Choices | Range) -> Any:
    """The trial's value of a setting, drawn if it has none yet."""
    if isinstance(one, Choices):
        return trial.suggest_categorical(name, [_encode(value) for value in one.values])
    if one.whole:
        return trial.suggest_int(name, int(one.low), int(one.high), log=one.log)
    return trial.suggest_float(name, one.low, one.high, log=one.log)


def _encode(value: Any) -> Any:
    return json.dumps(value) if isinstance(value, list) else value


def _decode(value: Any, name: str) -> Any:
    return json.loads(value) if len(split(name)) > 1 else value


class Numbered(BaseSampler):
    """Grid and random search: a trial's settings follow from its number."""

    def __init__(self, sweep: SweepFile) -> None:
        self.sweep = sweep

    def infer_relative_search_space(self, study: Any, trial: Any) -> dict[str, Any]:
        return {}

    def sample_relative(self, study: Any, trial: Any, search_space: Any) -> dict[str, Any]:
        return {}

    def sample_independent(
        self, study: Any, trial: FrozenTrial, param_name: str, param_distribution: Any
    ) -> Any:
        return _encode(self.sweep.params(trial.number)[param_name])


class NumberedTpe(Numbered):
    """TPE whose chance depends on the trial's number, not on what its process did before."""

    def _sampler(self, trial: FrozenTrial, place: int = 0) -> TPESampler:
        # a place for each setting, or all of a trial's would be drawn with the same luck
        seeds = np.random.SeedSequence((self.sweep.seed, trial.number, place))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            # running trials count as bad, or parallel ones would all try the same
            return TPESampler(seed=int(seeds.generate_state(1)[0]), constant_liar=True)

    def infer_relative_search_space(self, study: Any, trial: FrozenTrial) -> dict[str, Any]:
        return self._sampler(trial).infer_relative_search_space(study, trial)

    def sample_relative(
        self, study: Any, trial: FrozenTrial, search_space: dict[str, Any]
    ) -> dict[str, Any]:
        return self._sampler(trial).sample_relative(study, trial, search_space)

    def sample_independent(
        self, study: Any, trial: FrozenTrial, param_name: str, param_distribution: Any
    ) -> Any:
        sampler = self._sampler(trial, 1 + list(self.sweep.space).index(param_name))
        return sampler.sample_independent(study, trial, param_name, param_distribution)
