"""The rows being sampled together: tensors of one fixed shape that every step updates in place.

Law: a row that is done writes nothing more; every row of a batch is at the same token index, so a
step needs no indices of its own per row and can be captured once and replayed.
Rows are grouped by prompt, [groups, width]; groups and rows beyond the real ones are done at birth.
When many are done, a batch goes on with the others: the CPU copies them to a smaller one, on a GPU
keys and values stay where they are and the rows remember their places (`keep`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from rookworld.model.attention import padding_bias
from rookworld.model.inference import InferenceWeights, decode
from rookworld.model.sampling.kv_cache import GrowingCache, KVCache, Room
from rookworld.model.sampling.token_choice import Rows, choose
from rookworld.runtime.errors import ModelError

Mask = Callable[[Tensor], Tensor]
"""Tokens so far [rows, tokens] -> bool [rows, vocabulary], true where a token may follow."""


class Shape(NamedTuple):
    """What a batch is made for: groups × width rows, slots for prompts and answers, draws."""

    groups: int
    width: int
    prefix: int
    new: int
    truncated: bool = False
    """some row has a top-k or top-p"""
    random: bool = True
    """some row is not greedy"""

    @property
    def rows(self) -> int:
        return self.groups * self.width

    @property
    def room(self) -> Room:
        return Room(self.groups, self.width, self.prefix, self.new)


def round_up(size: int, multiple: int) -> int:
    """The next multiple: many sizes become few."""
    return -(-size // multiple) * multiple


class DecodeBatch:
    """The state of one decode, allocated once for a `Shape`."""

    def __init__(self, weights: InferenceWeights, shape: Shape, cache: KVCache) -> None:
        device, heads = weights.device, weights.config.n_head
        self.weights, self.cache = weights, cache
        self.shape = shape
        """What is in use: at most what all this was made for."""
        self.group_places = torch.arange(shape.groups, device=device)
        """[groups] where the prefix of each group in use lies."""
        self.columns = torch.arange(shape.rows, device=device) % shape.width
        """[rows] which of its group's rows in the cache each row in use is."""
        self.lengths = torch.ones(shape.groups, dtype=torch.int64, device=device)
        self.bias = torch.zeros(shape.groups * heads, 1, shape.prefix, device=device)
        self.padded = True
        self.rows = Rows.idle(shape.rows, device)
        self.last = torch.zeros(shape.rows, dtype=torch.int64, device=device)
        self.eos = torch.zeros(1, dtype=torch.int64, device=device)
        self.index = torch.zeros(1, dtype=torch.int64, device=device)
        self.arrivals = torch.zeros(shape.rows * heads, dtype=torch.int32, device=device)
        """Programs of a kernel that share a row count themselves here, and leave zeros behind."""
        self.tokens = torch.zeros(shape.new, shape.rows, dtype=torch.int64, device=device)
        self.logp = torch.zeros(shape.new, shape.rows, device=device)
        self.entropy = torch.zeros(shape.new, shape.rows, device=device)

    def resize(self, shape: Shape) -> None:
        """Be a batch of this shape, each row at its own place."""
        self.shape = shape
        torch.arange(len(self.group_places), out=self.group_places)
        places = torch.arange(shape.rows, device=self.columns.device)
        self.columns[: shape.rows] = places % shape.width

    def keep(self, shape: Shape, groups: Tensor, columns: Tensor) -> None:
        """Go on as a batch of this shape with some `groups` [n], of each some `columns` [n, width].

        Keys and values stay where they are.
        """
        rows = (groups[:, None] * self.shape.width + columns).flatten()
        count, self.shape = len(rows), shape
        self.group_places[: len(groups)] = self.group_places[groups]
        self.columns[:count] = self.columns[rows]
        self._set_lengths(self.lengths[groups])
        self.rows.receive(self.rows.take(rows))
        self.last[:count] = self.last[rows]
        for one in self.outputs():
            one[:, :count] = one[:, rows]

    def done(self) -> Tensor:
        """[groups, width] of those in use."""
        return self.rows.done[: self.shape.rows].view(self.shape.groups, self.shape.width)

    def begin(self, lengths: Tensor, rows: Rows, eos: int) -> None:
        """Take in a new request; the prefix is the caller's to fill."""
        self._set_lengths(lengths)
        self.rows.receive(rows)
        self.eos.fill_(eos)
        self.index.zero_()
        self.tokens.fill_(eos)
        self.logp.zero_()
        self.entropy.zero_()

    def _set_lengths(self, lengths: Tensor) -> None:
        self.lengths.fill_(1)
        self.lengths[: len(lengths)].copy_(lengths)
        slots, heads = self.bias.shape[-1], self.weights.config.n_head
        self.bias.copy_(padding_bias(self.lengths, slots, heads))

    def outputs(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.tokens, self.logp, self.entropy

    def record(self, token: Tensor, logp: Tensor, entropy: Tensor) -> None:
        """Write one token of every row that is not done, and see which now are."""
        done = self.rows.done
        token = torch.where(done, self.eos, token)
        self.tokens.index_copy_(0, self.index, token[None])
        self.logp.index_copy_(0, self.index, logp.masked_fill(done, 0)[None])
        self.entropy.index_copy_(0, self.index, entropy.masked_fill(done, 0)[None])
        # An end token that never comes is -1, and a row that is done is still fed.
        self.last.copy_(token.clamp_min(0))
        self.index.add_(1)
        done.logical_or_((token == self.eos) | (self.index >= self.rows.limits))

    def choose(self, logits: Tensor, mask: Mask | None = None, used: int = 0) -> None:
        """Draw the next token of every row from `logits` [rows, vocabulary] and record it."""
        if mask is not None:
            allowed = mask(self.tokens[:used].T)
            if not bool((allowed.any(-1) | self.rows.done).all()):
                raise ModelError("the constraint leaves a row without any token to continue with")
            logits = logits.masked_fill(~allowed, -torch.inf)
        kind = {"truncated": self.shape.truncated, "random": self.shape.random}
        self.record(*choose(logits, self.rows, self.index, **kind))

    def logits(self, slot: int) -> Tensor:
        """Scores for the next token of every row, after feeding the last one at own `slot`."""
        # A row that is done may stand beyond the last position while its neighbours go on.
        positions = (self.lengths[:, None] + slot).clamp_max(self.weights.config.n_positions - 1)
        positions = positions.expand(self.shape.groups, self.shape.width)
        ids = self.last.view(self.shape.groups, self.shape.width)
        bias = self.bias if self.padded else None
        return decode(self.weights, self.cache, ids, positions, slot, bias)


class GrowingBatch(DecodeBatch):
    """A batch with a cache of its own, all of whose rows are in use."""

    cache: GrowingCache

    def __init__(self, weights: InferenceWeights, shape: Shape) -> None:
        # On the CPU fp32: its batched bf16 products of one query are three times slower.
        dtype = torch.float32 if weights.device.type == "cpu" else weights.dtype
        cache = GrowingCache(weights.config, shape.room, dtype, weights.device)
        super().__init__(weights, shape, cache)

    def receive(self, other: GrowingBatch, groups: Tensor, columns: Tensor) -> None:
        """Continue with some `groups` [n] of `other`, each with some `columns` [n, width]."""
        rows = (groups[:, None] * other.shape.width + columns).flatten()
        self.padded = other.padded
        self._set_lengths(other.lengths[groups])
        self.rows.receive(other.rows.take(rows))
        self.cache.receive(other.cache, groups, columns)
        self.eos.copy_(other.eos)
        self.index.copy_(other.index)
        self.last[: len(rows)].copy_(other.last[rows])
        for mine, theirs in zip(self.outputs(), other.outputs(), strict=True):
            mine[:, : len(rows)].copy_(theirs[:, rows])
