"""Our GPT-2 computes what Hugging Face's does: logits and gradients, dropout or not."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from shutil import which
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from rookworld.model.attention import (
    Attend,
    causal,
    copy_words,
    packed_causal,
    shared_prefix_cpu,
    shared_prefix_gpu,
)
from rookworld.model.gpt2 import GPT2, GPT2Config
from rookworld.model.weights import load_model


def reference(folder: Path, **shape: Any) -> Any:
    """A random transformers model, saved in `folder`; its dropout is 0.1 as in GPT-2's config."""
    transformers = import_module("transformers")
    torch.manual_seed(0)
    dropout = {"resid_pdrop": 0.1, "embd_pdrop": 0.1, "attn_pdrop": 0.1}
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**dropout, **shape))
    with torch.no_grad():  # biases start at 0 and norms at 1, which would hide a swap
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.02)
    model.save_pretrained(folder)
    return model.eval()


def next_token_loss(logits: Tensor, ids: Tensor) -> Tensor:
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


SMALL: dict[str, Any] = {"vocab_size": 96, "n_positions": 48, "n_embd": 32, "n_layer": 3}
SHAPES = [
    pytest.param({**SMALL, "n_head": 4}, id="small"),
    pytest.param(
        {**SMALL, "n_head": 2, "n_inner": 40, "layer_norm_epsilon": 1e-3}
        | {"tie_word_embeddings": False},
        id="untied-narrow",
    ),
    pytest.param({}, id="124M", marks=pytest.mark.slow),
]


@pytest.mark.parametrize("shape", SHAPES)
def test_logits_and_gradients_equal_transformers(tmp_path: Path, shape: dict[str, Any]) -> None:
    theirs = reference(tmp_path, **shape)
    # Dropout would show here: theirs is switched off, ours is in training mode.
    ours = load_model(tmp_path).train()
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, ours.config.vocab_size, (2, 40), generator=generator)
    our_logits, their_logits = ours.logits(ours(ids)), theirs(ids).logits
    torch.testing.assert_close(our_logits, their_logits, atol=1e-5, rtol=0)

    torch.autograd.backward(next_token_loss(our_logits, ids))
    torch.autograd.backward(next_token_loss(their_logits, ids))
    gradients = {
        name.removeprefix("transformer."): parameter.grad
        for name, parameter in theirs.named_parameters()
    }
    for name, parameter in ours.named_parameters():
        assert parameter.grad is not None
        expected = gradients.pop(name)
        transposed = ".c_" in name and name.endswith("weight")
        expected = expected.t() if transposed else expected
        torch.testing.assert_close(parameter.grad, expected, atol=1e-5, rtol=1e-4)
    assert not gradients


def test_a_mask_and_positions_say_what_a_token_sees() -> None:
    """Two packed documents equal the same two apart."""
    model = GPT2(GPT2Config(vocab_size=50, n_positions=16, n_embd=16, n_layer=2, n_head=2))
    model.init_weights(2)
    ids = torch.randint(0, 50, (1, 12), generator=torch.Generator().manual_seed(3))
    document = torch.arange(12) // 6
    see = torch.tril(torch.ones(12, 12, dtype=torch.bool)) & (document[:, None] == document)
    packed = model(ids, torch.arange(12) % 6, masked(see[None, None]))
    apart = torch.cat([model(ids[:, :6]), model(ids[:, 6:])], dim=1)
    torch.testing.assert_close(packed, apart, atol=1e-5, rtol=0)


def test_wanted_places_are_those_of_the_whole() -> None:
    model = GPT2(GPT2Config(**SMALL, n_head=4)).init_weights(1).double()
    ids, wanted = torch.randint(96, (3, 7)), torch.tensor([6, 0, 8, 8, 20])
    whole, part = model(ids).flatten(0, 1)[wanted], model(ids, rows=wanted)
    weights = torch.randn_like(whole)
    torch.testing.assert_close(part, whole)
    for parameter in model.parameters():
        expected, found = (
            torch.autograd.grad((x * weights).sum(), parameter, retain_graph=True)[0]
            for x in (whole, part)
        )
        torch.testing.assert_close(found, expected)


def test_initial_weights_depend_on_the_seed_alone() -> None:
    shape = GPT2Config(vocab_size=50, n_positions=16, n_embd=16, n_layer=2, n_head=2)
    first = GPT2(shape).init_weights(7).state_dict()
    torch.rand(3)
    torch.testing.assert_close(GPT2(shape).init_weights(7).state_dict(), first, atol=0, rtol=0)
    assert not torch.equal(GPT2(shape).init_weights(8).wte.weight, first["wte.weight"])
    assert first["h.0.mlp.c_proj.weight"].std().item() == pytest.approx(0.02 / 2, rel=0.2)
    assert first["ln_f.weight"].eq(1).all()
    assert first["h.1.attn.c_attn.bias"].eq(0).all()


needs_compiler = pytest.mark.skipif(which("g++") is None, reason="needs g++")


def masked(mask: Tensor) -> Attend:
    """Attention under `mask` [batch or 1, 1, tokens, tokens], true where a token may look."""

    def attend(qkv: Tensor) -> Tensor:
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        return F.scaled_dot_product_attention(query, key, value, attn_mask=mask).transpose(1, 2)

    return attend


def shared_prefix_mask(heads: Tensor, head: int, k: int, tail: int) -> Tensor:
    """[groups, 1, L, L]: prompts are causal; an answer sees its prompt and its own past."""
    place = torch.arange(head + k * tail)
    is_head = place < head
    answer = torch.where(is_head, -1, (place - head) // tail)
    same = (answer[None, :] == answer[:, None]) & (place[None, :] <= place[:, None])
    real_head = is_head & (place < heads[:, None])
    return (same | (~is_head[None, :, None] & real_head[:, None, :]))[:, None]


def in_one_line(lines: Tensor, head: int) -> Tensor:
    """[groups, tokens, …] -> [1, groups x tokens, …], all prompts before all answers."""
    return torch.cat([lines[:, :head].flatten(0, 1), lines[:, head:].flatten(0, 1)])[None]


@pytest.mark.parametrize("on_gpu", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("k", "tail", "size"), [(3, 4, 8), (1, 4, 8), (3, 1, 8), (2, 3, 5)])
def test_answers_behind_a_prompt_see_what_the_mask_lets_them_see(
    dtype: torch.dtype, k: int, tail: int, size: int, on_gpu: bool
) -> None:
    torch.manual_seed(0)
    lengths, head = torch.tensor([5, 3]), 5
    of_pack = (
        shared_prefix_gpu(lengths, head, k, tail)
        if on_gpu
        else shared_prefix_cpu(lengths, head, tail)
    )
    mask = shared_prefix_mask(lengths, head, k, tail)
    lines = torch.randn(2, head + k * tail, 3, 2, size).to(dtype)
    real = torch.cat([torch.arange(head) < lengths[:, None], torch.ones(2, k * tail) > 0], 1)
    found = []
    for attend, given, counts in (
        (masked(mask), lines, real),
        (of_pack, in_one_line(lines, head), in_one_line(real, head)),
    ):
        parts = given.clone().requires_grad_()
        seen = attend(parts) * counts[..., None, None]
        (slope,) = torch.autograd.grad(seen.float().square().sum(), parts)
        alike = [x if given is not lines else in_one_line(x, head) for x in (seen, slope)]
        found.append(alike)
    close = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 3e-2}[dtype]
    torch.testing.assert_close(found[0][0], found[1][0], atol=close, rtol=close)
    torch.testing.assert_close(found[0][1], found[1][1], atol=close, rtol=close)


def test_packed_prompts_do_not_see_each_other() -> None:
    lines = torch.randn(2, 5, 3, 2, 8)
    expected = torch.cat([causal(line[None]) for line in lines], 1)
    torch.testing.assert_close(packed_causal(2)(lines.flatten(0, 1)[None]), expected)


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.zeros(2, 4, 8),
        lambda: torch.zeros(2, 4, 5),
        lambda: torch.zeros(40).as_strided((2, 4), (5, 1), 1),
        lambda: torch.zeros(8, 4).t(),
    ],
)
def test_a_copy_is_a_copy_however_it_is_laid_out(make: Callable[[], Tensor]) -> None:
    into = make()
    given = torch.randn(into.shape)
    copy_words(into, given)
    assert torch.equal(into, given)
    again = torch.zeros(into.shape)
    copy_words(again, into)
    assert torch.equal(again, given)


def test_blocks_that_are_computed_again_give_the_same_gradient() -> None:
    shape = GPT2Config(vocab_size=50, n_positions=16, n_embd=16, n_layer=3, n_head=2)
    model = GPT2(shape).init_weights(0)
    ids = torch.arange(24).view(2, 12)
    found = []
    for again in (False, True):
        model.recompute = again
        kept: list[Tensor] = []

        def keep(tensor: Tensor, kept: list[Tensor] = kept) -> Tensor:
            kept.append(tensor)
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            loss = model(ids).square().sum()
        found.append((torch.autograd.grad(loss, list(model.parameters())), len(kept)))
    torch.testing.assert_close(found[0][0], found[1][0], atol=0, rtol=0)
    assert found[1][1] < 0.6 * found[0][1], "nothing was saved by not keeping"


@pytest.mark.filterwarnings("ignore")  # a compiler warns of itself
@pytest.mark.parametrize(
    "backend",
    [
        "aot_eager",
        pytest.param("inductor", marks=[pytest.mark.slow, needs_compiler]),
    ],
)
def test_compiled_blocks_can_be_computed_again_behind_a_prompt(backend: str) -> None:
    """An attention prepares at once what it needs: a second pass must find what the first did."""
    shape = GPT2Config(vocab_size=50, n_positions=16, n_embd=16, n_layer=3, n_head=2)
    ids = torch.arange(22)[None]
    positions = torch.tensor([0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 5, 6, 5, 6, 5, 6, 5, 6, 5, 6, 5, 6])
    slopes = []
    for again in (False, True):
        model = GPT2(shape).init_weights(0)
        model.recompute = again
        if again:
            for block in model.h:
                block.compile(dynamic=True, backend=backend)
        attend = shared_prefix_gpu(torch.tensor([5, 4]), 5, 3, 2)
        loss = model(ids, positions, attend).square().sum()
        slopes.append(torch.autograd.grad(loss, list(model.parameters())))
    torch.testing.assert_close(slopes[0], slopes[1], atol=1e-4, rtol=1e-3)
