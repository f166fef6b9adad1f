"""A model with fewer layers or narrower inner layers, cut from a larger one.

Law: what is kept has the weights it had; cut down to its own shape a model is itself. The first
layers and the last are kept (they read and write tokens), and of each inner layer the units with
the largest product of the norms of their two weights. Nothing is trained here.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from rookworld.model.gpt2 import GPT2, MLP
from rookworld.runtime.errors import ConfigError


def cut_down(model: GPT2, n_layer: int, n_inner: int | None) -> GPT2:
    """A smaller model with the weights of this one; None keeps the inner width."""
    shape = model.config
    inner = shape.inner if n_inner is None else n_inner
    if n_layer > shape.n_layer or inner > shape.inner:
        raise ConfigError(
            f"a model of {shape.n_layer} layers with an inner width of {shape.inner} cannot be cut "
            f"down to {n_layer} layers and {inner}"
        )
    small = GPT2(replace(shape, n_layer=n_layer, n_inner=None if n_inner is None else inner))
    whole = {name: value for name, value in model.state_dict().items() if name[:2] != "h."}
    small.load_state_dict(whole, strict=False)
    layers = [*range(n_layer - 1), shape.n_layer - 1]
    for new, old in zip(small.h, (model.h[number] for number in layers), strict=True):
        weights = old.state_dict()
        if inner < shape.inner:
            units = largest_units(old.mlp, inner)
            for name in ("mlp.c_fc.weight", "mlp.c_fc.bias"):
                weights[name] = weights[name][units]
            weights["mlp.c_proj.weight"] = weights["mlp.c_proj.weight"][:, units]
        new.load_state_dict(weights)
    return small.to(model.device)


def largest_units(mlp: MLP, count: int) -> torch.Tensor:
    """Which hidden units count most, in their own order."""
    with torch.no_grad():
        size = mlp.c_fc.weight.norm(dim=1) * mlp.c_proj.weight.norm(dim=0)
        kept: torch.Tensor = size.topk(count).indices.sort().values
        return kept
