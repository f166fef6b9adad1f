# mypy: ignore-errors
"""What a loss needs of each row's scores, and their gradient, in Triton: two kernels, nothing kept.

Law: `stats_from_logits` of a draw that cuts nothing off, and its gradient, up to the order of sums.
Plain torch reads and writes a row of scores some forty times on the way there and back; here
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
KEPT = 8
"""Of each row: log-probability, entropy, forward KL, the reference's log-probability, the log-sums
of both, that of the policy at the temperature of the draw, reverse KL."""
KINDS = ("forward", "reverse", "symmetric")


class FusedTokenStats(torch.autograd.Function):
    """(hidden, head, ids, ref_hidden, ref_head, dtype, temperature, kind) -> as `TokenStats`.

    `temperature` is [rows], or None where all are 1; `kind` is a name in `KINDS`.
    """

    @staticmethod
    def forward(ctx, hidden, head, ids, ref_hidden, ref_head, dtype, temperature, kind):
        ids = ids.contiguous()  # the kernels step through them one by one
        weights, ref_weights = pad_vocabulary(head, dtype), pad_vocabulary(ref_head, dtype)
        states, ref_states = hidden.to(dtype), ref_hidden.to(dtype)
        found = torch.empty(KEPT, len(ids), device=hidden.device)
        for part in chunks(len(ids), len(weights), dtype):
            scores, reference = states[part] @ weights.T, ref_states[part] @ ref_weights.T
            given = (ids[part], _part(temperature, part), found[:, part])
            _read(scores, reference, *given, len(head))
        ctx.save_for_backward(hidden, head, ids, ref_hidden, ref_head, temperature, found)
        ctx.dtype, ctx.kind = dtype, kind
        logp, entropy, forward_kl, ref_logp, *_, reverse_kl = found.clone().unbind()
        kl = (forward_kl, reverse_kl, 0.5 * (forward_kl + reverse_kl))[KINDS.index(kind)]
        ctx.mark_non_differentiable(ref_logp)
        return logp, entropy, kl, ref_logp

    @staticmethod
    def backward(ctx, logp, entropy, kl, _):
        hidden, head, ids, ref_hidden, ref_head, temperature, found = ctx.saved_tensors
        weights, ref_weights = pad_vocabulary(head, ctx.dtype), pad_vocabulary(ref_head, ctx.dtype)
        states, ref_states = hidden.to(ctx.dtype), ref_hidden.to(ctx.dtype)
        wanted = torch.stack([logp, entropy, kl])
        to_hidden, to_head = torch.empty_like(hidden), None
        for part in chunks(len(ids), len(weights), ctx.dtype):
            scores = states[part] @ weights.T
            reference = ref_states[part] @ ref_weights.T
            given = (ids[part], _part(temperature, part), found[:, part], wanted[:, part])
            _write_gradient(scores, reference, *given, len(head), KINDS.index(ctx.kind))
            to_hidden[part] = (scores @ weights).to(hidden.dtype)
            if ctx.needs_input_grad[1]:
                share = (scores.T @ states[part])[: len(head)].to(head.dtype)
                to_head = share if to_head is None else to_head.add_(share)
        return to_hidden, to_head, *[None] * 6


def _part(temperature: Tensor | None, rows: slice) -> Tensor | None:
    return None if temperature is None else temperature[rows]


def pad_vocabulary(head: Tensor, dtype: torch.dtype) -> Tensor:
    """[V up to a multiple of 64, d]: products with an odd number of columns are slow."""
    return F.pad(head.detach().to(dtype), (0, 0, 0, -len(head) % 64))


def chunks(rows: int, width: int, dtype: torch.dtype) -> list[slice]:
    """Rows whose scores live at once."""
    most = max(1, CHUNK_BYTES // (2 * width * dtype.itemsize))
    return [slice(start, min(start + most, rows)) for start in range(0, rows, most)]


def _read(
    scores: Tensor, reference: Tensor, ids: Tensor, temperature: Tensor | None, found: Tensor,
    vocabulary: int,
) -> None:  # fmt: skip
    """Fill `found` [8, rows] (a part of it: its lines are `found.stride(0)` apart)."""
    tempered = temperature is not None
    _read_kernel[(len(ids),)](
        scores, reference, ids, temperature if tempered else found, found, scores.stride(0),
        found.stride(0), TEMPERED=tempered, VOCABULARY=vocabulary, BLOCK=_block(vocabulary),
        num_warps=WARPS,
    )  # fmt: skip


def _write_gradient(
    scores: Tensor, reference: Tensor, ids: Tensor, temperature: Tensor | None, found: Tensor,
    wanted: Tensor, vocabulary: int, kind: int,
) -> None:  # fmt: skip
    """Scores -> their gradient, in place, from that of logp, entropy and KL: `wanted` [3, rows]."""
    tempered = temperature is not None
    _gradient_kernel[(len(ids),)](
        scores, reference, ids, temperature if tempered else found, found, wanted,
        scores.stride(0), found.stride(0), wanted.stride(0), TEMPERED=tempered, KIND=kind,
        VOCABULARY=vocabulary, WIDTH=scores.shape[1], BLOCK=_block(vocabulary), num_warps=WARPS,
    )  # fmt: skip


def _block(vocabulary: int) -> int:
    return min(TOKENS_PER_BLOCK, triton.next_power_of_2(vocabulary))


@triton.jit
def _read_scores(scores, place, inside):
    z = tl.load(scores + place, mask=inside, other=0.0).to(tl.float32)
    return tl.where(inside, z, -1e30)


@triton.jit
def _read_kernel(
    scores, reference, ids, temperature, found, stride, line,
    TEMPERED: tl.constexpr, VOCABULARY: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    scores += row * stride
    reference += row * stride
    lanes = tl.arange(0, BLOCK)
    cold = 1.0
    if TEMPERED:
        cold = 1.0 / tl.load(temperature + row)
    # Every lane keeps a softmax of its own for each model; they meet after the loop. Those at the
    # temperature of the draw share the highest scores of those at 1.
    top = tl.full([BLOCK], -1e30, tl.float32)
    ref_top = tl.full([BLOCK], -1e30, tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    ref_total = tl.zeros([BLOCK], tl.float32)
    drawn_total = tl.zeros([BLOCK], tl.float32)
    ref_drawn_total = tl.zeros([BLOCK], tl.float32)
    for start in range(0, VOCABULARY, BLOCK):
        inside = start + lanes < VOCABULARY
        z = _read_scores(scores, start + lanes, inside)
        r = _read_scores(reference, start + lanes, inside)
        higher = tl.maximum(top, z)
        ref_higher = tl.maximum(ref_top, r)
        total = _add(total, top, higher, z, inside, 1.0)
        ref_total = _add(ref_total, ref_top, ref_higher, r, inside, 1.0)
        if TEMPERED:
            drawn_total = _add(drawn_total, top, higher, z, inside, cold)
            ref_drawn_total = _add(ref_drawn_total, ref_top, ref_higher, r, inside, cold)
        top = higher
        ref_top = ref_higher
    log_sum = _log_sum(total, top, 1.0)
    ref_log_sum = _log_sum(ref_total, ref_top, 1.0)
    drawn_log_sum = log_sum
    ref_drawn_log_sum = ref_log_sum
    if TEMPERED:
        drawn_log_sum = _log_sum(drawn_total, top, cold)
        ref_drawn_log_sum = _log_sum(ref_drawn_total, ref_top, cold)

    # A second reading, from the cache: differences of logs first, so that a small KL is exact.
    spread = tl.zeros([BLOCK], tl.float32)
    apart = tl.zeros([BLOCK], tl.float32)
    back = tl.zeros([BLOCK], tl.float32)
    for start in range(0, VOCABULARY, BLOCK):
        inside = start + lanes < VOCABULARY
        raw = _read_scores(scores, start + lanes, inside)
        z = raw - log_sum
        r = _read_scores(reference, start + lanes, inside) - ref_log_sum
        p = tl.exp(z)
        apart += tl.where(inside, p * (z - r), 0.0)
        back += tl.where(inside, tl.exp(r) * (r - z), 0.0)
        if TEMPERED:
            z = raw * cold - drawn_log_sum
            p = tl.exp(z)
        spread -= tl.where(inside, p * z, 0.0)

    token = tl.load(ids + row)
    found += row
    tl.store(found, tl.load(scores + token).to(tl.float32) * cold - drawn_log_sum)
    tl.store(found + line, tl.sum(spread, 0))
    tl.store(found + 2 * line, tl.sum(apart, 0))
    of_reference = tl.load(reference + token).to(tl.float32)
    tl.store(found + 3 * line, of_reference * cold - ref_drawn_log_sum)
    tl.store(found + 4 * line, log_sum)
    tl.store(found + 5 * line, ref_log_sum)
    tl.store(found + 6 * line, drawn_log_sum)
    tl.store(found + 7 * line, tl.sum(back, 0))


@triton.jit
def _add(total, top, higher, z, inside, cold):
    """Each lane's sum of exponentials, over a new highest score, with one more."""
    new = tl.where(inside, tl.exp((z - higher) * cold), 0.0)
    return total * tl.exp((top - higher) * cold) + new


@triton.jit
def _log_sum(total, top, cold):
    """All lanes' sums as one, in the log."""
    highest = tl.max(top, 0)
    return highest * cold + tl.log(tl.sum(total * tl.exp((top - highest) * cold), 0))


@triton.jit
def _gradient_kernel(
    scores, reference, ids, temperature, found, wanted, stride, line, wanted_line,
    TEMPERED: tl.constexpr, KIND: tl.constexpr, VOCABULARY: tl.constexpr, WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    scores += row * stride
    reference += row * stride
    found += row
    wanted += row
    cold = 1.0
    if TEMPERED:
        cold = 1.0 / tl.load(temperature + row)
    entropy = tl.load(found + line)
    kl = tl.load(found + 2 * line)
    log_sum = tl.load(found + 4 * line)
    ref_log_sum = tl.load(found + 5 * line)
    drawn_log_sum = tl.load(found + 6 * line)
    for_logp = tl.load(wanted) * cold
    for_entropy = tl.load(wanted + wanted_line) * cold
    for_kl = tl.load(wanted + 2 * wanted_line)
    token = tl.load(ids + row)
    for start in range(0, WIDTH, BLOCK):
        place = start + tl.arange(0, BLOCK)
        inside = place < VOCABULARY
        raw = _read_scores(scores, place, inside)
        z = raw - log_sum
        r = _read_scores(reference, place, inside) - ref_log_sum
        p = tl.exp(z)
        if KIND == 0:
            of_kl = p * (z - r - kl)
        elif KIND == 1:
            of_kl = p - tl.exp(r)
        else:
            of_kl = 0.5 * (p * (z - r - kl) + p - tl.exp(r))
        if TEMPERED:
            z = raw * cold - drawn_log_sum
            p = tl.exp(z)
        slope = for_kl * of_kl - p * (for_entropy * (z + entropy) + for_logp)
        slope = tl.where(place == token, slope + for_logp, slope)
        slope = tl.where(inside, slope, 0.0)
        tl.store(scores + place, slope.to(scores.dtype.element_ty), mask=place < WIDTH)
