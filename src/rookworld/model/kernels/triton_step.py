# mypy: ignore-errors
"""One decode step for CUDA in Triton: embed, norm, attend and choose, and products of a few rows.

Law: the numbers of `DecodeBatch.logits` and `DecodeBatch.choose`, up to the order of sums, and the
same noise bit by bit. Each kernel reads what it must once, and there are few of them. Imported only
where CUDA is: Triton is no dependency of its own. Left out: top-k and top-p, which take the plain
path after the logits.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from rookworld.model.inference import Dense, InferenceWeights, Norm
from rookworld.model.kernels.triton_attention import attend
from rookworld.model.kernels.triton_choice import choose
from rookworld.model.kernels.triton_launch import await_previous, begin, early
from rookworld.model.kernels.triton_norm import store_norm
from rookworld.model.kernels.triton_product import (
    linear_gelu,
    linear_parts,
    suits,
    suits_linear_gelu,
)
from rookworld.model.sampling.decode_batch import DecodeBatch


def advance(batch: DecodeBatch) -> None:
    """Feed every row's last token, draw and record the next; all of it on the device."""
    draw(batch, _logits(batch))


def draw(batch: DecodeBatch, logits: Tensor) -> None:
    """Draw and record the next token of every row."""
    if batch.shape.truncated:
        batch.choose(logits)
    else:
        choose(batch, logits)


def _logits(batch: DecodeBatch) -> Tensor:
    weights, rows = batch.weights, batch.shape.rows
    width = weights.config.n_embd
    x = torch.empty(rows, width, dtype=weights.wte.dtype, device=weights.device)
    h = torch.empty(rows, width, dtype=weights.dtype, device=weights.device)
    layers = weights.layers
    _embed_norm(batch, x, h, layers[0].norm_1)
    for index, layer in enumerate(layers):
        seen = torch.empty_like(h)
        if suits(h):
            attend(batch, index, linear_parts(layer.attend, h), seen, layer.attend.bias)
        else:
            attend(batch, index, layer.attend(h), seen)
        _finish(x, layer.project, seen, h, layer.norm_2)
        after = layers[index + 1].norm_1 if index + 1 < len(layers) else weights.norm
        _finish(x, layer.narrow, _widen(layer.widen, h), h, after)
    return weights.logits(h)


def _finish(x: Tensor, dense: Dense, seen: Tensor, h: Tensor, norm: Norm) -> None:
    """x += dense(seen); h = norm(x)."""
    if suits(seen):
        _add_norm(x, linear_parts(dense, seen), dense.bias, h, norm)
    else:
        _add_norm(x, dense(seen)[None], None, h, norm)


def _widen(dense: Dense, h: Tensor) -> Tensor:
    """gelu_tanh of the product, in one kernel where rounding to bf16 hides how it is computed."""
    if h.dtype is torch.float32:
        return dense(h, gelu=True)
    if suits_linear_gelu(h):
        return linear_gelu(dense, h)
    return torch._addmm_activation(dense.bias, h, dense.weight.t(), use_gelu=True)


def _embed_norm(batch: DecodeBatch, x: Tensor, h: Tensor, norm: Norm) -> None:
    weights: InferenceWeights = batch.weights
    rows, width = x.shape
    _embed_norm_kernel[(rows,)](
        x, h, weights.wte, weights.wpe, batch.last, batch.lengths, batch.index,
        norm.weight, norm.bias, norm.eps, batch.shape.width, weights.config.n_positions - 1,
        WIDTH=width, BLOCK=triton.next_power_of_2(width), EARLY=early(x.device)["EARLY"],
        num_warps=4,
    )  # fmt: skip


def _add_norm(x: Tensor, parts: Tensor, bias: Tensor | None, h: Tensor, norm: Norm) -> None:
    """x += the sum of parts + bias; h = norm(x)."""
    rows, width = x.shape
    _add_norm_kernel[(rows,)](
        x, parts, x if bias is None else bias, h, norm.weight, norm.bias, norm.eps, rows * width,
        PARTS=len(parts), BIASED=bias is not None, WIDTH=width,
        BLOCK=triton.next_power_of_2(width), num_warps=4, **early(x.device),
    )  # fmt: skip


@triton.jit
def _add_norm_kernel(
    x, parts, bias, h, weight, shift, eps, size, PARTS: tl.constexpr, BIASED: tl.constexpr,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    begin(EARLY)
    row = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, BLOCK)
    live = d < WIDTH
    await_previous(EARLY)
    value = tl.load(x + row * WIDTH + d, mask=live, other=0.0).to(tl.float32)
    if BIASED:
        value += tl.load(bias + d, mask=live, other=0.0).to(tl.float32)
    for part in tl.static_range(PARTS):
        at = parts + part * size + row * WIDTH + d
        value += tl.load(at, mask=live, other=0.0).to(tl.float32)
    value = value.to(x.dtype.element_ty)
    tl.store(x + row * WIDTH + d, value, mask=live)
    store_norm(value.to(tl.float32), live, d, h + row * WIDTH, weight, shift, eps, WIDTH)


@triton.jit
def _embed_norm_kernel(
    x, h, wte, wpe, last, lengths, index, weight, bias, eps, width, final,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """The first of a step, and launched plainly: whatever wrote weights or tokens is done."""
    begin(EARLY)
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
    store_norm(value.to(tl.float32), live, d, h + row * WIDTH, weight, bias, eps, WIDTH)
