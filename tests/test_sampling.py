"""The sampler's laws: batched = single, cached = uncached, K samples = K prompts, logp = logp."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from rookworld.model import inference
from rookworld.model.gpt2 import GPT2, GPT2Config
from rookworld.model.inference import InferenceWeights
from rookworld.model.kernels import cpu
from rookworld.model.sampling import decode_graphs, sampler
from rookworld.model.sampling.counter_rng import exponential_noise, fold, row_keys, to_signed
from rookworld.model.sampling.decode_batch import DecodeBatch, Mask, Shape, round_up
from rookworld.model.sampling.decode_graphs import (
    ArenaDecoder,
    EagerDecoder,
    Ids,
    pad_prompts,
    round_groups,
)
from rookworld.model.sampling.sampler import Sampler, Samples, Sampling
from rookworld.model.sampling.token_choice import entropy_of, truncated_logits
from rookworld.runtime.errors import ConfigError, ModelError
from tiny import sample

VOCABULARY, NEVER = 61, -1
GREEDY = Sampling(temperature=0.0, max_new_tokens=12)
WARM = Sampling(max_new_tokens=12)
SETTINGS = {
    "plain": WARM,
    "cool": replace(WARM, temperature=0.6),
    "top_k": replace(WARM, top_k=5),
    "top_p": replace(WARM, top_p=0.7),
    "all": replace(WARM, temperature=1.3, top_k=9, top_p=0.8),
}


@pytest.fixture(scope="module")
def model() -> GPT2:
    """InferenceWeights large enough that the next token is neither certain nor anybody's guess."""
    config = GPT2Config(vocab_size=VOCABULARY, n_positions=56, n_embd=32, n_layer=3, n_head=4)
    return _sharp(GPT2(config).init_weights(0))


def _sharp(model: GPT2) -> GPT2:
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.mul_(9.0)
    return model


def _prompts(lengths: list[int], seed: int = 0) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(VOCABULARY, (n,), generator=generator).tolist() for n in lengths]


MIXED = _prompts([7, 19, 1, 12, 12, 35, 2, 19])


def _rows(samples: Samples, rows: list[int]) -> tuple[list[list[int]], Tensor]:
    """Tokens of some rows without padding, and their log-probs one after the other."""
    lengths = samples.lengths.tolist()
    tokens = [samples.tokens[row, : lengths[row]].tolist() for row in rows]
    return tokens, torch.cat([samples.logp[row, : lengths[row]] for row in rows])


def _same(one: Samples, rows: list[int], other: Samples, other_rows: list[int]) -> None:
    (tokens, logp), (other_tokens, other_logp) = _rows(one, rows), _rows(other, other_rows)
    assert tokens == other_tokens
    torch.testing.assert_close(logp, other_logp, atol=1e-5, rtol=0)


def test_batched_greedy_is_single_greedy_on_mixed_lengths(model: GPT2) -> None:
    together = sample(model, MIXED, settings=GREEDY, eos=NEVER, seed=0)
    for row, prompt in enumerate(MIXED):
        alone = sample(model, [prompt], settings=GREEDY, eos=NEVER, seed=0)
        _same(together, [row], alone, [0])


def test_cached_is_uncached(model: GPT2) -> None:
    samples = sample(model, MIXED, settings=GREEDY, eos=NEVER, seed=0)
    for row, prompt in enumerate(MIXED):
        ids = list(prompt)
        for _ in range(GREEDY.max_new_tokens):
            ids.append(int(model.logits(model(torch.tensor([ids]))[:, -1]).argmax()))
        assert samples.tokens[row].tolist() == ids[len(prompt) :]


@pytest.mark.parametrize("tied", [True, False])
def test_head_and_inner_width_are_the_models_own(tied: bool) -> None:
    config = GPT2Config(
        vocab_size=VOCABULARY,
        n_positions=48,
        n_embd=24,
        n_layer=1,
        n_head=3,
        n_inner=40,
        tie_word_embeddings=tied,
    )
    other = _sharp(GPT2(config).init_weights(3))
    samples = sample(other, MIXED[:2], settings=WARM, eos=NEVER, seed=0)
    for row in range(2):
        torch.testing.assert_close(
            samples.logp[row], _teacher(other, MIXED[row], samples.tokens[row], WARM)[0]
        )


@pytest.mark.parametrize("name", SETTINGS)
def test_k_samples_are_k_prompts_under_the_same_keys(model: GPT2, name: str) -> None:
    settings = SETTINGS[name]
    together = sample(model, MIXED[:3], k=4, settings=settings, eos=5, seed=9, keys=[70, 3, 11])
    for index, (prompt, key) in enumerate(zip(MIXED[:3], [70, 3, 11], strict=True)):
        apart = sample(
            model,
            [prompt] * 4,
            settings=settings,
            eos=5,
            seed=9,
            keys=[key] * 4,
            first_sample=range(4),
        )
        _same(together, list(range(4 * index, 4 * index + 4)), apart, list(range(4)))
    assert len({tuple(row) for row in together.tokens.tolist()}) > 6


def log_probs(logits: Tensor, settings: Sampling) -> Tensor:
    """Of every token, under the distribution that a token is drawn from."""
    rules = settings.temperature, settings.top_k, settings.top_p
    return truncated_logits(logits, *rules).log_softmax(-1)


def _teacher(
    model: GPT2, prompt: list[int], answer: Tensor, settings: Sampling
) -> tuple[Tensor, Tensor]:
    """Log-prob and entropy of an answer's tokens by one plain forward pass."""
    with torch.no_grad():
        ids = torch.tensor([prompt + answer.tolist()])
        logits = model.logits(model(ids)[0, len(prompt) - 1 : -1])
    greedy = settings.temperature == 0
    logp = logits.log_softmax(-1) if greedy else log_probs(logits, settings)
    return logp.gather(-1, answer[:, None])[:, 0], entropy_of(logp)


def test_recorded_log_probs_are_the_teacher_forced_ones(model: GPT2) -> None:
    each = [*SETTINGS.values(), GREEDY, replace(WARM, temperature=2.0), replace(GREEDY, top_k=3)]
    samples = sample(model, MIXED, k=2, settings=each, eos=NEVER, seed=1)
    for row in range(len(samples.tokens)):
        prompt, settings = MIXED[row // 2], each[row // 2]
        logp, entropy = _teacher(model, prompt, samples.tokens[row], settings)
        torch.testing.assert_close(samples.logp[row], logp, atol=1e-4, rtol=0)
        torch.testing.assert_close(samples.entropy[row], entropy, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", SETTINGS)
def test_frequencies_match_the_distribution(model: GPT2, name: str) -> None:
    settings, count = replace(SETTINGS[name], max_new_tokens=1), 20_000
    samples = sample(model, [MIXED[0]], k=count, settings=settings, eos=NEVER, seed=5)
    with torch.no_grad():
        logits = model.logits(model(torch.tensor([MIXED[0]]))[0, -1])
    p = log_probs(logits, settings).exp()
    seen = torch.bincount(samples.tokens[:, 0], minlength=VOCABULARY).float()
    assert seen[p == 0].sum() == 0
    likely = p * count >= 5
    expected = torch.cat([p[likely] * count, (p[~likely] * count).sum()[None]])
    found = torch.cat([seen[likely], seen[~likely].sum()[None]])
    used = expected > 0
    chi2 = float(((found - expected) ** 2 / expected)[used].sum())
    freedom = int(used.sum()) - 1
    # Wilson-Hilferty: the 99.99 % quantile of χ².
    bound = freedom * (1 - 2 / (9 * freedom) + 3.72 * math.sqrt(2 / (9 * freedom))) ** 3
    assert chi2 < bound, (chi2, freedom)


def test_neighbours_order_and_batch_size_do_not_matter(
    model: GPT2, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys, each = list(range(100, 108)), [WARM, *SETTINGS.values(), GREEDY, WARM]
    together = sample(model, MIXED, k=3, settings=each, eos=7, seed=2, step=4, keys=keys)
    order = [5, 0, 7, 2]
    monkeypatch.setattr(sampler, "ROWS_AT_ONCE", 7)
    monkeypatch.setitem(decode_graphs.PREFILL_TOKENS, "cpu", 20)
    some = sample(
        model,
        [MIXED[i] for i in order],
        k=3,
        settings=[each[i] for i in order],
        eos=7,
        seed=2,
        step=4,
        keys=[keys[i] for i in order],
    )
    for place, index in enumerate(order):
        _same(
            some,
            [3 * place + i for i in range(3)],
            together,
            [3 * index + i for i in range(3)],
        )


@pytest.mark.parametrize("other", [{"seed": 3}, {"step": 1}, {"keys": [1]}, {"first_sample": 1}])
def test_every_part_of_the_key_changes_the_samples(model: GPT2, other: dict[str, int]) -> None:
    keys = {"seed": 2, "step": 0, "keys": [0], "first_sample": 0}
    one = sample(model, [MIXED[0]], settings=WARM, eos=NEVER, **keys)  # type: ignore[arg-type]
    two = sample(model, [MIXED[0]], settings=WARM, eos=NEVER, **{**keys, **other})  # type: ignore[arg-type]
    assert one.tokens.tolist() != two.tokens.tolist()


@pytest.mark.parametrize(("limits", "k"), [([3, 18, 16, 1, 9, 18, 18, 5], 4), ([18], 16)])
def test_rows_stop_at_their_own_end_or_maximum(
    model: GPT2, monkeypatch: pytest.MonkeyPatch, limits: list[int], k: int
) -> None:
    """Rows end one by one, so the batch is compacted on the way, by prompt or by sample."""
    each, prompts = [replace(WARM, max_new_tokens=n) for n in limits], MIXED[: len(limits)]
    free = sample(model, prompts, k=k, settings=each, eos=NEVER, seed=8)
    assert not free.finished.any()
    assert free.lengths.tolist() == [n for n in limits for _ in range(k)]
    end = int(free.tokens[free.tokens >= 0].mode().values)
    shapes: list[Shape] = []
    make = EagerDecoder.batch

    def watched(self: EagerDecoder, shape: Shape) -> DecodeBatch:
        shapes.append(shape)
        return make(self, shape)

    monkeypatch.setattr(EagerDecoder, "batch", watched)
    samples = sample(model, prompts, k=k, settings=each, eos=end, seed=8)
    assert shapes[-1].rows < shapes[0].rows == len(prompts) * k
    assert 0 < int(samples.finished.sum()) < len(samples.finished)
    for row, (tokens, length) in enumerate(zip(free.tokens.tolist(), free.lengths, strict=True)):
        tokens = tokens[: int(length)]
        expected = tokens[: tokens.index(end) + 1] if end in tokens else tokens
        kept = len(expected)
        assert samples.tokens[row, :kept].tolist() == expected
        assert (samples.tokens[row, kept:] == end).all()
        assert int(samples.lengths[row]) == kept
        assert bool(samples.finished[row]) == (end in tokens)
        assert (samples.logp[row, kept:] == 0).all()
        assert (samples.entropy[row, kept:] == 0).all()
        torch.testing.assert_close(
            samples.logp[row, :kept], free.logp[row, :kept], atol=1e-5, rtol=0
        )


def test_a_row_that_is_done_does_not_outrun_the_positions(model: GPT2) -> None:
    """A long prompt with a short maximum waits beside a short one with a long maximum."""
    each = [replace(GREEDY, max_new_tokens=2), replace(GREEDY, max_new_tokens=40)]
    samples = sample(model, _prompts([46, 3]), settings=each, eos=NEVER, seed=0)
    assert samples.lengths.tolist() == [2, 40]


def test_an_answer_ends_at_the_last_position(model: GPT2) -> None:
    """A maximum that only a longer model has room for is no mistake: `--preset mini`, `nano`."""
    samples = sample(model, _prompts([4, 45, 55]), settings=GREEDY, eos=NEVER, seed=0)
    assert samples.lengths.tolist() == [12, 11, 1]
    assert not samples.finished.any()


def test_what_does_not_fit_is_refused_by_both_numbers(model: GPT2) -> None:
    with pytest.raises(ModelError, match=r"56 tokens leaves no room .* has 56 positions"):
        sample(model, _prompts([4, 56]), settings=GREEDY, eos=NEVER, seed=0)
    with pytest.raises(ModelError, match="no tokens"):
        sample(model, [[1], []], settings=GREEDY, eos=NEVER, seed=0)
    with pytest.raises(ModelError, match=r"ids 3 to 61, the model 61 tokens"):
        sample(model, [[3, 61]], settings=GREEDY, eos=NEVER, seed=0)


@pytest.mark.parametrize(
    "wrong",
    [{"temperature": -1.0}, {"temperature": math.nan}, {"top_k": -1}, {"top_p": 0.0}],
)
def test_settings_out_of_range_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        replace(WARM, **wrong)  # type: ignore[arg-type]


def test_no_prompts_no_samples(model: GPT2) -> None:
    samples = sample(model, [], k=3, settings=[], eos=0, seed=0)
    assert samples.tokens.shape == samples.logp.shape == (0, 0)
    assert samples.lengths.shape == samples.finished.shape == (0,)


@pytest.mark.parametrize("training", [True, False])
def test_mode_and_gradients_are_left_alone(model: GPT2, training: bool) -> None:
    model.train(training)
    samples = sample(model, MIXED, settings=WARM, eos=NEVER, seed=0)
    assert model.training is training
    assert not samples.logp.requires_grad
    assert not samples.logp.is_inference()  # it takes part in a loss later
    assert all(parameter.grad is None for parameter in model.parameters())
    assert all(parameter.requires_grad for parameter in model.parameters())


@pytest.mark.parametrize("fused", [True, False])
def test_an_update_of_the_model_is_seen(model: GPT2, fused: bool) -> None:
    """A fused optimizer does not count versions: staleness must not hang on them."""
    model = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=5.0, fused=fused)
    sampler = Sampler(model)
    before = sampler.sample(MIXED, settings=WARM, eos=NEVER, seed=0)
    assert torch.equal(before.logp, sample(model, MIXED, settings=WARM, eos=NEVER, seed=0).logp)
    model.logits(model(torch.tensor([MIXED[0]]))).logsumexp(-1).mean().backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    after = sample(model, MIXED, settings=WARM, eos=NEVER, seed=0)
    assert not torch.equal(before.logp, after.logp)
    logp, _ = _teacher(model, MIXED[0], after.tokens[0], WARM)
    torch.testing.assert_close(after.logp[0], logp, atol=1e-4, rtol=0)
    sampler.refresh()
    _same(sampler.sample(MIXED, settings=WARM, eos=NEVER, seed=0), [0, 5], after, [0, 5])


def test_matrices_in_bf16_stay_near(model: GPT2) -> None:
    samples = sample(model, MIXED, settings=WARM, eos=NEVER, seed=0, dtype=torch.bfloat16)
    half = sample(copy.deepcopy(model).bfloat16(), MIXED, settings=WARM, eos=NEVER, seed=0)
    for drawn in (samples, half):
        gaps = [
            (_teacher(model, prompt, drawn.tokens[row], WARM)[0] - drawn.logp[row]).abs()
            for row, prompt in enumerate(MIXED)
        ]
        assert float(torch.cat(gaps).mean()) < 0.1
    assert half.logp.dtype is torch.float32


def test_a_constraint_masks_and_log_probs_are_under_the_mask(model: GPT2) -> None:
    """Row r may only say tokens ≡ r (mod 4), and never the same token twice running."""

    def constraint(rows: Tensor, tokens: Tensor) -> Tensor:
        allowed = torch.arange(VOCABULARY)[None] % 4 == rows[:, None] % 4
        if tokens.shape[1]:
            allowed = allowed.scatter(1, tokens[:, -1:], False)
        return allowed

    each = [WARM, GREEDY, SETTINGS["all"]]
    samples = sample(model, MIXED[:3], k=4, settings=each, eos=8, seed=0, constraint=constraint)
    for row in range(12):
        answer = samples.tokens[row, : int(samples.lengths[row])]
        assert (answer % 4 == row % 4).all()
        assert (answer[1:] != answer[:-1]).all()
        settings = each[row // 4]
        with torch.no_grad():
            ids = torch.tensor([MIXED[row // 4] + answer.tolist()])
            logits = model.logits(model(ids)[0, len(MIXED[row // 4]) - 1 : -1])
        for t, token in enumerate(answer):
            allowed = constraint(torch.tensor([row]), answer[None, :t])
            masked = logits[t].masked_fill(~allowed[0], -torch.inf)
            logp = (
                masked.log_softmax(-1) if settings.temperature == 0 else log_probs(masked, settings)
            )
            assert abs(float(samples.logp[row, t]) - float(logp[token])) < 1e-4


def test_a_constraint_that_leaves_nothing_is_refused(model: GPT2) -> None:
    with pytest.raises(ModelError, match="without any token"):
        sample(
            model,
            MIXED[:2],
            settings=WARM,
            eos=NEVER,
            seed=0,
            constraint=lambda rows, tokens: torch.zeros(len(rows), VOCABULARY, dtype=torch.bool),
        )


def test_keys_are_splitmix64() -> None:
    """The generator's published first outputs for the seed 0."""
    first = fold(torch.zeros(1, dtype=torch.int64), torch.arange(3))
    published = [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]
    assert first.tolist() == [to_signed(value, 64) for value in published]


def test_noise_is_exponential_and_rows_are_unrelated() -> None:
    keys = row_keys(0, 0, [*range(32)] * 2, [0] * 32 + [1] * 32)
    assert len(set(keys.tolist())) == 64
    waits = exponential_noise(keys, 4096)
    assert float(waits.min()) > 0
    assert float(waits.max()) < 23
    # Exp(1): mean 1, variance 1, P(wait < x) = 1 - e^-x, each within five standard errors.
    size = waits.numel()
    assert abs(float(waits.mean()) - 1) < 5 / math.sqrt(size)
    for x in (1e-3, 0.1, 1.0, 4.0):
        p = 1 - math.exp(-x)
        assert abs(float((waits < x).float().mean()) - p) < 5 * math.sqrt(p * (1 - p) / size)
    centred = waits - 1
    between_rows = centred @ centred.T / 4096 - torch.eye(64) * centred.square().mean(-1)
    assert float(between_rows.abs().max()) < 6 / math.sqrt(4096)
    neighbours = (centred[:, 1:] * centred[:, :-1]).mean()
    assert abs(float(neighbours)) < 5 / math.sqrt(size)


def test_both_halves_of_a_key_count() -> None:
    keys = torch.tensor([5, 5 + (1 << 32), 5 + (1 << 63) - (1 << 62), 6])
    assert len(set(exponential_noise(keys, 8)[:, 0].tolist())) == 4


def test_unpacked_weights_give_the_same(model: GPT2, monkeypatch: pytest.MonkeyPatch) -> None:
    packed = Sampler(model).sample(MIXED, settings=WARM, eos=NEVER, seed=0)
    monkeypatch.setattr(cpu, "multiplies", lambda device, dtype: False)
    plain = Sampler(model).sample(MIXED, settings=WARM, eos=NEVER, seed=0)
    _same(plain, list(range(8)), packed, list(range(8)))


class _Roomy(ArenaDecoder):
    """Batches cut from one block of memory, their steps taken by plain torch."""

    compact_at = 0.0

    def start(self, batch: DecodeBatch, prompts: Sequence[Ids], mask: Mask | None) -> None:
        given = pad_prompts(prompts, batch.shape.groups, round_up(len(prompts[-1]), 16))
        logits = inference.prefill(self.weights, batch.cache, 0, *given)
        batch.choose(logits.repeat_interleave(batch.shape.width, 0))

    def step(self, batch: DecodeBatch, slot: int, mask: Mask | None) -> None:
        batch.choose(batch.logits(slot))


def test_batches_cut_from_one_block_of_memory_change_nothing(model: GPT2) -> None:
    each = [replace(WARM, max_new_tokens=n) for n in (3, 18, 16, 4, 2)]
    eager, captured = Sampler(model), Sampler(model)
    captured.decoder = decoder = _Roomy(captured.weights)
    ask = {"k": 3, "settings": each, "eos": 9, "seed": 4}
    expected = eager.sample(MIXED[:5], **ask)  # type: ignore[arg-type]
    for _ in range(2):  # the second time in buffers that hold the first
        samples = captured.sample(MIXED[:5], **ask)  # type: ignore[arg-type]
        _same(samples, list(range(15)), expected, list(range(15)))
        assert torch.equal(samples.finished, expected.finished)
    assert decoder.batches[3].shape[:4] == (6, 3, 64, 32)


def test_rows_that_go_on_remember_where_their_keys_lie(model: GPT2) -> None:
    decoder = ArenaDecoder(InferenceWeights(model))
    batch = decoder.batch(Shape(4, 3, 8, 8))
    batch.rows.limits.copy_(torch.arange(12))
    kept = decoder.compact(batch, torch.tensor([0, 2, 3]), torch.tensor([[0, 2], [1, 2], [0, 1]]))
    kept = decoder.compact(kept, torch.tensor([1, 2]), torch.tensor([[1], [0]]))
    assert kept.shape[:2] == (2, 1)
    assert kept.group_places[:2].tolist() == [2, 3]
    assert kept.columns[:2].tolist() == [2, 0]
    assert kept.rows.limits[:2].tolist() == [8, 9]
    assert decoder.batch(Shape(4, 3, 8, 8)).columns[:6].tolist() == [0, 1, 2, 0, 1, 2]


def test_few_shapes_serve_many_sizes() -> None:
    groups = [round_groups(n) for n in range(1, 26)]
    assert sorted(set(groups)) == [1, 2, 3, 4, 6, 8, 12, 16, 24, 32]
    assert all(wide >= n for n, wide in enumerate(groups, 1))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("name", ["plain", "all", "greedy"])
def test_cuda_graphs_draw_what_the_cpu_draws(model: GPT2, name: str) -> None:
    settings = GREEDY if name == "greedy" else SETTINGS[name]
    expected = sample(model, MIXED, k=3, settings=settings, eos=9, seed=4)
    device = copy.deepcopy(model).cuda()
    sampler = Sampler(device)
    for _ in range(2):
        samples = sampler.sample(MIXED, k=3, settings=settings, eos=9, seed=4)
        assert samples.tokens.tolist() == expected.tokens.tolist()
        torch.testing.assert_close(samples.logp.cpu(), expected.logp, atol=1e-4, rtol=0)
        torch.testing.assert_close(samples.entropy.cpu(), expected.entropy, atol=1e-3, rtol=0)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize(("splits", "dtype"), [(4, torch.float32), (3, torch.bfloat16)])
def test_cuda_graphs_whose_programs_share_rows_draw_the_same(
    model: GPT2, splits: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    from rookworld.model.kernels import triton_attention

    device, ask = copy.deepcopy(model).cuda(), {"k": 3, "settings": WARM, "eos": NEVER, "seed": 4}
    plan = triton_attention.Plan(2, prefix=16, own=16, warps=1, stages=1)
    found = []
    for shared in (plan, plan._replace(splits=splits)):
        monkeypatch.setattr(triton_attention, "plan", lambda batch, shared=shared: shared)
        sampler = Sampler(device, dtype=dtype)
        found.append([sampler.sample(MIXED, **ask) for _ in range(30)])  # type: ignore[arg-type]
    alone, together = found
    for samples in together:  # whoever comes last puts the same together
        assert torch.equal(samples.logp, together[0].logp)
    if dtype is torch.float32:
        assert together[0].tokens.tolist() == alone[0].tokens.tolist()
        torch.testing.assert_close(together[0].logp, alone[0].logp, atol=1e-5, rtol=0)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_cuda_graphs_see_an_update(model: GPT2, dtype: torch.dtype) -> None:
    device = copy.deepcopy(model).cuda()
    before = sample(device, MIXED, settings=WARM, eos=NEVER, seed=0, dtype=dtype)
    with torch.no_grad():
        for parameter in device.parameters():
            parameter.mul_(0.9)
    after = sample(device, MIXED, settings=WARM, eos=NEVER, seed=0, dtype=dtype)
    fresh = Sampler(device, dtype=dtype).sample(MIXED, settings=WARM, eos=NEVER, seed=0)
    assert not torch.equal(before.logp, after.logp)
    torch.testing.assert_close(after.logp, fresh.logp)
