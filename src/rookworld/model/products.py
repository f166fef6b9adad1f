"""The four products of a block: made, or known from a pass that made them before.

Law: both have the same gradients. A known product is not multiplied again on the way forward; what
goes into it is still needed, for the gradient of its weights.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from rookworld.model.kernels import cpu_products


class Products(NamedTuple):
    """What a block's products found, [tokens, …] each: attention's two and then the MLP's."""

    attend: Tensor
    project: Tensor
    widen: Tensor
    narrow: Tensor


def product(linear: nn.Linear, x: Tensor, known: Tensor | None) -> Tensor:
    """`linear(x)`, which may be known."""
    if known is None:
        made: Tensor = linear(x)
        return made
    apply: Callable[..., Tensor] = _Known.apply
    return apply(x, linear.weight, linear.bias, known.view(*x.shape[:-1], -1))


def times(x: Tensor, weight: Tensor) -> Tensor:
    """x [rows, out] @ weight [out, in]."""
    if cpu_products.multiplies(x.device, x.dtype):
        return cpu_products.linear(x, weight.t(), None)
    return x @ weight


class _Known(torch.autograd.Function):
    """x, weight, bias and what they make, in the precision it was made in -> the latter."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, known: Tensor) -> Tensor:
        ctx.dtypes, ctx.shape = (x.dtype, weight.dtype, bias.dtype), x.shape
        of_x, of_weight, *_ = ctx.needs_input_grad
        ctx.save_for_backward(
            x.to(known.dtype) if of_weight else None, weight.to(known.dtype) if of_x else None
        )
        return known

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        rows = slope.flatten(0, -2)
        to_x, to_weight, to_bias = ctx.dtypes
        of_x = of_weight = of_bias = None
        if ctx.needs_input_grad[0]:
            of_x = times(rows, weight).view(ctx.shape).to(to_x)
        if ctx.needs_input_grad[1]:
            of_weight = (rows.t() @ x.flatten(0, -2)).to(to_weight)
        if ctx.needs_input_grad[2]:
            of_bias = rows.sum(0).to(to_bias)
        return of_x, of_weight, of_bias, None
