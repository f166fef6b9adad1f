# mypy: ignore-errors
"""Add to the residual stream and take its norm in Triton, forwards and backwards.

Law: `add_norm`'s, and its gradient, up to the order of sums; the same numbers every time. A row is
read once and stays in registers. Gradients of gain and shift are summed up over the rows of a
program, then over programs.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch.autograd.function import once_differentiable

PROGRAMS, WARPS = 1056, 4
"""Of the way back: eight for every multiprocessor of a large GPU, each with many rows."""


class AddNorm(torch.autograd.Function):
    """(x, delta or None, gain, shift, eps, dtype) -> x + delta, and its norm in `dtype`."""

    @staticmethod
    def forward(ctx, x, delta, gain, shift, eps, dtype):
        x = x.contiguous()
        summed = x if delta is None else torch.empty_like(x)
        normed = torch.empty(x.shape, dtype=dtype, device=x.device)
        rows, width = x.numel() // x.shape[-1], x.shape[-1]
        about = torch.empty(2, rows, device=x.device)
        if rows:
            _forward_kernel[(rows,)](
                x, x if delta is None else delta.contiguous(), gain, shift, summed, normed, about,
                rows, eps, ADDS=delta is not None, WIDTH=width,
                BLOCK=triton.next_power_of_2(width), num_warps=WARPS,
            )  # fmt: skip
        ctx.save_for_backward(summed, gain, about)
        ctx.added = None if delta is None else delta.dtype
        return summed, normed

    @staticmethod
    @once_differentiable
    def backward(ctx, of_summed, of_normed):
        summed, gain, about = ctx.saved_tensors
        rows, width = about.shape[1], summed.shape[-1]
        to_x = torch.empty_like(summed)
        to_delta = to_x if ctx.added is None else torch.empty_like(summed, dtype=ctx.added)
        programs = max(1, min(PROGRAMS, rows))
        sums = torch.zeros(2, programs, width, device=summed.device)
        if rows:
            _backward_kernel[(programs,)](
                of_summed.contiguous(), of_normed.contiguous(), summed, gain, about, to_x,
                to_delta, sums, rows, ADDS=ctx.added is not None, WIDTH=width,
                BLOCK=triton.next_power_of_2(width), num_warps=WARPS,
            )  # fmt: skip
        to_gain, to_shift = sums.sum(1).to(gain.dtype)
        return to_x, None if ctx.added is None else to_delta, to_gain, to_shift, None, None


@triton.jit
def store_norm(value, live, d, h, weight, bias, eps, WIDTH: tl.constexpr):
    """h[d] = norm of the fp32 `value`, whose elements outside `live` are 0; its mean and 1/std."""
    mean = tl.sum(value, 0) / WIDTH
    centred = tl.where(live, value - mean, 0.0)
    sharpness = 1.0 / tl.sqrt(tl.sum(centred * centred, 0) / WIDTH + eps)
    scale = tl.load(weight + d, mask=live, other=0.0).to(tl.float32)
    shift = tl.load(bias + d, mask=live, other=0.0).to(tl.float32)
    normed = centred * sharpness * scale + shift
    tl.store(h + d, normed.to(h.dtype.element_ty), mask=live)
    return mean, sharpness


@triton.jit
def _forward_kernel(
    x, delta, gain, shift, summed, normed, about, rows, eps,
    ADDS: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, BLOCK)
    live = d < WIDTH
    at = row * WIDTH + d
    value = tl.load(x + at, mask=live, other=0.0)
    if ADDS:
        value += tl.load(delta + at, mask=live, other=0.0).to(tl.float32)
        tl.store(summed + at, value, mask=live)
    mean, sharpness = store_norm(value, live, d, normed + row * WIDTH, gain, shift, eps, WIDTH)
    tl.store(about + row, mean)
    tl.store(about + rows + row, sharpness)


@triton.jit
def _backward_kernel(
    of_summed, of_normed, summed, gain, about, to_x, to_delta, sums, rows,
    ADDS: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, BLOCK)
    live = d < WIDTH
    scale = tl.load(gain + d, mask=live, other=0.0)
    to_gain = tl.zeros([BLOCK], tl.float32)
    to_shift = tl.zeros([BLOCK], tl.float32)
    for row in range(program, rows, tl.num_programs(0)):
        at = row * WIDTH + d
        through = tl.load(of_summed + at, mask=live, other=0.0)
        slope = tl.load(of_normed + at, mask=live, other=0.0).to(tl.float32)
        value = tl.load(summed + at, mask=live, other=0.0)
        mean, sharpness = tl.load(about + row), tl.load(about + rows + row)
        normal = tl.where(live, (value - mean) * sharpness, 0.0)
        to_gain += slope * normal
        to_shift += slope
        slope *= scale
        common = tl.sum(slope, 0) / WIDTH
        along = tl.sum(slope * normal, 0) / WIDTH
        found = through + (slope - common - normal * along) * sharpness
        tl.store(to_x + at, found, mask=live)
        if ADDS:
            tl.store(to_delta + at, found.to(to_delta.dtype.element_ty), mask=live)
    programs = tl.num_programs(0)
    tl.store(sums + program * WIDTH + d, to_gain, mask=live)
    tl.store(sums + (programs + program) * WIDTH + d, to_shift, mask=live)
