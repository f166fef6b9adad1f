"""The sampler's products on a store: an update that goes on from them finds what it would find."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rookworld.model import activation_reuse
from rookworld.model.activation_reuse import ActivationStore, BlockOutputs, linear
from rookworld.model.gpt2 import GPT2, GPT2Config
from rookworld.model.sampling import decode_graphs
from rookworld.model.sampling.sampler import Samples, Sampling
from rookworld.rl import collect
from rookworld.rl.batch import SharedPrefixBatch, padded_batch
from rookworld.rl.forward import states
from rookworld.rl.state import new_state
from rookworld.rl.trainer import train
from rookworld.runtime.errors import ModelError
from tiny import sample
from tiny_training import metrics_of, no_evaluation, relative, tiny_rows, tiny_settings

VOCABULARY, EOS, K, MOST = 23, 5, 4, 10_000
WARM = Sampling(max_new_tokens=20)
LENGTHS = [7, 19, 1, 12, 12, 30]


@pytest.fixture(scope="module")
def model() -> GPT2:
    config = GPT2Config(vocab_size=VOCABULARY, n_positions=56, n_embd=32, n_layer=3, n_head=4)
    model = GPT2(config).init_weights(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(5.0 if parameter.dim() == 2 else 1.0)
    return model


def prompts_of(lengths: Sequence[int], seed: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(VOCABULARY, (n,), generator=generator).tolist() for n in lengths]


def answered(
    model: GPT2,
    store: ActivationStore | None,
    prompts: Sequence[list[int]],
    keys: Sequence[int],
    **how: Any,
) -> Samples:
    how = {"k": K, "settings": WARM, "eos": EOS, "seed": 1, "activations": store, **how}
    return sample(model, prompts, keys=keys, **how)


def batch_of(
    prompts: Sequence[list[int]], samples: Samples, some: Sequence[int]
) -> SharedPrefixBatch:
    """The prompts at `some` places with their answers."""
    longest = max(len(prompts[i]) for i in some)
    lines = torch.tensor([prompts[i] + [EOS] * (longest - len(prompts[i])) for i in some])
    heads = torch.tensor([len(prompts[i]) for i in some])
    tokens = samples.tokens.view(len(prompts), K, -1)[list(some)]
    lengths = samples.lengths.view(len(prompts), K)[list(some)]
    return padded_batch(lines, heads, tokens[:, :, : int(lengths.max())], lengths)


def gradient(
    model: GPT2, batch: SharedPrefixBatch, known: Sequence[BlockOutputs] | None
) -> list[Tensor]:
    """Hidden states, and what every parameter would do to a sum of them."""
    model.zero_grad()
    hidden = states(batch, model, known=known)
    weights = torch.linspace(-1, 1, hidden.numel()).view_as(hidden)
    (hidden * weights).sum().backward()  # type: ignore[no-untyped-call]
    found = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    return [hidden.detach().clone(), *found]


@pytest.mark.parametrize("some", [[0, 1, 2, 3, 4, 5], [4, 0], [2]], ids=str)
@pytest.mark.parametrize("rows_at_once", [64, 8])
@pytest.mark.parametrize("tokens_at_once", [1152, 40])
def test_a_pass_from_the_store_is_the_pass(
    model: GPT2,
    monkeypatch: pytest.MonkeyPatch,
    some: list[int],
    rows_at_once: int,
    tokens_at_once: int,
) -> None:
    monkeypatch.setitem(decode_graphs.PREFILL_TOKENS, "cpu", tokens_at_once)
    prompts, keys = prompts_of(LENGTHS, seed=0), [31, 7, 1009, 2, 88, 5]
    store = ActivationStore(K, MOST)
    answered(model, store, prompts_of([9, 3], seed=1), keys=[100, 200])
    samples = answered(model, store, prompts, keys, rows_at_once=rows_at_once)
    assert len(set(samples.lengths.tolist())) > 5  # rows are dropped on the way
    batch = batch_of(prompts, samples, some)
    known = store.line([keys[i] for i in some], batch.head, batch.tail, batch.sources)
    assert known is not None
    expected = gradient(model, batch, None)
    for one, other in zip(gradient(model, batch, known), expected, strict=True):
        assert torch.allclose(one, other, rtol=1e-4, atol=1e-5 * float(other.abs().max()))


def test_a_store_changes_no_completion(model: GPT2) -> None:
    prompts = prompts_of(LENGTHS, seed=0)
    keys = range(len(prompts))
    plain = answered(model, None, prompts, keys)
    stored = answered(model, ActivationStore(K, MOST), prompts, keys)
    assert torch.equal(plain.tokens, stored.tokens)
    assert torch.allclose(plain.logp, stored.logp, atol=1e-5)


@pytest.mark.parametrize("most", [0, 100, 150, 200])
def test_completions_do_not_depend_on_where_a_store_ends(model: GPT2, most: int) -> None:
    # in bfloat16, where one rounding more is seen at once
    prompts, how = prompts_of(LENGTHS, seed=0), {"dtype": torch.bfloat16}
    keys = range(len(prompts))
    whole = answered(model, ActivationStore(K, MOST), prompts, keys, **how)
    cut = answered(model, ActivationStore(K, most), prompts, keys, **how)
    assert torch.equal(whole.logp, cut.logp)


def test_a_store_takes_no_key_twice(model: GPT2) -> None:
    store, prompts = ActivationStore(K, MOST), prompts_of([9, 3], seed=1)
    answered(model, store, prompts, keys=[100, 200])
    for keys in ([300, 300], [100, 300]):
        with pytest.raises(ModelError, match="no key twice"):
            answered(model, store, prompts, keys)
    with pytest.raises(ModelError, match="takes 1 completions"):
        answered(model, ActivationStore(1, MOST), prompts, keys=[100, 200])


def test_nothing_is_multiplied_again(model: GPT2, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts, store = prompts_of(LENGTHS, seed=0), ActivationStore(K, MOST)
    samples = answered(model, store, prompts, range(6))
    batch = batch_of(prompts, samples, range(6))
    known = store.line(range(6), batch.head, batch.tail, batch.sources)

    def refuse(self: nn.Linear, x: Tensor) -> Tensor:
        raise AssertionError("a product was made")

    monkeypatch.setattr(nn.Linear, "forward", refuse)
    states(batch, model, known=known)


def test_nothing_is_recorded_after_a_request(model: GPT2) -> None:
    store = ActivationStore(K, MOST)
    prompts = prompts_of(LENGTHS, seed=0)
    answered(model, store, prompts, range(6))
    rows = store.rows
    answered(model, None, prompts, range(6))
    assert store.rows == rows


def test_what_is_not_in_the_store_is_not_found(model: GPT2) -> None:
    store = ActivationStore(K, MOST)
    answered(model, store, prompts_of([9, 3], seed=1), keys=[100, 200])
    assert store.line([100, 300], 9, 5, torch.tensor([8])) is None


@pytest.mark.parametrize("most", [0, 1, 100, 200])
def test_a_full_store_forgets_everything(model: GPT2, most: int) -> None:
    prompts, store = prompts_of(LENGTHS, seed=0), ActivationStore(K, most)
    samples = answered(model, store, prompts, range(6))
    batch = batch_of(prompts, samples, range(6))
    assert store.full
    assert not store.parts
    assert store.line(range(6), batch.head, batch.tail, batch.sources) is None
    answered(model, store, prompts, keys=range(6, 12))
    assert not store.parts


@pytest.mark.parametrize("shape", [(6, 9), (9, 6)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_a_known_product_has_the_gradients_of_a_made_one(
    shape: tuple[int, int], dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    layer = nn.Linear(*shape, dtype=torch.promote_types(dtype, torch.float32))
    x = torch.randn(2, 7, shape[0], dtype=layer.weight.dtype, requires_grad=True)
    slope = torch.randn(2, 7, shape[1]).to(dtype)
    found: list[list[Tensor]] = []
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=dtype is torch.bfloat16):
        made = linear(layer, x, None)
        known = linear(layer, x, made.detach().flatten(0, 1))
    for out in (made, known):
        parts = torch.autograd.grad(out, (x, layer.weight, layer.bias), slope)
        found.append([out.detach(), *parts])
    off = 1e-2 if dtype is torch.bfloat16 else 1e-6
    for one, other in zip(*found, strict=True):
        assert one.dtype is other.dtype
        assert relative([one.double()], [other.double()]) < off


def test_what_is_frozen_gets_no_gradient() -> None:
    layer, x = nn.Linear(3, 4), torch.randn(2, 3, requires_grad=True)
    layer.weight.requires_grad_(False)
    linear(layer, x, layer(x).detach()).sum().backward()  # type: ignore[no-untyped-call]
    assert layer.weight.grad is None
    assert layer.bias.grad is not None
    assert x.grad is not None


CHANGES: list[dict[str, Any]] = [
    {},
    {"mix_env_ratio": 0.5, "batch_size": 4},  # several packs
    {"updates_per_rollout": 2},
    {"gae": True},
    {"flat_tries": 2},
    {"trained": "blocks"},
    {"dtype": "bfloat16"},
]


@pytest.mark.usefixtures("single_thread")
@pytest.mark.parametrize("changes", CHANGES, ids=str)
def test_training_is_the_same_with_a_store(
    warm_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any]
) -> None:
    runs, before = {}, activation_reuse.linear
    for stored in (True, False):
        reused: list[bool] = []
        with monkeypatch.context() as patch:
            if not stored:
                patch.setattr(collect, "may_reuse_activations", lambda *_: False)

            def counted(
                layer: nn.Linear, x: Tensor, known: Tensor | None, reused: list[bool] = reused
            ) -> Tensor:
                reused.append(known is not None)
                return before(layer, x, known)

            patch.setattr("rookworld.model.gpt2.linear", counted)
            out = tmp_path / f"{stored}"
            settings = tiny_settings(warm_folder, out, steps=3, lr=1e-4, **changes)
            train(settings, tiny_rows(), no_evaluation)
        assert any(reused) == stored
        runs[stored] = metrics_of(out)
    rel, off = (0.03, 0.01) if "dtype" in changes else (1e-3, 1e-5)
    for one, other in zip(runs[True], runs[False], strict=True):
        for name, value in one.items():
            assert value == pytest.approx(other[name], rel=rel, abs=off, nan_ok=True), name


def test_there_is_a_store_only_for_what_the_next_pass_may_use(
    warm_folder: Path, tmp_path: Path
) -> None:
    settings = tiny_settings(warm_folder, tmp_path)
    state = new_state(settings, tiny_rows(), torch.device("cpu"))
    first = collect.activations_for(state, settings)
    assert first is not None
    assert first.full  # KL is to be 0 while policy and reference are one
    with torch.no_grad():
        state.learner.model.h[1].get_parameter("mlp.c_fc.bias")[3] += 0.1
    then = collect.activations_for(state, settings)
    assert then is not None
    assert not then.full
    assert then.most == state.learner.memory.micro_tokens
    state.learner.memory = replace(state.learner.memory, recompute=True)
    never = collect.activations_for(state, settings)
    assert never is not None
    assert never.full
