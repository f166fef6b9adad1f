"""A training for tests: takes the flags of `rookworld train`, writes a run folder, learns nothing.

`--seed` says how it ends; FAKE_LOG gets a line when it starts and ends; FAKE_SECONDS is its length.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

OK, DIVERGES, BREAKS, NO_MEMORY, HANGS, NO_ENGINE, NO_ROWS, SILENT, KILLED = range(9)


def flag(name: str, default: str) -> str:
    return sys.argv[sys.argv.index(name) + 1] if name in sys.argv else default


def note(event: str, out: Path) -> None:
    log = os.environ.get("FAKE_LOG")
    if log:
        with Path(log).open("a") as file:
            file.write(f"{event} {out.name}\n")


def append(path: Path, **record: object) -> None:
    with path.open("a") as file:
        file.write(json.dumps(record) + "\n")


def fail(mode: int, out: Path) -> int:
    if mode == DIVERGES:
        append(out / "events.jsonl", step=3, kind="stop", cause="entropy_collapse", message="gone")
        sys.stderr.write("rookworld: training diverged at step 3 (entropy_collapse): gone\n")
        return 3
    if mode == BREAKS:
        raise ValueError("a bug of ours")
    if mode == NO_MEMORY:
        raise MemoryError("cannot allocate 4 TB")
    if mode == HANGS:
        time.sleep(60)
    if mode == KILLED:
        os.kill(os.getpid(), 9)
    told = {NO_ENGINE: "Stockfish was not found", NO_ROWS: "no P: rows in the data"}
    sys.stderr.write(f"rookworld: {told.get(mode, '--lr -1: must be positive')}\n")
    return 2


def main() -> int:
    out, lr, mode = Path(flag("--out", "")), float(flag("--lr", "0")), int(flag("--seed", "0"))
    out.mkdir(parents=True, exist_ok=True)
    note("start", out)
    if mode not in (OK, SILENT):
        return fail(mode, out)
    pause = float(os.environ.get("FAKE_SECONDS", "0")) / 3
    done = (out / "eval.jsonl").exists() and len((out / "eval.jsonl").read_text().splitlines())
    for place in range(int(done), 4):
        value = {"value": 0.4 + place * lr, "n": 10, "low": 0.0, "high": 1.0}
        append(out / "eval.jsonl", step=10 * place, **{"reward/greedy": value})
        append(out / "metrics.jsonl", step=10 * place, **{"reward/mean": 0.4 + place * lr})
        time.sleep(pause)
    (out / "final").mkdir(exist_ok=True)
    if mode == OK:
        (out / "DONE").write_text("done\n")
    note("end", out)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
