"""`make bench`: every benchmark in turn, their numbers in one flat `bench.json`.

A number belongs to this machine and this moment; ratios were taken within one run. Names ending in
`_cuda` are there when a GPU is.

    python benchmarks/run.py [--quick]
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import decode
import scoring
import step
import vs_trl


def main(quick: bool) -> dict[str, float]:
    numbers: dict[str, float] = {}
    for part in (scoring, decode, step, vs_trl):
        print(f"--- {part.__name__}")
        numbers |= part.main(quick)
    return numbers


if __name__ == "__main__":
    found = main("--quick" in sys.argv[1:])
    Path("bench.json").write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    print("written: bench.json")
