"""One training step of the demo's shape against the sum of its parts measured alone.

The model has the shape of the embedded one with random weights: time does not depend on what they
are, only on how many tokens are sampled, and those are made equal by never ending early.

    python benchmarks/step.py
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from statistics import median

import torch

from rookworld.data.sources import load_rows
from rookworld.model.gpt2 import GPT2, GPT2Config
from rookworld.model.precision import matrix_dtype
from rookworld.model.sampling.sampler import sampler_for
from rookworld.model.weights import save_model
from rookworld.pretrain.sources import pick_tokenizer
from rookworld.rl import forward, update
from rookworld.rl.collect import collect_groups
from rookworld.rl.metrics import Clock
from rookworld.rl.scratch import StepScratch
from rookworld.rl.settings import TrainSettings
from rookworld.rl.state import State, new_state, sampling
from rookworld.rl.step import learn
from rookworld.rollout.types import Group
from rookworld.runtime.distributed import start
from rookworld.tasks.scorer import judge_answer
from rookworld.tasks.task import PolicyRow

SHAPE = partial(GPT2Config, n_positions=192, n_embd=320, n_layer=6, n_head=10)


def main(quick: bool = False) -> dict[str, float]:
    repeats = 3 if quick else 6
    with tempfile.TemporaryDirectory() as folder:
        state, settings = demo_state(Path(folder))
        whole, parts = timed(state, settings, repeats)
    total = sum(parts.values())
    for name, value in parts.items():
        print(f"{name:12} {value:.3f} s")
    print(f"parts {total:.3f} s, step {whole:.3f} s, step/parts {whole / total:.3f}")
    return {"step_over_parts": whole / total, "step_s": whole}


def demo_state(folder: Path) -> tuple[State, TrainSettings]:
    tokenizer = pick_tokenizer("chess")
    model = GPT2(SHAPE(vocab_size=tokenizer.vocab_size)).init_weights(0)
    save_model(model, folder / "model", tokenizer=tokenizer)
    settings = TrainSettings.of(
        model=str(folder / "model"), out=folder / "run", mix_env_ratio=0.0, flat_tries=0
    )
    rows = [row for row in load_rows("embedded:train") if isinstance(row, PolicyRow)]
    return new_state(settings, rows, start("auto")), settings


def timed(state: State, settings: TrainSettings, repeats: int) -> tuple[float, dict[str, float]]:
    """Median seconds of a step, and of each part alone, taken in turns."""
    whole: list[float] = []
    parts: dict[str, list[float]] = {}
    for repeat in range(repeats + 1):
        clock = Clock(state.learner.model.device)
        scratch = StepScratch()
        collected = collect_groups(state, settings, None, clock, scratch)
        metrics, _ = learn(state, collected, scratch, settings, clock)
        alone = measured_alone(state, settings, collected.groups)
        if repeat:  # the first of each warms up
            whole.append(metrics["time/step_s"])
            for name, value in alone.items():
                parts.setdefault(name, []).append(value)
        state.step += 1
    return median(whole), {name: median(values) for name, values in parts.items()}


def measured_alone(
    state: State, settings: TrainSettings, groups: Sequence[Group]
) -> dict[str, float]:
    rules = settings.rewards
    drawn = sampling(settings.sampling, state.tokenizer)["P"]
    prompts = [group.prompt.ids for group in groups]
    micros = forward.prepare(groups, state.learner, settings, state.tokenizer.eos)
    for micro in micros:
        micro.advantages = torch.zeros(micro.batch.count, device=micro.old_logp.device)
    totals = update.step_totals(micros, drawn.max_new_tokens)
    assert totals is not None, "a step without tokens"

    dtype = matrix_dtype(settings.compute.dtype, state.learner.model.device)

    def decode() -> None:
        sampler_for(state.learner.model, dtype).sample(
            prompts, k=settings.sampling.k_samples, settings=drawn, eos=state.tokenizer.eos, seed=1
        )

    def score() -> None:
        for group in groups:
            for text, done in zip(group.texts, group.finished, strict=True):
                judge_answer(group.prompt.row, text, done, rules, None, 1.0)

    def learn() -> None:
        forward.prepare(groups, state.learner, settings, state.tokenizer.eos)
        update.gradient(
            micros, state.learner, totals, settings, update.Coefs(0.02, 0.0), StepScratch()
        )
        state.learner.model.zero_grad(set_to_none=True)

    named: dict[str, Callable[[], None]] = {
        "sample": decode,
        "score": score,
        "update": learn,
    }
    return {name: _seconds(run) for name, run in named.items()}


def _seconds(run: Callable[[], None]) -> float:
    began = time.perf_counter()
    run()
    return time.perf_counter() - began


if __name__ == "__main__":
    main()
