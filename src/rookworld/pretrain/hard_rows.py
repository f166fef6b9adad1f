"""Environment rows that a model finds hard, for it to learn from more often than they occur.

The law: a row is as hard as the least likely token of its answer, since one wrong token is a wrong
answer. Whether a move mates is one token of eighty, and most rows have long been learnt: a mean
over tokens or rows would hide what is left to learn.
Left out: analyses and mates. Several moves may be right there, and no model is sure of all five.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray

from rookworld.model.gpt2 import GPT2
from rookworld.model.precision import autocast_for
from rookworld.pretrain.dataset import PROMPT, STATE, TokenizedRows, select_rows
from rookworld.runtime.errors import DataError

SCORES_AT_ONCE = {"cpu": 1 << 24, "cuda": 1 << 28}
"""Tokens of answers × vocabulary that are looked at together."""


def environment_rows(packed: TokenizedRows) -> TokenizedRows:
    """The rows that speak of a move and what became of it."""
    return select_rows(packed, np.flatnonzero((packed.fields == STATE).any(1)))


@torch.no_grad()
def worst_losses(
    model: GPT2,
    packed: TokenizedRows,
    *,
    at_once: int | None = None,
    progress: Callable[[int, int], None] = lambda done, all_: None,
) -> NDArray[np.float32]:
    """[rows] the largest loss, in nats, of any token of each row's answer."""
    check_fit(model, packed)
    device, count = model.device, len(packed)
    longest = int((packed.lengths - packed.prompts).max(initial=1))
    scores = SCORES_AT_ONCE.get(device.type, 1 << 24)
    size = at_once or max(1, scores // (longest * model.config.vocab_size))
    found = np.zeros(count, np.float32)
    order = np.argsort(packed.lengths, kind="stable")  # rows of like length, so little padding
    for start in range(0, count, size):
        rows = order[start : start + size]
        width = int(packed.lengths[rows].max())
        ids = torch.from_numpy(packed.tokens[rows, :width].astype(np.int64)).to(device)
        answers = torch.from_numpy(packed.fields[rows, 1:width] != PROMPT).to(device)
        places = F.pad(answers, (0, 1)).flatten().nonzero().squeeze(1)
        with autocast_for("auto", device):
            logits = model.logits(model(ids, rows=places)).float()
        targets = ids.flatten()[places + 1]
        losses = F.cross_entropy(logits, targets, reduction="none")
        worst = torch.zeros(len(rows), device=device)
        worst.scatter_reduce_(0, places // width, losses, "amax")
        found[rows] = worst.cpu().numpy()
        progress(min(start + size, count), count)
    return found


def check_fit(model: GPT2, packed: TokenizedRows) -> None:
    """Refuse rows that the model has no embedding for."""
    config, longest, top = model.config, packed.lengths.max(initial=0), packed.tokens.max(initial=0)
    if longest > config.n_positions:
        raise DataError(f"a row has {longest} tokens, the model {config.n_positions} positions")
    if top >= config.vocab_size:
        raise DataError(
            f"rows have token ids up to {top}, the model {config.vocab_size} tokens: they were "
            "packed with another tokenizer"
        )


def hardest(
    packed: TokenizedRows, losses: NDArray[np.float32], *, least: float, most: int
) -> TokenizedRows:
    """The rows with a loss of at least `least`, at most `most` of them, in their order."""
    if not np.isfinite(losses).all():
        raise DataError("the model's losses are not finite: its weights are broken")
    hard = np.flatnonzero(losses >= least)
    hard = hard[np.argsort(-losses[hard], kind="stable")][:most]
    return select_rows(packed, np.sort(hard))
