"""Self-distillation: the policy learns lists of moves from the frozen reference, its teacher.

The teacher writes a few lists for each position and for its images: colours exchanged and, where
nobody may castle, left and right exchanged. Their average is better than each of them. It is asked
once, at the position's first turn. Each turn then trains on one image of the position, along a list
drawn from the targets. That takes neither rollouts nor rewards, so a step may have far more of
these prompts than it can answer. Its loss is added to that of GRPO with a weight of its own.

Laws: what the teacher writes depends on (seed, position), what a step trains on on (seed, step,
place in the step); so neither depends on how a step is cut, on ranks or on a resume. An image has
the image of the targets. The rules say which moves are legal; labels are not looked at.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache, partial

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from rookworld.grpo.list_targets import (
    ListTargets,
    continuation_rows,
    draw_lists,
    power_logits,
)
from rookworld.model.kernels.cuda_graphs import memory_of
from rookworld.model.precision import autocast_for, matrix_dtype
from rookworld.model.sampling.counter_rng import exponential_noise, row_keys
from rookworld.model.sampling.decode_batch import round_up
from rookworld.model.sampling.sampler import ROWS_AT_ONCE, Sampling, sampler_for
from rookworld.model.tokenizer import Tokenizer
from rookworld.rl.batch import (
    DistillBatch,
    SharedPrefixBatch,
    causal_batch,
    pad_multiple,
    padded_batch,
    to_device,
)
from rookworld.rl.forward import states
from rookworld.rl.models import Learner
from rookworld.rl.settings import TrainSettings
from rookworld.rollout.prompts import prompt_text, shuffled
from rookworld.rollout.symmetry import SIDES, Images, prompt_images, token_permutations
from rookworld.rollout.token_values import move_tokens
from rookworld.rollout.types import Prompt
from rookworld.runtime import distributed
from rookworld.runtime.errors import DataError
from rookworld.tasks.notation import read_fen
from rookworld.tasks.policy import MOST_MOVES
from rookworld.tasks.prefix_value import END_OF_LIST
from rookworld.tasks.scorer import Workers
from rookworld.tasks.task import PolicyRow, legal_in_each

LISTS = 4
"""Lists that the reference writes for each side of a position."""
POWER = 3.0
"""How sharp the target of later moves is: frequencies in the lists to this power."""
LEAST = 1e-9
"""Frequency of a legal move that no list holds: it is legal all the same."""
SEED = 7_368_787
"""Added to a run's seed, so that the teacher does not draw what the policy draws."""
LISTS_AT_ONCE, LISTS_A_GIB = 8192, 64
"""At most so many, and so many for each GiB of a GPU's memory, of which they take a part for good.
Lists are so short that it writes a thousand while the host prepares the next."""
MOVES_KEPT = 32
"""Of each position, the moves that lists name most often; the others hardly ever are."""
POSITIONS_AT_ONCE = 2048
"""Positions that the teacher answers together."""
WITHOUT_PLANS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
"""cuDNN's attention plans for each new size, which takes longer than to attend, and the teacher's
batches are of ever new sizes: some positions have four images and some two."""


@lru_cache(maxsize=8)
def move_mask(tokenizer: Tokenizer) -> NDArray[np.bool_]:
    """[vocabulary] which ids are a move."""
    found = np.zeros(tokenizer.vocab_size, dtype=np.bool_)
    found[list(move_tokens(tokenizer)[1])] = True
    return found


@torch.no_grad()
def teacher_frequencies(
    prompts: Sequence[Prompt],
    learner: Learner,
    tokenizer: Tokenizer,
    settings: TrainSettings,
    workers: Workers | None = None,
) -> Tensor:
    """[prompts, 2, vocabulary] how often each legal move is in the teacher's lists.

    First in a list, and anywhere; above 0 for every legal move and 0 for everything else.
    """
    device = learner.reference.device
    fens = [prompt.row.fen for prompt in prompts]
    # the rules take as long as a GPU takes for the rest, so others are asked about them meanwhile
    legal = workers.begin(legal_in_each, fens) if workers else partial(legal_in_each, fens)
    images = prompt_images(prompts, tokenizer, pad_multiple(device))
    keys = [prompts[number].key for number in images.prompts.tolist()]
    lists, list_lengths = teacher_lists(images, keys, learner, tokenizer, settings)
    total = torch.zeros(len(prompts), 2, learner.reference.config.vocab_size, device=device)
    names = torch.from_numpy(token_permutations(tokenizer)).to(device)
    ids, lengths, number, side = (
        to_device(torch.from_numpy(array), device)
        for array in (images.ids, images.lengths, images.prompts, images.sides)
    )
    most = max(1, learner.memory.micro_tokens // (ids.shape[1] + lists[0].numel()))
    for at in range(0, len(images.ids), most):
        part = slice(at, at + most)
        batch = padded_batch(ids[part], lengths[part], lists[part], list_lengths[part])
        found = list_frequencies(batch, learner, settings)
        here = found.gather(2, names[side[part], None].expand(-1, 2, -1))
        total[..., : names.shape[1]].index_add_(0, number[part], here)
    mean = total / number.bincount(minlength=len(prompts))[:, None, None]
    lines, moves = (to_device(part, device) for part in move_ids(legal(), tokenizer))
    frequencies = torch.zeros_like(mean)
    frequencies[lines, :, moves] = mean[lines, :, moves].clamp_min(LEAST)
    return frequencies.to(learner.model.device)


def move_ids(moves: Sequence[Iterable[str]], tokenizer: Tokenizer) -> tuple[Tensor, Tensor]:
    """Moves of each of several positions: numbers of positions, and ids."""
    tokens = move_tokens(tokenizer)[0]
    ids = [[tokens[move] for move in found] for found in moves]
    lines = np.repeat(np.arange(len(ids)), [len(found) for found in ids])
    flat = np.fromiter((token for found in ids for token in found), dtype=np.int64)
    return torch.from_numpy(lines), torch.from_numpy(flat)


def teacher_lists(
    images: Images,
    keys: Sequence[int],
    learner: Learner,
    tokenizer: Tokenizer,
    settings: TrainSettings,
) -> tuple[Tensor, Tensor]:
    """Sampled lists of each image, ids [images, lists, tokens], and how long each is.

    `keys` [images] are those of the prompts.
    """
    count, device = LISTS, learner.reference.device
    prompts = zip(images.ids, images.lengths.tolist(), strict=True)
    samples = sampler_for(learner.reference, matrix_dtype(settings.compute.dtype, device)).sample(
        [ids[:length] for ids, length in prompts],
        k=count,
        settings=Sampling(max_new_tokens=MOST_MOVES),
        eos=tokenizer.eos,
        seed=settings.seed + SEED,
        keys=[key * SIDES + side for key, side in zip(keys, images.sides.tolist(), strict=True)],
        rows_at_once=lists_at_once(device),
    )
    lists = samples.tokens.view(len(images.ids), count, -1)
    # the last token is never fed; half the usual multiple, since lists are short
    multiple = max(1, pad_multiple(device) // 2)
    short = round_up(lists.shape[2] - 1, multiple) + 1 - lists.shape[2]
    return F.pad(lists, (0, short), value=tokenizer.eos), samples.lengths.view(
        len(images.ids), count
    )


def lists_at_once(device: torch.device) -> int:
    """How many lists are written together."""
    if device.type != "cuda":
        return ROWS_AT_ONCE
    return max(ROWS_AT_ONCE, min(LISTS_AT_ONCE, LISTS_A_GIB * memory_of(device) // 2**30))


def list_frequencies(batch: SharedPrefixBatch, learner: Learner, settings: TrainSettings) -> Tensor:
    """[images, 2, vocabulary] how often an id is first in a list, and anywhere; mean over lists."""
    reference = learner.reference
    with autocast_for(settings.compute.dtype, reference.device):
        hidden = states(batch, reference)
        logits = F.linear(hidden, reference.lm_head.weight).float()
    found = logits.new_zeros(2 * len(batch.heads), logits.shape[1])
    lines = 2 * (batch.sequences // batch.answers) + (batch.places > 0)
    # the expectation at each token, not only what was drawn
    found.index_add_(0, lines, logits.softmax(-1))
    return found.view(len(batch.heads), 2, -1).cumsum(1) / batch.answers


def list_targets(
    batch: SharedPrefixBatch, frequencies: Tensor, tokenizer: Tokenizer, settings: TrainSettings
) -> ListTargets:
    """The targets of a batch of lists; `frequencies` [prompts, 2, vocabulary]."""
    device, count = frequencies.device, frequencies.shape[2]
    is_move = torch.zeros(count, dtype=torch.bool, device=device)
    is_move[: tokenizer.vocab_size] = to_device(torch.from_numpy(move_mask(tokenizer)), device)
    tokens = batch.grid(batch.targets)[:, :MOST_MOVES]
    counts = (frequencies[:, 1] > 0).sum(1).clamp(max=MOST_MOVES).repeat_interleave(batch.answers)
    end = move_tokens(tokenizer)[0][END_OF_LIST]
    since = 0 if settings.distill.distill_first > 0 else 1
    rows, named, ends = continuation_rows(
        tokens, batch.sequences, batch.places, is_move, counts, end, since
    )
    behind = batch.places[rows] > 0
    first = power_logits(frequencies[:, 0], settings.distill.distill_first_power)
    later = power_logits(frequencies[:, 1], POWER)
    return ListTargets(
        rows=rows,
        lines=2 * (batch.sequences[rows] // batch.answers) + behind,
        named=named,
        logits=torch.stack((first, later), 1).flatten(0, 1),
        weights=torch.where(behind, 1.0, settings.distill.distill_first),
        ends=ends,
        end=end,
    )


class Distiller:
    """The positions of a run, and the teacher's frequencies, on the policy's device."""

    def __init__(
        self,
        fens: Sequence[str],
        learner: Learner,
        tokenizer: Tokenizer,
        settings: TrainSettings,
    ) -> None:
        self.fens = fens
        self.learner, self.tokenizer, self.settings = learner, tokenizer, settings
        count, self.device = len(fens), learner.model.device
        small = tokenizer.vocab_size <= torch.iinfo(torch.int16).max
        self.id_dtype = torch.int16 if small else torch.int32
        """There may be a gigabyte of ids."""
        self.lengths = np.zeros(count, dtype=np.int64)
        """Tokens of each prompt; 0: it has not had a turn yet."""
        self.answered = np.zeros(count, dtype=np.bool_)
        """Whether the teacher has answered."""
        self.sides = np.zeros(count, dtype=np.int64)
        """From how many sides it is the same question."""
        self.images = torch.zeros(count, SIDES, 0, dtype=self.id_dtype, device=self.device)
        """[positions, sides, tokens], padded."""
        self.moves = torch.zeros(count, 2, MOVES_KEPT, dtype=self.id_dtype, device=self.device)
        self.frequencies = torch.zeros(count, 2, MOVES_KEPT, device=self.device)
        """How often each of these stands first, and anywhere."""

    def batches(self, step: int, workers: Workers | None = None) -> list[DistillBatch]:
        """This rank's share of what a step trains on; `workers` help with what is new."""
        count = self.settings.distill.distill_prompts
        places = np.arange(step * count, (step + 1) * count)[distributed.share(count)]
        if not len(places):
            return []
        numbers = self.positions_at(places)
        new = np.unique(numbers[self.lengths[numbers] == 0])
        for at in range(0, len(new), POSITIONS_AT_ONCE):
            self.introduce(new[at : at + POSITIONS_AT_ONCE], workers)
        tokens = int(self.lengths[numbers].max()) + MOST_MOVES - 1
        tokens = round_up(tokens, pad_multiple(self.device))
        most = max(1, self.learner.memory.micro_tokens // tokens)
        parts = -(-len(places) // most)
        # all of one size or one less: a pass whose size comes back can be recorded
        cuts = zip(np.array_split(numbers, parts), np.array_split(places, parts), strict=True)
        return [self.make_batch(*cut, tokens) for cut in cuts]

    def positions_at(self, places: NDArray[np.int64]) -> NDArray[np.int64]:
        """Whose turn it is at each place of the endless stream of positions."""
        count, seed = len(self.fens), self.settings.seed + SEED
        numbers = np.empty_like(places)
        for epoch in np.unique(places // count):
            now = places // count == epoch
            numbers[now] = shuffled(count, seed, int(epoch), 0)[places[now] % count]
        return numbers

    def introduce(self, numbers: NDArray[np.int64], workers: Workers | None) -> None:
        """Prepare positions for their first turn; after a resume the teacher knows some already."""
        rows = [PolicyRow(self.fen(number), (), ()) for number in numbers]
        ids = self.tokenizer.encode_batch([prompt_text(row, self.tokenizer) for row in rows])
        prompts = [
            Prompt(row, tuple(mine), int(number))
            for row, mine, number in zip(rows, ids, numbers, strict=True)
        ]
        self.ask_teacher([prompt for prompt in prompts if not self.answered[prompt.key]], workers)
        images = prompt_images(prompts, self.tokenizer, pad_multiple(self.device))
        wider = images.ids.shape[1] - self.images.shape[2]
        if wider > 0:
            self.images = F.pad(self.images, (0, wider), value=self.tokenizer.eos)
        here, prompt, side = (
            to_device(torch.from_numpy(one), self.device)
            for one in (numbers, images.prompts, images.sides)
        )
        new = to_device(torch.from_numpy(images.ids).to(self.id_dtype), self.device)
        self.images[here[prompt], side, : new.shape[1]] = new
        self.lengths[numbers] = [len(prompt.ids) for prompt in prompts]
        self.sides[numbers] = np.bincount(images.prompts)

    def fen(self, number: int) -> str:
        """A position, looked at now: all at the start would keep a run of millions waiting."""
        if (fen := read_fen(self.fens[number])) is None:
            raise DataError(f"--distill-data: not a FEN: {self.fens[number]!r}")
        return fen

    def ask_teacher(self, prompts: Sequence[Prompt], workers: Workers | None) -> None:
        """Keep the most frequent moves of the teacher's lists for these positions."""
        if not prompts:
            return
        with sdpa_kernel(WITHOUT_PLANS):
            found = teacher_frequencies(
                prompts, self.learner, self.tokenizer, self.settings, workers
            )
        kept = found[..., : self.tokenizer.vocab_size].topk(MOVES_KEPT)
        numbers = [prompt.key for prompt in prompts]
        self.moves[numbers] = kept.indices.to(self.id_dtype)
        self.frequencies[numbers] = kept.values
        self.answered[numbers] = True

    def tensors(self) -> dict[str, Tensor]:
        """The teacher's answers so far, for a checkpoint.

        Asked again beside other positions it would say the same but for its rounding.
        """
        numbers = torch.from_numpy(self.answered.nonzero()[0])
        here = numbers.to(self.device)
        found = {"moves": self.moves[here], "shares": self.frequencies[here]}
        return found | {"numbers": numbers, "of": torch.tensor(self.fingerprint())}

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        """Take back `tensors`, if they are about the same positions and lists."""
        if tensors.get("of", torch.tensor(0)).item() != self.fingerprint():
            return
        here = tensors["numbers"].to(self.device)
        self.moves[here] = tensors["moves"].to(self.moves)
        self.frequencies[here] = tensors["shares"].to(self.frequencies)
        self.answered[tensors["numbers"].numpy()] = True

    def fingerprint(self) -> int:
        """Of everything that answers of the same teacher depend on."""
        about = hashlib.sha256(f"{self.settings.seed} {LISTS}".encode())
        for fen in self.fens:
            about.update(fen.encode())
        return int.from_bytes(about.digest()[:7], "big")

    def make_batch(
        self, numbers: NDArray[np.int64], places: NDArray[np.int64], tokens: int
    ) -> DistillBatch:
        """One image of each position with a list behind it, as one pass with its targets."""
        here, lengths, sides = (
            to_device(torch.from_numpy(one), self.device)
            for one in (numbers, self.lengths[numbers], self.sides[numbers])
        )
        keys = row_keys(self.settings.seed + SEED, 1, places, np.zeros_like(places))
        waits = exponential_noise(to_device(keys, self.device), 1 + 2 * MOVES_KEPT)
        side = torch.minimum((sides * torch.exp(-waits[:, 0])).long(), sides - 1)
        names = to_device(torch.from_numpy(token_permutations(self.tokenizer)), self.device)
        moves, found = self.moves[here].long(), self.frequencies[here]
        moves = names[side[:, None, None], moves]
        powers = self.settings.distill.distill_first_power, POWER
        end = move_tokens(self.tokenizer)[0][END_OF_LIST]
        lists = draw_lists(moves, found, waits[:, 1:], powers, MOST_MOVES, end)
        vocabulary = self.learner.model.config.vocab_size
        table = found.new_zeros(len(numbers), 2, vocabulary).scatter_(2, moves, found)
        batch = causal_batch(self.images[here, side].long()[:, :tokens], lengths, lists, tokens)
        return DistillBatch(batch, list_targets(batch, table, self.tokenizer, self.settings))
