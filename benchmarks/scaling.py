"""One process against two: the same training on the CPU, started as a person would start it.

The model has the shape of the embedded one with random weights, the batch is 8 prompts × 8 answers
of the demo. Every row of the table is its own `torchrun`; rows are taken in turns, and a row's time
is the median of its steps without the first two of each turn. Two processes of one thread do not
ask for more cores than one process of two threads, so that is the pair to compare.

    python benchmarks/scaling.py [--quick]
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

from rookworld.model.gpt2 import GPT2, GPT2Config
from rookworld.model.weights import save_model
from rookworld.pretrain.sources import pick_tokenizer
from rookworld.runtime.run_folder import read_lines

WARM_UP = 2
TRAINING = (
    "train --device cpu --batch-size 8 --k-samples 8 --mix-env-ratio 0 --flat-tries 0 "
    "--eval-policy-rows 1 --eval-environment-rows 0 --eval-every 0 --save-every 1000 "
    # random weights answer nothing that earns a reward: the guard is told not to mind
    "--max-recoveries 1000000"
)
PARTS = ("time/step_s", "time/sample_s", "time/update_s", "mem/peak_mb")


@dataclass
class Way:
    """A way to start the training, and what was measured of it."""

    name: str
    processes: int
    threads: int
    flags: str = ""
    found: dict[str, list[float]] = field(default_factory=dict)

    def measure(self, model: Path, folder: Path, steps: int) -> None:
        start = f"-m torch.distributed.run --standalone --nproc-per-node {self.processes}"
        args = f"{TRAINING} --model {model} --out {folder} --steps {steps} {self.flags}"
        subprocess.run(
            [sys.executable, *start.split(), "-m", "rookworld", *args.split()],
            env=os.environ | {"OMP_NUM_THREADS": str(self.threads)},
            check=True,
            capture_output=True,
        )
        for line in list(read_lines(folder / "metrics.jsonl"))[WARM_UP:]:
            for part in PARTS:
                self.found.setdefault(part, []).append(float(line[part]))

    def value(self, part: str) -> float:
        return median(self.found[part])


def main(quick: bool = False) -> dict[str, float]:
    steps, rounds = (5, 1) if quick else (12, 3)
    ways = [
        Way("1 process, 1 thread", 1, 1),
        Way("1 process, 2 threads", 1, 2),
        Way("2 processes, 1 thread each", 2, 1),
        Way("2 processes, 1 thread each, --shard", 2, 1, "--shard"),
    ]
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}; {rounds} × {steps} steps")
    with tempfile.TemporaryDirectory() as name:
        model = save_shape(Path(name))
        for number in range(rounds):
            for place, way in enumerate(ways):
                way.measure(model, Path(name) / f"{number}-{place}", steps)
    base = ways[0].value("time/step_s")
    print("| | step | sampling | update | answers/s | against the first | peak memory of rank 0 |")
    print("|---|---|---|---|---|---|---|")
    for way in ways:
        step, sampling, update, memory = (way.value(part) for part in PARTS)
        print(
            f"| {way.name} | {step:.2f} s | {sampling:.2f} s | {update:.2f} s | {64 / step:.0f} | "
            f"{base / step:.2f}× | {memory:.0f} MB |"
        )
    print(f"load at the end {os.getloadavg()[0]:.1f}")
    return {"two_processes_vs_two_threads": ways[1].value(PARTS[0]) / ways[2].value(PARTS[0])}


def save_shape(folder: Path) -> Path:
    tokenizer = pick_tokenizer("chess")
    size = tokenizer.vocab_size
    shape = GPT2Config(vocab_size=size, n_positions=192, n_embd=320, n_layer=6, n_head=10)
    save_model(GPT2(shape).init_weights(0), folder / "model", tokenizer=tokenizer)
    return folder / "model"


if __name__ == "__main__":
    main("--quick" in sys.argv[1:])
