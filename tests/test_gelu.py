"""Our gelu is torch's, faster."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from rookworld.model.kernels.cpu import gelu

PLACES = torch.cat([torch.linspace(-12, 12, 2001), torch.tensor([-1e4, 0.0, 1e4])])


def exact(x: Tensor) -> Tensor:
    """By torch's own formula in float64, as wide as x is."""
    return F.gelu(x.double(), approximate="tanh")


@pytest.mark.parametrize(
    ("dtype", "close"), [(torch.float64, 1e-12), (torch.float32, 1e-6), (torch.bfloat16, 4e-3)]
)
@pytest.mark.parametrize("trained", [False, True])
def test_value_and_gradient_are_torchs(dtype: torch.dtype, close: float, trained: bool) -> None:
    x = PLACES.to(dtype).requires_grad_(trained)
    found, expected = gelu(x), exact(x)
    assert found.dtype is dtype
    torch.testing.assert_close(found.double(), expected, atol=close, rtol=close)
    if trained:
        slope = torch.linspace(-1, 2, len(PLACES))
        (mine,) = torch.autograd.grad(found, x, slope.to(dtype))
        (its,) = torch.autograd.grad(expected, x, slope.double())
        torch.testing.assert_close(mine.double(), its.double(), atol=3 * close, rtol=3 * close)


def test_what_went_in_is_as_it_was() -> None:
    x = PLACES.clone()
    gelu(x)
    assert torch.equal(x, PLACES)


def test_what_is_no_number_stays_none() -> None:
    assert gelu(torch.tensor([torch.nan])).isnan().all()
