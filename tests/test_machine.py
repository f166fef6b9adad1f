"""How threads wait beside other work."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from rookworld.runtime.machine import SPINS, wait_politely, waiting

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


def test_it_is_chosen_before_torch_is_loaded_or_not_at_all() -> None:
    environment: dict[str, str] = {}
    import torch  # noqa: F401

    assert wait_politely(environment) is None and environment == {}
    code = (
        "import os, sys; os.getloadavg = lambda: (1.5, 0, 0)\n"
        "from rookworld.cli.door import main\n"
        "main(['train', '--steps', '0']); assert 'torch' not in sys.modules\n"
        "print(os.environ['OMP_WAIT_POLICY'])"
    )
    bare = {name: value for name, value in os.environ.items() if not name.startswith("OMP_")}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=bare
    )
    assert done.stdout == "passive\n"
    assert done.stderr.count("threads sleep while they wait") == 1


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
