"""JOINT: prompts that learn what lists agree on, and nothing else -> packs with their targets.

What the reference agrees on about a position (`agreement`) stays what it is, so it is asked once,
when the position's first turn comes, and drilled at every turn: from one of the sides of the board,
along a list that is drawn from the targets themselves. That needs neither answers nor rewards, so a
step can drill many more prompts than it can answer. Laws: which prompts a step drills, from which
side and along which list is a function of (seed, step, place in the step), so it depends neither on
how a step is cut nor on the number of ranks, nor on where a run was resumed; an image has the image
of the targets; labels are not looked at.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from rookworld.grpo.list_targets import Agreed, raced, sharpened
from rookworld.model.sampling.counter_rng import row_keys, waiting_times
from rookworld.model.sampling.decode_batch import rounded_up
from rookworld.model.tokenizer import Tokenizer
from rookworld.rl.agreement import SEED, SIDES, agreed_rows, agreed_shares, called, views
from rookworld.rl.batch import Pack, lined, sent, together_on
from rookworld.rl.forward import Learner
from rookworld.rl.settings import TrainSettings
from rookworld.rollout.collector import prompt_text, shuffled
from rookworld.rollout.token_values import move_tokens
from rookworld.rollout.types import Prompt
from rookworld.runtime import distributed
from rookworld.runtime.errors import DataError
from rookworld.tasks.notation import read_fen
from rookworld.tasks.policy import MOST_MOVES
from rookworld.tasks.prefix_value import END_OF_LIST
from rookworld.tasks.scorer import Workers
from rookworld.tasks.task import PolicyRow

MOVES_KEPT = 32
"""Of each position, the moves that lists name most often; the others hardly ever are."""
ASKED_AT_ONCE = 2048
"""Positions about which the reference is asked together."""
WITHOUT_PLANS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
"""cuDNN's attention plans for each new size, which takes longer than to attend, and questions are
of ever new sizes: some positions may be turned four ways and some two."""


@dataclass(frozen=True)
class Drilled:
    """Lists as one pass, and what should have been in them."""

    pack: Pack
    agreed: Agreed


class Drill:
    """The positions of a run, and what is known of them, on the policy's device."""

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
        self.kind = torch.int16 if small else torch.int32
        """What ids are kept as: there may be a gigabyte of them."""
        self.heads = np.zeros(count, dtype=np.int64)
        """Tokens of each prompt; 0: it has not had a turn yet."""
        self.asked = np.zeros(count, dtype=np.bool_)
        """Whether the reference has been asked."""
        self.sides = np.zeros(count, dtype=np.int64)
        """From how many sides it is the same question."""
        self.images = torch.zeros(count, SIDES, 0, dtype=self.kind, device=self.device)
        """[positions, sides, tokens], padded."""
        self.moves = torch.zeros(count, 2, MOVES_KEPT, dtype=self.kind, device=self.device)
        self.shares = torch.zeros(count, 2, MOVES_KEPT, device=self.device)
        """How often each of these stands first, and anywhere."""

    def at(self, step: int, workers: Workers | None = None) -> list[Drilled]:
        """This rank's share of what a step drills; `workers` help with what is new."""
        count = self.settings.agreement_prompts
        places = np.arange(step * count, (step + 1) * count)[distributed.share(count)]
        if not len(places):
            return []
        numbers = self.turns(places)
        new = np.unique(numbers[self.heads[numbers] == 0])
        for at in range(0, len(new), ASKED_AT_ONCE):
            self.meet(new[at : at + ASKED_AT_ONCE], workers)
        tokens = int(self.heads[numbers].max()) + MOST_MOVES - 1
        tokens = rounded_up(tokens, together_on(self.device))
        most = max(1, self.settings.micro_tokens // tokens)
        parts = -(-len(places) // most)
        # all of one size or one less: a pass whose size comes back can be recorded
        cuts = zip(np.array_split(numbers, parts), np.array_split(places, parts), strict=True)
        return [self.lined(*cut, tokens) for cut in cuts]

    def turns(self, places: NDArray[np.int64]) -> NDArray[np.int64]:
        """Whose turn it is at each place of the endless stream of positions."""
        count, seed = len(self.fens), self.settings.seed + SEED
        numbers = np.empty_like(places)
        for epoch in np.unique(places // count):
            now = places // count == epoch
            numbers[now] = shuffled(count, seed, int(epoch), 0)[places[now] % count]
        return numbers

    def meet(self, numbers: NDArray[np.int64], workers: Workers | None) -> None:
        """Have positions ready for their first turn; those of a resumed run were asked before."""
        rows = [PolicyRow(self.fen(number), (), ()) for number in numbers]
        ids = self.tokenizer.encode_batch([prompt_text(row, self.tokenizer) for row in rows])
        prompts = [
            Prompt("P", row, tuple(mine), int(number))
            for row, mine, number in zip(rows, ids, numbers, strict=True)
        ]
        self.ask([prompt for prompt in prompts if not self.asked[prompt.key]], workers)
        seen = views(prompts, self.tokenizer, together_on(self.device))
        wider = seen.ids.shape[1] - self.images.shape[2]
        if wider > 0:
            self.images = F.pad(self.images, (0, wider), value=self.tokenizer.eos)
        here = sent(torch.from_numpy(numbers), self.device)
        asked, side = (sent(torch.from_numpy(one), self.device) for one in (seen.asked, seen.sides))
        images = sent(torch.from_numpy(seen.ids).to(self.kind), self.device)
        self.images[here[asked], side, : images.shape[1]] = images
        self.heads[numbers] = [len(prompt.ids) for prompt in prompts]
        self.sides[numbers] = np.bincount(seen.asked)

    def fen(self, number: int) -> str:
        """A position, looked at now: all at the start would keep a run of millions waiting."""
        if (fen := read_fen(self.fens[number])) is None:
            raise DataError(f"--agreement-data: not a FEN: {self.fens[number]!r}")
        return fen

    def ask(self, prompts: Sequence[Prompt], workers: Workers | None) -> None:
        """Find out and keep what the reference agrees on about these positions."""
        if not prompts:
            return
        with sdpa_kernel(WITHOUT_PLANS):
            shares = agreed_shares(prompts, self.learner, self.tokenizer, self.settings, workers)
        kept = shares[..., : self.tokenizer.vocab_size].topk(MOVES_KEPT)
        numbers = [prompt.key for prompt in prompts]
        self.moves[numbers], self.shares[numbers] = kept.indices.to(self.kind), kept.values
        self.asked[numbers] = True

    def tensors(self) -> dict[str, Tensor]:
        """What the reference has said so far, for a checkpoint.

        Asked again beside other positions it would say the same but for its rounding.
        """
        numbers = torch.from_numpy(self.asked.nonzero()[0])
        here = numbers.to(self.device)
        told = {"moves": self.moves[here], "shares": self.shares[here]}
        return told | {"numbers": numbers, "of": torch.tensor(self.fingerprint())}

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        """Know again what `tensors` gave, if it is about the same positions and questions."""
        if tensors.get("of", torch.tensor(0)).item() != self.fingerprint():
            return
        here = tensors["numbers"].to(self.device)
        self.moves[here] = tensors["moves"].to(self.moves)
        self.shares[here] = tensors["shares"].to(self.shares)
        self.asked[tensors["numbers"].numpy()] = True

    def fingerprint(self) -> int:
        """Of everything that answers of the same reference depend on."""
        told = hashlib.sha256(f"{self.settings.seed} {self.settings.agreement_lists}".encode())
        for fen in self.fens:
            told.update(fen.encode())
        return int.from_bytes(told.digest()[:7], "big")

    def lined(self, numbers: NDArray[np.int64], places: NDArray[np.int64], tokens: int) -> Drilled:
        """Positions, each from a side and with a list behind it, as one pass with its targets."""
        here, heads, sides = (
            sent(torch.from_numpy(one), self.device)
            for one in (numbers, self.heads[numbers], self.sides[numbers])
        )
        nobody = np.zeros_like(places)
        keys = row_keys(self.settings.seed + SEED, 1, places, nobody)
        waits = waiting_times(sent(keys, self.device), 1 + 2 * MOVES_KEPT)
        side = torch.minimum((sides * torch.exp(-waits[:, 0])).long(), sides - 1)
        names = sent(torch.from_numpy(called(self.tokenizer)), self.device)
        moves, shares = self.moves[here].long(), self.shares[here]
        moves = names[side[:, None, None], moves]
        lists = self.drawn(moves, shares, waits[:, 1:])
        vocabulary = self.learner.model.config.vocab_size
        table = shares.new_zeros(len(numbers), 2, vocabulary).scatter_(2, moves, shares)
        prompts = self.images[here, side].long()[:, :tokens]
        line = lined(prompts, heads, lists, tokens)
        return Drilled(line, agreed_rows(line, table, self.tokenizer, self.settings))

    def drawn(self, moves: Tensor, shares: Tensor, waits: Tensor) -> Tensor:
        """[positions, five] a list of each, by its targets; filled up with its end."""
        settings = self.settings
        first = sharpened(shares[:, 0], settings.agreement_first_power)
        best = moves[:, 0].gather(1, raced(first, waits[:, :MOVES_KEPT], 1))
        later = sharpened(shares[:, 1], settings.agreement_power)
        later = torch.where(moves[:, 1] == best, -torch.inf, later)
        others = moves[:, 1].gather(1, raced(later, waits[:, MOVES_KEPT:], MOST_MOVES - 1))
        there = (shares[:, 1] > 0).sum(1, keepdim=True)
        place = torch.arange(MOST_MOVES, device=moves.device)
        end = move_tokens(self.tokenizer)[0][END_OF_LIST]
        return torch.where(place < there, torch.cat((best, others), 1), end)
