"""What a sampler's products found, so that the update of its answers need not multiply again.

A policy does not change between its answers and their first update, whose pass forward would make
every product of the sampler's passes once more. Laws: with a tape or without, a gradient is the
same but for rounding; a tape that would outgrow its limit forgets everything, and answers are the
same whether it does or not. For the CPU, where products are most of a step.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor

from rookworld.model.products import Products
from rookworld.model.sampling.decoder import Dense, Layer, Weights
from rookworld.runtime.errors import ModelError


class Head(NamedTuple):
    """Where a prompt is on a tape."""

    row: int
    tokens: int
    """With the padding that it was fed with."""


class Fed(NamedTuple):
    """Tokens of answers that were fed together."""

    slot: int
    """Which token of their answers."""
    answers: Tensor
    row: int
    """Of the first."""


class Tape:
    """Of requests for `k` answers to each of some prompts, which have keys of their own.

    It holds `most` tokens; one of none only has a sampler round as if there were a tape.
    """

    def __init__(self, k: int, most: int) -> None:
        self.k, self.most = k, most
        self.full = most == 0
        self.numbers: dict[int, int] = {}
        """Of prompts, by their keys."""
        self.first = 0
        """The number of the present request's first prompt."""
        self.heads: dict[int, Head] = {}
        """By a prompt's number."""
        self.fed: list[Fed] = []
        self.rows = 0
        self.parts: list[list[Products]] = []
        """What all layers' products found, [rows, …] each, for the tokens of a pass."""

    # --- recording ------------------------------------------------------------------------------

    def request(self, keys: Sequence[int], k: int) -> None:
        """Answers to the prompts of these keys are asked for next."""
        self.first = len(self.numbers)
        self.numbers |= {key: number for number, key in enumerate(keys, self.first)}
        if k != self.k or len(self.numbers) != self.first + len(keys):
            raise ModelError(f"a tape takes {self.k} answers to each prompt, and no key twice")

    @contextmanager
    def listening(self, weights: Weights) -> Iterator[None]:
        """Have all products heard; whoever feeds tokens then says which they were."""
        self._listen(weights)
        try:
            yield
        finally:
            weights.listen(False, gelu_apart=False)

    def _listen(self, weights: Weights) -> None:
        weights.listen(not self.full, gelu_apart=True)

    def prompts(self, weights: Weights, places: Sequence[int], lengths: Tensor) -> None:
        """The request's prompts at `places` were fed, some at a time."""
        if self.full:
            return
        *earlier, last = weights.layers
        sizes = [part.shape[:2] for part in last.key_value.heard or ()]
        ends = torch.split(lengths - 1, [count for count, _ in sizes])
        left = iter(places)
        for part, (count, tokens) in enumerate(sizes):
            for row in range(self.rows, self.rows + count * tokens, tokens):
                self.heads[self.first + next(left)] = Head(row, tokens)
            found = [_heard(layer, part) for layer in earlier]
            self._keep([*found, _heard_at_ends(last, part, ends[part])])
        self._listen(weights)

    def answers(self, weights: Weights, slot: int, answers: Tensor) -> None:
        """A token of each of the request's `answers` was fed, at their own `slot`."""
        if self.full:
            return
        self.fed.append(Fed(slot, self.first * self.k + answers, self.rows))
        self._keep([_heard(layer, part=0) for layer in weights.layers])
        self._listen(weights)

    def _keep(self, found: Sequence[Products]) -> None:
        part = [Products(*(one.flatten(0, -2) for one in layer)) for layer in found]
        self.rows += len(part[0].attend)
        self.full = self.full or self.rows > self.most
        self.parts = [] if self.full else [*self.parts, part]

    # --- playing --------------------------------------------------------------------------------

    @torch.no_grad()
    def play(
        self, keys: Sequence[int], head: int, tail: int, sources: Tensor
    ) -> list[Products] | None:
        """What was found for a line of prompts, `head` tokens each, and behind them their answers.

        An answer has `tail` tokens; padding gets zeros. Behind the last layer's attention only the
        `sources` of the line are told. None where something is not on the tape.
        """
        if self.full or not all(key in self.numbers for key in keys):
            return None
        rows = self._rows(keys, head, tail)
        real, padding = (rows >= 0).nonzero()[:, 0], (rows < 0).nonzero()[:, 0]
        places = torch.full((self.rows,), -1).index_copy_(0, rows[real], real)
        each = torch.split(places, [len(part[0].attend) for part in self.parts])
        taken = [(there >= 0).nonzero()[:, 0] for there in each]
        targets = [there[some] for there, some in zip(each, taken, strict=True)]

        def line(layer: int, product: int) -> Tensor:
            found = [part[layer][product] for part in self.parts]
            whole = found[0].new_empty(len(rows), found[0].shape[1])
            whole.index_fill_(0, padding, 0)
            for one, some, there in zip(found, taken, targets, strict=True):
                whole.index_copy_(0, there, one if len(some) == len(one) else one[some])
            return whole

        *earlier, last = range(len(self.parts[0]))
        played = [Products(*(line(layer, one) for one in range(4))) for layer in earlier]
        later = (line(last, one)[sources] for one in (1, 2, 3))
        return [*played, Products(line(last, 0), *later)]

    def _rows(self, keys: Sequence[int], head: int, tail: int) -> Tensor:
        """Where each token of such a line is on the tape; -1 where it is not, being padding."""
        numbers = [self.numbers[key] for key in keys]
        first, tokens = torch.tensor([self.heads[number] for number in numbers]).T[:, :, None]
        place = torch.arange(head)
        prompts = torch.where(place < tokens, first + place, -1)
        answers = torch.full((len(self.numbers) * self.k, tail), -1)
        for fed in self.fed:
            if fed.slot < tail:
                answers[fed.answers, fed.slot] = fed.row + torch.arange(len(fed.answers))
        answers = answers.view(-1, self.k, tail)[numbers]
        return torch.cat([prompts.flatten(), answers.flatten()])


def _heard(layer: Layer, part: int) -> Products:
    """What was heard of a layer when the part was fed."""
    return Products(*(_at(dense, part) for dense in layer.four))


def _at(dense: Dense, part: int) -> Tensor:
    assert dense.heard is not None
    return dense.heard[part]


def _heard_at_ends(layer: Layer, part: int, ends: Tensor) -> Products:
    """The same of the last layer in a prefill, where only prompts' ends go on behind attention."""
    key_value = _at(layer.key_value, part)
    count, tokens, _ = key_value.shape

    def whole(x: Tensor) -> Tensor:
        room = x.new_zeros(count, tokens, x.shape[-1])
        room[torch.arange(count), ends] = x
        return room

    _, *later = layer.four
    query, *rest = (whole(_at(dense, part)) for dense in (layer.query, *later))
    return Products(torch.cat([query, key_value], -1), *rest)
