"""Weights, optimizer, reference, counters <-> disk.

Laws: a checkpoint is whole or it is not used (files synced, checksummed, renamed into place last);
never pickle; loading one and going on gives the bits an uninterrupted run gives. Each checkpoint is
also a Hugging Face model folder, with the trainer's state beside it.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from rookworld.model import sharding
from rookworld.model.gpt2 import GPT2
from rookworld.model.tokenizer import Tokenizer
from rookworld.model.weights import read_config, write_model
from rookworld.runtime.atomic_files import atomic_folder
from rookworld.runtime.checkpoint_names import saved_checkpoints as saved_checkpoints
from rookworld.runtime.checkpoint_names import step_of as step_of
from rookworld.runtime.errors import ConfigError, RookworldError
from rookworld.runtime.run_folder import read_json

TENSORS, STATE, MANIFEST = "trainer.safetensors", "trainer.json", "manifest.json"
SOUND = "SOUND"
NEEDED = {TENSORS, STATE, "config.json", "model.safetensors"}


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint read back: a model folder, further tensors, and plain state."""

    folder: Path
    tensors: dict[str, Tensor]
    state: dict[str, Any]

    @property
    def step(self) -> int:
        return int(self.state["step"])

    @property
    def maker(self) -> str:
        """The command that saved it: each keeps a state of its own kind."""
        if self.state.get("backend") == "trl":
            return "train --backend trl"
        return "train --backend native" if "guard" in self.state else "pretrain"


def save_checkpoint(
    folder: Path,
    model: GPT2,
    tokenizer: Tokenizer,
    tensors: Mapping[str, Tensor],
    state: Mapping[str, Any],
) -> None:
    """Write a whole checkpoint in place of `folder`; a full disk leaves the old ones alone."""
    try:
        with atomic_folder(folder) as unfinished:
            write_model(model, unfinished, tokenizer=tokenizer)
            plain = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
            save_file(plain, unfinished / TENSORS)
            (unfinished / STATE).write_text(json.dumps(dict(state)), encoding="utf-8")
            sums = {path.name: _sha256(path) for path in sorted(unfinished.iterdir())}
            (unfinished / MANIFEST).write_text(json.dumps(sums, indent=1), encoding="utf-8")
    except (OSError, SafetensorError, RookworldError) as error:
        raise RookworldError(
            f"{folder}: the checkpoint cannot be written ({error}); earlier ones are kept, make "
            "room and go on with --resume"
        ) from None


def load_checkpoint(folder: Path) -> Checkpoint:
    """Read a checkpoint, refusing one that is not whole."""
    fault = fault_of(folder)
    if fault:
        raise RookworldError(f"{folder}: not a whole checkpoint ({fault})")
    return Checkpoint(folder, load_file(folder / TENSORS), read_json(folder / STATE))


def fault_of(folder: Path) -> str | None:
    """What is wrong with a checkpoint, or None when every file is as it was written.

    A disk that cannot be read just now is no fault: taking an older checkpoint deletes this one.
    """
    try:
        sums = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        if not isinstance(sums, dict) or not sums.keys() >= NEEDED:
            return f"{MANIFEST} does not name every file"
        for name, expected in sums.items():
            if _sha256(folder / name) != expected:
                return f"{name} has changed since it was written"
        state = json.loads((folder / STATE).read_text(encoding="utf-8"))
        if not isinstance(state, dict) or type(state.get("step")) is not int:
            return f"{STATE} does not say its step"
    except FileNotFoundError as error:
        return f"{Path(error.filename).name} is missing"
    except OSError as error:
        raise RookworldError(
            f"{error.filename or folder}: cannot be read ({error.strerror}); nothing was changed, "
            "try again"
        ) from None
    except (ValueError, RecursionError):
        return f"{MANIFEST} is cut off"
    return None


def refuse_another_kind(checkpoint: Checkpoint, command: str, model: GPT2) -> None:
    """A run is resumed by the command that made it, with a model of its shape."""
    if checkpoint.maker != command:
        raise ConfigError(
            f"{checkpoint.folder}: saved by {checkpoint.maker}, not by {command}; resume with "
            "that, or choose another --out"
        )
    saved, now = asdict(read_config(checkpoint.folder)), asdict(model.config)
    other = [name for name in now if saved[name] != now[name]]
    differing = [f"{name} is {saved[name]}, not {now[name]}" for name in other]
    if differing:
        raise ConfigError(
            f"{checkpoint.folder}: {', '.join(differing)}; resume with the run's own model and "
            "shape, or choose another --out"
        )


def newest_checkpoint(folder: Path, warn: Callable[[str], None]) -> Path | None:
    """The latest whole checkpoint of a run; broken ones are passed over with a line each."""
    for candidate in reversed(saved_checkpoints(folder)):
        fault = fault_of(candidate)
        if fault is None:
            return candidate
        warn(f"{candidate}: skipped, {fault}")
    return None


def newest_step(folder: Path, warn: Callable[[str], None]) -> int:
    """The step of the latest whole checkpoint; -1 without one."""
    newest = newest_checkpoint(folder, warn)
    return -1 if newest is None else step_of(newest)


def mark_sound(folder: Path) -> None:
    """Say that a step taken from this checkpoint found nothing wrong with it."""
    if folder.is_dir():
        (folder / SOUND).touch()


def last_sound(folder: Path) -> Path:
    """The newest checkpoint a run can return to; its first if none has been proven yet."""
    saved = saved_checkpoints(folder)
    return next((path for path in reversed(saved) if (path / SOUND).exists()), saved[0])


def drop_after(folder: Path, step: int) -> None:
    """Remove the checkpoints of steps after `step`: what follows is another course.

    The best one stays under another name, which `newest_checkpoint` does not go by.
    """
    best = folder / "checkpoints" / "best"
    for path in saved_checkpoints(folder):
        if step_of(path) <= step:
            continue
        if path.resolve() == best.resolve() and fault_of(path) is None:
            kept = path.rename(path.with_name(path.name.replace("step", "best")))
            mark_best(kept)
        else:
            shutil.rmtree(path)


def mark_best(folder: Path) -> None:
    """Let `checkpoints/best` point at this checkpoint."""
    link = folder.with_name(".best.tmp")
    link.unlink(missing_ok=True)
    link.symlink_to(folder.name)
    link.replace(folder.with_name("best"))


def prune(folder: Path, keep: int) -> None:
    """Remove all but the newest `keep` checkpoints, the best and the last sound one."""
    checkpoints = folder / "checkpoints"
    needed = {(checkpoints / "best").resolve(), last_sound(folder).resolve()}
    for old in (*saved_checkpoints(folder)[:-keep], *checkpoints.glob("best-*")):
        if old.resolve() not in needed:
            shutil.rmtree(old)
    for leftover in checkpoints.glob(".step-*"):  # of a process that was killed while writing
        shutil.rmtree(leftover)


def optimizer_tensors(
    optimizers: Iterable[torch.optim.Optimizer], prefixes: Iterable[str]
) -> dict[str, Tensor]:
    """The moments of optimizers under flat names."""
    return {
        f"{prefix}.{index}.{name}": value
        for optimizer, prefix in zip(optimizers, prefixes, strict=False)
        for index, moments in optimizer.state_dict()["state"].items()
        for name, value in moments.items()
        if isinstance(value, Tensor)
    }


def restore_optimizers(
    optimizers: Iterable[torch.optim.Optimizer],
    tensors: Mapping[str, Tensor],
    prefixes: Iterable[str],
) -> None:
    """Put the moments saved by `optimizer_tensors` back in place of those there are."""
    for optimizer, prefix in zip(optimizers, prefixes, strict=False):
        optimizer.state.clear()
        restore_optimizer(optimizer, tensors, prefix)


def restore_optimizer(
    optimizer: torch.optim.Optimizer, tensors: Mapping[str, Tensor], prefix: str
) -> None:
    """Put the moments of one optimizer back."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    state: dict[int, dict[str, Tensor]] = {}
    for name, value in below(tensors, prefix):
        index, moment = name.split(".", 1)
        if not _belongs(value, int(index), parameters):
            raise ConfigError(
                f"{prefix}: the moments saved are not those of the weights trained now; resume "
                "with the run's own --trained and --optimizer (pretrain: --optimizer)"
            )
        # a copy: tensors read from a file stay mapped to it
        mine = sharding.share_like(value.clone(), parameters[int(index)])
        state.setdefault(int(index), {})[moment] = mine
    groups = optimizer.state_dict()["param_groups"]
    optimizer.load_state_dict({"state": state, "param_groups": groups})


def _belongs(moment: Tensor, index: int, parameters: list[Tensor]) -> bool:
    """Whether a moment can be that of the parameter of this number; counts have no shape."""
    return index < len(parameters) and moment.shape in ((), parameters[index].shape)


def below(tensors: Mapping[str, Tensor], prefix: str) -> Iterable[tuple[str, Tensor]]:
    """Those whose names begin with a prefix and a dot, by the rest of their names."""
    start = prefix + "."
    return ((n.removeprefix(start), t) for n, t in tensors.items() if n.startswith(start))


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
