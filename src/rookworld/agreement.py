"""JOINT: what the reference's lists agree on, from every side of the board.

The reference writes a few lists of moves for each analysis prompt and for its images: colours
exchanged and, where nobody may castle, left and right exchanged. It answers them differently, and
what its answers share is better than each. Laws: lists are drawn by (seed, step, prompt), so they
depend neither on how a step is cut nor on the number of ranks; labels are not looked at.
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
from rookworld.grpo.agreement import Agreed, continued
from rookworld.model.precision import matrices_in, passes_in
from rookworld.model.sampling import Sampling, sample
from rookworld.model.tokenizer import Tokenizer
from rookworld.packs import Pack, micro_packs, pack, together_on
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

SEED = 7_368_787
"""Added to a run's seed, so that the reference does not draw what the policy draws."""
VIEWS = 4


@dataclass(frozen=True)
class View:
    """A prompt as seen from one side of the board."""

    prompt: Prompt
    """With the ids and the randomness of this side."""
    asked: int
    """The key of the prompt it is an image of."""
    side: int
    """Which line of `sides` it is."""


@dataclass(frozen=True)
class Lists:
    """The reference's lists for a view."""

    view: View
    tokens: Tensor
    lengths: Tensor

    @property
    def prompt(self) -> Prompt:
        return self.view.prompt


@lru_cache(maxsize=8)
def symmetries(tokenizer: Tokenizer) -> tuple[Symmetry, Symmetry]:
    """Colours exchanged, left and right exchanged."""
    return colour_flip(tokenizer), left_right_mirror(tokenizer)


@lru_cache(maxsize=8)
def sides(tokenizer: Tokenizer) -> NDArray[np.int64]:
    """[views, vocabulary] what each id is called from each side of the board."""
    flip, mirror = (symmetry.renamed for symmetry in symmetries(tokenizer))
    return np.stack([np.arange(len(flip)), flip, mirror, mirror[flip]])


@lru_cache(maxsize=8)
def is_move(tokenizer: Tokenizer) -> NDArray[np.bool_]:
    """[vocabulary] which ids are a move."""
    found = np.zeros(tokenizer.vocab_size, dtype=np.bool_)
    found[list(move_tokens(tokenizer)[1])] = True
    return found


def views(prompts: Sequence[Prompt], tokenizer: Tokenizer) -> list[View]:
    """Every prompt from every side from which it is the same question."""
    flip, mirror = symmetries(tokenizer)
    castles_not = tokenizer.token(" -")
    width = max(len(prompt.ids) for prompt in prompts)
    ids = np.full((len(prompts), width), tokenizer.eos, dtype=np.int64)
    for line, prompt in zip(ids, prompts, strict=True):
        line[: len(prompt.ids)] = prompt.ids
    flipped = apply_symmetry(ids, flip)
    images = (ids, flipped, apply_symmetry(ids, mirror), apply_symmetry(flipped, mirror))
    found = []
    for number, prompt in enumerate(prompts):
        count = VIEWS if ids[number, CASTLING] == castles_not else 2
        for side in range(count):
            turned = tuple(images[side][number, : len(prompt.ids)].tolist())
            seen = Prompt(prompt.letter, prompt.row, turned, prompt.key * VIEWS + side)
            found.append(View(seen, prompt.key, side))
    return found


@torch.no_grad()
def agreed_shares(
    prompts: Sequence[Prompt],
    learner: Learner,
    tokenizer: Tokenizer,
    settings: TrainSettings,
    step: int,
) -> dict[int, Tensor]:
    """How often each id is in the reference's lists [vocabulary], by an analysis prompt's key."""
    prompts = [prompt for prompt in prompts if prompt.letter == "P"]
    if not prompts:
        return {}
    seen = views(prompts, tokenizer)
    lines = {prompt.key: line for line, prompt in enumerate(prompts)}
    device = learner.reference.device
    total = torch.zeros(len(prompts), learner.reference.config.vocab_size, device=device)
    count = torch.zeros(len(prompts), device=device)
    called = torch.from_numpy(sides(tokenizer)).to(device)
    multiple = together_on(device)
    lists = written(seen, learner, tokenizer, settings, step)
    for part in micro_packs(lists, settings.micro_tokens, multiple):
        shares = listed(pack(part, tokenizer.eos, multiple), learner, settings)
        line = torch.tensor([lines[one.view.asked] for one in part], device=device)
        side = torch.tensor([one.view.side for one in part], device=device)
        total[:, : called.shape[1]].index_add_(0, line, shares.gather(1, called[side]))
        count.index_add_(0, line, torch.ones_like(line, dtype=count.dtype))
    moves = torch.zeros(total.shape[1], device=device)
    moves[: called.shape[1]] = torch.from_numpy(is_move(tokenizer)).to(moves)
    total = (total * moves / count[:, None]).to(learner.model.device)
    return {prompt.key: total[line] for line, prompt in enumerate(prompts)}


def written(
    seen: Sequence[View],
    learner: Learner,
    tokenizer: Tokenizer,
    settings: TrainSettings,
    step: int,
) -> list[Lists]:
    """The reference's lists for each view, as it would write them."""
    k = settings.agreement_lists
    samples = sample(
        learner.reference,
        [view.prompt.ids for view in seen],
        k=k,
        settings=Sampling(max_new_tokens=MOST_MOVES),
        eos=tokenizer.eos,
        seed=settings.seed + SEED,
        step=step,
        keys=[view.prompt.key for view in seen],
        dtype=matrices_in(settings.dtype, learner.reference.device),
    )
    parts = [slice(line * k, (line + 1) * k) for line in range(len(seen))]
    return [
        Lists(view, samples.tokens[part], samples.lengths[part])
        for view, part in zip(seen, parts, strict=True)
    ]


def listed(packed: Pack, learner: Learner, settings: TrainSettings) -> Tensor:
    """[prompts, vocabulary] how often each id may stand in a list, on average over the lists."""
    reference = learner.reference
    with passes_in(settings.dtype, reference.device):
        hidden = states(packed, reference)
        scores = F.linear(hidden, reference.lm_head.weight).float()
    shares = scores.new_zeros(len(packed.heads), scores.shape[1])
    # every draw there could have been, not only the one there was
    shares.index_add_(0, packed.sequences // packed.answers, scores.softmax(-1))
    return shares / packed.answers


def set_agreed(
    micros: Sequence[Micro],
    learner: Learner,
    tokenizer: Tokenizer,
    settings: TrainSettings,
    step: int,
    known: dict[int, Tensor],
) -> None:
    """Give packs their targets; takes all out of `known`, what was found while answers were scored.

    On a GPU it has nothing else to do then.
    """
    asked = [group.prompt for micro in micros for group in micro.groups]
    missing = [prompt for prompt in asked if prompt.key not in known]
    shares = known | agreed_shares(missing, learner, tokenizer, settings, step)
    for micro in micros:
        found = [shares.get(group.prompt.key) for group in micro.groups]
        micro.agreed = agreed_rows(micro.pack, found, tokenizer, settings)
    known.clear()


def agreed_rows(
    packed: Pack,
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
    listable = torch.zeros_like(none, dtype=torch.bool)
    listable[: tokenizer.vocab_size] = torch.from_numpy(is_move(tokenizer)).to(listable.device)
    tokens = packed.grid(packed.targets)[:, :MOST_MOVES]
    counts = table.sum(1).repeat_interleave(packed.answers)
    rows, named, ends = continued(tokens, packed.sequences, packed.places, listable, counts)
    return Agreed(
        rows=rows,
        lists=packed.sequences[rows] // packed.answers,
        named=named,
        shares=table,
        ends=ends,
        end=move_tokens(tokenizer)[0][END_OF_LIST],
        power=settings.agreement_power,
    )
