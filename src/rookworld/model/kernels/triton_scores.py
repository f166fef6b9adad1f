# mypy: ignore-errors
"""What a loss needs of each row's scores, and their gradient, in Triton: two kernels, nothing kept.

Law: `stats_from_logits` of a plain draw with the forward KL, and its gradient, up to the order of
sums. Plain torch reads and writes a row of scores some forty times on the way there and back; here
the scores of policy and reference are read twice, turned into the gradient where they lie, and
multiplied a second time rather than kept.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

CHUNK_BYTES = 2**28
"""Scores of policy and reference that live at once."""
TOKENS_PER_BLOCK, WARPS = 2048, 8
KEPT = 6
"""Of each row: log-probability, entropy, KL, the reference's log-probability, both log-sums."""


class FusedTokenStats(torch.autograd.Function):
    """(hidden, head, ids, ref_hidden, ref_head, dtype) -> logp, entropy, kl, ref_logp [rows]."""

    @staticmethod
    def forward(ctx, hidden, head, ids, ref_hidden, ref_head, dtype):
        ids = ids.contiguous()  # the kernels step through them one by one
        weights, ref_weights = pad_vocabulary(head, dtype), pad_vocabulary(ref_head, dtype)
        states, ref_states = hidden.to(dtype), ref_hidden.to(dtype)
        found = torch.empty(KEPT, len(ids), device=hidden.device)
        for part in chunks(len(ids), len(weights), dtype):
            _read(
                states[part] @ weights.T,
                ref_states[part] @ ref_weights.T,
                ids[part],
                found[:, part],
                len(head),
            )
        ctx.save_for_backward(hidden, head, ids, ref_hidden, ref_head, found)
        ctx.dtype = dtype
        logp, entropy, kl, ref_logp = found[:4].clone().unbind()
        ctx.mark_non_differentiable(ref_logp)
        return logp, entropy, kl, ref_logp

    @staticmethod
    def backward(ctx, logp, entropy, kl, _):
        hidden, head, ids, ref_hidden, ref_head, found = ctx.saved_tensors
        weights, ref_weights = pad_vocabulary(head, ctx.dtype), pad_vocabulary(ref_head, ctx.dtype)
        states, ref_states = hidden.to(ctx.dtype), ref_hidden.to(ctx.dtype)
        wanted = torch.stack([logp, entropy, kl])
        to_hidden, to_head = torch.empty_like(hidden), None
        for part in chunks(len(ids), len(weights), ctx.dtype):
            scores = states[part] @ weights.T
            reference = ref_states[part] @ ref_weights.T
            given = (ids[part], found[:, part], wanted[:, part])
            _write_gradient(scores, reference, *given, len(head))
            to_hidden[part] = (scores @ weights).to(hidden.dtype)
            if ctx.needs_input_grad[1]:
                share = (scores.T @ states[part])[: len(head)].to(head.dtype)
                to_head = share if to_head is None else to_head.add_(share)
        return to_hidden, to_head, None, None, None, None


def pad_vocabulary(head: Tensor, dtype: torch.dtype) -> Tensor:
    """[V up to a multiple of 64, d]: products with an odd number of columns are slow."""
    return F.pad(head.detach().to(dtype), (0, 0, 0, -len(head) % 64))


def chunks(rows: int, width: int, dtype: torch.dtype) -> list[slice]:
    """Rows whose scores live at once."""
    most = max(1, CHUNK_BYTES // (2 * width * dtype.itemsize))
    return [slice(start, min(start + most, rows)) for start in range(0, rows, most)]


def _read(scores: Tensor, reference: Tensor, ids: Tensor, found: Tensor, vocabulary: int) -> None:
    """Fill `found` [6, rows] (a part of it: its lines are `found.stride(0)` apart)."""
    _read_kernel[(len(ids),)](
        scores, reference, ids, found, scores.stride(0), found.stride(0),
        VOCABULARY=vocabulary, BLOCK=_block(vocabulary), num_warps=WARPS,
    )  # fmt: skip


def _write_gradient(
    scores: Tensor, reference: Tensor, ids: Tensor, found: Tensor, wanted: Tensor, vocabulary: int
) -> None:
    """Scores -> their gradient, in place, from that of logp, entropy and KL: `wanted` [3, rows]."""
    _gradient_kernel[(len(ids),)](
        scores, reference, ids, found, wanted, scores.stride(0), found.stride(0),
        wanted.stride(0), VOCABULARY=vocabulary, WIDTH=scores.shape[1], BLOCK=_block(vocabulary),
        num_warps=WARPS,
    )  # fmt: skip


def _block(vocabulary: int) -> int:
    return min(TOKENS_PER_BLOCK, triton.next_power_of_2(vocabulary))


@triton.jit
def _read_scores(scores, place, inside):
    z = tl.load(scores + place, mask=inside, other=0.0).to(tl.float32)
    return tl.where(inside, z, -1e30)


@triton.jit
def _read_kernel(
    scores, reference, ids, found, stride, line, VOCABULARY: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    scores += row * stride
    reference += row * stride
    lanes = tl.arange(0, BLOCK)
    # Every lane keeps a softmax of its own for each model; they meet after the loop.
    top = tl.full([BLOCK], -1e30, tl.float32)
    ref_top = tl.full([BLOCK], -1e30, tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    ref_total = tl.zeros([BLOCK], tl.float32)
    for start in range(0, VOCABULARY, BLOCK):
        inside = start + lanes < VOCABULARY
        z = _read_scores(scores, start + lanes, inside)
        r = _read_scores(reference, start + lanes, inside)
        higher = tl.maximum(top, z)
        total = total * tl.exp(top - higher) + tl.where(inside, tl.exp(z - higher), 0.0)
        top = higher
        ref_higher = tl.maximum(ref_top, r)
        new = tl.where(inside, tl.exp(r - ref_higher), 0.0)
        ref_total = ref_total * tl.exp(ref_top - ref_higher) + new
        ref_top = ref_higher
    highest = tl.max(top, 0)
    log_sum = highest + tl.log(tl.sum(total * tl.exp(top - highest), 0))
    ref_highest = tl.max(ref_top, 0)
    ref_log_sum = ref_highest + tl.log(tl.sum(ref_total * tl.exp(ref_top - ref_highest), 0))

    # A second reading, from the cache: differences of logs first, so that a small KL is exact.
    spread = tl.zeros([BLOCK], tl.float32)
    apart = tl.zeros([BLOCK], tl.float32)
    for start in range(0, VOCABULARY, BLOCK):
        inside = start + lanes < VOCABULARY
        z = _read_scores(scores, start + lanes, inside) - log_sum
        r = _read_scores(reference, start + lanes, inside)
        p = tl.exp(z)
        spread -= tl.where(inside, p * z, 0.0)
        apart += tl.where(inside, p * (z - (r - ref_log_sum)), 0.0)

    token = tl.load(ids + row)
    found += row
    tl.store(found, tl.load(scores + token).to(tl.float32) - log_sum)
    tl.store(found + line, tl.sum(spread, 0))
    tl.store(found + 2 * line, tl.sum(apart, 0))
    tl.store(found + 3 * line, tl.load(reference + token).to(tl.float32) - ref_log_sum)
    tl.store(found + 4 * line, log_sum)
    tl.store(found + 5 * line, ref_log_sum)


@triton.jit
def _gradient_kernel(
    scores, reference, ids, found, wanted, stride, line, wanted_line,
    VOCABULARY: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    scores += row * stride
    reference += row * stride
    found += row
    wanted += row
    entropy = tl.load(found + line)
    kl = tl.load(found + 2 * line)
    log_sum = tl.load(found + 4 * line)
    ref_log_sum = tl.load(found + 5 * line)
    for_logp = tl.load(wanted)
    for_entropy = tl.load(wanted + wanted_line)
    for_kl = tl.load(wanted + 2 * wanted_line)
    token = tl.load(ids + row)
    for start in range(0, WIDTH, BLOCK):
        place = start + tl.arange(0, BLOCK)
        inside = place < VOCABULARY
        z = _read_scores(scores, place, inside) - log_sum
        r = _read_scores(reference, place, inside) - ref_log_sum
        p = tl.exp(z)
        slope = p * (for_kl * (z - r - kl) - for_entropy * (z + entropy) - for_logp)
        slope = tl.where(place == token, slope + for_logp, slope)
        slope = tl.where(inside, slope, 0.0)
        tl.store(scores + place, slope.to(scores.dtype.element_ty), mask=place < WIDTH)
