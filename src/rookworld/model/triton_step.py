# mypy: ignore-errors
"""One decode step for CUDA in Triton: embed, norm, attend and choose, between cuBLAS products.

Law: the same numbers as `Batch.choose(Batch.logits(slot))`, up to the order of sums, and the same
noise bit by bit. Each kernel reads what it must once: attention stops at a row's own length and
meets a prompt's keys once for all its samples in the L2 cache; drawing a token takes a single pass
over its logits. Imported only where CUDA is: Triton is no dependency of its own.
Left out: top-k and top-p, which take the plain path after the logits.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .batch import Batch
from .decoder import Norm, Weights

SLOTS_PER_BLOCK, ATTEND_WARPS = 64, 4
TOKENS_PER_BLOCK, CHOOSE_WARPS = 2048, 8


def advance(batch: Batch) -> None:
    """Feed every row's last token, draw and record the next; all of it on the device."""
    logits = _logits(batch)
    if batch.rows.rules.truncated:
        batch.choose(logits)
    else:
        _choose_all(batch, logits)


def _logits(batch: Batch) -> Tensor:
    weights, cache, rows = batch.weights, batch.cache, batch.shape.rows
    width = weights.config.n_embd
    x = torch.empty(rows, width, dtype=weights.wte.dtype, device=weights.device)
    h = torch.empty(rows, width, dtype=weights.dtype, device=weights.device)
    layers = weights.layers
    _embed_norm(batch, x, h, layers[0].norm_1)
    for index, layer in enumerate(layers):
        seen = torch.empty_like(h)
        _attend_rows(batch, layer.attend(h), seen, [part[index] for part in _parts(cache)])
        _add_norm(x, layer.project(seen), h, layer.norm_2)
        after = layers[index + 1].norm_1 if index + 1 < len(layers) else weights.norm
        _add_norm(x, layer.narrow(layer.widen(h, gelu=True)), h, after)
    return weights.logits(h)


def _parts(cache) -> tuple[Tensor, ...]:
    return cache.prefix_keys, cache.prefix_values, cache.own_keys, cache.own_values


def _embed_norm(batch: Batch, x: Tensor, h: Tensor, norm: Norm) -> None:
    weights: Weights = batch.weights
    rows, width = x.shape
    _embed_norm_kernel[(rows,)](
        x,
        h,
        weights.wte,
        weights.wpe,
        batch.last,
        batch.lengths,
        batch.index,
        norm.weight,
        norm.bias,
        norm.eps,
        batch.shape.width,
        weights.config.n_positions - 1,
        WIDTH=width,
        BLOCK=triton.next_power_of_2(width),
        num_warps=4,
    )


def _add_norm(x: Tensor, delta: Tensor, h: Tensor, norm: Norm) -> None:
    """x += delta; h = norm(x)."""
    rows, width = x.shape
    _add_norm_kernel[(rows,)](
        x,
        delta,
        h,
        norm.weight,
        norm.bias,
        norm.eps,
        WIDTH=width,
        BLOCK=triton.next_power_of_2(width),
        num_warps=4,
    )


def _attend_rows(batch: Batch, qkv: Tensor, seen: Tensor, parts: list[Tensor]) -> None:
    """`seen` [rows, width] from `qkv` [rows, 3 × width]; writes the new keys and values."""
    prefix_keys, prefix_values, own_keys, own_values = parts
    heads, size = batch.weights.config.n_head, batch.weights.config.head_size
    _attend_kernel[(batch.shape.rows, heads)](
        qkv,
        seen,
        prefix_keys,
        prefix_values,
        own_keys,
        own_values,
        batch.lengths,
        batch.index,
        prefix_keys.stride(0),
        prefix_keys.stride(1),
        own_keys.stride(0),
        own_keys.stride(1),
        own_keys.stride(2),
        batch.shape.width,
        size**-0.5,
        HEADS=heads,
        SIZE=size,
        BLOCK_D=triton.next_power_of_2(size),
        BLOCK_N=SLOTS_PER_BLOCK,
        num_warps=ATTEND_WARPS,
    )


def _choose_all(batch: Batch, logits: Tensor) -> None:
    rows, rules = batch.rows, batch.rows.rules
    count, vocabulary = logits.shape
    _choose_kernel[(count,)](
        logits,
        rules.temperature,
        rules.greedy.view(torch.uint8),
        rows.keys,
        rows.limits,
        rows.done.view(torch.uint8),
        batch.eos,
        batch.index,
        batch.last,
        batch.tokens,
        batch.logp,
        batch.entropy,
        count,
        logits.stride(0),
        VOCABULARY=vocabulary,
        RANDOM=rules.random,
        BLOCK=min(TOKENS_PER_BLOCK, triton.next_power_of_2(vocabulary)),
        num_warps=CHOOSE_WARPS,
    )
    # Outside the kernel, whose rows all still read it.
    batch.index.add_(1)


@triton.jit
def _store_norm(value, live, d, h, weight, bias, eps, WIDTH: tl.constexpr):
    """h[d] = norm of the fp32 `value`, whose elements outside `live` are 0."""
    mean = tl.sum(value, 0) / WIDTH
    centred = tl.where(live, value - mean, 0.0)
    spread = tl.sum(centred * centred, 0) / WIDTH
    scale = tl.load(weight + d, mask=live, other=0.0).to(tl.float32)
    shift = tl.load(bias + d, mask=live, other=0.0).to(tl.float32)
    normed = centred * (1.0 / tl.sqrt(spread + eps)) * scale + shift
    tl.store(h + d, normed.to(h.dtype.element_ty), mask=live)


@triton.jit
def _embed_norm_kernel(
    x, h, wte, wpe, last, lengths, index, weight, bias, eps, width, final,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, BLOCK)
    live = d < WIDTH
    token = tl.load(last + row)
    position = tl.load(lengths + row // width) + tl.load(index) - 1
    position = tl.minimum(position, final)
    value = tl.load(wte + token * WIDTH + d, mask=live, other=0.0).to(tl.float32)
    value += tl.load(wpe + position * WIDTH + d, mask=live, other=0.0).to(tl.float32)
    value = value.to(x.dtype.element_ty)
    tl.store(x + row * WIDTH + d, value, mask=live)
    _store_norm(value.to(tl.float32), live, d, h + row * WIDTH, weight, bias, eps, WIDTH)


@triton.jit
def _add_norm_kernel(
    x, delta, h, weight, bias, eps, WIDTH: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, BLOCK)
    live = d < WIDTH
    value = tl.load(x + row * WIDTH + d, mask=live, other=0.0).to(tl.float32)
    value += tl.load(delta + row * WIDTH + d, mask=live, other=0.0).to(tl.float32)
    value = value.to(x.dtype.element_ty)
    tl.store(x + row * WIDTH + d, value, mask=live)
    _store_norm(value.to(tl.float32), live, d, h + row * WIDTH, weight, bias, eps, WIDTH)


@triton.jit
def _attend_slots(
    q, top, total, seen, keys, values, count, d, live,
    SIZE: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Carry an online softmax over `count` slots of SIZE numbers each."""
    n = tl.arange(0, BLOCK_N)
    for start in range(0, count, BLOCK_N):
        inside = start + n < count
        at = (start + n)[:, None] * SIZE + d[None, :]
        mask = inside[:, None] & live[None, :]
        key = tl.load(keys + at, mask=mask, other=0.0).to(tl.float32)
        value = tl.load(values + at, mask=mask, other=0.0).to(tl.float32)
        scores = tl.where(inside, tl.sum(key * q[None, :], 1), -float("inf"))
        higher = tl.maximum(top, tl.max(scores, 0))
        fade = tl.exp(top - higher)
        p = tl.exp(scores - higher)
        seen = seen * fade + tl.sum(p[:, None] * value, 0)
        total = total * fade + tl.sum(p, 0)
        top = higher
    return top, total, seen


@triton.jit
def _attend_kernel(
    qkv, seen, prefix_keys, prefix_values, own_keys, own_values, lengths, index,
    prefix_group, prefix_head, own_group, own_head, own_row, width, scale,
    HEADS: tl.constexpr, SIZE: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    # Rows vary fastest, so the samples of a prompt read its keys at about the same time.
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1).to(tl.int64)
    group = row // width
    d = tl.arange(0, BLOCK_D)
    live = d < SIZE
    at = qkv + row * (3 * HEADS * SIZE) + head * SIZE + d
    q = tl.load(at, mask=live, other=0.0).to(tl.float32) * scale
    key = tl.load(at + HEADS * SIZE, mask=live, other=0.0)
    value = tl.load(at + 2 * HEADS * SIZE, mask=live, other=0.0)
    slot = tl.load(index) - 1
    own = group * own_group + head * own_head + (row % width) * own_row
    tl.store(own_keys + own + slot * SIZE + d, key, mask=live)
    tl.store(own_values + own + slot * SIZE + d, value, mask=live)
    # The newest token starts the softmax out of registers: what was just stored is not read back.
    top = tl.sum(q * key.to(tl.float32), 0)
    total = top * 0.0 + 1.0
    sums = value.to(tl.float32)
    prefix = group * prefix_group + head * prefix_head
    length = tl.load(lengths + group)
    top, total, sums = _attend_slots(
        q, top, total, sums, prefix_keys + prefix, prefix_values + prefix, length, d, live,
        SIZE, BLOCK_N,
    )  # fmt: skip
    top, total, sums = _attend_slots(
        q, top, total, sums, own_keys + own, own_values + own, slot, d, live, SIZE, BLOCK_N
    )
    out = seen + row * (HEADS * SIZE) + head * SIZE + d
    tl.store(out, (sums / total).to(seen.dtype.element_ty), mask=live)


@triton.jit
def _waiting_time(ids, low, high):
    """noise.waiting_times of one row, whose key's halves are `low` and `high`."""
    x = ids.to(tl.uint32) * 0x9E3779B9 + low
    x ^= x >> 16
    x *= 0x85EBCA6B
    x ^= high
    x ^= x >> 13
    x *= 0xC2B2AE35
    x ^= x >> 16
    u = ((x >> 1).to(tl.float32) + 0.5) * (4.656612873077393e-10 * (1 - 1.1920928955078125e-07))
    # -log(1 - u) loses short waits to rounding, so they come from its series.
    short = u * (1 + u * (0.5 + u * (0.3333333333333333 + u * 0.25)))
    return tl.where(u < 0.03, short, -tl.log(1 - u))


@triton.jit
def _token_key(key, count):
    """noise.fold of a row's key and a token's index."""
    x = key.to(tl.uint64) + (count + 1).to(tl.uint64) * 0x9E3779B97F4A7C15
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return x ^ (x >> 31)


@triton.jit
def _choose_kernel(
    logits, temperature, greedy, keys, limits, done, eos, index, last, tokens, logp, entropy, rows,
    stride,
    VOCABULARY: tl.constexpr, RANDOM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    count = tl.load(index)
    divisor = tl.load(temperature + row)
    is_greedy = tl.load(greedy + row) != 0
    key = _token_key(tl.load(keys + row), count)
    low = (key & 0xFFFFFFFF).to(tl.uint32)
    high = (key >> 32).to(tl.uint32)

    # Every lane keeps its own softmax and its own leader; they meet after the loop.
    lanes = tl.arange(0, BLOCK)
    top = tl.full([BLOCK], -1e30, tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    weighted = tl.zeros([BLOCK], tl.float32)
    lead = tl.full([BLOCK], -float("inf"), tl.float32)
    lead_z = tl.zeros([BLOCK], tl.float32)
    lead_id = tl.full([BLOCK], VOCABULARY, tl.int32)
    for start in range(0, VOCABULARY, BLOCK):
        ids = start + lanes
        inside = ids < VOCABULARY
        z = tl.load(logits + row * stride + ids, mask=inside, other=-1e30) / divisor
        higher = tl.maximum(top, z)
        fade = tl.exp(top - higher)
        p = tl.where(inside, tl.exp(z - higher), 0.0)
        total = total * fade + p
        weighted = weighted * fade + p * z
        top = higher
        score = z
        if RANDOM:
            score = tl.where(is_greedy, z, z - tl.log(_waiting_time(ids, low, high)))
        ahead = inside & (score > lead)
        lead = tl.where(ahead, score, lead)
        lead_z = tl.where(ahead, z, lead_z)
        lead_id = tl.where(ahead, ids, lead_id)

    highest = tl.max(top, 0)
    fade = tl.exp(top - highest)
    sum_p = tl.sum(total * fade, 0)
    log_sum = highest + tl.log(sum_p)
    spread = log_sum - tl.sum(weighted * fade, 0) / sum_p
    winner = tl.max(lead, 0)
    token = tl.min(tl.where(lead == winner, lead_id, VOCABULARY), 0)
    chosen = tl.max(tl.where(lead_id == token, lead_z, -float("inf")), 0)

    end = tl.load(eos)
    over = tl.load(done + row) != 0
    token = tl.where(over, end, token.to(tl.int64))
    at = count * rows + row
    tl.store(tokens + at, token)
    tl.store(logp + at, tl.where(over, 0.0, chosen - log_sum))
    tl.store(entropy + at, tl.where(over, 0.0, spread))
    tl.store(last + row, tl.maximum(token, 0))
    now_over = over | (token == end) | (count + 1 >= tl.load(limits + row))
    tl.store(done + row, now_over.to(tl.uint8))
