"""A dense layer's product is the layer's, forwards and backwards, whoever computes it."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rookworld.model.kernels import have_onednn
from rookworld.model.product import dense


def layer_and_rows(dtype: torch.dtype = torch.float32) -> tuple[nn.Linear, Tensor]:
    torch.manual_seed(0)
    return nn.Linear(24, 40, dtype=dtype), torch.randn(3, 7, 24, dtype=dtype)


def plain(x: Tensor, layer: nn.Linear, gelu: bool) -> Tensor:
    out = F.linear(x, layer.weight, layer.bias)
    return F.gelu(out, approximate="tanh") if gelu else out


@pytest.mark.parametrize("gelu", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_product_is_the_layer(gelu: bool, dtype: torch.dtype) -> None:
    layer, x = layer_and_rows(dtype)
    torch.testing.assert_close(dense(x, layer, gelu), plain(x, layer, gelu))
    with torch.no_grad():
        torch.testing.assert_close(dense(x, layer, gelu), plain(x, layer, gelu))


@pytest.mark.parametrize("gelu", [False, True])
def test_its_gradients_are_the_layers(gelu: bool) -> None:
    layer, x = layer_and_rows()
    x.requires_grad_()
    wanted = (x, layer.weight, layer.bias)
    slope = torch.randn(3, 7, 40)
    found = torch.autograd.grad(dense(x, layer, gelu), wanted, slope)
    expected = torch.autograd.grad(plain(x, layer, gelu), wanted, slope)
    torch.testing.assert_close(found, expected)


def test_what_is_frozen_gets_no_gradient() -> None:
    layer, x = layer_and_rows()
    layer.requires_grad_(False)
    dense(x.requires_grad_(), layer).sum().backward()  # type: ignore[no-untyped-call]
    assert x.grad is not None
    assert layer.weight.grad is None and layer.bias.grad is None


def test_autocast_rounds_it() -> None:
    layer, x = layer_and_rows()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert dense(x, layer).dtype is torch.bfloat16
        with torch.no_grad():
            assert torch.equal(dense(x, layer, gelu=True), plain(x, layer, gelu=True))


@pytest.mark.skipif(not have_onednn(), reason="needs oneDNN")
def test_float32_goes_to_onednn() -> None:
    layer, x = layer_and_rows()
    assert "Product" in type(dense(x, layer).grad_fn).__name__
