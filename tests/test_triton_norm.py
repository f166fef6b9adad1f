"""The stream's kernels against plain torch: compiled where CUDA is, interpreted elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

pytest.importorskip("triton")
CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"

from rookworld.model.attention import causal  # noqa: E402
from rookworld.model.gpt2 import GPT2, GPT2Config  # noqa: E402
from rookworld.model.kernels import dispatch, triton_norm  # noqa: E402

fused: Callable[..., tuple[Tensor, Tensor]] = triton_norm.AddNorm.apply


@pytest.mark.parametrize("adds", [True, False])
@pytest.mark.parametrize(("rows", "width"), [(1, 16), (7, 24), (40, 48)])
def test_it_is_the_sum_and_its_norm_both_ways(
    rows: int, width: int, adds: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(triton_norm, "PROGRAMS", 6)
    generator = torch.Generator().manual_seed(0)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(DEVICE)

    x, delta = drawn(1, rows, width), drawn(1, rows, width) if adds else None
    gain, shift = 1 + 0.3 * drawn(width), drawn(width)
    inputs = [t.requires_grad_() for t in (x, delta, gain, shift) if t is not None]
    to_sum, to_norm = drawn(1, rows, width), drawn(1, rows, width)

    summed, normed = fused(x, delta, gain, shift, 1e-5, torch.float32)
    found = torch.autograd.grad((summed, normed), inputs, (to_sum, to_norm))
    plain = x if delta is None else x + delta
    expected = torch.layer_norm(plain, (width,), gain, shift, 1e-5)
    slopes = torch.autograd.grad((plain * 1.0, expected), inputs, (to_sum, to_norm))

    torch.testing.assert_close(summed, plain, atol=0, rtol=0)
    torch.testing.assert_close(normed, expected, atol=2e-6, rtol=1e-5)
    for mine, theirs in zip(found, slopes, strict=True):
        torch.testing.assert_close(mine, theirs, atol=2e-5, rtol=1e-4)


def test_the_norm_is_rounded_once_and_its_gradient_comes_back_as_it_was() -> None:
    half = torch.bfloat16 if CUDA else torch.float16
    x = torch.randn(1, 5, 32, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    delta = (x.detach() / 3).to(half).requires_grad_()
    x.requires_grad_()
    gain, shift = torch.ones(32, device=DEVICE), torch.zeros(32, device=DEVICE)
    summed, normed = fused(x, delta, gain, shift, 1e-5, half)
    assert (summed.dtype, normed.dtype) == (torch.float32, half)
    plain = torch.layer_norm(x + delta, (32,))
    torch.testing.assert_close(normed, plain.to(half), atol=2e-3, rtol=8e-3)
    torch.autograd.backward(summed.sum() + normed.float().square().sum())
    assert x.grad is not None and delta.grad is not None
    assert delta.grad.dtype is half
    torch.testing.assert_close(delta.grad, x.grad.to(half), atol=0, rtol=0)


def test_a_block_that_is_computed_again_finds_the_same_gradient() -> None:
    x = torch.randn(1, 6, 32, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    x.requires_grad_()
    gain, shift = (torch.full((32,), value, device=DEVICE) for value in (1.5, 0.2))

    def block(x: Tensor) -> Tensor:
        x, h = fused(x, None, gain, shift, 1e-5, torch.float32)
        summed, h = fused(x, h.tanh(), gain, shift, 1e-5, torch.float32)
        return summed + h.square()

    slopes = [
        torch.autograd.grad(found.square().sum(), x)[0]
        for found in (block(x), checkpoint(block, x, use_reentrant=False))
    ]
    assert torch.equal(*slopes)


@pytest.mark.skipif(not CUDA, reason="needs a GPU")
@pytest.mark.parametrize("again", [False, True], ids=["kept", "computed again"])
def test_a_model_under_autocast_is_that_of_plain_torch(
    again: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    shape = GPT2Config(vocab_size=50, n_positions=16, n_embd=48, n_layer=3, n_head=2)
    ids, wanted = torch.arange(24, device=DEVICE).view(2, 12), torch.tensor([3, 17], device=DEVICE)
    found, calls = [], []

    def counted(*args: Any) -> tuple[Tensor, Tensor]:
        calls.append(1)
        return fused(*args)

    monkeypatch.setattr(triton_norm.AddNorm, "apply", counted)
    for plain in (False, True):
        if plain:
            monkeypatch.setattr(dispatch, "_suits_triton", lambda x, norm: False)
        model = GPT2(shape).init_weights(0).to(DEVICE)
        model.recompute = again
        with torch.autocast("cuda", dtype=torch.bfloat16):
            hidden = model(ids, None, causal, wanted)
        slopes = torch.autograd.grad(
            hidden.square().sum(), list(model.parameters()), allow_unused=True
        )
        found.append([hidden, *(slope for slope in slopes if slope is not None)])
        assert len(calls) == 2 * shape.n_layer + again * 2 * (shape.n_layer - 1)
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, atol=3e-2, rtol=3e-2)
