"""What the sampler computed, kept so that the update of its completions need not compute it again.

The policy does not change between sampling and the first update, whose forward pass would make
every matrix product of the sampler once more. Laws: with the store or without, a gradient is the
same but for rounding; a store that would outgrow its limit forgets everything, and completions are
the same whether it does or not. For the CPU, where products are most of a step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from rookworld.model.kernels import cpu
from rookworld.runtime.errors import ModelError

if TYPE_CHECKING:
    from rookworld.model.inference import Dense, InferenceWeights, Layer


class BlockOutputs(NamedTuple):
    """The outputs of a block's linear layers, [tokens, …] each: attention's two, the MLP's two."""

    attend: Tensor
    project: Tensor
    widen: Tensor
    narrow: Tensor


def linear(layer: nn.Linear, x: Tensor, known: Tensor | None) -> Tensor:
    """`layer(x)`; where it is `known` it is not multiplied again, and has the same gradients."""
    if known is None:
        made: Tensor = layer(x)
        return made
    apply: Callable[..., Tensor] = _KnownLinear.apply
    return apply(x, layer.weight, layer.bias, known.view(*x.shape[:-1], -1))


class _KnownLinear(torch.autograd.Function):
    """x, weight, bias and their product, in the precision it was made in -> the latter."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, known: Tensor) -> Tensor:
        ctx.dtypes, ctx.shape = (x.dtype, weight.dtype, bias.dtype), x.shape
        of_x, of_weight, *_ = ctx.needs_input_grad
        ctx.save_for_backward(
            x.to(known.dtype) if of_weight else None, weight.to(known.dtype) if of_x else None
        )
        return known

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        rows = gradient.flatten(0, -2)
        to_x, to_weight, to_bias = ctx.dtypes
        of_x = of_weight = of_bias = None
        if ctx.needs_input_grad[0]:
            of_x = matmul(rows, weight).view(ctx.shape).to(to_x)
        if ctx.needs_input_grad[1]:
            of_weight = (rows.t() @ x.flatten(0, -2)).to(to_weight)
        if ctx.needs_input_grad[2]:
            of_bias = rows.sum(0).to(to_bias)
        return of_x, of_weight, of_bias, None


def matmul(x: Tensor, weight: Tensor) -> Tensor:
    """x [rows, out] @ weight [out, in]."""
    if cpu.multiplies(x.device, x.dtype):
        return cpu.linear(x, weight.t(), None)
    return x @ weight


class _PromptRows(NamedTuple):
    """Where a prompt is in the store."""

    row: int
    tokens: int
    """With the padding that it was fed with."""


class _TokenRows(NamedTuple):
    """Tokens of completions that were fed together."""

    slot: int
    """Which token of their completions."""
    completions: Tensor
    row: int
    """Of the first."""


class ActivationStore:
    """Block outputs of requests for `k` completions to each prompt; prompts are named by keys.

    It holds `most` tokens; with 0 it only makes the sampler round as if there were a store.
    """

    def __init__(self, k: int, most: int) -> None:
        self.k, self.most = k, most
        self.full = most == 0
        self.numbers: dict[int, int] = {}
        """Of prompts, by their keys."""
        self.first = 0
        """The number of the present request's first prompt."""
        self.prompts: dict[int, _PromptRows] = {}
        """By a prompt's number."""
        self.tokens: list[_TokenRows] = []
        self.rows = 0
        self.parts: list[list[BlockOutputs]] = []
        """The outputs of all blocks, [rows, …] each, for the tokens of a pass."""

    # --- recording ------------------------------------------------------------------------------

    def begin_request(self, keys: Sequence[int], k: int) -> None:
        """Completions to the prompts of these keys are sampled next."""
        self.first = len(self.numbers)
        self.numbers |= {key: number for number, key in enumerate(keys, self.first)}
        if k != self.k or len(self.numbers) != self.first + len(keys):
            raise ModelError(
                f"an activation store takes {self.k} completions to each prompt, and no key twice"
            )

    @contextmanager
    def recording(self, weights: InferenceWeights) -> Iterator[None]:
        """Have all linear layers record; whoever feeds tokens then says which they were."""
        self._record_next(weights)
        try:
            yield
        finally:
            weights.record(False, separate_gelu=False)

    def _record_next(self, weights: InferenceWeights) -> None:
        weights.record(not self.full, separate_gelu=True)

    def add_prompts(
        self, weights: InferenceWeights, places: Sequence[int], lengths: Tensor
    ) -> None:
        """Keep the pass of the request's prompts at `places`, which were fed some at a time."""
        if self.full:
            return
        *earlier, last = weights.layers
        sizes = [part.shape[:2] for part in last.key_value.recorded or ()]
        ends = torch.split(lengths - 1, [count for count, _ in sizes])
        left = iter(places)
        for part, (count, tokens) in enumerate(sizes):
            for row in range(self.rows, self.rows + count * tokens, tokens):
                self.prompts[self.first + next(left)] = _PromptRows(row, tokens)
            outputs = [_recorded(layer, part) for layer in earlier]
            self._append([*outputs, _recorded_at_ends(last, part, ends[part])])
        self._record_next(weights)

    def add_tokens(self, weights: InferenceWeights, slot: int, completions: Tensor) -> None:
        """Keep the pass of one token of each of the request's `completions`, at their `slot`."""
        if self.full:
            return
        self.tokens.append(_TokenRows(slot, self.first * self.k + completions, self.rows))
        self._append([_recorded(layer, part=0) for layer in weights.layers])
        self._record_next(weights)

    def _append(self, outputs: Sequence[BlockOutputs]) -> None:
        part = [BlockOutputs(*(one.flatten(0, -2) for one in layer)) for layer in outputs]
        self.rows += len(part[0].attend)
        self.full = self.full or self.rows > self.most
        self.parts = [] if self.full else [*self.parts, part]

    # --- reading --------------------------------------------------------------------------------

    @torch.no_grad()
    def line(
        self, keys: Sequence[int], head: int, tail: int, sources: Tensor
    ) -> list[BlockOutputs] | None:
        """Outputs of a line of prompts, `head` tokens each, and behind them their completions.

        A completion has `tail` tokens; padding gets zeros. Behind the last layer's attention only
        the `sources` of the line are given. None where something is not in the store.
        """
        if self.full or not all(key in self.numbers for key in keys):
            return None
        rows = self._rows(keys, head, tail)
        real, padding = (rows >= 0).nonzero()[:, 0], (rows < 0).nonzero()[:, 0]
        places = torch.full((self.rows,), -1).index_copy_(0, rows[real], real)
        each = torch.split(places, [len(part[0].attend) for part in self.parts])
        taken = [(there >= 0).nonzero()[:, 0] for there in each]
        targets = [there[some] for there, some in zip(each, taken, strict=True)]

        def gathered(layer: int, output: int) -> Tensor:
            kept = [part[layer][output] for part in self.parts]
            whole = kept[0].new_empty(len(rows), kept[0].shape[1])
            whole.index_fill_(0, padding, 0)
            for one, some, there in zip(kept, taken, targets, strict=True):
                whole.index_copy_(0, there, one if len(some) == len(one) else one[some])
            return whole

        *earlier, last = range(len(self.parts[0]))
        outputs = [BlockOutputs(*(gathered(layer, one) for one in range(4))) for layer in earlier]
        later = (gathered(last, one)[sources] for one in (1, 2, 3))
        return [*outputs, BlockOutputs(gathered(last, 0), *later)]

    def _rows(self, keys: Sequence[int], head: int, tail: int) -> Tensor:
        """The row of each token of such a line; -1 for padding."""
        numbers = [self.numbers[key] for key in keys]
        first, tokens = torch.tensor([self.prompts[number] for number in numbers]).T[:, :, None]
        place = torch.arange(head)
        prompts = torch.where(place < tokens, first + place, -1)
        completions = torch.full((len(self.numbers) * self.k, tail), -1)
        for fed in self.tokens:
            if fed.slot < tail:
                there = torch.arange(fed.row, fed.row + len(fed.completions))
                completions[fed.completions, fed.slot] = there
        completions = completions.view(-1, self.k, tail)[numbers]
        return torch.cat([prompts.flatten(), completions.flatten()])


def _recorded(layer: Layer, part: int) -> BlockOutputs:
    """What a layer's four products were when the part was fed."""
    return BlockOutputs(*(_at(dense, part) for dense in layer.four))


def _at(dense: Dense, part: int) -> Tensor:
    assert dense.recorded is not None
    return dense.recorded[part]


def _recorded_at_ends(layer: Layer, part: int, ends: Tensor) -> BlockOutputs:
    """The same of the last layer in a prefill, where only prompts' ends go on behind attention."""
    key_value = _at(layer.key_value, part)
    count, tokens, _ = key_value.shape

    def whole(x: Tensor) -> Tensor:
        room = x.new_zeros(count, tokens, x.shape[-1])
        room[torch.arange(count), ends] = x
        return room

    _, *later = layer.four
    query, *rest = (whole(_at(dense, part)) for dense in (layer.query, *later))
    return BlockOutputs(torch.cat([query, key_value], -1), *rest)
