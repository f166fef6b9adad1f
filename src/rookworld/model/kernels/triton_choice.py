# mypy: ignore-errors
"""Drawing and recording a token in Triton: a single pass over the logits.

Law: what `DecodeBatch.choose` does without top-k and top-p, up to the order of sums, and the same
noise bit by bit. A row's vocabulary is cut into parts, for a few dozen rows do not fill a GPU; one
program for all rows puts together what each part found, and moves the batch to its next token.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from rookworld.model.kernels.triton_launch import await_previous, begin, early
from rookworld.model.sampling.decode_batch import DecodeBatch

TOKENS_PER_BLOCK, SEARCH_WARPS = 1024, 4
MOST_PARTS, PROGRAMS = 16, 1024
ROWS_PER_BLOCK, RECORD_WARPS = 512, 8
FOUND = 6
"""What a part tells: its softmax as top, sum and weighted sum; its leader as race, score, id."""


def choose(batch: DecodeBatch, logits: Tensor) -> None:
    """Draw and record the next token of every row, and count it."""
    rows = batch.rows
    count, vocabulary = logits.shape
    parts = max(1, min(MOST_PARTS, triton.next_power_of_2(PROGRAMS // count)))
    block = min(TOKENS_PER_BLOCK, triton.next_power_of_2(vocabulary))
    found = torch.empty(FOUND, parts, count, device=logits.device)
    _search_kernel[(count, parts)](
        logits, rows.temperature, rows.greedy.view(torch.uint8), rows.keys, batch.index, found,
        logits.stride(0), VOCABULARY=vocabulary,
        SHARE=triton.cdiv(triton.cdiv(vocabulary, parts), block) * block,
        RANDOM=batch.shape.random, BLOCK=block, num_warps=SEARCH_WARPS, **early(logits.device),
    )  # fmt: skip
    _record_kernel[(1,)](
        found, rows.limits, rows.done.view(torch.uint8), batch.eos, batch.index, batch.last,
        batch.tokens, batch.logp, batch.entropy, count, batch.tokens.stride(0),
        PARTS=parts, BLOCK=min(ROWS_PER_BLOCK, triton.next_power_of_2(count)),
        num_warps=RECORD_WARPS, **early(logits.device),
    )  # fmt: skip


@triton.jit
def _waiting_time(ids, low, high):
    """counter_rng.exponential_noise of one row, whose key's halves are `low` and `high`."""
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
    """counter_rng.fold of a row's key and a token's index."""
    x = key.to(tl.uint64) + (count + 1).to(tl.uint64) * 0x9E3779B97F4A7C15
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return x ^ (x >> 31)


@triton.jit
def _add_to_softmax(z, inside, top, total, weighted):
    """Each lane's softmax, and its sum weighted by score, with one more score."""
    higher = tl.maximum(top, z)
    fade = tl.exp(top - higher)
    p = tl.where(inside, tl.exp(z - higher), 0.0)
    return higher, total * fade + p, weighted * fade + p * z


@triton.jit
def _search_kernel(
    logits, temperature, greedy, keys, index, found, stride,
    VOCABULARY: tl.constexpr, SHARE: tl.constexpr, RANDOM: tl.constexpr, BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    begin(EARLY)
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    divisor = tl.load(temperature + row)
    is_greedy = tl.load(greedy + row) != 0
    key = _token_key(tl.load(keys + row), tl.load(index))
    low = (key & 0xFFFFFFFF).to(tl.uint32)
    high = (key >> 32).to(tl.uint32)
    await_previous(EARLY)

    # Every lane keeps its own softmax and its own leader; they meet after the loop.
    lanes = tl.arange(0, BLOCK)
    top = tl.full([BLOCK], -1e30, tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    weighted = tl.zeros([BLOCK], tl.float32)
    lead = tl.full([BLOCK], -float("inf"), tl.float32)
    lead_z = tl.zeros([BLOCK], tl.float32)
    lead_id = tl.full([BLOCK], VOCABULARY, tl.int32)
    for start in range(0, SHARE, BLOCK):
        ids = part * SHARE + start + lanes
        inside = ids < VOCABULARY
        # Up to the stride, not to the odd vocabulary, so that loads are wide.
        z = tl.load(logits + row * stride + ids, mask=ids < stride, other=0.0) / divisor
        z = tl.where(inside, z, -1e30)
        top, total, weighted = _add_to_softmax(z, inside, top, total, weighted)
        score = z
        if RANDOM:
            score = tl.where(is_greedy, z, z - tl.log(_waiting_time(ids, low, high)))
        ahead = inside & (score > lead)
        lead = tl.where(ahead, score, lead)
        lead_z = tl.where(ahead, z, lead_z)
        lead_id = tl.where(ahead, ids, lead_id)

    highest = tl.max(top, 0)
    fade = tl.exp(top - highest)
    winner = tl.max(lead, 0)
    token = tl.min(tl.where(lead == winner, lead_id, VOCABULARY), 0)
    rows, parts = tl.num_programs(0), tl.num_programs(1)
    at = found + part * rows + row
    tl.store(at, highest)
    tl.store(at + parts * rows, tl.sum(total * fade, 0))
    tl.store(at + 2 * parts * rows, tl.sum(weighted * fade, 0))
    tl.store(at + 3 * parts * rows, winner)
    tl.store(at + 4 * parts * rows, tl.max(tl.where(lead_id == token, lead_z, -float("inf")), 0))
    # Exact in float32: no vocabulary has 2**24 tokens.
    tl.store(at + 5 * parts * rows, token.to(tl.float32))


@triton.jit
def _record_kernel(
    found, limits, done, eos, index, last, tokens, logp, entropy, rows, line,
    PARTS: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    count = tl.load(index)
    end = tl.load(eos)
    part = tl.arange(0, PARTS)
    await_previous(EARLY)
    for start in range(0, rows, BLOCK):
        row = start + tl.arange(0, BLOCK)
        here = row < rows
        at = found + part[:, None] * rows + row[None, :]
        size = PARTS * rows
        top = tl.load(at, mask=here[None, :], other=0.0)
        total = tl.load(at + size, mask=here[None, :], other=1.0)
        weighted = tl.load(at + 2 * size, mask=here[None, :], other=0.0)
        lead = tl.load(at + 3 * size, mask=here[None, :], other=0.0)
        lead_z = tl.load(at + 4 * size, mask=here[None, :], other=0.0)
        lead_id = tl.load(at + 5 * size, mask=here[None, :], other=0.0)

        highest = tl.max(top, 0)
        fade = tl.exp(top - highest[None, :])
        sum_p = tl.sum(total * fade, 0)
        log_sum = highest + tl.log(sum_p)
        spread = log_sum - tl.sum(weighted * fade, 0) / sum_p
        winner = tl.max(lead, 0)
        # Parts follow the ids, so among equals the least id wins, as in the pass itself.
        token = tl.min(tl.where(lead == winner[None, :], lead_id, float("inf")), 0)
        chosen = tl.max(tl.where(lead_id == token[None, :], lead_z, -float("inf")), 0)

        over = tl.load(done + row, mask=here, other=1) != 0
        drawn = tl.where(over, end, token.to(tl.int64))
        to = count * line + row
        tl.store(tokens + to, drawn, mask=here)
        tl.store(logp + to, tl.where(over, 0.0, chosen - log_sum), mask=here)
        tl.store(entropy + to, tl.where(over, 0.0, spread), mask=here)
        tl.store(last + row, tl.maximum(drawn, 0), mask=here)
        most = tl.load(limits + row, mask=here, other=0)
        now_over = over | (drawn == end) | (count + 1 >= most)
        tl.store(done + row, now_over.to(tl.uint8), mask=here)
    # The whole program has read the count before it changes.
    tl.debug_barrier()
    tl.store(index, count + 1)
