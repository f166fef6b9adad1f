"""Where a gain comes from: one recipe, one part of it at a time, on the same rows, steps and seed.

    python benchmarks/ablation.py ARM --out runs/ARM [flags of `rookworld train`]
    python benchmarks/ablation.py sides --model MODEL --rows ROWS

The arms: `both` (reward and self-distillation), `reward`, `distill` (with the KL), `labels`
(cross-entropy on the rows' own answers, with the same KL and optimizer). `sides` trains nothing: it
averages the first move over the position and its images.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rookworld.cli.dispatch import main as rookworld
from rookworld.data.sources import load_rows
from rookworld.model.precision import autocast_for
from rookworld.model.tokenizer import Tokenizer
from rookworld.model.weights import load_model, resolve_folder
from rookworld.rl import collect, credit
from rookworld.rl.forward import MicroBatch, policy_stats, states
from rookworld.rl.models import Learner
from rookworld.rl.settings import TrainSettings
from rookworld.rollout.collector import Collector
from rookworld.rollout.prompts import prompt_text
from rookworld.rollout.symmetry import prompt_images, token_permutations
from rookworld.rollout.types import Completions, Prompt
from rookworld.tasks.registry import task_of
from rookworld.tasks.task import PolicyRow

ARMS = ("both", "reward", "distill", "labels")


def main(argv: Sequence[str]) -> int:
    if argv[:1] == ["sides"]:
        return sides(argv[1:])
    arm, flags = argv[0], list(argv[1:])
    if arm not in ARMS:
        raise SystemExit(f"{arm}: not one of {', '.join(ARMS)}, sides")
    if arm == "distill":
        setattr(credit, "set_advantages", pay_nothing)  # noqa: B010
    if arm == "labels":
        flags += ["--credit", "answer"]
        Collector.sample = true_completions  # type: ignore[method-assign]
        setattr(credit, "set_advantages", pay_alike)  # noqa: B010
        collect.may_reuse_activations = lambda *_: False
    if arm in ("reward", "labels"):
        flags += ["--distill-coef", "0"]
    return rookworld(["train", *flags])


# --- the arms -----------------------------------------------------------------------------------


def pay_nothing(micros: Sequence[MicroBatch], *_: Any) -> dict[str, float]:
    """No token is paid: the KL and self-distillation are all that is left."""
    for micro in micros:
        micro.advantages = torch.zeros_like(micro.batch.grid(micro.old_logp))
    return {}


def pay_alike(
    micros: Sequence[MicroBatch], learner: Learner, settings: TrainSettings, *_: Any
) -> dict[str, float]:
    """Every token of the true answer is paid 1, at ratio 1: the gradient of cross-entropy."""
    for micro in micros:
        with torch.no_grad(), autocast_for(settings.compute.dtype, learner.model.device):
            hidden = states(micro.batch, learner.model, None, None)
            micro.old_logp = policy_stats(micro, hidden, learner, settings).logp.float()
        micro.advantages = torch.ones_like(micro.batch.grid(micro.old_logp))
    return {}


def true_completions(self: Collector, prompts: Sequence[Prompt], step: int) -> list[Completions]:
    """The rows' own answers in place of sampled ones, K times each."""
    return [true_completion(self, prompt) for prompt in prompts]


def true_completion(collector: Collector, prompt: Prompt) -> Completions:
    tokenizer, row = collector.tokenizer, prompt.row
    text = task_of(row).answer(row, tokenizer.style)
    ids = [*tokenizer.encode_batch([prompt_text(row, tokenizer) + text])[0], tokenizer.eos]
    ids = ids[len(prompt.ids) :]
    table = np.tile(np.array(ids, dtype=np.int64), (collector.k, 1))
    device = collector.model.device
    tokens = torch.from_numpy(table).to(device)
    zeros = torch.zeros(table.shape, device=device)
    lengths = torch.full((collector.k,), len(ids), device=device)
    counts = [len(ids)] * collector.k
    return Completions(prompt, tokens, lengths, zeros, zeros, table, counts, (True,) * collector.k)


# --- no training: the average over the sides of the board ---------------------------------------


def sides(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="ablation.py sides")
    parser.add_argument("--model", default="nano")
    parser.add_argument("--rows", default="evaluation/test-5k.parquet")
    given = parser.parse_args(argv)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    folder = resolve_folder(given.model)
    model, tokenizer = load_model(folder, device), Tokenizer.load(folder)
    rows = [row for row in load_rows(given.rows) if isinstance(row, PolicyRow)]
    alone, averaged = [], []
    for at in range(0, len(rows), 256):
        some = rows[at : at + 256]
        ids = tokenizer.encode_batch([prompt_text(row, tokenizer) for row in some])
        prompts = [Prompt(row, tuple(one), 0) for row, one in zip(some, ids, strict=True)]
        shares = first_moves(model, prompts, tokenizer)
        for mine, row in zip(shares, some, strict=True):
            best = tokenizer.token(f" {row.moves[0]}")
            alone.append(int(mine[0].argmax()) == best)
            averaged.append(int(mine.mean(0).argmax()) == best)
    before, after = np.array(alone, dtype=float), np.array(averaged, dtype=float)
    apart = after - before
    error = 1.96 * apart.std() / len(apart) ** 0.5
    print(
        f"best move of {len(rows)}: {100 * before.mean():.1f} alone, {100 * after.mean():.1f} "
        f"averaged, {100 * apart.mean():+.2f} ± {100 * error:.2f}"
    )
    return 0


@torch.no_grad()
def first_moves(model: Any, prompts: Sequence[Prompt], tokenizer: Any) -> list[Tensor]:
    """For each prompt [sides, vocabulary]: what the first move is, seen from each side."""
    images = prompt_images(prompts, tokenizer)
    ids = torch.from_numpy(images.ids).to(model.device)
    last = torch.from_numpy(images.lengths - 1).to(model.device)
    states_at_end = model(ids)[torch.arange(len(ids), device=ids.device), last]
    shares = model.lm_head(states_at_end).float().softmax(-1).cpu()
    back = torch.from_numpy(token_permutations(tokenizer))
    turned = torch.stack(
        [one[back[side]] for one, side in zip(shares, images.sides.tolist(), strict=True)]
    )
    return [turned[torch.from_numpy(images.prompts == at)] for at in range(len(prompts))]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
