"""A random GPT-2 of a few thousand parameters with the chess tokenizer, for tests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from rookworld.model.gpt2 import GPT2, GPT2Config
from rookworld.model.sampling.sampler import Ids, Samples, sampler_for
from rookworld.model.tokenizer import Tokenizer, chess_tokenizer
from rookworld.tasks.notation import CASTLING, EN_PASSANT, EVALS, MOVES


def tiny_model(seed: int = 0, spread: float = 10.0) -> tuple[GPT2, Tokenizer]:
    """`spread` widens the initial weights, so that one token stands out and prompts matter."""
    tokenizer = chess_tokenizer(MOVES, EVALS, CASTLING, EN_PASSANT)
    config = GPT2Config(
        vocab_size=tokenizer.vocab_size, n_positions=256, n_embd=16, n_layer=2, n_head=2
    )
    model = GPT2(config).init_weights(seed).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(spread if parameter.dim() > 1 else 1.0)
    return model, tokenizer


def sample(
    model: GPT2, prompts: Sequence[Ids], *, dtype: torch.dtype | None = None, **ask: Any
) -> Samples:
    """Answers from the model as it is now."""
    return sampler_for(model, dtype).sample(prompts, **ask)
