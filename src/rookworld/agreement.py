"""JOINT: what the reference's lists agree on, from every side of the board.

The reference writes a few lists of moves for each analysis prompt and for its images: colours
exchanged and, where nobody may castle, left and right exchanged. It answers them differently, and
what its answers share is better than each. Laws: lists are drawn by (seed, step, prompt), so they
depend neither on how a step is cut nor on the number of ranks; the rules are asked which moves are
legal, labels are not looked at.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from rookworld.groups import Prompt
from rookworld.grpo.agreement import Agreed, continued, sharpened
from rookworld.model.batch import rounded_up
from rookworld.model.precision import matrices_in, passes_in
from rookworld.model.sampling import Sampling, sample
from rookworld.model.tokenizer import Tokenizer
from rookworld.packs import Pack, packed, sent, together_on
from rookworld.passes import Learner, Micro, states
from rookworld.promises import move_tokens
from rookworld.settings import TrainSettings
from rookworld.symmetry import (
    CASTLING,
    Symmetry,
    apply_symmetry,
    colour_flip,
    left_right_mirror,
)
from rookworld.tasks.outlook import END_OF_LIST
from rookworld.tasks.policy import MOST_MOVES
from rookworld.tasks.task import legal_moves

LEAST = 1e-9
"""Share of a legal move that no list holds: it is legal all the same."""
SEED = 7_368_787
"""Added to a run's seed, so that the reference does not draw what the policy draws."""
SIDES = 4


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
    step: int,
) -> dict[int, Tensor]:
    """How often each legal move is in the reference's lists, by an analysis prompt's key.

    [2, vocabulary]: stands first, and stands anywhere; more than 0 for every legal move and 0 for
    everything else.
    """
    prompts = [prompt for prompt in prompts if prompt.letter == "P"]
    if not prompts:
        return {}
    device = learner.reference.device
    seen = views(prompts, tokenizer, together_on(device))
    keys = [prompts[asked].key for asked in seen.asked.tolist()]
    lists, lengths = written(seen, keys, learner, tokenizer, settings, step)
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
    lines, moves = (sent(part, device) for part in legal(prompts, tokenizer))
    found = torch.zeros_like(mean)
    found[lines, :, moves] = mean[lines, :, moves].clamp_min(LEAST)
    found = found.to(learner.model.device)
    return {prompt.key: found[line] for line, prompt in enumerate(prompts)}


def legal(prompts: Sequence[Prompt], tokenizer: Tokenizer) -> tuple[Tensor, Tensor]:
    """The legal moves of each prompt: numbers of prompts, and ids."""
    tokens = move_tokens(tokenizer)[0]
    moves = [[tokens[move] for move in legal_moves(prompt.row.fen)] for prompt in prompts]
    lines = np.repeat(np.arange(len(moves)), [len(found) for found in moves])
    ids = [move for found in moves for move in found]
    return torch.from_numpy(lines), torch.tensor(ids, dtype=torch.long)


def written(
    seen: Views,
    keys: Sequence[int],
    learner: Learner,
    tokenizer: Tokenizer,
    settings: TrainSettings,
    step: int,
) -> tuple[Tensor, Tensor]:
    """The reference's lists for each view, as it would write them: ids [views, lists, tokens].

    And how many of them each list has; `keys` [views] are those of the prompts.
    """
    count, device = settings.agreement_lists, learner.reference.device
    asked = zip(seen.ids.tolist(), seen.heads.tolist(), strict=True)
    samples = sample(
        learner.reference,
        [ids[:head] for ids, head in asked],
        k=count,
        settings=Sampling(max_new_tokens=MOST_MOVES),
        eos=tokenizer.eos,
        seed=settings.seed + SEED,
        step=step,
        keys=[key * SIDES + side for key, side in zip(keys, seen.sides.tolist(), strict=True)],
        dtype=matrices_in(settings.dtype, device),
    )
    lists = samples.tokens.view(len(seen), count, -1)
    # the last token is never fed; half the usual multiple, since lists are short
    multiple = max(1, together_on(device) // 2)
    short = rounded_up(lists.shape[2] - 1, multiple) + 1 - lists.shape[2]
    return F.pad(lists, (0, short), value=tokenizer.eos), samples.lengths.view(len(seen), count)


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


def set_agreed(
    micros: Sequence[Micro],
    learner: Learner,
    tokenizer: Tokenizer,
    settings: TrainSettings,
    step: int,
    known: dict[int, Tensor],
) -> None:
    """Give packs their targets; `known` is what was found while answers were scored."""
    prompts = [group.prompt for micro in micros for group in micro.groups]
    missing = [prompt for prompt in prompts if prompt.key not in known]
    shares = known | agreed_shares(missing, learner, tokenizer, settings, step)
    for micro in micros:
        found = [shares.get(group.prompt.key) for group in micro.groups]
        micro.agreed = agreed_rows(micro.pack, found, tokenizer, settings)


def agreed_rows(
    lined: Pack,
    shares: Sequence[Tensor | None],
    tokenizer: Tokenizer,
    settings: TrainSettings,
) -> Agreed | None:
    """The rows of a pack that have a target; `shares` in the order of its prompts, None for A."""
    known = next((one for one in shares if one is not None), None)
    if known is None:
        return None
    none = torch.zeros_like(known)
    table = torch.stack([none if one is None else one for one in shares])
    listable = torch.zeros_like(none[0], dtype=torch.bool)
    listable[: tokenizer.vocab_size] = torch.from_numpy(is_move(tokenizer)).to(listable.device)
    tokens = lined.grid(lined.targets)[:, :MOST_MOVES]
    counts = (table[:, 1] > 0).sum(1).clamp(max=MOST_MOVES).repeat_interleave(lined.answers)
    end, since = move_tokens(tokenizer)[0][END_OF_LIST], 0 if settings.agreement_first > 0 else 1
    rows, named, ends = continued(
        tokens, lined.sequences, lined.places, listable, counts, end, since
    )
    behind = lined.places[rows] > 0
    first = sharpened(table[:, 0], settings.agreement_first_power)
    later = sharpened(table[:, 1], settings.agreement_power)
    return Agreed(
        rows=rows,
        lines=2 * (lined.sequences[rows] // lined.answers) + behind,
        named=named,
        scores=torch.stack((first, later), 1).flatten(0, 1),
        weights=torch.where(behind, 1.0, settings.agreement_first),
        ends=ends,
        end=end,
    )
