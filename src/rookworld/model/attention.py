"""How tokens attend: plain causal attention, and that of a batch whose completions share prompts.

Law: every prompt is causal; a completion sees the real tokens of its prompt and its own past. Such
a batch is one line: all prompts, padded to `head` tokens, then all completions, padded to `tail`.
What nobody may see is not computed, which is nearly all of the line. On a GPU one fused kernel
takes the prompts and one the completions; on the CPU, where torch's fused kernel takes twice as
long for prompts of a hundred tokens, the products and their gradient are written out in float32
(batched products of few rows are no faster in bf16).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

Attend = Callable[[Tensor], Tensor]
"""Queries, keys and values [batch, tokens, 3, heads, head size] -> [batch, tokens, heads, size]."""


def causal(qkv: Tensor) -> Tensor:
    """Every token sees itself and what came before."""
    query, key, value = qkv.permute(2, 0, 3, 1, 4)
    return F.scaled_dot_product_attention(query, key, value, is_causal=True).transpose(1, 2)


def shared_prefix_attention(lengths: Tensor, head: int, completions: int, tail: int) -> Attend:
    """For a line of prompts, the first `lengths` [prompts] of `head` tokens real, and completions.

    Each prompt has as many `completions`, of `tail` tokens.
    """
    if tail == 0:
        return packed_causal(len(lengths))
    if lengths.device.type == "cpu":
        return shared_prefix_cpu(lengths, head, tail)
    return shared_prefix_gpu(lengths, head, completions, tail)


def packed_causal(sequences: int) -> Attend:
    """`causal` for sequences of one length, one behind the other in a single line."""

    def attend(qkv: Tensor) -> Tensor:
        each = _causal_in_float32 if qkv.device.type == "cpu" else causal
        return each(qkv.reshape(sequences, -1, *qkv.shape[2:])).flatten(0, 1)[None]

    return attend


def _causal_in_float32(qkv: Tensor) -> Tensor:
    """`causal` for the CPU, where the gradient of its bf16 kernel takes seven times as long."""
    with torch.autocast("cpu", enabled=False):
        return causal(qkv.float()).to(qkv.dtype)


def padding_bias(lengths: Tensor, slots: int, heads: int) -> Tensor:
    """[prompts × heads, 1, slots]: 0 on a prompt's own slots, -inf on its padding."""
    beyond = torch.arange(slots, device=lengths.device) >= lengths[:, None]
    bias = torch.zeros(beyond.shape, device=lengths.device).masked_fill_(beyond, -torch.inf)
    return bias.repeat_interleave(heads, 0)[:, None]


def _parts(line: Tensor, prompts: int, head: int, tail: int) -> tuple[Tensor, Tensor]:
    """The two parts of a line: [prompts, head, …] and [prompts, completions, tail, …]."""
    # split and flatten, not slices: a slice's gradient would be zeros of the whole's size first
    first, each = prompts * head, line.shape[2:]
    front, back = torch.split(line.flatten(0, 1), [first, line.shape[1] - first])
    return front.view(prompts, head, *each), back.view(prompts, -1, tail, *each)


# --- on a GPU -----------------------------------------------------------------------------------


def shared_prefix_gpu(lengths: Tensor, head: int, completions: int, tail: int) -> Attend:
    """One fused kernel for prompts, one for completions.

    Each completion brings its prompt's keys and values along, which costs a copy of them and saves
    every completion from being scored against all others.
    """
    prompts = len(lengths)
    real = torch.arange(head, device=lengths.device) < lengths[:, None]
    own = torch.ones(tail, tail, dtype=torch.bool, device=lengths.device).tril()
    sees = real[:, None, None].expand(prompts, completions, tail, head)
    own = own.expand(prompts, completions, tail, tail)
    sees = torch.cat([sees, own], -1).flatten(0, 1)[:, None]
    # once for all layers, each of which would turn booleans into this
    bias = {
        dtype: sees.new_zeros(sees.shape, dtype=dtype).masked_fill(~sees, -torch.inf)
        for dtype in (torch.float32, torch.bfloat16)
    }

    repeat_prefix: Callable[..., tuple[Tensor, ...]] = _RepeatPrefix.apply

    def attend(qkv: Tensor) -> Tensor:
        front, *back = repeat_prefix(qkv, prompts, head, tail)
        query, keys, values = (part.flatten(0, 1).transpose(1, 2) for part in back)
        mask = bias.get(qkv.dtype, sees)
        seen = F.scaled_dot_product_attention(query, keys, values, attn_mask=mask)
        line = (causal(front), seen.transpose(1, 2))
        return torch.cat([part.flatten(0, -3) for part in line])[None]

    return attend


class _RepeatPrefix(torch.autograd.Function):
    """A line -> its prompts, and completions' queries, keys and values, prompts' before their own.

    [1, tokens, 3, heads, size] -> [prompts, head, 3, heads, size], [prompts, completions, tail,
    heads, size] and twice [prompts, completions, head + tail, heads, size]. By autograd alone the
    gradient would be put together four times over.
    """

    @staticmethod
    def forward(
        ctx: Any, qkv: Tensor, prompts: int, head: int, tail: int
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        ctx.shape, ctx.sizes = qkv.shape, (prompts, head, tail)
        front, back = _parts(qkv, prompts, head, tail)
        query, own = back[:, :, :, 0], back[:, :, :, 1:]
        both = own.new_empty(*own.shape[:2], head + tail, *own.shape[3:])
        copy_words(both[:, :, :head], front[:, None, :, 1:])
        copy_words(both[:, :, head:], own)
        return front, query, both[:, :, :, 0], both[:, :, :, 1]

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, of_prompts: Tensor, of_query: Tensor, of_keys: Tensor, of_values: Tensor
    ) -> tuple[Tensor, None, None, None]:
        _, head, _ = ctx.sizes
        gradient = of_query.new_empty(ctx.shape)
        front, back = _parts(gradient, *ctx.sizes)
        copy_words(front, of_prompts)
        copy_words(back[:, :, :, 0], of_query)
        for place, part in ((1, of_keys), (2, of_values)):
            front[:, :, place] += part[:, :, :head].sum(1)
            copy_words(back[:, :, :, place], part[:, :, head:])
        return gradient, None, None, None


def copy_words(target: Tensor, x: Tensor) -> None:
    """Copy in words of 8 bytes where rows are made of them: GPUs pay for strides by element.

    Compiled code does that by itself, and its compiler stumbles over words of unknown number.
    """
    eager = not torch.compiler.is_compiling()
    if eager and target.dtype is x.dtype and _in_words(target) and _in_words(x):
        target, x = target.view(torch.int64), x.view(torch.int64)
    target.copy_(x)


def _in_words(x: Tensor) -> bool:
    """Whether every row of `x` begins and ends between two words of 8 bytes."""
    *outer, inner = x.stride()
    starts = (x.shape[-1], x.storage_offset(), *outer)
    return inner == 1 and all(start * x.element_size() % 8 == 0 for start in starts)


# --- on the CPU ---------------------------------------------------------------------------------


def shared_prefix_cpu(lengths: Tensor, head: int, tail: int) -> Attend:
    """Batched products, with the gradient written out: autograd copies every part several times."""
    before, later = (torch.full((size, size), -torch.inf).triu(1) for size in (head, tail))
    apply: Callable[..., Tensor] = _SharedPrefix.apply

    def attend(qkv: Tensor) -> Tensor:
        padding = padding_bias(lengths, head, qkv.shape[3])
        with torch.autocast("cpu", enabled=False):
            return apply(qkv, len(lengths), before, later, padding)

    return attend


class _SharedPrefix(torch.autograd.Function):
    """[1, tokens, 3, heads, size] -> [1, tokens, heads, size].

    Below, p is how much each query looks at each key: of prompts at themselves, of all completions
    of a prompt (`_join`) at the prompt and at themselves, which is one softmax.
    """

    @staticmethod
    def forward(
        ctx: Any, qkv: Tensor, prompts: int, before: Tensor, later: Tensor, padding: Tensor
    ) -> Tensor:
        ctx.sizes = prompts, len(before), len(later)
        parts = [_by_head(part) for part in _parts(qkv, *ctx.sizes)]
        for query, *_ in parts:
            query *= qkv.shape[-1] ** -0.5
        (q, k, v), (q_own, k_own, v_own) = parts
        before, later, padding = (mask.to(q.dtype) for mask in (before, later, padding))
        p = torch.baddbmm(before, q, k.mT).softmax(-1)
        at_prompt = torch.baddbmm(padding, _join(q_own, q), k.mT)
        at_own = torch.baddbmm(later, q_own, k_own.mT)
        p_back = torch.cat([at_prompt, _join(at_own, q)], -1).softmax(-1)
        p_prompt, p_own = _split(p_back, q_own)
        seen = torch.bmm(p_prompt, v).view(v_own.shape).baddbmm_(p_own, v_own)
        ctx.save_for_backward(*parts, p, p_back)
        line = qkv.new_empty((*qkv.shape[:2], 1, *qkv.shape[3:]))
        _write(line, ctx.sizes, [torch.bmm(p, v)], [seen])
        return line.squeeze(2)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        *parts, p, p_back = ctx.saved_tensors
        (q, k, v), (q_own, k_own, v_own) = parts
        (of_seen,), (of_own,) = map(_by_head, _parts(gradient.unsqueeze(2), *ctx.sizes))
        of_joined = _join(of_own, q)
        of_p = torch.cat([of_joined @ v.mT, _join(of_own @ v_own.mT, q)], -1)
        p_prompt, p_own = _split(p_back, q_own)
        to_prompt, to_own = _split(_softmax_gradient(of_p, p_back), q_own)
        looks = (
            (q, k, p, of_seen, _softmax_gradient(of_seen @ v.mT, p)),
            (_join(q_own, q), k, p_prompt, of_joined, to_prompt),
            (q_own, k_own, p_own, of_own, to_own),
        )
        (dq, dk, dv), (dq_at, dk_at, dv_at), (dq_own, dk_own, dv_own) = (
            (torch.bmm(scores, keys), torch.bmm(scores.mT, queries), torch.bmm(weights.mT, seen))
            for queries, keys, weights, seen, scores in looks
        )
        dq_own += dq_at.view(dq_own.shape)
        for query in (dq, dq_own):
            query *= gradient.shape[-1] ** -0.5
        out = gradient.new_empty((*gradient.shape[:2], 3, *gradient.shape[2:]))
        front = (dq, dk.add_(dk_at), dv.add_(dv_at))
        _write(out, ctx.sizes, front, (dq_own, dk_own, dv_own))
        return out, None, None, None, None


def _by_head(part: Tensor) -> Tensor:
    """[prompts, …, tokens, n, heads, size] -> [n, prompts × heads × …, tokens, size], a copy."""
    turned, dtype = _heads_first(part), torch.promote_types(part.dtype, torch.float32)
    return torch.empty(turned.shape, dtype=dtype).copy_(turned).flatten(1, -3)


def _heads_first(part: Tensor) -> Tensor:
    """[prompts, …, tokens, n, heads, size] seen as [n, prompts, heads, …, tokens, size]."""
    return part.movedim((-3, -2), (0, 2))


def _write(
    line: Tensor, sizes: tuple[int, int, int], front: Sequence[Tensor], back: Sequence[Tensor]
) -> None:
    """Write what `_by_head` would read into a line."""
    for part, given in zip(_parts(line, *sizes), (front, back), strict=True):
        for place, x in zip(_heads_first(part), given, strict=True):
            place.copy_(x.view(place.shape))


def _join(own: Tensor, prompts: Tensor) -> Tensor:
    """[prompts × completions, tokens, n] -> [prompts, completions × tokens, n]."""
    return own.reshape(len(prompts), -1, own.shape[-1])


def _split(p: Tensor, own: Tensor) -> tuple[Tensor, Tensor]:
    """What completions see of their prompt, joined, and each of itself; both are views."""
    tail = own.shape[1]
    return p[..., :-tail], p.view(len(own), tail, -1)[..., -tail:]


def _softmax_gradient(gradient: Tensor, p: Tensor) -> Tensor:
    """From a softmax's result to what it was made of."""
    found: Tensor = torch._softmax_backward_data(gradient, p, -1, p.dtype)
    return found
