"""A training step here against one of TRL's `GRPOTrainer`: the same weights, prompts, K, lengths,
reward, KL weight and optimizer, on the same machine in one run.

TRL gets its best flags: no gradient checkpointing, no dropout, a KV cache, one pass where memory
allows, bf16 and fused AdamW on CUDA. Each side has a process, and so a peak of memory, of its own;
they step in turns, so that a busy machine is busy for both. (It still needs a quiet one: threads
that wait for each other suffer more from a third party the shorter the step.) Without TRL ours is
measured alone; without a GPU the GPT-2 124M cases are left out.

    python benchmarks/vs_trl.py [--model nano] [--quick]
    python benchmarks/vs_trl.py --growth    how a step here grows with K, batch, length and model
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from statistics import fmean
from threading import Timer
from typing import IO, Any, Literal

import torch

from rookworld.data.sources import load_rows
from rookworld.model.gpt2 import GPT2, GPT2Config
from rookworld.model.precision import resolve_dtype
from rookworld.model.tokenizer import Tokenizer
from rookworld.model.weights import load_model, resolve_folder, save_model
from rookworld.pretrain.sources import pick_tokenizer
from rookworld.rl.collect import collect_groups
from rookworld.rl.metrics import Clock, peak_memory_mb
from rookworld.rl.scratch import StepScratch
from rookworld.rl.settings import TrainSettings
from rookworld.rl.state import new_state
from rookworld.rl.step import learn
from rookworld.rollout.prompts import Prompts
from rookworld.runtime.distributed import start
from rookworld.tasks.task import PolicyRow
from rookworld.trl.rewards import policy_reward, records

Numbers = dict[str, float]
NANO = {"n_positions": 192, "n_embd": 320, "n_layer": 6, "n_head": 10}
GPT2_124M = {"vocab_size": 50257, "n_positions": 1024, "n_embd": 768, "n_layer": 12, "n_head": 12}
TIMEOUT_S = 600
GO = "step\n"
LR, KL_COEF = 1e-5, 0.02
PARTS = ("sample", "score", "update")


@dataclass(frozen=True)
class Case:
    """What a step is made of; `passes` is what TRL's rows are cut into."""

    model: str
    device: str = "cpu"
    batch: int = 8
    k: int = 8
    new_tokens: int = 16
    steps: int = 3
    passes: int = 1
    recompute: bool = False
    """Ours: less memory for more time."""
    dtype: Literal["auto", "fastest"] = "auto"

    @property
    def samples(self) -> int:
        return self.batch * self.k


def main(quick: bool = False, model: str = "nano") -> Numbers:
    """Ratios above 1 mean that we are faster, or need less."""
    with tempfile.TemporaryDirectory() as folder:
        case = Case(str(resolve_folder(model)), steps=2 if quick else 4)
        numbers = compared(case, "")
        if resolve_dtype("fastest", torch.device("cpu")) == "bfloat16":
            quicker = compared(replace(case, dtype="fastest"), "_bf16")
            if "step_vs_trl" in numbers:
                best = numbers["step_vs_trl"] * numbers["grpo_step_s"]
                best = min(best, quicker["step_vs_trl_bf16"] * quicker["grpo_step_s_bf16"])
                quicker["best_vs_best_trl"] = best / quicker["grpo_step_s_bf16"]
                print(f"  {quicker['best_vs_best_trl']:.2f} times the better of TRL's two")
            numbers |= quicker
        if not torch.cuda.is_available():
            print("no CUDA device here: GPT-2 124M, 8 × 8 × 144 and 32 × 16 × 144, left out")
            return numbers
        large = random_model(Path(folder) / "124m", GPT2_124M)
        case = Case(large, "cuda", new_tokens=144, steps=8, recompute=True)
        numbers |= compared(case, "_cuda")
        if not quick:
            case = replace(case, batch=32, k=16, steps=4, passes=2, recompute=False)
            numbers |= compared(case, "_32x16_cuda")
    return numbers


def random_model(folder: Path, shape: dict[str, int]) -> str:
    """Weights as before any training, with the chess tokenizer."""
    tokenizer = pick_tokenizer("chess")
    config: dict[str, Any] = {"vocab_size": tokenizer.vocab_size, **shape}
    save_model(GPT2(GPT2Config(**config)).init_weights(0), folder, tokenizer=tokenizer)
    return str(folder)


def compared(case: Case, suffix: str) -> Numbers:
    """Both sides step by step in turns; the best of each, as other work only ever adds."""
    sides = ["ours", "trl"] if find_spec("trl") else ["ours"]
    if len(sides) == 1:
        print('TRL is not installed (pip install "rookworld[trl]"): ours alone is measured')
    found = in_turns(sides, case)
    step = {side: numbers["step_s"] for side, numbers in found.items()}
    memory = {side: numbers["peak_mb"] for side, numbers in found.items()}
    kind = resolve_dtype(case.dtype, torch.device(case.device))
    shape = f"{case.batch} prompts × {case.k} samples × {case.new_tokens} tokens"
    print(f"{case.device}, {kind}: {shape}")
    for side in sides:
        print(
            f"  {side:4} {step[side]:7.3f} s a step, {case.samples / step[side]:8.1f} samples/s, "
            f"peak {memory[side]:7.0f} MB, {found[side]['tokens']:.1f} tokens an answer"
        )
        if case.device == "cuda":
            print(f"       {found[side]['held_mb']:7.0f} MB held by the allocator")
    where = ", ".join(f"{name} {found['ours'][name]:.3f} s" for name in PARTS)
    print(f"  of ours: {where}")
    numbers = {
        f"samples_per_s{suffix}": case.samples / step["ours"],
        f"grpo_step_s{suffix}": step["ours"],
        f"peak_mb{suffix}": memory["ours"],
    }
    if "trl" in sides:
        numbers[f"step_vs_trl{suffix}"] = step["trl"] / step["ours"]
        numbers[f"memory_vs_trl{suffix}"] = memory["trl"] / memory["ours"]
        print(
            f"  {step['trl'] / step['ours']:.2f} times the step rate of TRL, "
            f"{memory['ours'] / memory['trl']:.2f} of its peak memory"
        )
    return numbers


# --- a process a side ---------------------------------------------------------------------------


def in_turns(sides: Sequence[str], case: Case) -> dict[str, Numbers]:
    """Best step, mean length and peak memory of each side; the first step warms up."""
    with ExitStack() as stack:
        children: dict[str, Child] = {}
        for side in sides:
            errors = stack.enter_context(tempfile.TemporaryFile("w+"))
            children[side] = stack.enter_context(Child(side, case, errors))
        steps: dict[str, list[Numbers]] = {side: [] for side in sides}
        for _ in range(case.steps + 1):
            for side, child in children.items():
                steps[side].append(child.step())
    return {
        side: min(taken[1:], key=lambda one: one["step_s"])
        | {
            "tokens": fmean(one["tokens"] for one in taken[1:]),
            "peak_mb": taken[-1]["peak_mb"],
            "held_mb": taken[-1]["held_mb"],
        }
        for side, taken in steps.items()
    }


class Child:
    """One side in a process of its own that takes a step when it is told to."""

    def __init__(self, side: str, case: Case, errors: IO[str]) -> None:
        command = [sys.executable, __file__, "--side", side, "--case", json.dumps(asdict(case))]
        self.errors = errors
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.errors, text=True
        )
        self.clock = Timer(TIMEOUT_S, self.process.kill)
        self.side = side

    def __enter__(self) -> Child:
        self.clock.start()
        return self

    def step(self) -> Numbers:
        assert self.process.stdin is not None and self.process.stdout is not None
        with suppress(BrokenPipeError):
            self.process.stdin.write(GO)
            self.process.stdin.flush()
        for line in self.process.stdout:
            if line.startswith("{"):
                numbers: Numbers = json.loads(line)
                return numbers
        self.errors.seek(0)
        raise SystemExit(f"{self.side} has ended early:\n{self.errors.read()[-4000:]}")

    def __exit__(self, *_: object) -> None:
        self.process.communicate()  # at the end of its orders a child tidies up and ends
        self.clock.cancel()


def await_turn() -> None:
    """In a child: wait to be told."""
    if sys.stdin.readline() != GO:
        raise SystemExit


def tell(seconds: float, tokens: float, device: torch.device, parts: Numbers | None = None) -> None:
    """In a child: say what a step took, and what of it where."""
    found = {"step_s": seconds, "tokens": tokens, "peak_mb": peak_memory_mb(device)}
    # what the allocator holds on to, recorded passes included
    on_cuda = device.type == "cuda"
    found["held_mb"] = torch.cuda.max_memory_reserved(device) / 2**20 if on_cuda else math.nan
    print(json.dumps(found | (parts or {})), flush=True)


# --- the two sides ------------------------------------------------------------------------------


def policy_rows() -> list[PolicyRow]:
    return [row for row in load_rows("embedded:train") if isinstance(row, PolicyRow)]


def our_settings(case: Case) -> TrainSettings:
    return TrainSettings.of(
        model=case.model,
        batch_size=case.batch,
        k_samples=case.k,
        max_new_tokens=case.new_tokens,
        mix_env_ratio=0.0,
        flat_tries=0,  # TRL replaces no groups either
        lr=LR,
        lr_schedule="constant",
        lr_warmup_steps=0,
        kl_coef=KL_COEF,
        device=case.device,
        dtype=case.dtype,
        micro_tokens=40_000 if case.device == "cuda" else 16_384,
        recompute=case.recompute,
    )


def ours(case: Case) -> None:
    settings, device = our_settings(case), start(case.device)
    state = new_state(settings, policy_rows(), device)
    for _ in range(case.steps + 1):
        await_turn()
        clock = Clock(device)
        scratch = StepScratch()
        collected = collect_groups(state, settings, None, clock, scratch)
        metrics, _ = learn(state, collected, scratch, settings, clock)
        parts = {name: metrics[f"time/{name}_s"] for name in PARTS}
        tell(metrics["time/step_s"], metrics["tokens/mean_length"], device, parts)
        state.step += 1


def trl(case: Case) -> None:
    """TRL's trainer on the prompts that ours takes, in the same order."""
    import transformers
    from datasets import Dataset
    from transformers import PrinterCallback, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    device = start(case.device)
    cuda = device.type == "cuda"
    tokens: list[float] = []

    def reward(completion_ids: Any, **columns: Any) -> Any:
        tokens.append(fmean(len(ids) for ids in completion_ids))
        return policy_reward(**columns)

    class Stopwatch(TrainerCallback):
        began = 0.0

        def on_step_begin(self, *_: Any, **__: Any) -> None:
            await_turn()
            self.began = time.perf_counter()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            wait(device)
            tell(time.perf_counter() - self.began, tokens[-1], device)

    chatter: Any = transformers.utils.logging
    chatter.set_verbosity_error()
    chatter.disable_progress_bar()
    tokenizer = Tokenizer.load(case.model)
    stream = Prompts(policy_rows(), tokenizer, 0.0, our_settings(case).seed)
    rows = [prompt.row for prompt in stream.take(case.batch * (case.steps + 1))]
    with tempfile.TemporaryDirectory() as folder:
        trainer = GRPOTrainer(
            model=case.model,
            reward_funcs=reward,
            args=GRPOConfig(
                output_dir=folder,
                max_steps=case.steps + 1,
                per_device_train_batch_size=case.samples // case.passes,
                gradient_accumulation_steps=case.passes,
                num_generations=case.k,
                max_completion_length=case.new_tokens,
                beta=KL_COEF,
                learning_rate=LR,
                lr_scheduler_type="constant",
                adam_beta2=0.95,
                optim="adamw_torch_fused" if cuda else "adamw_torch",
                disable_dropout=True,
                gradient_checkpointing=False,
                shuffle_dataset=False,
                bf16=resolve_dtype(case.dtype, device) == "bfloat16",
                use_cpu=not cuda,
                dataloader_pin_memory=cuda,
                save_strategy="no",
                report_to="none",
                disable_tqdm=True,
            ),
            train_dataset=Dataset.from_list(records(rows, tokenizer.style)),
            callbacks=[Stopwatch()],
        )
        trainer.remove_callback(PrinterCallback)
        trainer.train()


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


# --- growth -------------------------------------------------------------------------------------

SIZES = (
    {"n_embd": 128, "n_layer": 4, "n_head": 4},
    {"n_embd": 256, "n_layer": 4, "n_head": 8},
    {"n_embd": 320, "n_layer": 6, "n_head": 10},
    {"n_embd": 512, "n_layer": 8, "n_head": 16},
)


def growth(model: str = "nano") -> None:
    """Seconds a step, one size varied at a time around 8 prompts × 8 samples × 16 tokens."""
    with tempfile.TemporaryDirectory() as folder:
        base = Case(str(resolve_folder(model)))
        for k in (2, 4, 8, 16, 32):
            show("k", str(k), replace(base, k=k))
        for batch in (2, 4, 8, 16, 32):
            show("batch", str(batch), replace(base, batch=batch))
        for length in (8, 16, 32, 64, 112):
            show("new tokens", str(length), replace(base, new_tokens=length))
        for number, shape in enumerate(SIZES):
            made = random_model(Path(folder) / f"size-{number}", NANO | shape)
            size = sum(one.numel() for one in load_model(made).parameters())
            show("parameters", f"{size / 1e6:.1f}M", replace(base, model=made))


def show(name: str, value: str, case: Case) -> None:
    found = in_turns(["ours"], case)["ours"]
    rate = case.samples / found["step_s"]
    print(f"{name:10} {value:>5}: {found['step_s']:7.3f} s a step, {rate:7.1f} samples/s", end="")
    print(f", peak {found['peak_mb']:6.0f} MB", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--model", default="nano")
    parser.add_argument("--quick", action="store_true", help="fewer steps")
    parser.add_argument("--growth", action="store_true", help="our own growth curves")
    parser.add_argument("--side", choices=("ours", "trl"), help=argparse.SUPPRESS)
    parser.add_argument("--case", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.side:
        {"ours": ours, "trl": trl}[asked.side](Case(**json.loads(asked.case)))
    elif asked.growth:
        growth(asked.model)
    else:
        for name, value in main(asked.quick, asked.model).items():
            print(f"{name:24} {value:10.4g}")
