"""What a model would play among the legal moves, and the mask that keeps all others out of a list.

The law: the share of a move is the model's probability that its list begins with it. From all sides
of the board the shares of a position and of its images are turned back and averaged, so a position
and its colour-flipped image are judged alike.

Left out on purpose: the rest of the list from all sides; only the first move was measured to gain.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from rookworld.evaluation.generator import ModelAnswerer, prompt_key
from rookworld.runtime.errors import ConfigError
from rookworld.tasks.notation import MOVES
from rookworld.tasks.policy import POLICY
from rookworld.tasks.position import position_asked
from rookworld.tasks.task import PolicyRow, legal_moves

if TYPE_CHECKING:
    from torch import Tensor

    from rookworld.model.sampling.sampler import Constraint

Shares = dict[str, float]
"""Legal move -> probability; together less than 1 where a model thinks of illegal moves too."""


def writes_moves_whole(model: ModelAnswerer) -> bool:
    """Whether a move is one token, so that a mask can refuse it and an image can rename it."""
    return model.style == "compact"


def require_whole_moves(model: ModelAnswerer, what: str) -> None:
    """A `ConfigError` where a move is several tokens."""
    if not writes_moves_whole(model):
        raise ConfigError(
            f"{what} needs a model that writes a move as one token, as nano does; "
            "this one spells moves out"
        )


def move_shares(model: ModelAnswerer, fens: Sequence[str], *, sides: bool = False) -> list[Shares]:
    """For each position the share of every legal move, seen from one side or from all."""
    if not writes_moves_whole(model):
        return [_spelled(model, fen) for fen in fens]
    shares = _of_all_sides(model, fens) if sides else _of_one_side(model, fens)
    token = model.tokenizer.token
    return [
        {move: float(line[token(f" {move}")]) for move in sorted(legal_moves(fen))}
        for fen, line in zip(fens, shares, strict=True)
    ]


def images_of(fen: str) -> int:
    """From how many sides a position may be looked at."""
    return 4 if fen.split()[2] == "-" else 2


def choose(
    shares: Shares, *, temperature: float, top_p: float, seed: int, fen: str, salt: int
) -> str:
    """The most probable move, or one drawn from the shares; no shares, no move."""
    if temperature == 0 or len(shares) < 2:
        return max(shares, key=lambda move: shares[move], default="")
    moves = sorted(shares, key=lambda move: -shares[move])
    logits = np.log(np.maximum([shares[move] for move in moves], 1e-30)) / temperature
    weights = np.exp(logits - logits.max())
    weights /= weights.sum()
    kept = weights * (np.cumsum(weights) - weights < top_p)
    rng = np.random.default_rng([seed, prompt_key(f"{salt} {fen}")])
    return moves[int(rng.choice(len(moves), p=kept / kept.sum()))]


def legal_moves_only(model: ModelAnswerer) -> Callable[[Sequence[str]], Constraint]:
    """For prompts of positions: which tokens may follow, illegal moves being those that may not."""
    import torch

    vocabulary = model.model.config.vocab_size
    moves = {move: model.tokenizer.token(f" {move}") for move in MOVES}
    no_move = torch.ones(vocabulary, dtype=torch.bool)
    no_move[list(moves.values())] = False

    def constraint(prompts: Sequence[str]) -> Constraint:
        allowed = no_move.repeat(len(prompts), 1)
        for line, prompt in zip(allowed, prompts, strict=True):
            line[[moves[move] for move in legal_moves(position_asked(prompt))]] = True
        allowed = allowed.to(model.model.device)
        return lambda rows, _: allowed[rows // model.samples]

    return constraint


def _ids(model: ModelAnswerer, fens: Sequence[str]) -> list[list[int]]:
    prompts = [POLICY.prompt(PolicyRow(fen, (), ()), model.style) for fen in fens]
    return model.tokenizer.encode_batch(prompts)


def _of_one_side(model: ModelAnswerer, fens: Sequence[str]) -> Tensor:
    import torch

    ids = _ids(model, fens)
    table = np.full((len(ids), max(map(len, ids))), model.tokenizer.eos)
    for line, one in zip(table, ids, strict=True):
        line[: len(one)] = one
    return _next_token(model, torch.from_numpy(table), torch.tensor([len(one) for one in ids]))


def _of_all_sides(model: ModelAnswerer, fens: Sequence[str]) -> Tensor:
    import torch

    from rookworld.rollout.symmetry import prompt_images, token_permutations
    from rookworld.rollout.types import Prompt

    rows = [PolicyRow(fen, (), ()) for fen in fens]
    prompts = [Prompt(*one, 0) for one in zip(rows, map(tuple, _ids(model, fens)), strict=True)]
    images = prompt_images(prompts, model.tokenizer)
    shares = _next_token(model, torch.from_numpy(images.ids), torch.from_numpy(images.lengths))
    back = torch.from_numpy(token_permutations(model.tokenizer))[torch.from_numpy(images.sides)]
    turned = shares.gather(1, back)
    total = torch.zeros(len(fens), turned.shape[1]).index_add_(
        0, torch.from_numpy(images.prompts), turned
    )
    return total / torch.from_numpy(np.bincount(images.prompts))[:, None]


def _next_token(model: ModelAnswerer, ids: Tensor, lengths: Tensor) -> Tensor:
    """[rows, vocabulary] what follows each prompt, on the CPU."""
    import torch

    device = model.model.device
    with torch.inference_mode():
        hidden = model.model(ids.to(device))
        last = hidden[torch.arange(len(ids), device=device), lengths.to(device) - 1]
        shares: Tensor = model.model.lm_head(last).float().softmax(-1).cpu()
    return shares


def _spelled(model: ModelAnswerer, fen: str) -> Shares:
    """The shares where a move is several tokens: the product along each legal move's own."""
    import torch

    moves = sorted(legal_moves(fen))
    if not moves:
        return {}
    (start,) = _ids(model, [fen])
    prompt = POLICY.prompt(PolicyRow(fen, (), ()), model.style)
    whole = model.tokenizer.encode_batch([f"{prompt} {move} " for move in moves])
    ids = torch.full((len(moves), max(map(len, whole))), model.tokenizer.eos)
    for line, one in zip(ids, whole, strict=True):
        line[: len(one)] = torch.tensor(one)
    device, first = model.model.device, len(start)
    with torch.inference_mode():
        hidden = model.model(ids.to(device))[:, first - 1 : -1]
        logp = model.model.lm_head(hidden).float().log_softmax(-1).cpu()
    each = logp.gather(2, ids[:, first:, None])[..., 0]
    return {
        move: float(line[: len(one) - first].sum().exp())
        for move, line, one in zip(moves, each, whole, strict=True)
    }
