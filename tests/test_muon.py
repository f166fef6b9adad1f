"""Stacked Muon is torch's Muon."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from rookworld.model.gpt2 import GPT2, GPT2Config
from rookworld.model.optim import StackedMuon, muon_groups

SHAPES = [(8, 8), (8, 8), (32, 8), (8, 32), (8, 8)]


def test_the_update_is_the_one_of_torch() -> None:
    mine = [
        nn.Parameter(torch.randn(s, generator=torch.manual_seed(i))) for i, s in enumerate(SHAPES)
    ]
    theirs = [nn.Parameter(p.detach().clone()) for p in mine]
    how: dict[str, Any] = {"lr": 0.01, "weight_decay": 0.1, "adjust_lr_fn": "match_rms_adamw"}
    stacked, plain = StackedMuon(mine, **how), torch.optim.Muon(theirs, **how)
    for step in range(5):
        for place, (a, b) in enumerate(zip(mine, theirs, strict=True)):
            noise = torch.randn(a.shape, generator=torch.manual_seed(100 * step + place))
            a.grad, b.grad = noise, noise.clone()
        stacked.step()
        plain.step()  # type: ignore[no-untyped-call]
    for a, b in zip(mine, theirs, strict=True):
        # bfloat16 inside: one rounding of the iteration is 2 ** -8 of an update of 0.2 · lr · √n
        torch.testing.assert_close(a, b, atol=2e-3, rtol=0)
    states = [optimizer.state_dict()["state"] for optimizer in (stacked, plain)]
    assert states[0].keys() == states[1].keys()
    for place, a in states[0].items():
        torch.testing.assert_close(a["momentum_buffer"], states[1][place]["momentum_buffer"])


def test_a_matrix_without_gradient_stays() -> None:
    still, moving = nn.Parameter(torch.ones(4, 4)), nn.Parameter(torch.ones(4, 4))
    moving.grad = torch.eye(4)
    StackedMuon([still, moving], adjust_lr_fn="match_rms_adamw").step()
    assert torch.equal(still, torch.ones(4, 4)) and not torch.equal(moving, torch.ones(4, 4))


def test_query_key_and_value_are_three_matrices_in_one_weight() -> None:
    model = GPT2(GPT2Config(vocab_size=11, n_positions=8, n_embd=8, n_layer=2, n_head=2))
    groups = muon_groups(model.named_parameters())
    fused = [group["params"] for group in groups if group["parts"] == 3]
    assert fused == [[block.get_parameter("attn.c_attn.weight") for block in model.h]]
    whole = nn.Parameter(torch.randn(24, 8, generator=torch.manual_seed(1)))
    thirds = [nn.Parameter(third.clone()) for third in whole.detach().chunk(3)]
    whole.grad = torch.randn(24, 8, generator=torch.manual_seed(2))
    for third, gradient in zip(thirds, whole.grad.chunk(3), strict=True):
        third.grad = gradient
    StackedMuon([{"params": [whole], "parts": 3}], adjust_lr_fn="match_rms_adamw").step()
    StackedMuon(thirds, adjust_lr_fn="match_rms_adamw").step()
    assert torch.equal(whole, torch.cat([*thirds]))
