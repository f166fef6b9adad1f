"""Ctrl-C, SIGTERM and the death of a parent: who hears of them, and what work does then.

Laws: the first signal lets the step in progress end, so that it can be saved; another one ends at
once, unless it is the same request: `timeout` signals a process and then its group. The handlers
found are put back, unless others have been set meanwhile. Workers end with their parent, and leave
Ctrl-C to it.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import monotonic
from types import FrameType

from rookworld.runtime.errors import ConfigError

ONE_REQUEST_S = 1.0
"""Signals that Python sees so close to the first are no second request."""


class Interrupted(KeyboardInterrupt):
    """Ctrl-C or SIGTERM; a checkpoint has been written."""


@contextmanager
def interruptible() -> Iterator[Callable[[], bool]]:
    """A function that says whether somebody has asked to stop; long work asks between steps."""
    asked: list[float] = []

    def ask(number: int, frame: FrameType | None) -> None:
        asked.append(monotonic())
        if asked[-1] - asked[0] > ONE_REQUEST_S:
            raise KeyboardInterrupt

    kept = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield lambda: bool(asked)
    finally:
        for number, handler in kept.items():
            if signal.getsignal(number) is ask:
                signal.signal(number, handler)


def refuse_unguarded_scripts() -> None:
    """A script without a guard is run again by every worker it starts, and would train again."""
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        raise ConfigError(
            "this script is being run again by a worker process: put what it does under "
            "`if __name__ == '__main__':`"
        )


@contextmanager
def interrupts_held() -> Iterator[None]:
    """Ctrl-C waits: a worker still importing would print a traceback of its own."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def end_with_parent() -> None:
    """For a worker of the parent's group: it ends with the parent, and by Ctrl-C at once."""
    # Ctrl-C reaches the whole group: a worker ends at once, without a traceback of its own.
    # Where it is ignored (a job in the background of a script) workers ignore it too.
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    outlive_nobody()


def outlive_interrupts() -> None:
    """For a worker whose parent ends its step after Ctrl-C: it serves until the parent ends.

    SIGTERM stays: it is what a pool that lost a worker ends the others by, and then waits for them.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    outlive_nobody()


def outlive_nobody() -> None:
    """A worker whose parent was killed would wait for work for ever."""
    parent = multiprocessing.parent_process()
    assert parent is not None

    def watch() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
