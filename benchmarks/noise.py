"""How much of a step's gradient is signal: agreement between batches that share no prompt.

The cosine of two gradients from independent batches is signal² / (signal² + noise²). Where it is c,
a run of n such steps moves a weight by n × c / (1 − c) as much along the signal, squared, as along
the noise: below 1 there is nothing to expect but a random walk.

    python benchmarks/noise.py [--model nano] [--batches 4] [--batch-size 64]
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from itertools import combinations
from statistics import fmean
from typing import Literal

import torch
from torch import Tensor

from rookworld.cli.train import read_rows
from rookworld.rl import credit, forward, update
from rookworld.rl.collect import collect_groups
from rookworld.rl.metrics import Clock
from rookworld.rl.scratch import StepScratch
from rookworld.rl.settings import TrainSettings
from rookworld.rl.state import State, new_state
from rookworld.rollout.collector import Collected

Credit = Literal["answer", "fields", "outlook", "choices"]
CREDITS: tuple[Credit, ...] = ("answer", "fields", "outlook", "choices")
PARTS: dict[str, Callable[[str, Tensor], bool]] = {
    "all": lambda name, weight: True,
    "gains and biases": lambda name, weight: weight.ndim == 1,
    "block matrices": lambda name, weight: weight.ndim == 2 and name.startswith("h."),
    "token embeddings": lambda name, weight: name == "wte.weight",
}


def main(model: str, batches: int, batch_size: int) -> None:
    """A table of agreement by part of the model and by credit; analysis prompts alone."""
    settings = TrainSettings.of(
        model=model,
        batch_size=batch_size,
        mix_env_ratio=0.0,
        flat_tries=0,
        dtype="fastest",
        credit="choices",  # collects what all of them need
    )
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    state = new_state(settings, read_rows(settings.data), device)
    found: dict[str, list[dict[str, Tensor]]] = {credit: [] for credit in CREDITS}
    for _ in range(batches):
        collected = collect_groups(state, settings, None, Clock(device), StepScratch())
        state.step += 1
        for paid in CREDITS:
            found[paid].append(gradients(state, collected, settings.but(credit=paid)))
    weights = dict(state.learner.model.named_parameters())
    print(f"{batches} batches of {batch_size} prompts × {settings.sampling.k_samples} answers")
    for part, belongs in PARTS.items():
        names = [name for name, weight in weights.items() if belongs(name, weight)]
        for paid in CREDITS:
            flat = [torch.cat([one[name].flatten() for name in names]) for one in found[paid]]
            pairs = combinations(flat, 2)
            agreement = fmean(float(torch.cosine_similarity(a, b, dim=0)) for a, b in pairs)
            norm = fmean(float(one.norm()) for one in flat)
            print(f"{part:16} {paid:7} norm {norm:.3f} agreement {agreement:+.4f}")


def gradients(state: State, collected: Collected, settings: TrainSettings) -> dict[str, Tensor]:
    """The policy's part of one step's gradient, by the weights' names."""
    learner = state.learner
    learner.model.zero_grad(set_to_none=True)
    micros = forward.prepare(collected.groups, learner, settings, state.tokenizer.eos)
    credit.set_advantages(micros, learner, settings, state.running, None, 0.0)
    totals = update.step_totals(micros, max(micro.batch.width for micro in micros))
    assert totals is not None
    update.gradient(micros, learner, totals, settings, update.Coefs(0.0, 0.0), StepScratch())
    named = learner.model.named_parameters()
    return {name: weight.grad.clone() for name, weight in named if weight.grad is not None}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--model", default="nano")
    parser.add_argument("--batches", type=int, default=4)
    parser.add_argument("--batch-size", type=int, default=64)
    main(**vars(parser.parse_args()))
