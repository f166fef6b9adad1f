"""A machine is lost: torchrun starts again with those that are left, and nothing is missing."""

from __future__ import annotations

import os
import subprocess
import sys
from datetime import timedelta
from pathlib import Path

import pytest
from torch.distributed import TCPStore  # type: ignore[attr-defined]

import child_process
from test_distributed import assert_same_trajectory, command
from tiny_training import tiny_rows, write_jsonl

MACHINE = """
import os, signal, sys, threading, time
from pathlib import Path
from rookworld.cli.dispatch import main

def lose_the_machine():
    path = Path(sys.argv[sys.argv.index("--out") + 1]) / "metrics.jsonl"
    while not path.exists() or path.read_text().count(chr(10)) < 4:
        time.sleep(0.001)
    os.kill(os.getppid(), signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)

if (os.environ["WORLD_SIZE"], os.environ["RANK"]) == ("3", os.environ["LOSES"]):
    threading.Thread(target=lose_the_machine, daemon=True).start()
sys.exit(main(sys.argv[1:]))
"""
"""A rank; in the fifth step one of the three dies with its torchrun, as with its machine."""


def machine(endpoint: str, loses: int, args: list[str], log: Path) -> subprocess.Popen[bytes]:
    """A torchrun of one process that meets the others at `endpoint`."""
    quick = "is_host=false,last_call_timeout=3,keep_alive_interval=1,keep_alive_max_attempt=10"
    start = (
        "-m torch.distributed.run --nnodes 2:3 --nproc-per-node 1 --max-restarts 3 "
        f"--rdzv-backend c10d --rdzv-id 1 --rdzv-endpoint {endpoint} --rdzv-conf {quick}"
    )
    own = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "OMP_NUM_THREADS": "1", "LOSES": str(loses)}
    with log.open("wb") as file:
        return subprocess.Popen(
            [sys.executable, *start.split(), *args],
            env=os.environ | own,
            stdout=file,
            stderr=subprocess.STDOUT,
        )


@pytest.mark.slow
@pytest.mark.parametrize("loses", [0, 1], ids=["the writer", "another"])
def test_a_job_that_loses_a_machine_goes_on_with_those_left(
    warm_folder: Path, tmp_path: Path, loses: int
) -> None:
    rows = write_jsonl(tmp_path / "rows.jsonl", tiny_rows())
    more = "--steps 20 --lr 1e-4 --save-every 3"
    alone = command(warm_folder, rows, tmp_path / "alone", more)
    assert child_process.run(alone, tmp_path / "alone.log") == 0
    script = tmp_path / "machine.py"
    script.write_text(MACHINE)
    args = [str(script), *command(warm_folder, rows, tmp_path / "run", more)]
    # a machine that stays keeps the meeting point: torchrun cannot do without it
    place = TCPStore("127.0.0.1", 0, is_master=True, timeout=timedelta(seconds=60))
    logs = [tmp_path / f"machine-{number}.log" for number in range(3)]
    machines = [machine(f"127.0.0.1:{place.port}", loses, args, log) for log in logs]
    try:
        codes = [one.wait(timeout=400) for one in machines]
    finally:
        for one in machines:
            one.terminate()
    said = "\n".join(log.read_text() for log in logs)
    assert sorted(codes) == [-9, 0, 0], said
    # who lost the writer cannot ask whether the other has spoken
    lost = said.count("another process of this training does not answer")
    assert 1 <= lost <= (1 if loses else 2), said
    assert said.count("resumed after step ") == 1, said
    assert said.count("model: ") == 1, said
    assert_same_trajectory(tmp_path / "run", tmp_path / "alone", 20)
    assert (tmp_path / "run" / "DONE").exists()
