"""One process or many: what a training step needs to know of its neighbours.

Laws: with N ranks a step computes what it computes with one: every rank works on its share of the
rows, and gradients and counts are summed before they are divided by the global ones. A rank that
dies ends the others at once, one that hangs ends them after `TIMEOUT`; one of them says so.
Started by torchrun (its environment variables); without it, rank 0 of 1.
"""

from __future__ import annotations

import atexit
import gc
import os
import re
import signal
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.distributed_c10d import Store
from torch.distributed.rendezvous import rendezvous

from rookworld.runtime.errors import ConfigError, Diverged, RookworldError

TIMEOUT = timedelta(minutes=10)
"""How long a rank waits for the others within a step."""
PATIENCE = timedelta(hours=6)
"""How long the others wait for what rank 0 does alone: evaluations and checkpoints."""
_LOST = "rookworld/lost"

_store: Store | None = None
_patient: dist.ProcessGroup | None = None


def start(device: str) -> torch.device:
    """Join the process group that torchrun prepared, if any; the device this rank works on."""
    chosen = torch.device(pick_device(device))
    if "RANK" not in os.environ or int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return chosen
    if chosen.type == "cuda":
        chosen = own_gpu(int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(chosen)
    if not dist.is_initialized():
        # gradients go by the device's own way, counts and flags live on the CPU
        join("cpu:gloo,cuda:nccl" if chosen.type == "cuda" else "gloo")
    return chosen


def own_gpu(number: int) -> torch.device:
    """The GPU of the `number`-th process of this machine."""
    count = torch.cuda.device_count()
    if number >= count:
        raise ConfigError(
            f"process {number + 1} of this machine has no GPU of its own, there are {count}: "
            f"start with --nproc-per-node {count}, or train with --device cpu"
        )
    return torch.device("cuda", number)


def join(ways: str) -> None:
    """Meet the other ranks where torchrun's environment says."""
    global _store, _patient
    with _answering():
        _store, own, size = next(rendezvous("env://", timeout=TIMEOUT))
        dist.init_process_group(ways, store=_store, rank=own, world_size=size, timeout=TIMEOUT)
        _patient = dist.new_group(backend="gloo", timeout=PATIENCE)
    # a group still alive when the interpreter is gone aborts the process
    atexit.register(stop)


@contextmanager
def _answering() -> Iterator[None]:
    """A neighbour that has died or hangs ends this process, and one of them with a line."""
    try:
        yield
    except RuntimeError as error:
        _leave_the_word(_first_to_notice(), RookworldError.exit_code)
        raise RookworldError(
            f"rank {os.environ.get('RANK', '?')}: another process of this training does not "
            f"answer ({_reason(error)}); start again with --resume"
        ) from error


@contextmanager
def answering() -> Iterator[None]:
    """Training as a whole: what ends all ranks is said by one of them.

    Sharded passes communicate on their own, outside of the functions below.
    """
    try:
        yield
    except Diverged as error:  # decided by all of them together
        if world_size() > 1:
            _leave_the_word(rank() == 0, error.exit_code)
        raise
    except RuntimeError as error:
        if not isinstance(error, dist.DistError) and "gloo/transport" not in str(error):
            raise
        with _answering():
            raise


def _leave_the_word(to_me: bool, exit_code: int) -> None:
    """Go on to say why all ranks end, or end in silence because another one will."""
    if not to_me:
        raise SystemExit(exit_code)
    # torchrun ends the ranks that are left: not before this one has spoken
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


def _reason(error: RuntimeError) -> str:
    """The first sentence of what the transport said, without its source file."""
    text = re.sub(r"^\[\S+\] ", "", str(error).strip()) or type(error).__name__
    return re.split(r"\.\s|\n", text)[0]


def _first_to_notice() -> bool:
    """Whether no other rank has spoken of the loss; true where nobody can be asked."""
    if _store is None:
        return True
    try:
        _store.set_timeout(timedelta(seconds=5))
        return int(_store.add(_LOST, 1)) == 1
    except RuntimeError:
        return True


def pick_device(device: str) -> str:
    """`auto` is CUDA where there is one; a device that is not there is the user's mistake."""
    if device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise ConfigError(f"--device {device}: no CUDA device here; use --device cpu")
    if device.split(":")[0] not in ("cpu", "cuda"):
        raise ConfigError(f"--device {device}: expected auto, cpu, cuda or cuda:N")
    kind, colon, number = device.partition(":")
    if colon and not (kind == "cuda" and number.isdecimal()):
        raise ConfigError(f"--device {device}: expected auto, cpu, cuda or cuda:N")
    if colon and int(number) >= torch.cuda.device_count():
        raise ConfigError(
            f"--device {device}: the last one is cuda:{torch.cuda.device_count() - 1}"
        )
    return device


def stop() -> None:
    """Leave the group."""
    global _store, _patient
    if dist.is_initialized():
        _store = _patient = None
        gc.collect()  # sharded models hold the group, in cycles
        dist.destroy_process_group()


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def world_size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def local_world_size() -> int:
    """Ranks on this machine."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def sum_over_ranks(values: Tensor) -> Tensor:
    """`values` summed over all ranks, in place."""
    if dist.is_initialized():
        with _answering():
            dist.all_reduce(values)
    return values


def max_over_ranks(values: Tensor) -> Tensor:
    if dist.is_initialized():
        with _answering():
            dist.all_reduce(values, op=dist.ReduceOp.MAX)
    return values


def sum_gradients(parameters: Iterable[nn.Parameter]) -> None:
    """Replace every gradient by its sum over the ranks, in one message."""
    if not dist.is_initialized():
        return
    gradients = [p.grad for p in parameters if p.grad is not None]
    if not gradients:
        return
    flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
    with _answering():
        dist.all_reduce(flat)
    offset = 0
    for gradient in gradients:
        gradient.copy_(flat[offset : offset + gradient.numel()].view_as(gradient))
        offset += gradient.numel()


def barrier() -> None:
    """Until every rank is here; rank 0 may take its time."""
    if dist.is_initialized():
        with _answering():
            dist.barrier(group=_patient)


def share(count: int) -> slice:
    """This rank's contiguous share of `count` things."""
    size, place = world_size(), rank()
    return slice(count * place // size, count * (place + 1) // size)


def gather_floats(values: list[float]) -> list[float]:
    """Every rank's values, in rank order."""
    if not dist.is_initialized():
        return values
    parts: list[list[float]] = [[] for _ in range(world_size())]
    with _answering():
        dist.all_gather_object(parts, values)
    return [value for part in parts for value in part]


def mean_by_name(sums: dict[str, list[float]]) -> dict[str, float]:
    """Means from each rank's [sum, count] by name; a name that any rank knows is known to all."""
    merged = dict(sums)
    if dist.is_initialized():
        parts: list[dict[str, list[float]]] = [{} for _ in range(world_size())]
        with _answering():
            dist.all_gather_object(parts, sums)
        merged = {}
        for part in parts:
            for name, (total, count) in part.items():
                known = merged.get(name, [0.0, 0.0])
                merged[name] = [known[0] + total, known[1] + count]
    return {name: total / count for name, (total, count) in merged.items() if count}


def from_first(values: list[float]) -> list[float]:
    """Rank 0's values, on every rank; rank 0 may take its time to find them."""
    if not dist.is_initialized():
        return values
    shared: list[object] = [values]
    with _answering():
        dist.broadcast_object_list(shared, group=_patient)
    received = shared[0]
    assert isinstance(received, list)
    return received


def by_first(find: Callable[[], float | None]) -> float:
    """What rank 0 finds, on every rank; its mistake ends them all and is said once."""
    found, mistake = 0.0, None
    if rank() == 0:
        try:
            found = find() or 0.0
        except RookworldError as error:
            mistake = error
    found, failed = from_first([found, float(mistake is not None)])
    if not failed:
        return found
    if world_size() > 1:
        _leave_the_word(mistake is not None, RookworldError.exit_code)
    assert mistake is not None
    raise mistake


@contextmanager
def held_by_first(resource: AbstractContextManager[None]) -> Iterator[None]:
    """What rank 0 holds for all of them."""
    with ExitStack() as stack:
        by_first(lambda: stack.enter_context(resource))
        yield


def any_rank(flag: bool) -> bool:
    """Whether any rank says so."""
    return bool(gather_floats([float(flag)]).count(1.0)) if dist.is_initialized() else flag
