"""Recorded passes: on CUDA as they are, elsewhere with a stand-in that runs again for a replay."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

from rookworld.model.attention import causal
from rookworld.model.gpt2 import GPT2, GPT2Config
from rookworld.model.kernels import cuda_graphs
from rookworld.model.kernels.cuda_graphs import PassGraph, PassGraphs, Run, alias_of
from rookworld.rl.models import hold_still

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


class Rerun(PassGraph):
    """Does on any device what a replay does: fixed places in, fixed places out."""

    made = 0

    def __init__(
        self, run: Run, model: GPT2, x: Tensor, heads: Tensor, most: int, pool: Any, learns: bool
    ) -> None:
        Rerun.made += 1
        self.run, self.model, self.learns = run, model, learns
        self.x, self.heads = x.detach().clone(), heads.clone()
        self.wanted = heads.new_zeros(most)

    def forward(self, x: Tensor, heads: Tensor, wanted: Tensor) -> Tensor:
        with torch.no_grad():
            self.x.copy_(x)
            self.heads.copy_(heads)
            self.wanted[: len(wanted)].copy_(wanted)
        self.x = self.x.detach().requires_grad_(self.learns)
        with torch.set_grad_enabled(self.learns):
            self.found = self.run(self.model, self.x, self.heads, self.wanted)
        return self.found[: len(wanted)].detach().clone()

    def backward(self, slope: Tensor) -> Tensor:
        rest = self.found.new_zeros(len(self.found) - len(slope), slope.shape[1])
        self.found.backward(torch.cat([slope, rest]))  # type: ignore[no-untyped-call]
        assert self.x.grad is not None
        return self.x.grad


@pytest.fixture(autouse=True)
def recorded(monkeypatch: pytest.MonkeyPatch) -> type[Rerun]:
    Rerun.made = 0
    if DEVICE == "cpu":
        monkeypatch.setattr(cuda_graphs, "PassGraph", Rerun)
        monkeypatch.setattr(torch.cuda, "device", lambda _: torch.inference_mode(False))
    return Rerun


def small_model(seed: int = 0) -> GPT2:
    config = GPT2Config(vocab_size=40, n_positions=32, n_embd=32, n_layer=3, n_head=2)
    return GPT2(config).init_weights(seed).to(DEVICE)


def pool_of() -> Any:
    return torch.cuda.graph_pool_handle() if DEVICE == "cuda" else None


NONE = torch.zeros(1, dtype=torch.int64, device=DEVICE)


def run(model: GPT2, x: Tensor, heads: Tensor, wanted: Tensor) -> Tensor:
    return model.through_blocks(x, causal, wanted)


def gradients_of(model: GPT2, ids: Tensor, wanted: Tensor, passes: PassGraphs | None) -> list[Any]:
    """(states, gradients) of some loss over two passes, as a step of two packs has them."""
    for parameter in model.parameters():
        parameter.grad = None
    found = []
    for turn in (1.0, 2.0):
        x = model.embed(ids.roll(int(turn)))
        if passes is None:
            hidden = run(model, x, NONE, wanted)
        else:
            hidden = passes("one", run, x, NONE, wanted, 18)
        loss = turn * hidden.sin().sum() + model.logits(hidden)[:, 3].sum()
        loss.backward()  # type: ignore[no-untyped-call]
        found.append(hidden.detach())
    return [*found, *[p.grad.clone() for p in model.parameters() if p.grad is not None]]


@pytest.mark.parametrize("again", [False, True], ids=["kept", "recomputed"])
@pytest.mark.parametrize("trained", ["all", "blocks"])
def test_a_replay_is_the_pass_and_its_gradient(trained: str, again: bool) -> None:
    model = small_model()
    model.recompute = again
    hold_still(model, trained)
    passes = PassGraphs(model, pool_of())
    for step in range(4):
        generator = torch.Generator().manual_seed(step)
        ids = torch.randint(0, 40, (2, 9), generator=generator).to(DEVICE)
        wanted = torch.randperm(18, generator=generator)[: 9 - step].to(DEVICE)
        plain = copy.deepcopy(model)
        expected = gradients_of(plain, ids, wanted, None)
        found = gradients_of(model, ids, wanted, passes)
        assert len(found) == len(expected)
        for mine, theirs in zip(found, expected, strict=True):
            # float32 sums over other numbers of rows, some of which nearly cancel
            torch.testing.assert_close(mine, theirs, atol=1e-4, rtol=1e-3)
        with torch.no_grad():  # an update in place, which replays must see
            for parameter in model.parameters():
                if parameter.grad is not None:
                    parameter.sub_(0.1 * parameter.grad)
    assert len(passes.kept) == 1


def test_only_sizes_that_return_are_recorded(
    recorded: type[Rerun], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda_graphs, "GRAPHS_KEPT", 2)
    model = small_model().requires_grad_(False)
    passes = PassGraphs(model, pool_of())
    wanted = torch.tensor([1, 3], device=DEVICE)

    def ask(tokens: int) -> int:
        ids = torch.arange(2 * tokens, device=DEVICE).view(2, tokens)
        passes("one", run, model.embed(ids), NONE, wanted, 2)
        return len(passes.kept)

    assert [ask(5) for _ in range(4)] == [0, 0, 1, 1]
    assert [ask(6) for _ in range(4)] == [1, 1, 2, 2]
    assert [ask(7) for _ in range(4)] == [2, 2, 2, 2], "no more than are kept"
    before = set(passes.kept)
    monkeypatch.setattr(cuda_graphs, "FORGOTTEN", 4)
    assert [ask(7), len(before & set(passes.kept))] == [2, 1], "the one not asked for makes way"


def test_a_size_that_returns_seldom_is_not_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Recording it would cost more than its replays save."""
    monkeypatch.setattr(cuda_graphs, "SOON", 3)
    model = small_model().requires_grad_(False)
    passes = PassGraphs(model, pool_of())
    for number in range(24):
        tokens = 5 if number % 4 == 0 else 6 + number
        x = model.embed(torch.arange(tokens, device=DEVICE)[None])
        passes("one", run, x, NONE, NONE, 1)
    assert not passes.kept
    for _ in range(3):
        passes("one", run, model.embed(torch.arange(5, device=DEVICE)[None]), NONE, NONE, 1)
    assert len(passes.kept) == 1


def test_large_passes_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    passes = PassGraphs(small_model(), pool_of())
    monkeypatch.setattr(cuda_graphs, "memory_of", lambda device: 5 * 50 * 100 * 32 * 3)
    assert passes.suit(100)
    assert not passes.suit(101)


def test_without_a_gradient_to_learn_from_a_replay_only_finds(recorded: type[Rerun]) -> None:
    model = small_model()
    passes = PassGraphs(model, pool_of())
    ids, wanted = torch.arange(10, device=DEVICE)[None], torch.tensor([4, 9], device=DEVICE)
    for _ in range(4):
        with torch.no_grad():
            x = model.embed(ids)
            found = passes("one", run, x, NONE, wanted, 10)
            torch.testing.assert_close(found, run(model, x, NONE, wanted), atol=1e-5, rtol=1e-4)
        assert not found.requires_grad
    assert len(passes.kept) == 1


def test_a_twin_has_the_weights_and_no_place_in_the_models_graph() -> None:
    model = small_model()
    twin = alias_of(model)
    for mine, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        assert mine is not theirs and mine.data_ptr() == theirs.data_ptr()
    assert twin.lm_head.weight is twin.wte.weight


def test_gradients_found_before_a_replay_are_kept() -> None:
    model = small_model()
    passes = PassGraphs(model, pool_of())
    first = next(model.parameters())
    first.grad = torch.full_like(first, 2.0)
    passes.share_gradients()
    assert first.grad is next(passes.twin.parameters()).grad
    assert bool((first.grad == 2.0).all())
    first.grad = None
    passes.share_gradients()
    assert first.grad is not None and not first.grad.any()
