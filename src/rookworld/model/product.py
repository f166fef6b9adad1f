"""A dense layer's product: float32 on a CPU goes to oneDNN, which is faster than what torch takes.

Law: `dense` is the layer, and gelu_tanh of it where asked for, up to the order of additions.
The gradient of a matrix stays with torch: oneDNN would want both factors copied.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from .kernels import have_onednn


def dense(x: Tensor, layer: nn.Linear, gelu: bool = False) -> Tensor:
    """`layer` of x [..., in] -> [..., out]."""
    if not _suits_onednn(x, layer.weight):
        found: Tensor = layer(x)
    elif torch.is_grad_enabled():
        found = _Product.apply(x, layer.weight, layer.bias)  # type: ignore[no-untyped-call]
    else:
        return onednn(x, layer.weight, layer.bias, gelu)
    return F.gelu(found, approximate="tanh") if gelu else found


def onednn(x: Tensor, weight: Tensor, bias: Tensor | None, gelu: bool = False) -> Tensor:
    """x @ weight.T + bias, or gelu_tanh of that; the weight may be packed, or lie transposed."""
    kind, how = ("gelu", "tanh") if gelu else ("none", "")
    out: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, kind, [], how)
    return out


def _suits_onednn(x: Tensor, weight: Tensor) -> bool:
    """Whether all is float32 on a CPU; what is rounded on the way goes to oneDNN by itself."""
    if x.device.type != "cpu" or not x.dtype is weight.dtype is torch.float32:
        return False
    if torch.is_autocast_enabled("cpu") or torch.compiler.is_compiling():
        return False
    wanted = bool(torch.backends.mkldnn.enabled) and have_onednn()
    return wanted and type(weight) in (Tensor, nn.Parameter)


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return onednn(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        of_x, of_weight, of_bias = ctx.needs_input_grad
        rows = slope.reshape(-1, slope.shape[-1])
        return (
            onednn(slope, weight.t(), None) if of_x else None,
            rows.t() @ x.reshape(-1, x.shape[-1]) if of_weight else None,
            rows.sum(0) if of_bias else None,
        )
