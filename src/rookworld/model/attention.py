"""Attention of prompts and of the answers behind them, for the CPU, its gradient written out.

Law: every prompt is causal; an answer sees the real tokens of its prompt and its own past. What
nobody may see is not computed, which is nearly all of such a line. torch's fused kernel takes twice
as long for prompts of a hundred tokens as the products here, and autograd copies every part of the
line several times on the way back. What comes in as bf16 is computed in float32: batched products
of few rows are no faster in bf16.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from rookworld.model.gpt2 import Attend, prompts_and_answers
from rookworld.model.sampling.kv_cache import padding_bias


def branched(lengths: Tensor, head: int, tail: int) -> Attend:
    """One line of all prompts (`head` tokens, the first `lengths` real), then all answers.

    Each prompt has as many answers, of `tail` tokens.
    """
    before, later = (torch.full((size, size), -torch.inf).triu(1) for size in (head, tail))
    apply: Callable[..., Tensor] = _Branched.apply

    def attend(qkv: Tensor) -> Tensor:
        padding = padding_bias(lengths, head, qkv.shape[3])
        with torch.autocast("cpu", enabled=False):
            return apply(qkv, len(lengths), before, later, padding)

    return attend


class _Branched(torch.autograd.Function):
    """[1, tokens, 3, heads, size] -> [1, tokens, heads, size].

    Below, p is how much each query looks at each key: of prompts at themselves, of all answers to a
    prompt (`joined`) at the prompt and at themselves, which is one softmax.
    """

    @staticmethod
    def forward(
        ctx: Any, qkv: Tensor, groups: int, before: Tensor, later: Tensor, padding: Tensor
    ) -> Tensor:
        ctx.sizes = groups, len(before), len(later)
        parts = [by_head(part) for part in prompts_and_answers(qkv, *ctx.sizes)]
        for query, *_ in parts:
            query *= qkv.shape[-1] ** -0.5
        (q, k, v), (q_own, k_own, v_own) = parts
        before, later, padding = (mask.to(q.dtype) for mask in (before, later, padding))
        p = torch.baddbmm(before, q, k.mT).softmax(-1)
        at_prompt = torch.baddbmm(padding, joined(q_own, q), k.mT)
        at_own = torch.baddbmm(later, q_own, k_own.mT)
        p_answers = torch.cat([at_prompt, joined(at_own, q)], -1).softmax(-1)
        p_prompt, p_own = split(p_answers, q_own)
        seen = torch.bmm(p_prompt, v).view(v_own.shape).baddbmm_(p_own, v_own)
        ctx.save_for_backward(*parts, p, p_answers)
        line = qkv.new_empty((*qkv.shape[:2], 1, *qkv.shape[3:]))
        put_back(line, ctx.sizes, [torch.bmm(p, v)], [seen])
        return line.squeeze(2)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor | None, ...]:
        *parts, p, p_answers = ctx.saved_tensors
        (q, k, v), (q_own, k_own, v_own) = parts
        (of_seen,), (of_own,) = map(by_head, prompts_and_answers(slope.unsqueeze(2), *ctx.sizes))
        of_joined = joined(of_own, q)
        of_p = torch.cat([of_joined @ v.mT, joined(of_own @ v_own.mT, q)], -1)
        p_prompt, p_own = split(p_answers, q_own)
        to_prompt, to_own = split(through_softmax(of_p, p_answers), q_own)
        looks = (
            (q, k, p, of_seen, through_softmax(of_seen @ v.mT, p)),
            (joined(q_own, q), k, p_prompt, of_joined, to_prompt),
            (q_own, k_own, p_own, of_own, to_own),
        )
        (dq, dk, dv), (dq_at, dk_at, dv_at), (dq_own, dk_own, dv_own) = (
            (torch.bmm(scores, keys), torch.bmm(scores.mT, queries), torch.bmm(weights.mT, seen))
            for queries, keys, weights, seen, scores in looks
        )
        dq_own += dq_at.view(dq_own.shape)
        for query in (dq, dq_own):
            query *= slope.shape[-1] ** -0.5
        out = slope.new_empty((*slope.shape[:2], 3, *slope.shape[2:]))
        prompts = (dq, dk.add_(dk_at), dv.add_(dv_at))
        put_back(out, ctx.sizes, prompts, (dq_own, dk_own, dv_own))
        return out, None, None, None, None


def by_head(part: Tensor) -> Tensor:
    """[groups, …, tokens, n, heads, size] -> [n, groups × heads × …, tokens, size], a copy."""
    turned, dtype = heads_first(part), torch.promote_types(part.dtype, torch.float32)
    return torch.empty(turned.shape, dtype=dtype).copy_(turned).flatten(1, -3)


def heads_first(part: Tensor) -> Tensor:
    """[groups, …, tokens, n, heads, size] seen as [n, groups, heads, …, tokens, size]."""
    return part.movedim((-3, -2), (0, 2))


def put_back(
    line: Tensor, sizes: tuple[int, int, int], prompts: Sequence[Tensor], answers: Sequence[Tensor]
) -> None:
    """Write what `by_head` would read into a line."""
    parts = prompts_and_answers(line, *sizes)
    for part, found in zip(parts, (prompts, answers), strict=True):
        for place, x in zip(heads_first(part), found, strict=True):
            place.copy_(x.view(place.shape))


def joined(own: Tensor, prompts: Tensor) -> Tensor:
    """[prompts × answers, tokens, n] -> [prompts, answers × tokens, n]."""
    return own.reshape(len(prompts), -1, own.shape[-1])


def split(p: Tensor, own: Tensor) -> tuple[Tensor, Tensor]:
    """What answers see of their prompt, joined, and each of itself; products read both in place."""
    tail = own.shape[1]
    return p[..., :-tail], p.view(len(own), tail, -1)[..., -tail:]


def through_softmax(slope: Tensor, p: Tensor) -> Tensor:
    """From a softmax's result to what it was made of."""
    found: Tensor = torch._softmax_backward_data(slope, p, -1, p.dtype)
    return found
