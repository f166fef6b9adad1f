"""What a loss needs of each row's scores in a plain draw, with its gradient written out.

Law: `stats_from_logits` with the forward KL, and its gradient, up to the order of sums. Autograd
would go over the scores some forty times on the way there and back; here it is a dozen times.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


class PlainTokenStats(torch.autograd.Function):
    """(logits, ref_logits [rows, V], ids [rows]) -> logp, entropy, kl, ref_logp [rows]."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, ref_logits: Tensor, ids: Tensor) -> tuple[Tensor, ...]:
        index = ids.unsqueeze(-1)
        log_pi, log_ref = logits.log_softmax(-1), ref_logits.log_softmax(-1)
        logp, ref_logp = (log_p.gather(-1, index).squeeze(-1) for log_p in (log_pi, log_ref))
        p = log_pi.exp()
        apart = torch.sub(log_pi, log_ref, out=log_ref)
        entropy, kl = -(p * log_pi).sum(-1), (p * apart).sum(-1)
        ctx.save_for_backward(index, p, log_pi, apart, entropy, kl)
        ctx.mark_non_differentiable(ref_logp)
        ctx.set_materialize_grads(False)
        return logp, entropy, kl, ref_logp

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any,
        of_logp: Tensor | None,
        of_entropy: Tensor | None,
        of_kl: Tensor | None,
        _: Tensor | None,
    ) -> tuple[Tensor, None, None]:
        index, p, log_pi, apart, entropy, kl = ctx.saved_tensors
        of_logp = torch.zeros_like(kl) if of_logp is None else of_logp
        of_kl = torch.zeros_like(kl) if of_kl is None else of_kl
        # each is p times how far a token is above the average, and log p moves its own token too
        slope = torch.addcmul(-(of_logp + of_kl * kl)[:, None], of_kl[:, None], apart)
        if of_entropy is not None:
            slope -= of_entropy[:, None] * (log_pi + entropy[:, None])
        slope.mul_(p).scatter_add_(-1, index, of_logp[:, None])
        return slope, None, None
