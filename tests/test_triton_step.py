"""The Triton step against plain torch: compiled where CUDA is, interpreted elsewhere."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from rookworld.model.gpt2 import GPT2, GPT2Config
from rookworld.model.inference import Dense, InferenceWeights, Norm, _attend_parts
from rookworld.model.sampling.decode_batch import DecodeBatch, GrowingBatch, Shape
from rookworld.model.sampling.decode_graphs import ArenaDecoder
from rookworld.model.sampling.kv_cache import Room
from rookworld.model.sampling.sampler import Sampler, Sampling

pytest.importorskip("triton")
CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
# The interpreter multiplies the bits of bf16 as if they were integers.
HALF = torch.bfloat16 if CUDA else torch.float16

from rookworld.model.kernels import (  # noqa: E402
    triton_attention,
    triton_choice,
    triton_product,
    triton_step,
)

# The interpreter's integers are numpy's, which warn where they wrap around as they should.
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def _sharp(model: GPT2) -> GPT2:
    """InferenceWeights large enough that the next token is neither certain nor anybody's guess."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.mul_(9.0)
    return model.to(DEVICE)


def _model(heads: int = 2, size: int = 16) -> GPT2:
    width = heads * size
    config = GPT2Config(vocab_size=61, n_positions=56, n_embd=width, n_layer=2, n_head=heads)
    return _sharp(GPT2(config).init_weights(0))


def _as_on_cuda(batch: GrowingBatch, dtype: torch.dtype | None = None) -> DecodeBatch:
    """The batch with the layout its cache has on CUDA, and all of its own slots."""
    cache = batch.cache
    cache.resize_own(batch.shape.new)
    for name in ("prefix_keys", "prefix_values", "own_keys", "own_values"):
        part: Tensor = getattr(cache, name).contiguous()
        setattr(cache, name, part.to(dtype or part.dtype))
    return batch


SHAPES = {
    "groups of 8": (Shape(2, 8, 64, 32), 32, [64, 41], 31),
    "a row alone": (Shape(3, 1, 64, 16), 64, [1, 64, 33], 2),
    "three rows, a large head": (Shape(2, 3, 32, 16), 128, [17, 32], 15),
    "more rows than a tile": (Shape(1, 20, 32, 16), 16, [20], 9),
    "an odd head, the first token": (Shape(2, 2, 16, 16), 24, [16, 5], 1),
}


@pytest.mark.parametrize(("rows", "dtype"), [(1, torch.float32), (4, HALF), (16, torch.float32)])
@pytest.mark.parametrize(("parts", "splits"), [(0, 1), (3, 1), (0, 2), (3, 5)])
@pytest.mark.parametrize("name", SHAPES)
def test_attention_is_one_softmax(
    name: str,
    parts: int,
    splits: int,
    rows: int,
    dtype: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shape, size, lengths, index = SHAPES[name]
    plan = triton_attention.Plan(rows, prefix=32, own=64, warps=4, stages=1, splits=splits)
    monkeypatch.setattr(triton_attention, "plan", lambda batch: plan)
    generator = torch.Generator().manual_seed(0)
    weights = InferenceWeights(_model(2, size))
    batch = _as_on_cuda(GrowingBatch(weights, shape), dtype)
    cache, layer = batch.cache, 1
    for part in (cache.prefix_keys, cache.prefix_values, cache.own_keys, cache.own_values):
        part.copy_(torch.randn(part.shape, generator=generator))
    batch._set_lengths(torch.tensor(lengths))
    batch.index.fill_(index)
    batch.rows.done.fill_(False)
    batch.rows.done[0] = name == "groups of 8"
    # In steps of 1/256, so that a sum of parts is exact.
    qkv = (torch.randn(shape.rows, 3 * 2 * size, generator=generator) * 256).round() / 256
    qkv = qkv.to(DEVICE, dtype)
    # What is not in use may hold anything: it must not be read, or it would spread.
    cache.own_keys[..., index:, :] = torch.nan
    for group, length in enumerate(lengths):
        cache.prefix_values[:, group, :, length:] = torch.nan
    seen = torch.full((shape.rows, 2 * size), torch.nan, device=DEVICE, dtype=dtype)
    triton_attention.attend(batch, layer, *_given(qkv, seen, parts))
    expected = _expected(batch, layer, qkv, index, lengths)
    kept = ~batch.rows.done
    error = (seen.float() - expected)[kept].norm() / expected[kept].norm()
    assert float(error) < (2e-6 if dtype is torch.float32 else 6e-3)
    assert bool(seen.isfinite().all())
    assert not bool(batch.arrivals.any())


def _given(qkv: Tensor, seen: Tensor, parts: int) -> tuple[Tensor, ...]:
    """`qkv` as it is, or as fp32 parts and a bias whose sum it is, exactly."""
    if not parts:
        return qkv, seen
    bias = torch.arange(qkv.shape[1], device=qkv.device) % 7 / 16
    pieces = [qkv.float() * 2, *[-qkv.float() / (parts - 1) - bias / (parts - 1)] * (parts - 1)]
    return torch.stack(pieces), seen, bias


def _expected(
    batch: DecodeBatch, layer: int, qkv: Tensor, index: int, lengths: list[int]
) -> Tensor:
    """The same by `_attend_parts`, group by group in fp32; checks what was written on the way."""
    shape, cache = batch.shape, batch.cache
    query, key, value = (
        qkv.view(shape.groups, shape.width, 3, 2, -1).permute(2, 0, 3, 1, 4).unbind()
    )
    own = (cache.own_keys[layer], cache.own_values[layer])
    going = ~batch.done()
    for kept, given in zip(own, (key, value), strict=True):
        written = kept[..., index - 1, :].transpose(1, 2)
        assert torch.equal(written[going], given.transpose(1, 2)[going])
    seen = []
    for group, length in enumerate(lengths):
        at = slice(group, group + 1)
        prefix = [
            part[layer, at, :, :length].float() for part in (cache.prefix_keys, cache.prefix_values)
        ]
        mine = [part[at, ..., :index, :].float() for part in own]
        q = query[at].float()
        seen.append(_attend_parts(q, (prefix[0], prefix[1]), (mine[0], mine[1]), None))
    return torch.cat(seen).transpose(1, 2).reshape(shape.rows, -1)


class _Kernels(ArenaDecoder):
    """The kernels of a captured step launched by hand."""

    def __init__(self, weights: InferenceWeights) -> None:
        super().__init__(weights)
        self.shapes: set[Shape] = set()

    def compact(self, batch: DecodeBatch, groups: Tensor, columns: Tensor) -> DecodeBatch:
        smaller = super().compact(batch, groups, columns)
        self.shapes.add(smaller.shape)
        return smaller


@pytest.mark.parametrize(
    ("shape", "dtype", "programs", "splits"),
    [
        (Shape(8, 8, 64, 16), HALF, 192, 4),
        (Shape(1, 1, 64, 16), HALF, 12, 4),
        (Shape(32, 16, 64, 16), HALF, 384, 1),
        (Shape(8, 8, 64, 16), torch.float32, 192, 1),
    ],
)
def test_programs_share_rows_where_few_would_walk_through_many_slots(
    shape: Shape, dtype: torch.dtype, programs: int, splits: int
) -> None:
    batch = _as_on_cuda(GrowingBatch(InferenceWeights(_model(12, 16)), shape), dtype)
    plan = triton_attention.plan(batch)
    assert shape.groups * -(-shape.width // plan.rows) * 12 == programs
    assert plan.splits == splits
    assert plan.own % plan.rows == 0


WARM = Sampling(max_new_tokens=12)


@pytest.mark.parametrize(
    ("k", "kinds"),
    [
        (3, [replace(WARM, max_new_tokens=n) for n in (2, 10, 3, 2)]),
        (4, [replace(WARM, max_new_tokens=n) for n in (2, 12, 3, 7)]),
        (1, [replace(WARM, temperature=t, max_new_tokens=6) for t in (0.0, 0.5, 1.0, 1.5)]),
        (2, [replace(WARM, temperature=0.0, max_new_tokens=4)] * 4),
        (2, [replace(WARM, top_k=5, max_new_tokens=4)] * 4),
    ],
    ids=["shrinking", "shrinking more", "mixed", "greedy", "top-k"],
)
def test_the_kernels_draw_what_torch_draws(
    k: int, kinds: list[Sampling], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(triton_choice, "TOKENS_PER_BLOCK", 16)
    monkeypatch.setattr(triton_choice, "PROGRAMS", 48)
    monkeypatch.setattr(triton_attention, "PROGRAMS", 1)
    generator = torch.Generator().manual_seed(0)
    ids = [torch.randint(61, (n,), generator=generator).tolist() for n in (7, 19, 1, 35)]
    model = _model()
    plain, kernels = Sampler(model, graph=False), Sampler(model, graph=False)
    kernels.decoder = decoder = _Kernels(kernels.weights)
    ask: dict[str, Any] = {"k": k, "settings": kinds, "eos": 9, "seed": 4}
    expected = plain.sample(ids, **ask)
    samples = kernels.sample(ids, **ask)
    assert samples.tokens.tolist() == expected.tokens.tolist()
    assert torch.equal(samples.lengths, expected.lengths)
    assert torch.equal(samples.finished, expected.finished)
    torch.testing.assert_close(samples.logp, expected.logp, atol=1e-4, rtol=0)
    torch.testing.assert_close(samples.entropy, expected.entropy, atol=1e-3, rtol=0)
    assert k < 3 or len(decoder.shapes) >= k - 2


def test_parts_are_cut_to_memory_and_lengths_that_were_met_stay(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(triton_attention, "PROGRAMS", 1)
    ids = [[1, 2, 3]] * 5
    ask: dict[str, Any] = {"settings": replace(WARM, max_new_tokens=2), "eos": -1, "seed": 4}
    sampler = Sampler(_model(), graph=False)
    sampler.decoder = decoder = _Kernels(sampler.weights)
    whole = sampler.sample(ids, k=2, **ask)
    room = Room(1, 2, 64, 16)
    held = decoder.arena.group_bytes(room)
    assert held == 2 * 2 * 32 * (64 + 32) * 4
    assert decoder.arena.groups(room) == 6
    decoder.forget()
    decoder.arena.grow(room)
    decoder.most_bytes = 5 * held
    parts = sampler.sample(ids, k=2, **ask)
    assert decoder.arena.groups(room) == 4
    assert parts.tokens.tolist() == whole.tokens.tolist()
    decoder.batch(Shape(1, 2, 3, 30))
    decoder.batch(Shape(1, 2, 3, 2))
    assert (decoder.prefix, decoder.new) == (64, 32)
    # in the same memory there are more groups of fewer samples
    before = decoder.arena.keys
    alone = sampler.sample(ids, k=1, **ask)
    assert decoder.arena.keys is before
    assert alone.tokens.tolist() == whole.tokens[::2].tolist()


def test_equal_scores_go_to_the_least_id() -> None:
    weights = InferenceWeights(_model())
    batch = GrowingBatch(weights, Shape(1, 3, 16, 16, random=False))
    batch.rows.done.fill_(False)
    batch.rows.limits.fill_(16)
    batch.eos.fill_(-1)
    logits = torch.zeros(3, 50000, device=DEVICE)
    logits[1, [7, 49999]] = 1.0
    logits[2, 30000:] = 1.0
    triton_choice.choose(batch, logits)
    assert batch.tokens[0].tolist() == [0, 7, 30000]
    assert batch.index.tolist() == [1]
    torch.testing.assert_close(batch.logp[0], logits.log_softmax(-1).amax(-1), atol=1e-5, rtol=0)


@pytest.mark.parametrize(("rows", "inner", "width"), [(64, 96, 32), (3, 320, 48), (17, 40, 40)])
def test_a_product_in_parts_is_the_product(rows: int, inner: int, width: int) -> None:
    generator = torch.Generator().manual_seed(0)
    weight, bias, norm_weight, norm_bias = (
        torch.randn(*shape, generator=generator).to(DEVICE)
        for shape in ((width, inner), (width,), (width,), (width,))
    )
    seen = torch.randn(rows, inner, generator=generator).to(DEVICE, HALF)
    dense = Dense(weight, bias, HALF)
    parts = triton_product.linear_parts(dense, seen)
    expected = seen.float() @ weight.to(HALF).float().T
    torch.testing.assert_close(parts.sum(0), expected, atol=2e-3, rtol=1e-3)
    x = torch.randn(rows, width, generator=generator).to(DEVICE)
    norm = Norm(torch.nn.LayerNorm(width).to(DEVICE))
    norm.weight, norm.bias = norm_weight, norm_bias
    h, stream = torch.empty(rows, width, device=DEVICE, dtype=HALF), x.clone()
    assert dense.bias is not None
    triton_step._add_norm(stream, parts, dense.bias, h, norm)
    total = x + expected + bias.to(HALF).float()
    torch.testing.assert_close(stream, total, atol=2e-3, rtol=1e-3)
    torch.testing.assert_close(h.float(), norm(total), atol=2e-2, rtol=1e-2)


@pytest.mark.parametrize(("rows", "inner", "width"), [(64, 96, 32), (3, 320, 48), (17, 600, 40)])
def test_a_widened_row_is_gelu_of_its_product(rows: int, inner: int, width: int) -> None:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(width, inner, generator=generator).to(DEVICE) / inner**0.5
    bias = torch.randn(width, generator=generator).to(DEVICE)
    x = torch.randn(rows, inner, generator=generator).to(DEVICE, HALF)
    dense = Dense(weight, bias, HALF)
    plain = x.float() @ weight.to(HALF).float().T + bias.to(HALF).float()
    expected = torch.nn.functional.gelu(plain, approximate="tanh")
    found = triton_product.linear_gelu(dense, x).float()
    torch.testing.assert_close(found, expected, atol=4e-3, rtol=8e-3)


@pytest.mark.parametrize(
    ("memory", "rows", "inner", "parts", "widening"),
    [
        (232_448, 64, 768, True, True),  # Hopper
        (232_448, 64, 4096, True, False),
        (101_376, 64, 1280, True, False),  # cards for one's home
        (101_376, 8, 1024, True, True),
        (65_536, 64, 768, False, False),
    ],
)
def test_a_program_holds_no_more_than_the_gpu_lets_it(
    memory: int, rows: int, inner: int, parts: bool, widening: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(triton_product, "_room", lambda x: memory // 2)
    x = torch.empty(rows, inner, dtype=HALF, device="meta")
    assert triton_product.suits(x) is parts
    assert triton_product.suits_linear_gelu(x) is widening
    assert not triton_product.suits(x.float())
