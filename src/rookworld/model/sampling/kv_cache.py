"""The keys and values that decoding has seen, in two parts.

The *prefix* is one copy per prompt, read by all of its samples; what each sample wrote itself is
its *own*. All rows are at the same own slot and only their prefixes differ in length, so no
position is ever shifted by padding. Law: slots that are not in use hold numbers, for they are read
and hidden behind a bias of -inf, and 0 × nan would be nan.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from rookworld.model.gpt2 import GPT2Config

FIRST_SLOTS = 16
"""Own slots at the start of a decode that grows them; doubled whenever they are used up."""


class KVCache:
    """Keys and values of groups of samples, wherever they lie in memory.

    prefix_*: [layers, groups, heads, slots, head size]
    own_*: [layers, groups, heads, width, slots, head size]
    """

    prefix_keys: Tensor
    prefix_values: Tensor
    own_keys: Tensor
    own_values: Tensor

    def clear_beyond(self, groups: slice, tokens: int) -> None:
        """Forget what an earlier decode left in the prefix slots after `tokens`."""
        for part in (self.prefix_keys, self.prefix_values):
            part[:, groups, :, tokens:].zero_()


class Room(NamedTuple):
    """What a cache must hold: groups of samples, and slots for each prompt and each sample."""

    groups: int
    width: int
    prefix: int
    new: int


class KVArena:
    """One block of memory that is cut into the cache of any batch; only one is in use at a time.

    A group's keys lie together, layer by layer, so a cache of more groups begins like one of fewer.
    """

    def __init__(self, config: GPT2Config, dtype: torch.dtype, device: torch.device) -> None:
        self.config = config
        self.keys, self.values = (torch.zeros(0, dtype=dtype, device=device) for _ in range(2))

    def group_size(self, room: Room) -> int:
        """Numbers in the keys of one group."""
        slots = room.prefix + room.width * room.new
        return self.config.n_layer * self.config.n_embd * slots

    def group_bytes(self, room: Room) -> int:
        return 2 * self.group_size(room) * self.keys.element_size()

    def groups(self, room: Room) -> int:
        """How many such groups there is memory for."""
        return len(self.keys) // self.group_size(room)

    def grow(self, room: Room) -> None:
        """Make memory for `room`; whatever was cut from the old must be gone already."""
        size, like = room.groups * self.group_size(room), self.keys.new_zeros(0)
        self.keys = self.values = like  # freed before the new is asked for
        self.keys, self.values = like.new_zeros(size), like.new_zeros(size)

    def cut(self, room: Room) -> KVCache:
        """The memory as the cache of a batch."""
        config, cache = self.config, KVCache()
        outer = (room.groups, config.n_layer, config.n_head)
        own = (config.n_layer, room.groups, config.n_head, room.width, room.new, config.head_size)
        for name, block in (("keys", self.keys), ("values", self.values)):
            used = block[: room.groups * self.group_size(room)]
            slots = used.view(*outer, -1, config.head_size).transpose(0, 1)
            setattr(cache, f"prefix_{name}", slots[..., : room.prefix, :])
            setattr(cache, f"own_{name}", slots[..., room.prefix :, :].view(own))
        return cache


class GrowingCache(KVCache):
    """A cache with memory of its own, for samples whose slots are made as they are needed."""

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

    def receive(self, source: GrowingCache, groups: Tensor, columns: Tensor) -> None:
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
