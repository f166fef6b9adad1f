# mypy: ignore-errors
"""Attention of one decode step in Triton: several rows of a prompt read its keys together.

Law: the numbers of one softmax over a row's prefix, its own slots and its newest token, up to the
order of sums; a row that is done may hold any finite numbers. A program takes some rows of one
group and one head: their queries, 16 to a tile, meet a block of the prefix in one product, and then
a block of slots of all these rows, of which each query keeps its own row's. So memory is read once
per program and the tensor cores, idle otherwise, do the work that is thrown away.
Few rows leave most of a GPU idle, so several programs may share a row's slots; who of them is done
last puts their softmaxes together, always in the same order.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from rookworld.model.kernels.triton_launch import await_previous, begin, early
from rookworld.model.sampling.decode_batch import DecodeBatch

TILE = 16
"""Queries in a product, the fewest that tensor cores take; rows that are missing are zeros."""
PROGRAMS = 192
"""Three for two multiprocessors of a large GPU: with fewer, it waits instead of reading."""
NOTHING = tl.constexpr(-1e30)
"""The highest score of a program that has met no slot yet; finite, so that it may be taken off."""


class Plan(NamedTuple):
    """How the work is cut."""

    rows: int
    """rows of a group in one program, a power of two"""
    prefix: int
    """slots of the prefix in one block"""
    own: int
    """own slots in one block, those of all rows together"""
    warps: int
    stages: int
    splits: int = 1
    """programs that share the slots of the same rows"""


def plan(batch: DecodeBatch) -> Plan:
    (groups, width, *_), config = batch.shape, batch.weights.config
    rows = min(TILE, triton.next_power_of_2(width))

    def programs() -> int:
        return groups * triton.cdiv(width, rows) * config.n_head

    while rows > 1 and programs() < PROGRAMS:
        rows //= 2
    if batch.cache.own_keys.dtype is torch.float32:
        # Without tensor cores a block lives in registers.
        return Plan(rows, prefix=32, own=32, warps=4, stages=1)
    if programs() < 2 * PROGRAMS:
        # One row's blocks one after the other would take longer than all of them to read.
        return Plan(rows, prefix=32, own=32, warps=1, stages=3, splits=4)
    slots = 64 if config.head_size <= 64 else 32
    return Plan(rows, prefix=slots, own=slots, warps=4, stages=3)


def attend(
    batch: DecodeBatch, index: int, qkv: Tensor, seen: Tensor, bias: Tensor | None = None
) -> None:
    """`seen` [rows, width] of a layer from `qkv` [rows, 3 × width]; writes keys and values.

    With a `bias` what is given are fp32 parts [parts, rows, 3 × width] that sum to `qkv` less it.
    """
    cache, (groups, width, *_) = batch.cache, batch.shape
    heads, size = batch.weights.config.n_head, batch.weights.config.head_size
    rows, prefix, own, warps, stages, splits = plan(batch)
    prefix_keys, own_keys = cache.prefix_keys[index], cache.own_keys[index]
    shared = (splits, batch.shape.rows, heads) if splits > 1 else (1, 1, 1)
    _attend_kernel[(groups * triton.cdiv(width, rows), heads, splits)](
        qkv, seen if bias is None else bias, seen,
        torch.empty(*shared, size, device=seen.device),
        torch.empty(2, *shared, device=seen.device), batch.arrivals,
        prefix_keys, cache.prefix_values[index], own_keys, cache.own_values[index],
        batch.lengths, batch.index, batch.rows.done.view(torch.uint8), batch.group_places,
        batch.columns,
        *prefix_keys.stride()[:2], *own_keys.stride()[:3],
        width, batch.shape.rows * 3 * heads * size, size**-0.5,
        HEADS=heads, SIZE=size, BLOCK_D=max(16, triton.next_power_of_2(size)), ROWS=rows,
        TILE=TILE, PREFIX=prefix, OWN=own, PARTS=0 if bias is None else len(qkv), SPLITS=splits,
        num_warps=warps, num_stages=stages, **early(seen.device),
    )  # fmt: skip


@triton.jit
def _meet(q, key, value, shown, scale, top, total, sums):
    """Carry an online softmax, in powers of two, over one block of slots."""
    scores = tl.dot(q, tl.trans(key), input_precision="ieee") * scale
    scores = tl.where(shown, scores, -float("inf"))
    higher = tl.maximum(top, tl.max(scores, 1))
    fade = tl.exp2(top - higher)
    p = tl.exp2(scores - higher[:, None])
    total = total * fade + tl.sum(p, 1)
    sums = tl.dot(p.to(value.dtype), value, sums * fade[:, None], input_precision="ieee")
    return higher, total, sums


@triton.jit
def _share(length, split, BLOCK: tl.constexpr, SPLITS: tl.constexpr):
    """From where to where a program reads of `length` slots: whole blocks, but for the last."""
    size = tl.cdiv(tl.cdiv(length, SPLITS), BLOCK) * BLOCK
    return split * size, tl.minimum(length, (split + 1) * size)


@triton.jit
def _attend_prefix(
    q, keys, values, first, last, scale, top, total, sums, d, live,
    SIZE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Every query over the slots from `first` to `last` at `keys` and `values`."""
    n = tl.arange(0, BLOCK)
    for start in range(first, last, BLOCK):
        inside = start + n < last
        at = (start + n)[:, None] * SIZE + d[None, :]
        mask = inside[:, None] & live[None, :]
        key = tl.load(keys + at, mask=mask, other=0.0)
        value = tl.load(values + at, mask=mask, other=0.0)
        top, total, sums = _meet(q, key, value, inside[None, :], scale, top, total, sums)
    return top, total, sums


@triton.jit
def _attend_own(
    q, keys, values, first, last, going, row, scale, top, total, sums, d, live,
    SIZE: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Each query over slots of its own row, which begin at `row` for each lane of a block.

    A block holds the same few slots of every row; those not `going` are not read.
    """
    SLOTS: tl.constexpr = BLOCK // ROWS
    owner = tl.arange(0, BLOCK) // SLOTS
    n = tl.arange(0, BLOCK) % SLOTS
    theirs = tl.arange(0, TILE)[:, None] == owner[None, :]
    for start in range(first, last, SLOTS):
        inside = going & (start + n < last)
        at = (row + (start + n) * SIZE)[:, None] + d[None, :]
        mask = inside[:, None] & live[None, :]
        key = tl.load(keys + at, mask=mask, other=0.0)
        value = tl.load(values + at, mask=mask, other=0.0)
        shown = theirs & inside[None, :]
        top, total, sums = _meet(q, key, value, shown, scale, top, total, sums)
    return top, total, sums


@triton.jit
def _newest(at, bias, mask, live, d, size, PARTS: tl.constexpr):
    """A row's newest query, key or value, whole or summed up from parts `size` apart, in fp32."""
    found = tl.load(at, mask=mask, other=0.0).to(tl.float32)
    for part in tl.static_range(1, PARTS):
        found += tl.load(at + part * size, mask=mask, other=0.0)
    if PARTS > 0:
        found += tl.load(bias + d, mask=live, other=0.0).to(tl.float32)[None, :]
    return found


@triton.jit
def _put_together(
    top, total, sums, out, shares, tops, arrived, at, place, rows, mask, here,
    HEADS: tl.constexpr, SIZE: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """Leave a share of a softmax behind; who is last writes the whole, summed in their order."""
    split = tl.program_id(2).to(tl.int64)
    tl.store(shares + split * rows * HEADS * SIZE + at, sums, mask=mask)
    tl.store(tops + split * rows * HEADS + place, top, mask=here)
    tl.store(tops + (SPLITS + split) * rows * HEADS + place, total, mask=here)
    # All of the program has written before it says so.
    tl.debug_barrier()
    if tl.atomic_add(arrived, 1, sem="acq_rel") == SPLITS - 1:
        highest = tl.full(top.shape, NOTHING, tl.float32)
        for other in tl.static_range(SPLITS):
            one = tops + other * rows * HEADS + place
            highest = tl.maximum(highest, tl.load(one, mask=here, cache_modifier=".cg"))
        total = tl.zeros(total.shape, tl.float32)
        sums = tl.zeros(sums.shape, tl.float32)
        for other in tl.static_range(SPLITS):
            one = tops + other * rows * HEADS + place
            weight = tl.exp2(tl.load(one, mask=here, cache_modifier=".cg") - highest)
            one += SPLITS * rows * HEADS
            total += weight * tl.load(one, mask=here, other=1.0, cache_modifier=".cg")
            share = shares + other * rows * HEADS * SIZE + at
            sums += weight[:, None] * tl.load(share, mask=mask, cache_modifier=".cg")
        tl.store(out + at, (sums / total[:, None]).to(out.dtype.element_ty), mask=mask)
        tl.store(arrived, 0)


@triton.jit
def _begin_softmax(q, key, value, scale, split):
    """The newest token starts a softmax out of registers; of programs that share, the first's."""
    top = tl.sum(q.to(tl.float32) * key.to(tl.float32), 1) * scale
    total = tl.full(top.shape, 1.0, tl.float32)
    sums = value.to(tl.float32)
    if split > 0:
        top = tl.full(top.shape, NOTHING, tl.float32)
        total = tl.zeros(top.shape, tl.float32)
        sums = tl.zeros(sums.shape, tl.float32)
    return top, total, sums


@triton.jit
def _newest_three(
    qkv, bias, row, head, mask, live, d, part_size, kind: tl.constexpr,
    HEADS: tl.constexpr, SIZE: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Query, key and value of each row's newest token."""
    third = HEADS * SIZE
    at = qkv + row[:, None] * (3 * third) + head * SIZE + d[None, :]
    bias += head * SIZE
    q = _newest(at, bias, mask, live, d, part_size, PARTS)
    key = _newest(at + third, bias + third, mask, live, d, part_size, PARTS)
    value = _newest(at + 2 * third, bias + 2 * third, mask, live, d, part_size, PARTS)
    return q.to(kind), key.to(kind), value.to(kind)


@triton.jit
def _attend_kernel(
    qkv, bias, seen, shares, tops, arrivals,
    prefix_keys, prefix_values, own_keys, own_values, lengths, index, done, places, columns,
    prefix_group, prefix_head, own_group, own_head, own_row, width, part_size, scale,
    HEADS: tl.constexpr, SIZE: tl.constexpr, BLOCK_D: tl.constexpr, ROWS: tl.constexpr,
    TILE: tl.constexpr, PREFIX: tl.constexpr, OWN: tl.constexpr, PARTS: tl.constexpr,
    SPLITS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    begin(EARLY)
    # Programs of one group run next to each other, so they meet its prefix in the cache.
    parts = tl.cdiv(width, ROWS)
    group = (tl.program_id(0) // parts).to(tl.int64)
    first = tl.program_id(0) % parts * ROWS
    head = tl.program_id(1).to(tl.int64)
    split = tl.program_id(2)
    d = tl.arange(0, BLOCK_D)
    live = d < SIZE
    m = tl.arange(0, TILE)
    here = (m < ROWS) & (first + m < width)
    row = group * width + first + m
    mask = here[:, None] & live[None, :]

    # Of this step only the newest token is not there yet.
    slot = tl.load(index).to(tl.int32) - 1
    owner = first + tl.arange(0, OWN) // (OWN // ROWS)
    going = tl.load(done + group * width + owner, mask=owner < width, other=1) == 0
    column = tl.load(columns + group * width + owner, mask=owner < width, other=0)
    alive = tl.load(done + row, mask=here, other=1) == 0
    to_column = tl.load(columns + row, mask=here, other=0)
    place = tl.load(places + group)
    awake = tl.max(going.to(tl.int32), 0)
    length = tl.load(lengths + group).to(tl.int32) * awake
    prefix = place * prefix_group + head * prefix_head
    own = place * own_group + head * own_head
    prefix_first, prefix_last = _share(length, split, PREFIX, SPLITS)
    own_first, own_last = _share(slot * awake, split, OWN // ROWS, SPLITS)

    await_previous(EARLY)
    kind: tl.constexpr = own_keys.dtype.element_ty
    q, key, value = _newest_three(
        qkv, bias, row, head, mask, live, d, part_size, kind, HEADS, SIZE, PARTS
    )
    if split == 0:
        # Where a row that is done has its slots, by now another may have them.
        fresh = own + to_column[:, None] * own_row + slot * SIZE + d[None, :]
        tl.store(own_keys + fresh, key, mask=mask & alive[:, None])
        tl.store(own_values + fresh, value, mask=mask & alive[:, None])

    # What was just stored is not read back.
    scale *= 1.4426950408889634
    top, total, sums = _begin_softmax(q, key, value, scale, split)
    top, total, sums = _attend_prefix(
        q, prefix_keys + prefix, prefix_values + prefix, prefix_first, prefix_last, scale,
        top, total, sums, d, live, SIZE, PREFIX,
    )  # fmt: skip
    top, total, sums = _attend_own(
        q, own_keys + own, own_values + own, own_first, own_last, going, column * own_row, scale,
        top, total, sums, d, live, SIZE, ROWS, TILE, OWN,
    )  # fmt: skip
    to = row[:, None] * (HEADS * SIZE) + head * SIZE + d[None, :]
    if SPLITS == 1:
        tl.store(seen + to, (sums / total[:, None]).to(seen.dtype.element_ty), mask=mask)
    else:
        rows = tl.num_programs(0) // parts * width
        _put_together(
            top, total, sums, seen, shares, tops, arrivals + tl.program_id(0) * HEADS + head,
            to, row * HEADS + head, rows, mask, here, HEADS, SIZE, SPLITS,
        )  # fmt: skip
