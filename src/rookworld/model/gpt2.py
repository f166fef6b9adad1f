"""GPT-2 as Hugging Face computes it: learned positions, gelu_tanh, tied or untied head.

Law: logits equal `transformers` within 1e-5 in fp32. There is no dropout, whatever a loaded config
says: dropout in the policy but not in the reference is what made earlier KL estimates explode.
How keys and values are attended is a function passed in (`Attend`), so training and shared-prefix
updates are one forward pass; layers share their code, so that few compilations serve them all.
Left out: cross-attention, attention upcasting.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from rookworld.model.activation_reuse import BlockOutputs, linear
from rookworld.model.attention import Attend, causal
from rookworld.model.kernels.cpu import gelu
from rookworld.model.kernels.dispatch import add_norm


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


class Attention(nn.Module):
    def __init__(self, config: GPT2Config) -> None:
        super().__init__()
        self.n_head = config.n_head
        self.c_attn = nn.Linear(config.n_embd, 3 * config.n_embd)
        self.c_proj = nn.Linear(config.n_embd, config.n_embd)

    def forward(
        self, x: Tensor, attend: Attend, rows: Tensor | None, known: BlockOutputs | None
    ) -> Tensor:
        batch, tokens, width = x.shape
        qkv = linear(self.c_attn, x, known and known.attend)
        qkv = qkv.view(batch, tokens, 3, self.n_head, width // self.n_head)
        seen = attend(qkv).reshape(batch, tokens, width)
        return linear(self.c_proj, select_rows(seen, rows), known and known.project)


def select_rows(x: Tensor, rows: Tensor | None) -> Tensor:
    """Some rows of x [batch, tokens, width], counted through the batch; all of it for None."""
    return x if rows is None else x.flatten(0, 1).index_select(0, rows)


class MLP(nn.Module):
    def __init__(self, config: GPT2Config) -> None:
        super().__init__()
        self.c_fc = nn.Linear(config.n_embd, config.inner)
        self.c_proj = nn.Linear(config.inner, config.n_embd)

    def forward(self, x: Tensor, known: BlockOutputs | None) -> Tensor:
        wide = gelu(linear(self.c_fc, x, known and known.widen))
        return linear(self.c_proj, wide, known and known.narrow)


class Block(nn.Module):
    def __init__(self, config: GPT2Config) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(config.n_embd, eps=config.layer_norm_epsilon)
        self.attn = Attention(config)
        self.ln_2 = nn.LayerNorm(config.n_embd, eps=config.layer_norm_epsilon)
        self.mlp = MLP(config)

    def forward(
        self,
        x: Tensor,
        attend: Attend,
        rows: Tensor | None = None,
        known: BlockOutputs | None = None,
    ) -> Tensor:
        x, h = add_norm(x, None, self.ln_1)
        x, h = add_norm(select_rows(x, rows), self.attn(h, attend, rows, known), self.ln_2)
        out: Tensor = x + self.mlp(h, known)
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
        rows: Tensor | None = None,
        known: Sequence[BlockOutputs] | None = None,
    ) -> Tensor:
        """Hidden states [batch, tokens, width] of `ids` [batch, tokens], after the last norm.

        Or only the `rows` places of them [rows, width], counted through the batch: after the last
        layer's keys and values nobody looks at a prompt any more. `known` is what each block's
        products will find.
        """
        return self.through_blocks(self.embed(ids, positions), attend, rows, known)

    def embed(self, ids: Tensor, positions: Tensor | None = None) -> Tensor:
        """[batch, tokens, width] what goes into the first block."""
        if positions is None:
            positions = torch.arange(ids.shape[1], device=ids.device)
        x: Tensor = self.wte(ids) + self.wpe(positions)
        return x

    def through_blocks(
        self,
        x: Tensor,
        attend: Attend,
        rows: Tensor | None = None,
        known: Sequence[BlockOutputs] | None = None,
    ) -> Tensor:
        """What `forward` does after `embed`."""
        *earlier, last = zip(self.h, [None] * len(self.h) if known is None else known, strict=True)
        for block, found in earlier:
            if self.recompute and torch.is_grad_enabled():
                x = checkpoint(block, x, attend, use_reentrant=False, preserve_rng_state=False)
            else:
                x = block(x, attend, None, found)
        block, found = last
        x = block(x, attend, rows, found)
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
