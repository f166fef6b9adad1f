"""GPT-2 run forward only: over a cache of keys and values, prefilled once, a token at a time; or
over whole lines.

Laws: the numbers are those of `GPT2.forward` followed by `GPT2.logits`; nothing here touches the
module's mode or its gradients.
Matrices run in `dtype`; embeddings, norms and the residual stream stay in the model's dtype, as
autocast does it, and logits are fp32: at the size of GPT-2's logits bf16 is off by a quarter nat.
Left out: dropout, training, models whose cache does not fit in memory.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rookworld.model.attention import Attend, padding_bias
from rookworld.model.gpt2 import GPT2, Block, select_rows
from rookworld.model.kernels import cpu
from rookworld.model.kernels.cpu import gelu as gelu_of
from rookworld.model.sampling.kv_cache import KVCache


class Dense:
    """x @ weight.T + bias, optionally gelu_tanh of it, on a view or copy of live parameters.

    In the parameters' own dtype on CUDA the weights are the live ones. Otherwise they are a copy,
    written again in place by `refresh`, so that a captured graph sees an update.
    """

    def __init__(
        self, weight: Tensor, bias: Tensor | None, dtype: torch.dtype, multiple: int = 1
    ) -> None:
        self.sources = (weight.detach(), None if bias is None else bias.detach())
        self.dtype = dtype
        self.separate_gelu = False
        """Round before gelu as well, as a training pass does."""
        self.recorded: list[Tensor] | None = None
        """Outputs of the calls before gelu, while they are recorded."""
        self.packed = cpu.multiplies(weight.device, dtype)
        self.weight = self.sources[0].to(dtype)
        self.bias = None if bias is None else bias.detach().to(dtype)
        if len(weight) % multiple:
            self.weight = F.pad(self.weight, (0, 0, 0, -len(weight) % multiple))
        if self.packed:
            self.refresh()

    def refresh(self) -> None:
        """Pack the weights again; a copy that is not packed is the caller's to write."""
        if self.packed:
            self.weight = cpu.pack(self.sources[0].to(self.dtype))

    def copies(self) -> list[tuple[Tensor, Tensor]]:
        """(copy, live parameter) of what is neither live nor packed."""
        pairs = [] if self.packed else [(self.weight[: len(self.sources[0])], self.sources[0])]
        if self.bias is not None and self.sources[1] is not None:
            pairs.append((self.bias, self.sources[1]))
        return [(copy, live) for copy, live in pairs if copy.data_ptr() != live.data_ptr()]

    def __call__(self, x: Tensor, gelu: bool = False) -> Tensor:
        if not self.separate_gelu:
            return self._multiply(x, gelu)
        found = self._multiply(x, gelu=False)
        if self.recorded is not None:
            self.recorded.append(found)
        return gelu_of(found) if gelu else found

    def _multiply(self, x: Tensor, gelu: bool) -> Tensor:
        x = x.to(self.dtype)
        if self.packed:
            return cpu.linear(x, self.weight, self.bias, gelu)
        out = F.linear(x, self.weight, self.bias)
        return gelu_of(out) if gelu else out


class Norm:
    """A layer norm on the live parameters."""

    def __init__(self, norm: nn.LayerNorm) -> None:
        self.weight, self.bias, self.eps = norm.weight.detach(), norm.bias.detach(), norm.eps

    def __call__(self, x: Tensor) -> Tensor:
        return torch.layer_norm(x, self.weight.shape, self.weight, self.bias, self.eps)


class Layer:
    """One block; `query` and `key_value` are `attend`'s two parts, for the end of a prefill."""

    def __init__(self, block: Block, dtype: torch.dtype, last: bool) -> None:
        def dense(linear: nn.Linear) -> Dense:
            return Dense(linear.weight, linear.bias, dtype)

        attention, mlp = block.attn, block.mlp
        self.norm_1, self.norm_2 = Norm(block.ln_1), Norm(block.ln_2)
        self.attend, self.project = dense(attention.c_attn), dense(attention.c_proj)
        self.widen, self.narrow = dense(mlp.c_fc), dense(mlp.c_proj)
        self.four = (self.attend, self.project, self.widen, self.narrow)
        self.dense = list(self.four)
        if last:
            weight, bias = attention.c_attn.weight, attention.c_attn.bias
            width = weight.shape[1]
            self.query = Dense(weight[:width], bias[:width], dtype)
            self.key_value = Dense(weight[width:], bias[width:], dtype)
            self.dense += [self.query, self.key_value]

    def finish(self, x: Tensor, seen: Tensor) -> Tensor:
        """What follows attention, added to the residual stream `x` in place."""
        x += self.project(seen)
        x += self.narrow(self.widen(self.norm_2(x), gelu=True))
        return x


class InferenceWeights:
    """What decoding reads of a `GPT2`, without holding the module itself."""

    def __init__(self, model: GPT2, dtype: torch.dtype | None = None) -> None:
        self.config = model.config
        self.wte, self.wpe = model.wte.weight.detach(), model.wpe.weight.detach()
        self.device, self.dtype = self.wte.device, dtype or self.wte.dtype
        blocks = [block for block in model.h if isinstance(block, Block)]
        self.layers = [Layer(block, self.dtype, block is blocks[-1]) for block in blocks]
        self.norm = Norm(model.ln_f)
        on_cuda = self.device.type == "cuda"
        # Only CUDA has a bf16 product with fp32 logits, and GPT-2's odd vocabulary misaligns it.
        self.head = Dense(
            model.lm_head.weight,
            None,
            self.dtype if on_cuda else torch.float32,
            multiple=64 if on_cuda else 1,
        )

    def refresh(self) -> None:
        """Copy the model's parameters again, in place; live ones need nothing."""
        pairs = []
        for dense in [self.head, *(dense for layer in self.layers for dense in layer.dense)]:
            dense.refresh()
            pairs += dense.copies()
        if pairs:
            copies, live = zip(*pairs, strict=True)
            torch._foreach_copy_(copies, live)  # on a GPU few launches instead of a hundred

    def record(self, on: bool, separate_gelu: bool) -> None:
        """Record the outputs of all linear layers from now on, or stop; earlier ones are gone."""
        for dense in (dense for layer in self.layers for dense in layer.dense):
            dense.separate_gelu, dense.recorded = separate_gelu, [] if on else None

    def embed(self, ids: Tensor, positions: Tensor) -> Tensor:
        return F.embedding(ids, self.wte) + F.embedding(positions, self.wpe)

    def logits(self, hidden: Tensor) -> Tensor:
        """fp32 scores [rows, vocabulary] of `hidden` [rows, width]."""
        if self.head.dtype is torch.float32:
            scores = self.head(hidden)
        else:
            hidden = hidden.to(self.head.dtype)
            scores = torch.mm(hidden, self.head.weight.t(), out_dtype=torch.float32)
        return scores[:, : self.config.vocab_size]


def hidden_states(
    weights: InferenceWeights, ids: Tensor, positions: Tensor, attend: Attend, rows: Tensor
) -> Tensor:
    """What `GPT2.forward` finds at the `rows` places, without a cache and without a gradient."""
    shape = (*ids.shape, 3, weights.config.n_head, weights.config.head_size)
    x = weights.embed(ids, positions)
    for layer in weights.layers:
        seen = attend(layer.attend(layer.norm_1(x)).view(shape)).flatten(2)
        if layer is weights.layers[-1]:
            x, seen = select_rows(x, rows), select_rows(seen, rows)
        x = layer.finish(x, seen)
    return weights.norm(x)


def prefill(
    weights: InferenceWeights, cache: KVCache, first: int, ids: Tensor, lengths: Tensor
) -> Tensor:
    """Fill the prefix of groups `first`… from `ids` [prompts, tokens], padded at the right.

    Returns the logits after each prompt. Causal attention never looks right, so padding is only
    wasted work; and in the last layer only the last token needs more than its key and value.
    """
    prompts, tokens = ids.shape
    config, heads = weights.config, weights.config.n_head
    groups = slice(first, first + prompts)
    attend = _causal_cpu if weights.device.type == "cpu" else _causal_fused
    cache.clear_beyond(groups, tokens)
    x = weights.embed(ids, torch.arange(tokens, device=ids.device))
    for index, layer in enumerate(weights.layers):
        keys = cache.prefix_keys[index, groups, :, :tokens]
        values = cache.prefix_values[index, groups, :, :tokens]
        h, shape = layer.norm_1(x), (prompts, tokens, -1, heads, config.head_size)
        if layer is weights.layers[-1]:
            break
        query, key, value = layer.attend(h).view(shape).permute(2, 0, 3, 1, 4).unbind()
        keys.copy_(key)
        values.copy_(value)
        x = layer.finish(x, attend(query, keys, values))
    for part, kept in zip(layer.key_value(h).view(shape).unbind(2), (keys, values), strict=True):
        kept.copy_(part.transpose(1, 2))
    rows = torch.arange(prompts, device=ids.device)
    x, h = x[rows, lengths - 1], h[rows, lengths - 1]
    query = layer.query(h).view(prompts, heads, 1, -1)
    bias = padding_bias(lengths, tokens, heads)
    seen = _attend_parts(query, (keys, values), None, bias).reshape(prompts, -1)
    return weights.logits(weights.norm(layer.finish(x, seen)))


def _causal_fused(query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """[prompts, heads, tokens, size] each -> [prompts, tokens, width]."""
    seen = F.scaled_dot_product_attention(query, keys, values, is_causal=True)
    return seen.transpose(1, 2).flatten(2)


def _causal_cpu(query: Tensor, keys: Tensor, values: Tensor, block: int = 32) -> Tensor:
    """As `_causal_fused`, and faster than that on the CPU for prompts of a hundred tokens.

    Queries go in blocks that see only the keys up to their end: a third less to compute.
    """
    prompts, heads, tokens, size = query.shape
    later = torch.full((1, tokens, tokens), -torch.inf).triu_(1)
    seen = query.new_empty(prompts, tokens, heads, size)
    for start in range(0, tokens, block):
        end = min(start + block, tokens)
        part = (keys[:, :, :end], values[:, :, :end])
        found = _attend_parts(query[:, :, start:end], part, None, later[:, start:end, :end])
        seen[:, start:end].copy_(found.transpose(1, 2))
    return seen.flatten(2)


Part = tuple[Tensor, Tensor]


def _attend_parts(
    query: Tensor,
    prefix: Part,
    own: Part | None,
    prefix_bias: Tensor | None,
    own_bias: Tensor | None = None,
) -> Tensor:
    """One softmax over prefix and own: query [groups, heads, width, size] -> the same shape.

    prefix: [groups, heads, slots, size]; own: [groups, heads, width, slots, size], of each row.
    """
    keys, values = prefix[0].flatten(0, 1), prefix[1].flatten(0, 1)
    q = query.to(keys.dtype, memory_format=torch.contiguous_format).flatten(0, 1)
    scores = _scores(q, keys, prefix_bias)
    if own is None:
        return torch.bmm(torch.softmax(scores, -1), values).view(query.shape)
    own_keys, own_values = own[0].flatten(0, 2), own[1].flatten(0, 2)
    more = _scores(q.reshape(-1, 1, q.shape[-1]), own_keys, own_bias)
    scores = torch.cat([scores, more.view(*scores.shape[:2], -1)], -1)
    p = torch.softmax(scores, -1, dtype=torch.float32).to(keys.dtype)
    split, all_slots = keys.shape[1], scores.shape[-1]
    seen = torch.bmm(p[..., :split], values)
    # A product reads rows with gaps between them: no copy of the last part of p.
    seen.view(-1, 1, seen.shape[-1]).baddbmm_(p.view(-1, 1, all_slots)[..., split:], own_values)
    return seen.view(query.shape)


def _scores(q: Tensor, keys: Tensor, bias: Tensor | None) -> Tensor:
    """q @ keys.T / sqrt(size) + bias, for each of a batch."""
    scale, rest = 1 / math.sqrt(q.shape[-1]), 0.0 if bias is None else 1.0
    bias = q.new_empty(1, 1, 1) if bias is None else bias.to(q.dtype)
    return torch.baddbmm(bias, q, keys.transpose(1, 2), beta=rest, alpha=scale)


def decode(
    weights: InferenceWeights,
    cache: KVCache,
    ids: Tensor,
    positions: Tensor,
    slot: int,
    bias: Tensor | None,
) -> Tensor:
    """Logits after one more token: `ids` and `positions` [groups, width]; `bias` hides padding.

    All own slots are read and those after `slot` hidden.
    """
    config, (groups, width) = weights.config, ids.shape
    x = weights.embed(ids, positions).flatten(0, 1)
    later = torch.arange(cache.own_keys.shape[-2], device=weights.device) > slot
    own_bias = torch.zeros(later.shape, device=weights.device).masked_fill(later, -torch.inf)
    for index, layer in enumerate(weights.layers):
        qkv = layer.attend(layer.norm_1(x)).view(groups, width, 3, config.n_head, -1)
        query, key, value = qkv.permute(2, 0, 3, 1, 4).unbind()
        prefix = (cache.prefix_keys[index], cache.prefix_values[index])
        own = (cache.own_keys[index], cache.own_values[index])
        for kept, part in zip(own, (key, value), strict=True):
            kept[:, :, :, slot].copy_(part)
        seen = _attend_parts(query, prefix, own, bias, own_bias)
        x = layer.finish(x, seen.transpose(1, 2).reshape(x.shape))
    return weights.logits(weights.norm(x))
