"""One process or many: what a training step needs to know of its neighbours.

Law: with N ranks a step computes what it computes with one. Every rank holds the whole model, works
on its share of the rows, and sums gradients and counts before dividing by the global ones.
Started by torchrun (its environment variables); without it, rank 0 of 1.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor, nn

from rookworld.errors import ConfigError, RookworldError

TIMEOUT = timedelta(minutes=10)


def start(device: str) -> torch.device:
    """Join the process group that torchrun prepared, if any; the device this rank works on."""
    chosen = torch.device(pick_device(device))
    if "RANK" not in os.environ or int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return chosen
    if chosen.type == "cuda":
        chosen = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(chosen)
    if not dist.is_initialized():
        # gradients go by the device's own way, counts and flags live on the CPU
        ways = "cpu:gloo,cuda:nccl" if chosen.type == "cuda" else "gloo"
        with _answering():
            dist.init_process_group(ways, timeout=TIMEOUT)
    return chosen


@contextmanager
def _answering() -> Iterator[None]:
    """A neighbour that has died or hangs ends this process with one line."""
    try:
        yield
    except RuntimeError as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise RookworldError(
            f"rank {os.environ.get('RANK', '?')}: another process of this training does not "
            f"answer ({reason}); start again with --resume"
        ) from error


def pick_device(device: str) -> str:
    """`auto` is CUDA where there is one; a device that is not there is the user's mistake."""
    if device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise ConfigError(f"--device {device}: no CUDA device here; use --device cpu")
    if device.split(":")[0] not in ("cpu", "cuda"):
        raise ConfigError(f"--device {device}: expected auto, cpu, cuda or cuda:N")
    return device


def stop() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def world_size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


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
    flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
    with _answering():
        dist.all_reduce(flat)
    offset = 0
    for gradient in gradients:
        gradient.copy_(flat[offset : offset + gradient.numel()].view_as(gradient))
        offset += gradient.numel()


def barrier() -> None:
    if dist.is_initialized():
        with _answering():
            dist.barrier()


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
    """Rank 0's values, on every rank."""
    if not dist.is_initialized():
        return values
    shared: list[object] = [values]
    with _answering():
        dist.broadcast_object_list(shared)
    received = shared[0]
    assert isinstance(received, list)
    return received


def any_rank(flag: bool) -> bool:
    """Whether any rank says so."""
    return bool(gather_floats([float(flag)]).count(1.0)) if dist.is_initialized() else flag
