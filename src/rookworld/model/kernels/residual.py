"""The residual stream of a block: what was found is added to it, and its norm is handed on.

Law: `add_norm` is `x + delta` and the norm of that, as autocast rounds it. On CUDA both ways go
through one Triton kernel each; plain torch takes several, and each reads and writes the stream.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from rookworld.model.kernels.dispatch import on_one_gpu


def add_norm(x: Tensor, delta: Tensor | None, norm: nn.LayerNorm) -> tuple[Tensor, Tensor]:
    """(x + delta, its norm); of `x` itself where there is no `delta`."""
    if _suits_triton(x, norm):
        from rookworld.model.kernels.triton_norm import AddNorm

        # kernels go to the current device, which need not be the tensors'
        with torch.cuda.device(x.device):
            apply: Callable[..., tuple[Tensor, Tensor]] = AddNorm.apply
            dtype = torch.get_autocast_dtype("cuda")
            return apply(x, delta, norm.weight, norm.bias, norm.eps, dtype)
    if delta is not None:
        x = x + delta
    return x, norm(x)


def _suits_triton(x: Tensor, norm: nn.LayerNorm) -> bool:
    """Whether the stream is float32 among products of bf16; a compiler fuses by itself."""
    if x.device.type != "cuda" or x.dtype is not torch.float32 or torch.compiler.is_compiling():
        return False
    return torch.is_autocast_enabled("cuda") and on_one_gpu(x, norm.weight, norm.bias)
