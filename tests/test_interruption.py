"""Asked to stop: once, twice by one request, and twice by somebody who will not wait."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

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


@pytest.mark.parametrize("loaded", ["numpy", "libtorch_cpu"])
def test_sigterm_ends_with_130_while_modules_are_still_loading(tmp_path: Path, loaded: str) -> None:
    args = [sys.executable, "-m", "rookworld", "pretrain", "--device", "cpu", "--out", "run"]
    with subprocess.Popen(args, cwd=tmp_path, stderr=subprocess.PIPE, text=True) as child:
        maps = Path(f"/proc/{child.pid}/maps")
        while child.poll() is None and loaded not in maps.read_text():
            time.sleep(0.01)
        child.terminate()
        _, shown = child.communicate(timeout=60)
    assert child.returncode == 130
    assert [line for line in shown.splitlines() if line.startswith("rookworld:")] == [
        "rookworld: interrupted"
    ]
    assert "Traceback" not in shown
