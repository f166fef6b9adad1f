"""Asked to stop: once, twice by one request, and twice by somebody who will not wait."""

from __future__ import annotations

import os
import signal

import pytest

from rookworld.runtime import processes
from rookworld.runtime.processes import interruptible


@pytest.mark.parametrize("second", [signal.SIGINT, signal.SIGTERM])
def test_one_request_may_come_as_two_signals(
    second: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`timeout` signals the process and then its group."""
    monkeypatch.setattr(processes, "monotonic", lambda: 10.0)
    with interruptible() as asked:
        assert not asked()
        os.kill(os.getpid(), signal.SIGINT)
        assert asked()
        os.kill(os.getpid(), second)
        assert asked()


def test_somebody_who_asks_again_later_is_obeyed_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 10.0
    monkeypatch.setattr(processes, "monotonic", lambda: now)
    with pytest.raises(KeyboardInterrupt), interruptible():
        os.kill(os.getpid(), signal.SIGINT)
        now += processes.ONE_REQUEST_S + 0.01
        os.kill(os.getpid(), signal.SIGINT)


def test_handlers_are_put_back() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with interruptible():
        assert signal.getsignal(signal.SIGTERM) is not before
    assert signal.getsignal(signal.SIGTERM) is before


def test_handlers_that_others_have_set_stay() -> None:
    before = signal.getsignal(signal.SIGTERM)
    try:
        with interruptible():
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGTERM, before)
