"""GPT-2 as Hugging Face computes it: learned positions, gelu_tanh, tied or untied head.

Law: logits equal `transformers` within 1e-5 in fp32. There is no dropout, whatever a loaded config
says: dropout in the policy but not in the reference is what made earlier KL estimates explode.
How keys and values are attended is a function passed in (`Attend`), so training and shared-prefix
updates are one forward pass; layers share their code, so that few compilations serve them all.
Left out: cross-attention, attention upcasting.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(query, key, value), each [batch, heads, tokens, head size] -> attended, same shape."""


@dataclass(frozen=True, kw_only=True)
class GPT2Config:
    """The shape of a GPT-2; field names are those of its Hugging Face `config.json`."""

    vocab_size: int
    n_positions: int = 1024
    n_embd: int = 768
    n_layer: int = 12
    n_head: int = 12
    n_inner: int | None = None
    layer_norm_epsilon: float = 1e-5
    tie_word_embeddings: bool = True

    @property
    def head_size(self) -> int:
        return self.n_embd // self.n_head

    @property
    def inner(self) -> int:
        return self.n_inner or 4 * self.n_embd


def causal(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Every token sees itself and what came before."""
    return F.scaled_dot_product_attention(query, key, value, is_causal=True)


def causal_in_float32(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """`causal` for the CPU, where the gradient of its bf16 kernel takes seven times as long."""
    with torch.autocast("cpu", enabled=False):
        return causal(query.float(), key.float(), value.float()).to(value.dtype)


def branched(lengths: Tensor, head: int, tail: int) -> Attend:
    """Lines of a prompt (`head` tokens, the first `lengths` real) and answers of `tail` tokens.

    An answer sees the prompt and its own past. For the CPU: what nobody may see is not computed,
    which is two thirds and more of such a line.
    """
    hidden = torch.arange(head, device=lengths.device) >= lengths[:, None]
    bias = torch.zeros(hidden.shape, device=lengths.device).masked_fill(hidden, -torch.inf)
    later = torch.full((tail, tail), -torch.inf, device=lengths.device).triu(1)

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        groups, heads, tokens, size = query.shape
        answers = (groups, heads, -1, tail, size)
        # split, not slices: each slice's gradient would be a tensor of zeros of the whole's size
        (q, q_own), (k, k_own), (v, v_own) = (
            torch.split(x, [head, tokens - head], 2) for x in (query, key, value)
        )
        prompt = causal_in_float32(q, k, v)
        asked = q_own * (1 / math.sqrt(size))
        own = asked.reshape(answers) @ k_own.reshape(answers).transpose(-1, -2) + later
        shared = asked @ k.transpose(-1, -2) + bias[:, None, None]
        scores = torch.cat([shared.view(*own.shape[:-1], head), own], -1)
        p, p_own = torch.split(scores.softmax(-1).to(value.dtype), [head, tail], -1)
        seen = p.flatten(2, 3) @ v + (p_own @ v_own.reshape(answers)).flatten(2, 3)
        return torch.cat([prompt, seen], 2)

    return attend


def fanned(lengths: Tensor, head: int, answers: int, tail: int) -> Attend:
    """The same attention for a GPU: one fused kernel for prompts, one for answers.

    Each answer brings its prompt's keys and values along, which costs a copy of them and saves
    every answer from being scored against all others.
    """
    groups = len(lengths)
    real = torch.arange(head, device=lengths.device) < lengths[:, None]
    own = torch.ones(tail, tail, dtype=torch.bool, device=lengths.device).tril()
    sees = real[:, None, None].expand(groups, answers, tail, head)
    sees = torch.cat([sees, own.expand(groups, answers, tail, tail)], -1).flatten(0, 1)[:, None]
    # once for all layers, each of which would turn booleans into this
    bias = {
        dtype: torch.zeros(sees.shape, dtype=dtype, device=sees.device).masked_fill(
            ~sees, -torch.inf
        )
        for dtype in (torch.float32, torch.bfloat16)
    }

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        _, heads, tokens, size = query.shape
        by_answer = (groups, heads, answers, tail, size)

        def with_prompt(prompt: Tensor, others: Tensor) -> Tensor:
            shared = prompt[:, None].expand(groups, answers, heads, head, size)
            return torch.cat([shared, others.view(by_answer).transpose(1, 2)], 3).flatten(0, 1)

        # split, not slices: each slice's gradient would be a tensor of zeros of the whole's size
        (q, q_own), (k, k_own), (v, v_own) = (
            torch.split(x, [head, tokens - head], 2) for x in (query, key, value)
        )
        seen = F.scaled_dot_product_attention(
            q_own.view(by_answer).transpose(1, 2).flatten(0, 1),
            with_prompt(k, k_own),
            with_prompt(v, v_own),
            attn_mask=bias.get(query.dtype, sees),
        )
        seen = seen.view(groups, answers, heads, tail, size).transpose(1, 2).flatten(2, 3)
        return torch.cat([causal(q, k, v), seen], 2)

    return attend


class Attention(nn.Module):
    def __init__(self, config: GPT2Config) -> None:
        super().__init__()
        self.n_head = config.n_head
        self.c_attn = nn.Linear(config.n_embd, 3 * config.n_embd)
        self.c_proj = nn.Linear(config.n_embd, config.n_embd)

    def forward(self, x: Tensor, attend: Attend, wanted: Tensor | None) -> Tensor:
        batch, tokens, width = x.shape
        qkv = self.c_attn(x).view(batch, tokens, 3, self.n_head, width // self.n_head)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        seen = attend(query, key, value).transpose(1, 2).reshape(batch, tokens, width)
        projected: Tensor = self.c_proj(chosen(seen, wanted))
        return projected


def chosen(x: Tensor, wanted: Tensor | None) -> Tensor:
    """The wanted places of x [batch, tokens, width], counted through; all of it for None."""
    return x if wanted is None else x.flatten(0, 1).index_select(0, wanted)


class MLP(nn.Module):
    def __init__(self, config: GPT2Config) -> None:
        super().__init__()
        self.c_fc = nn.Linear(config.n_embd, config.inner)
        self.c_proj = nn.Linear(config.inner, config.n_embd)

    def forward(self, x: Tensor) -> Tensor:
        projected: Tensor = self.c_proj(F.gelu(self.c_fc(x), approximate="tanh"))
        return projected


class Block(nn.Module):
    def __init__(self, config: GPT2Config) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(config.n_embd, eps=config.layer_norm_epsilon)
        self.attn = Attention(config)
        self.ln_2 = nn.LayerNorm(config.n_embd, eps=config.layer_norm_epsilon)
        self.mlp = MLP(config)

    def forward(self, x: Tensor, attend: Attend, wanted: Tensor | None = None) -> Tensor:
        x = chosen(x, wanted) + self.attn(self.ln_1(x), attend, wanted)
        out: Tensor = x + self.mlp(self.ln_2(x))
        return out


class GPT2(nn.Module):
    """Token ids in, hidden states out; `logits` turns the hidden states one needs into scores."""

    def __init__(self, config: GPT2Config) -> None:
        super().__init__()
        self.config = config
        self.recompute = False
        """Compute blocks again in the backward pass rather than keep what they found."""
        self.wte = nn.Embedding(config.vocab_size, config.n_embd)
        self.wpe = nn.Embedding(config.n_positions, config.n_embd)
        self.h = nn.ModuleList(Block(config) for _ in range(config.n_layer))
        self.ln_f = nn.LayerNorm(config.n_embd, eps=config.layer_norm_epsilon)
        self.lm_head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        if config.tie_word_embeddings:
            self.lm_head.weight = self.wte.weight

    def forward(
        self,
        ids: Tensor,
        positions: Tensor | None = None,
        attend: Attend = causal,
        wanted: Tensor | None = None,
    ) -> Tensor:
        """Hidden states [batch, tokens, width] of `ids` [batch, tokens], after the last norm.

        Or only the `wanted` places of them [rows, width], counted through the batch: after the last
        layer's keys and values nobody looks at a prompt any more.
        """
        if positions is None:
            positions = torch.arange(ids.shape[1], device=ids.device)
        x = self.wte(ids) + self.wpe(positions)
        *earlier, last = self.h
        for block in earlier:
            if self.recompute and torch.is_grad_enabled():
                x = checkpoint(block, x, attend, use_reentrant=False, preserve_rng_state=False)
            else:
                x = block(x, attend)
        x = last(x, attend, wanted)
        hidden: Tensor = self.ln_f(x)
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """Scores over the vocabulary; ask only for the positions that are needed."""
        scores: Tensor = self.lm_head(hidden)
        return scores

    @property
    def device(self) -> torch.device:
        return self.wte.weight.device

    def init_weights(self, seed: int) -> GPT2:
        """GPT-2's own initialisation, the same for a seed on every device."""
        generator = torch.Generator().manual_seed(seed)
        for name, parameter in self.named_parameters():
            with torch.no_grad():
                if name.endswith("bias"):
                    parameter.zero_()
                elif "ln_" in name:
                    parameter.fill_(1.0)
                else:
                    residual = name.endswith("c_proj.weight")
                    std = 0.02 / math.sqrt(2 * self.config.n_layer) if residual else 0.02
                    noise = torch.randn(parameter.shape, generator=generator)
                    parameter.copy_(noise * std)
        return self
