"""The keys and values that decoding has seen, in two parts.

The *prefix* is one copy per prompt, read by all of its samples; what each sample wrote itself is
its *own*. All rows are at the same own slot and only their prefixes differ in length, so no
position is ever shifted by padding. Law: slots that are not in use hold numbers, for they are read
and hidden behind a bias of -inf, and 0 × nan would be nan.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from rookworld.model.gpt2 import GPT2Config

FIRST_SLOTS = 16
"""Own slots at the start of a decode that grows them; doubled whenever they are used up."""


class KVCache:
    """Room for `groups` prompts of up to `prefix` tokens, with `width` samples of up to `own` each.

    prefix_*: [layers, groups, heads, slots, head size]
    own_*: [layers, groups, heads, width, slots, head size]
    """

    def __init__(
        self,
        config: GPT2Config,
        shape: tuple[int, int, int, int],
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        groups, width, prefix, self.most = shape
        outer, inner = (config.n_layer, groups, config.n_head), config.head_size

        def zeros(*sizes: int) -> Tensor:
            return torch.zeros(*outer, *sizes, dtype=dtype, device=device)

        self.prefix_keys, self.prefix_values = zeros(prefix, inner), zeros(prefix, inner)

        def own(slots: int) -> tuple[Tensor, Tensor]:
            return zeros(width, slots, inner), zeros(width, slots, inner)

        self.make_own: Callable[[int], tuple[Tensor, Tensor]] = own
        self.rooms: dict[int, tuple[Tensor, Tensor]] = {}
        self.restart_own()

    def resize_own(self, slots: int) -> None:
        """Give every row's own part `slots`, what is in there now undefined.

        Each size has a room where a row's slots lie next to the next row's: read with gaps in
        between, memory is three times slower on the CPU, which is worth a copy at every doubling.
        """
        if slots not in self.rooms:
            self.rooms[slots] = self.make_own(slots)
        self.own_keys, self.own_values = self.rooms[slots]

    def restart_own(self) -> None:
        self.resize_own(min(FIRST_SLOTS, self.most))

    def make_room_for(self, slot: int) -> None:
        """Grow own, if need be, until it has the slot `slot`."""
        old, slots = (self.own_keys, self.own_values), self.own_keys.shape[-2]
        if slot >= slots:
            self.resize_own(min(2 * slots, self.most))
            for new, kept in zip((self.own_keys, self.own_values), old, strict=True):
                new[..., :slots, :].copy_(kept)

    def clear_beyond(self, groups: slice, tokens: int) -> None:
        """Forget what an earlier decode left in the prefix slots after `tokens`."""
        for part in (self.prefix_keys, self.prefix_values):
            part[:, groups, :, tokens:].zero_()

    def receive(self, source: KVCache, groups: Tensor, columns: Tensor) -> None:
        """Copy some `groups` [n] of `source`, each with some of its `columns` [n, width]."""
        count, slots = len(groups), source.own_keys.shape[-2]
        self.resize_own(slots)
        self.prefix_keys[:, :count].copy_(source.prefix_keys[:, groups])
        self.prefix_values[:, :count].copy_(source.prefix_values[:, groups])
        for mine, other in (
            (self.own_keys, source.own_keys),
            (self.own_values, source.own_values),
        ):
            for layer in range(len(mine)):
                kept = other[layer][groups[:, None], :, columns]
                mine[layer, :count].copy_(kept.transpose(1, 2))
