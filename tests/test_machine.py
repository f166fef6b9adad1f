"""How threads wait beside other work."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from rookworld.data.sources import write_rows
from rookworld.runtime import machine
from rookworld.runtime.machine import SPINS, chosen_wait, wait_politely, waiting
from tiny_training import tiny_rows

BESIDE = """
import sys, time
from rookworld.runtime.machine import waiting
import os
os.environ.update(waiting(float(sys.argv[1]), {}) if sys.argv[1] != "0" else {})
import torch
torch.set_num_threads(len(os.sched_getaffinity(0)))
a, w = torch.randn(256, 320), torch.randn(320, 320)
begun, passes = time.perf_counter(), 0
while time.perf_counter() - begun < 5:
    torch.nn.functional.gelu(a @ w)
    passes += 1
print(passes)
"""


def test_threads_sleep_beside_other_work_and_spin_shortly_alone() -> None:
    assert waiting(0.1, {}) == {"GOMP_SPINCOUNT": SPINS, "KMP_BLOCKTIME": "1"}
    assert waiting(1.3, {}) == {"OMP_WAIT_POLICY": "passive", "KMP_BLOCKTIME": "0"}
    assert waiting(1.3, {"OMP_WAIT_POLICY": "active"}) == {}


BUSY = """
import sys
from rookworld.cli.dispatch import main
from rookworld.runtime import machine; machine.busy_cores = lambda: 1.5
code = main(sys.argv[1:])
"""


def busy_main(*args: str, then: str = "") -> subprocess.CompletedProcess[str]:
    """A command beside other work, in a process that has not loaded torch."""
    bare = {name: value for name, value in os.environ.items() if not name.startswith("OMP_")}
    return subprocess.run(
        [sys.executable, "-c", BUSY + then, *args],
        capture_output=True,
        text=True,
        check=True,
        env=bare,
    )


def test_it_is_chosen_before_torch_is_loaded_or_not_at_all() -> None:
    environment: dict[str, str] = {}
    import torch  # noqa: F401

    wait_politely(environment)
    assert environment == {} and chosen_wait() == ""
    then = (
        "assert 'torch' not in sys.modules and code == 2\n"
        "import os; print(os.environ['OMP_WAIT_POLICY'])"
    )
    assert busy_main("train", "--steps", "0", then=then).stdout == "passive\n"


def test_it_is_said_when_work_begins_and_not_beside_a_mistake(tmp_path: Path) -> None:
    for mistake in (["--stepz", "3"], ["--steps", "0"]):
        (line,) = busy_main("train", *mistake).stderr.splitlines()
        assert line.startswith("rookworld: ")
    rows = tmp_path / "rows.jsonl"
    write_rows(rows, tiny_rows())
    small = ["--n-layer", "1", "--n-head", "1", "--n-embd", "8", "--eval-rows", "0"]
    given = ["--data", str(rows), "--steps", "1", "--device", "cpu", "--out", str(tmp_path / "run")]
    done = busy_main("pretrain", *small, *given)
    assert (tmp_path / "run" / "DONE").exists(), done.stderr
    assert done.stderr.count("threads sleep while they wait") == 1


def test_other_work_is_that_of_now(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An installation that has just ended still stands in the load average of a minute."""
    stat, cores = tmp_path / "stat", os.cpu_count() or 1
    lines = iter(["cpu 100 0 100 700 100 0 0 0 9 9\n", "cpu 150 0 150 760 140 0 0 0 9 9\n"])
    monkeypatch.setattr(machine, "STAT", stat)
    monkeypatch.setattr("time.sleep", lambda _: stat.write_text(next(lines)))
    stat.write_text(next(lines))
    assert machine.busy_cores() == pytest.approx(0.5 * cores)
    stat.unlink()
    monkeypatch.setattr("time.sleep", lambda _: None)
    monkeypatch.setattr(os, "getloadavg", lambda: (1.5, 0.0, 0.0))
    assert machine.busy_cores() == 1.5
    stat.write_text("")
    assert machine.busy_cores() == 1.5


@pytest.mark.slow
def test_passes_beside_a_busy_process_are_much_faster() -> None:
    """As a ratio, on whatever machine: threads that spin against threads that sleep."""
    cores = len(os.sched_getaffinity(0))
    if cores < 2:
        pytest.skip("one core: no threads that wait")
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(cores)]
    bare = {name: value for name, value in os.environ.items() if not name.startswith("OMP_")}

    def passes(load: str) -> int:
        args = [sys.executable, "-c", BESIDE, load]
        return int(subprocess.run(args, capture_output=True, check=True, env=bare).stdout)

    try:
        assert passes("2.0") > 1.5 * passes("0")
    finally:
        for one in busy:
            one.kill()
            one.wait()
