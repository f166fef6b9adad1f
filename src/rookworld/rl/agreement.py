"""JOINT: what the reference's lists agree on, from every side of the board.

The reference writes a few lists of moves for each analysis prompt and for its images: colours
exchanged and, where nobody may castle, left and right exchanged. It answers them differently, and
what its answers share is better than each. Laws: lists are drawn by (seed, prompt), so they depend
neither on when they are asked for nor on how a step is cut nor on the number of ranks; the rules
are asked which moves are legal, labels are not looked at.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from rookworld.grpo.list_targets import Agreed, continued, sharpened
from rookworld.model.kernels.cuda_graphs import memory_of
from rookworld.model.precision import matrices_in, passes_in
from rookworld.model.sampling.decode_batch import rounded_up
from rookworld.model.sampling.sampler import ROWS_AT_ONCE, Sampling, sample
from rookworld.model.tokenizer import Tokenizer
from rookworld.rl.batch import Pack, packed, sent, together_on
from rookworld.rl.forward import Learner, states
from rookworld.rl.settings import TrainSettings
from rookworld.rollout.symmetry import (
    CASTLING,
    Symmetry,
    apply_symmetry,
    colour_flip,
    left_right_mirror,
)
from rookworld.rollout.token_values import move_tokens
from rookworld.rollout.types import Prompt
from rookworld.tasks.policy import MOST_MOVES
from rookworld.tasks.prefix_value import END_OF_LIST
from rookworld.tasks.scorer import Workers
from rookworld.tasks.task import legal_in_each

LEAST = 1e-9
"""Share of a legal move that no list holds: it is legal all the same."""
SEED = 7_368_787
"""Added to a run's seed, so that the reference does not draw what the policy draws."""
SIDES = 4
LISTS_AT_ONCE, LISTS_A_GIB = 8192, 64
"""At most so many, and so many for each GiB of a GPU's memory, of which they take a part for good.
Lists are so short that it writes a thousand while the host lays out the next."""


@dataclass(frozen=True)
class Views:
    """Prompts as seen from each side of the board."""

    ids: NDArray[np.int64]
    """[views, tokens], padded with end tokens."""
    heads: NDArray[np.int64]
    """[views] tokens of each."""
    asked: NDArray[np.int64]
    """[views] the number of the prompt that a view is an image of."""
    sides: NDArray[np.int64]
    """[views] which line of `called` it is."""

    def __len__(self) -> int:
        return len(self.ids)


@lru_cache(maxsize=8)
def symmetries(tokenizer: Tokenizer) -> tuple[Symmetry, Symmetry]:
    """Colours exchanged, left and right exchanged."""
    return colour_flip(tokenizer), left_right_mirror(tokenizer)


@lru_cache(maxsize=8)
def called(tokenizer: Tokenizer) -> NDArray[np.int64]:
    """[sides, vocabulary] what each id is called from each side of the board."""
    flip, mirror = (symmetry.renamed for symmetry in symmetries(tokenizer))
    return np.stack([np.arange(len(flip)), flip, mirror, mirror[flip]])


@lru_cache(maxsize=8)
def is_move(tokenizer: Tokenizer) -> NDArray[np.bool_]:
    """[vocabulary] which ids are a move."""
    found = np.zeros(tokenizer.vocab_size, dtype=np.bool_)
    found[list(move_tokens(tokenizer)[1])] = True
    return found


def views(prompts: Sequence[Prompt], tokenizer: Tokenizer, multiple: int = 1) -> Views:
    """Every prompt from every side from which it is the same question."""
    flip, mirror = symmetries(tokenizer)
    heads = np.array([len(prompt.ids) for prompt in prompts])
    ids = np.full((len(prompts), rounded_up(int(heads.max()), multiple)), tokenizer.eos)
    for line, prompt in zip(ids, prompts, strict=True):
        line[: len(prompt.ids)] = prompt.ids
    flipped = apply_symmetry(ids, flip)
    images = np.stack([ids, flipped, apply_symmetry(ids, mirror), apply_symmetry(flipped, mirror)])
    castles = ids[:, CASTLING] != tokenizer.token(" -")
    same = ~castles[:, None] | (np.arange(len(images)) < 2)
    asked, side = same.nonzero()
    return Views(images[side, asked], heads[asked], asked, side)


@torch.no_grad()
def agreed_shares(
    prompts: Sequence[Prompt],
    learner: Learner,
    tokenizer: Tokenizer,
    settings: TrainSettings,
    workers: Workers | None = None,
) -> Tensor:
    """[prompts, 2, vocabulary] how often each legal move is in the reference's lists.

    Stands first, and stands anywhere; more than 0 for every legal move and 0 for everything else.
    """
    device = learner.reference.device
    fens = [prompt.row.fen for prompt in prompts]
    # the rules take as long as a GPU takes for the rest, so others are asked about them meanwhile
    legal = workers.begin(legal_in_each, fens) if workers else partial(legal_in_each, fens)
    seen = views(prompts, tokenizer, together_on(device))
    keys = [prompts[asked].key for asked in seen.asked.tolist()]
    lists, lengths = written(seen, keys, learner, tokenizer, settings)
    total = torch.zeros(len(prompts), 2, learner.reference.config.vocab_size, device=device)
    names = torch.from_numpy(called(tokenizer)).to(device)
    ids, heads, asked, side = (
        sent(torch.from_numpy(array), device)
        for array in (seen.ids, seen.heads, seen.asked, seen.sides)
    )
    most = max(1, settings.micro_tokens // (ids.shape[1] + lists[0].numel()))
    for at in range(0, len(seen), most):
        part = slice(at, at + most)
        lined = packed(ids[part], heads[part], lists[part], lengths[part])
        shares = listed(lined, learner, settings)
        here = shares.gather(2, names[side[part], None].expand(-1, 2, -1))
        total[..., : names.shape[1]].index_add_(0, asked[part], here)
    mean = total / asked.bincount(minlength=len(prompts))[:, None, None]
    lines, moves = (sent(part, device) for part in numbered(legal(), tokenizer))
    found = torch.zeros_like(mean)
    found[lines, :, moves] = mean[lines, :, moves].clamp_min(LEAST)
    return found.to(learner.model.device)


def numbered(moves: Sequence[Iterable[str]], tokenizer: Tokenizer) -> tuple[Tensor, Tensor]:
    """Moves of each of several positions: numbers of positions, and ids."""
    tokens = move_tokens(tokenizer)[0]
    ids = [[tokens[move] for move in found] for found in moves]
    lines = np.repeat(np.arange(len(ids)), [len(found) for found in ids])
    flat = np.fromiter((token for found in ids for token in found), dtype=np.int64)
    return torch.from_numpy(lines), torch.from_numpy(flat)


def written(
    seen: Views,
    keys: Sequence[int],
    learner: Learner,
    tokenizer: Tokenizer,
    settings: TrainSettings,
) -> tuple[Tensor, Tensor]:
    """The reference's lists for each view, as it would write them: ids [views, lists, tokens].

    And how many of them each list has; `keys` [views] are those of the prompts.
    """
    count, device = settings.agreement_lists, learner.reference.device
    asked = zip(seen.ids, seen.heads.tolist(), strict=True)
    samples = sample(
        learner.reference,
        [ids[:head] for ids, head in asked],
        k=count,
        settings=Sampling(max_new_tokens=MOST_MOVES),
        eos=tokenizer.eos,
        seed=settings.seed + SEED,
        keys=[key * SIDES + side for key, side in zip(keys, seen.sides.tolist(), strict=True)],
        rows_at_once=lists_at_once(device),
        dtype=matrices_in(settings.dtype, device),
    )
    lists = samples.tokens.view(len(seen), count, -1)
    # the last token is never fed; half the usual multiple, since lists are short
    multiple = max(1, together_on(device) // 2)
    short = rounded_up(lists.shape[2] - 1, multiple) + 1 - lists.shape[2]
    return F.pad(lists, (0, short), value=tokenizer.eos), samples.lengths.view(len(seen), count)


def lists_at_once(device: torch.device) -> int:
    """How many lists are written together."""
    if device.type != "cuda":
        return ROWS_AT_ONCE
    return max(ROWS_AT_ONCE, min(LISTS_AT_ONCE, LISTS_A_GIB * memory_of(device) // 2**30))


def listed(lined: Pack, learner: Learner, settings: TrainSettings) -> Tensor:
    """[views, 2, vocabulary] how often each id may stand first in a list, and in a list at all.

    On average over the lists.
    """
    reference = learner.reference
    with passes_in(settings.dtype, reference.device):
        hidden = states(lined, reference)
        scores = F.linear(hidden, reference.lm_head.weight).float()
    shares = scores.new_zeros(2 * len(lined.heads), scores.shape[1])
    lines = 2 * (lined.sequences // lined.answers) + (lined.places > 0)
    # every draw there could have been, not only the one there was
    shares.index_add_(0, lines, scores.softmax(-1))
    return shares.view(len(lined.heads), 2, -1).cumsum(1) / lined.answers


def agreed_rows(
    lined: Pack, shares: Tensor, tokenizer: Tokenizer, settings: TrainSettings
) -> Agreed:
    """The targets of a pack of lists; `shares` [prompts, 2, vocabulary] in the order of prompts."""
    listable = torch.zeros(shares.shape[2], dtype=torch.bool, device=shares.device)
    listable[: tokenizer.vocab_size] = sent(torch.from_numpy(is_move(tokenizer)), shares.device)
    tokens = lined.grid(lined.targets)[:, :MOST_MOVES]
    counts = (shares[:, 1] > 0).sum(1).clamp(max=MOST_MOVES).repeat_interleave(lined.answers)
    end, since = move_tokens(tokenizer)[0][END_OF_LIST], 0 if settings.agreement_first > 0 else 1
    rows, named, ends = continued(
        tokens, lined.sequences, lined.places, listable, counts, end, since
    )
    behind = lined.places[rows] > 0
    first = sharpened(shares[:, 0], settings.agreement_first_power)
    later = sharpened(shares[:, 1], settings.agreement_power)
    return Agreed(
        rows=rows,
        lines=2 * (lined.sequences[rows] // lined.answers) + behind,
        named=named,
        scores=torch.stack((first, later), 1).flatten(0, 1),
        weights=torch.where(behind, 1.0, settings.agreement_first),
        ends=ends,
        end=end,
    )
