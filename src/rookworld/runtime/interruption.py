"""Ctrl-C and SIGTERM as a question that long work asks between its steps.

Law: the first signal lets the step in progress end, so that it can be saved; another one ends at
once, unless it is the same request: `timeout` signals a process and then its group. The handlers
found are put back, unless others have been set meanwhile.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import monotonic
from types import FrameType

ONE_REQUEST_S = 1.0
"""Signals that Python sees so close to the first are no second request."""


class Interrupted(KeyboardInterrupt):
    """Ctrl-C or SIGTERM; a checkpoint has been written."""


@contextmanager
def interruptible() -> Iterator[Callable[[], bool]]:
    """A function that says whether somebody has asked to stop."""
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
