"""Ctrl-C and SIGTERM as a question that long work asks between its steps.

Law: the first signal lets the step in progress end, so that it can be saved; a second one ends at
once. The handlers found are put back, unless others have been set meanwhile.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType


class Interrupted(KeyboardInterrupt):
    """Ctrl-C or SIGTERM; a checkpoint has been written."""


@contextmanager
def interruptible() -> Iterator[Callable[[], bool]]:
    """A function that says whether somebody has asked to stop."""
    asked: list[int] = []

    def ask(number: int, frame: FrameType | None) -> None:
        if asked:
            raise KeyboardInterrupt
        asked.append(number)

    kept = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield lambda: bool(asked)
    finally:
        for number, handler in kept.items():
            if signal.getsignal(number) is ask:
                signal.signal(number, handler)
