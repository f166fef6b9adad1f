"""Recorded passes: on CUDA as they are, elsewhere with a stand-in that runs again for a replay."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from rookworld.model import graphs
from rookworld.model.gpt2 import GPT2, GPT2Config, causal
from rookworld.model.graphs import PassGraph, PassGraphs, Run, twin_of
from rookworld.trainer_state import hold_still

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


class Rerun(PassGraph):
    """Does on any device what a replay does: fixed places in, fixed places out."""

    made = 0

    def __init__(
        self, run: Run, model: GPT2, x: Tensor, others: Sequence[Tensor], pool: Any, learns: bool
    ) -> None:
        Rerun.made += 1
        self.run, self.model, self.learns = run, model, learns
        self.x = x.detach().clone()
        self.others = [other.clone() for other in others]

    def forward(self, x: Tensor, others: Sequence[Tensor]) -> Tensor:
        with torch.no_grad():
            self.x.copy_(x)
            for mine, other in zip(self.others, others, strict=True):
                mine.copy_(other)
        self.x = self.x.detach().requires_grad_(self.learns)
        with torch.set_grad_enabled(self.learns):
            self.found = self.run(self.model, self.x, *self.others)
        return self.found.detach().clone()

    def backward(self, slope: Tensor) -> Tensor:
        self.found.backward(slope)  # type: ignore[no-untyped-call]
        assert self.x.grad is not None
        return self.x.grad


@pytest.fixture(autouse=True)
def recorded(monkeypatch: pytest.MonkeyPatch) -> type[Rerun]:
    Rerun.made = 0
    if DEVICE == "cpu":
        monkeypatch.setattr(graphs, "PassGraph", Rerun)
        monkeypatch.setattr(torch.cuda, "device", lambda _: torch.inference_mode(False))
    return Rerun


def small_model(seed: int = 0) -> GPT2:
    config = GPT2Config(vocab_size=40, n_positions=32, n_embd=32, n_layer=3, n_head=2)
    return GPT2(config).init_weights(seed).to(DEVICE)


def pool_of() -> Any:
    return torch.cuda.graph_pool_handle() if DEVICE == "cuda" else None


def run(model: GPT2, x: Tensor, wanted: Tensor) -> Tensor:
    return model.through_blocks(x, causal, wanted)


def gradients_of(model: GPT2, ids: Tensor, wanted: Tensor, passes: PassGraphs | None) -> list[Any]:
    """(states, gradients) of some loss over two passes, as a step of two packs has them."""
    for parameter in model.parameters():
        parameter.grad = None
    found = []
    for turn in (1.0, 2.0):
        x = model.embed(ids.roll(int(turn)))
        hidden = run(model, x, wanted) if passes is None else passes("one", run, x, wanted)
        loss = turn * hidden.sin().sum() + model.logits(hidden)[:, 3].sum()
        loss.backward()  # type: ignore[no-untyped-call]
        found.append(hidden.detach())
    return [*found, *[p.grad.clone() for p in model.parameters() if p.grad is not None]]


@pytest.mark.parametrize("again", [False, True], ids=["kept", "recomputed"])
@pytest.mark.parametrize("trained", ["all", "blocks", "vectors"])
def test_a_replay_is_the_pass_and_its_gradient(trained: str, again: bool) -> None:
    model = small_model()
    model.recompute = again
    hold_still(model, trained)
    passes = PassGraphs(model, pool_of())
    for step in range(4):
        generator = torch.Generator().manual_seed(step)
        ids = torch.randint(0, 40, (2, 9), generator=generator).to(DEVICE)
        wanted = torch.randperm(18, generator=generator)[:7].to(DEVICE)
        plain = copy.deepcopy(model)
        expected = gradients_of(plain, ids, wanted, None)
        found = gradients_of(model, ids, wanted, passes)
        assert len(found) == len(expected)
        for mine, theirs in zip(found, expected, strict=True):
            torch.testing.assert_close(mine, theirs, atol=2e-5, rtol=1e-4)
        with torch.no_grad():  # an update in place, which replays must see
            for parameter in model.parameters():
                if parameter.grad is not None:
                    parameter.sub_(0.1 * parameter.grad)
    assert len(passes.kept) == 1


def test_only_sizes_that_return_are_recorded(
    recorded: type[Rerun], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(graphs, "GRAPHS_KEPT", 2)
    model = small_model().requires_grad_(False)
    passes = PassGraphs(model, pool_of())
    wanted = torch.tensor([1, 3], device=DEVICE)

    def ask(tokens: int) -> int:
        ids = torch.arange(2 * tokens, device=DEVICE).view(2, tokens)
        passes("one", run, model.embed(ids), wanted)
        return len(passes.kept)

    assert [ask(5) for _ in range(4)] == [0, 0, 1, 1]
    assert [ask(6) for _ in range(4)] == [1, 1, 2, 2]
    assert [ask(7) for _ in range(4)] == [2, 2, 2, 2], "no more than are kept"
    monkeypatch.setattr(graphs, "GRAPHS_KEPT", 9)
    monkeypatch.setattr(graphs, "LARGEST", 2 * 7 * 32)
    assert ask(7) == 3
    assert [ask(8) for _ in range(4)] == [3, 3, 3, 3], "the host keeps ahead of large ones"


def test_without_a_gradient_to_learn_from_a_replay_only_finds(recorded: type[Rerun]) -> None:
    model = small_model()
    passes = PassGraphs(model, pool_of())
    ids, wanted = torch.arange(10, device=DEVICE)[None], torch.tensor([4, 9], device=DEVICE)
    for _ in range(4):
        with torch.no_grad():
            x = model.embed(ids)
            found = passes("one", run, x, wanted)
            torch.testing.assert_close(found, run(model, x, wanted), atol=1e-5, rtol=1e-4)
        assert not found.requires_grad
    assert len(passes.kept) == 1


def test_a_twin_has_the_weights_and_no_place_in_the_models_graph() -> None:
    model = small_model()
    twin = twin_of(model)
    for mine, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        assert mine is not theirs and mine.data_ptr() == theirs.data_ptr()
    assert twin.lm_head.weight is twin.wte.weight


def test_gradients_found_before_a_replay_are_kept() -> None:
    model = small_model()
    passes = PassGraphs(model, pool_of())
    first = next(model.parameters())
    first.grad = torch.full_like(first, 2.0)
    passes.settle_gradients()
    assert first.grad is next(passes.twin.parameters()).grad
    assert bool((first.grad == 2.0).all())
    first.grad = None
    passes.settle_gradients()
    assert first.grad is not None and not first.grad.any()
