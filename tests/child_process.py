"""`rookworld …` in a process of its own that a test can kill, starve or number.

The children are forked from a server that has loaded torch once, so that a test may start many.
"""

from __future__ import annotations

import multiprocessing
import os
import resource
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

DIED = 86
"""Exit code of a child that was told to die."""

_CONTEXT = multiprocessing.get_context("forkserver")
# the first optimizer of a process imports torch._dynamo
_CONTEXT.set_forkserver_preload(["rookworld.rl.checks", "rookworld.cli.train", "torch._dynamo"])


def start(
    args: Sequence[str],
    log: Path,
    *,
    environment: Mapping[str, str] | None = None,
    largest_file: int | None = None,
    dies_after: int | None = None,
) -> ForkServerProcess:
    """Begin `rookworld ARGS`; what it says goes to `log`."""
    child = _CONTEXT.Process(
        target=_main, args=(list(args), log, dict(environment or {}), largest_file, dies_after)
    )
    child.start()
    return child


def run(
    args: Sequence[str],
    log: Path,
    *,
    environment: Mapping[str, str] | None = None,
    largest_file: int | None = None,
    dies_after: int | None = None,
    timeout_s: float = 120,
) -> int:
    """The exit code of `rookworld ARGS`."""
    child = start(
        args, log, environment=environment, largest_file=largest_file, dies_after=dies_after
    )
    return ended(child, timeout_s)


def ranks(args: Sequence[str], log: Path, count: int) -> list[ForkServerProcess]:
    """Begin `rookworld ARGS` as torchrun would, in `count` processes."""
    return [start(args, log, environment=rank_of(count, rank, log)) for rank in range(count)]


def rank_of(count: int, rank: int, log: Path) -> dict[str, str]:
    """What torchrun tells a process; the processes of one `log` find each other."""
    port = log.with_suffix(".port")
    if rank == 0 or not port.exists():
        with socket.socket() as found:
            found.bind(("127.0.0.1", 0))
            port.write_text(str(found.getsockname()[1]))
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": count}
    master = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port.read_text()}
    return {name: str(value) for name, value in (place | master).items()}


def call(
    function: Callable[..., None], args: Sequence[Any], log: Path, environment: Mapping[str, str]
) -> ForkServerProcess:
    """Begin `function(*args)` of a test module in a process of its own."""
    child = _CONTEXT.Process(target=_call, args=(function, tuple(args), log, dict(environment)))
    child.start()
    return child


def wait_for(path: Path, child: ForkServerProcess, timeout_s: float = 60) -> None:
    """Until a child has written a file."""
    deadline = time.monotonic() + timeout_s
    while not path.exists():
        assert child.is_alive(), "the child has ended"
        assert time.monotonic() < deadline, f"no {path} after {timeout_s} s"
        time.sleep(0.02)


def ended(child: ForkServerProcess, timeout_s: float = 120) -> int:
    """Wait for a child; its exit code."""
    child.join(timeout_s)
    assert child.exitcode is not None, "the child hangs"
    code: int = child.exitcode
    child.close()
    return code


def _settle(log: Path, environment: Mapping[str, str]) -> None:
    import torch

    with log.open("ab") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.environ.update(environment)
    torch.set_num_threads(1)


def _call(
    function: Callable[..., None], args: tuple[Any, ...], log: Path, environment: dict[str, str]
) -> None:
    _settle(log, environment)
    function(*args)


def _die_after(count: int) -> None:
    """End this process, as a power cut would, before the next of `count` changes of the disk."""
    left = [count]

    def counted(change: Callable[..., Any]) -> Callable[..., Any]:
        def dying(*args: Any, **options: Any) -> Any:
            left[0] -= 1
            if left[0] < 0:
                os._exit(DIED)
            return change(*args, **options)

        return dying

    for name in ("fsync", "rename", "replace", "unlink", "rmdir", "mkdir", "symlink"):
        setattr(os, name, counted(getattr(os, name)))


def _main(
    args: list[str],
    log: Path,
    environment: dict[str, str],
    largest_file: int | None,
    dies_after: int | None,
) -> None:
    from rookworld.cli.dispatch import main

    _settle(log, environment)
    if largest_file is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (largest_file, largest_file))
    if dies_after is not None:
        _die_after(dies_after)
    sys.exit(main(args))
