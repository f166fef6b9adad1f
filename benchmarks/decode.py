"""Decoding and the training pass against `transformers`, on the same weights in one run.

The CPU's model has the shape of the embedded one; CUDA's that of GPT-2 124M in bf16, decoded by
every variant of the step. Variants run in processes of their own: a failure in one, even one that
takes the device's context with it, is printed and the rest still run. Floors are measured here: the
FLOP rate of a large product and the bandwidth of a large copy, not a data sheet's.

    python benchmarks/decode.py            everything this machine can measure
    python benchmarks/decode.py VARIANT    one part, its numbers as a line of JSON at the end
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from rookworld.model.gpt2 import GPT2, GPT2Config
from rookworld.model.inference import InferenceWeights, Layer
from rookworld.model.sampling.sampler import Sampler, Samples, Sampling, sampler_for
from rookworld.model.weights import save_model

NANO = GPT2Config(vocab_size=2496, n_positions=192, n_embd=320, n_layer=6, n_head=10)
GPT2_124M = GPT2Config(vocab_size=50257)
NEVER = -1
PROMPT, PROMPT_CUDA, NEW_CUDA, SAMPLES = 71, 100, 144, 8
VARIANTS: dict[str, dict[str, Any]] = {"triton": {"graph": True}, "eager": {"graph": False}}
TIMEOUT_S = 150
Numbers = dict[str, float]


def main(quick: bool = False) -> Numbers:
    """Ratios above 1 mean that we are faster; names ending in _cuda are the GPU's."""
    numbers = cpu_decode((16,) if quick else (16, 80)) | cpu_train()
    if not quick:
        numbers |= cpu_greedy()
    if torch.cuda.is_available():
        numbers |= cuda(["triton"] if quick else list(VARIANTS), profiled=not quick)
    for name, value in numbers.items():
        print(f"{name:34} {value:12.4g}")
    return numbers


def prompts(count: int, length: int, vocabulary: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    ids: list[list[int]] = torch.randint(vocabulary, (count, length), generator=generator).tolist()
    return ids


def seconds(*runs: Callable[[], object], repeats: int = 3) -> list[float]:
    """The best time of each, taken in turns so that a busy machine is busy for all of them."""
    best = [float("inf")] * len(runs)
    for _ in range(repeats + 1):
        for index, run in enumerate(runs):
            _wait()
            start = time.perf_counter()
            run()
            _wait()
            best[index] = min(best[index], time.perf_counter() - start)
    return best


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def flops_per_s(dtype: torch.dtype, device: str) -> float:
    """The rate of a large product, counted as 2 operations per multiplication."""
    rows, width = (8192, 8192) if device == "cuda" else (4096, 1280)
    left = torch.randn(rows, width, dtype=dtype, device=device)
    right = torch.randn(width, width, dtype=dtype, device=device)
    (time_s,) = seconds(lambda: torch.mm(left, right), repeats=8)
    return 2.0 * rows * width * width / time_s


def bytes_per_s(device: str) -> float:
    """The bandwidth of a large copy, reading and writing counted."""
    source = torch.ones((1 << 30) if device == "cuda" else (1 << 24), device=device)
    target = torch.empty_like(source)
    (time_s,) = seconds(lambda: target.copy_(source), repeats=8)
    return 2.0 * source.numel() * source.element_size() / time_s


def twin(model: GPT2, dtype: torch.dtype, device: str) -> Any:
    """The same weights as a `transformers` model."""
    from transformers import AutoModelForCausalLM

    with tempfile.TemporaryDirectory() as folder:
        save_model(model, f"{folder}/model")
        load: Any = AutoModelForCausalLM.from_pretrained
        return load(f"{folder}/model", dtype=dtype).to(device).eval()


def generate(other: Any, ids: list[list[int]], new: int) -> None:
    tensor = torch.tensor(ids, device=other.device)
    with torch.no_grad():
        other.generate(
            tensor,
            attention_mask=torch.ones_like(tensor),
            do_sample=True,
            top_k=0,
            num_return_sequences=SAMPLES,
            max_new_tokens=new,
            min_new_tokens=new,
            pad_token_id=0,
        )


def draw(model: GPT2, ids: list[list[int]], **ask: Any) -> Samples:
    """As a step of training draws: from the weights of the moment."""
    return sampler_for(model).sample(ids, **ask)


def cpu_decode(lengths: tuple[int, ...]) -> Numbers:
    """8 prompts × 8 samples, as a step of training on two cores."""
    model = GPT2(NANO).init_weights(0)
    other, ids = twin(model, torch.float32, "cpu"), prompts(8, PROMPT, NANO.vocab_size)
    size, rate = _parameters(model), flops_per_s(torch.float32, "cpu")
    rows, numbers = len(ids) * SAMPLES, {}
    for new in lengths:
        settings = Sampling(max_new_tokens=new)
        theirs, ours = seconds(
            partial(generate, other, ids, new),
            partial(draw, model, ids, k=SAMPLES, settings=settings, eos=NEVER, seed=0),
        )
        floor = 2.0 * size * (len(ids) * PROMPT + rows * (new - 1)) / rate
        print(f"cpu {rows} rows × {new} tokens: transformers {theirs:.3f} s, here {ours:.3f} s,")
        print(f"  {theirs / ours:.2f}× faster, {floor / ours:.0%} of the FLOP floor")
        numbers[f"decode_vs_transformers_{new}"] = theirs / ours
        numbers["tokens_per_s"] = rows * new / ours
    return numbers | {
        "decode_vs_transformers": min(
            value for name, value in numbers.items() if name.startswith("decode_vs")
        )
    }


def cpu_greedy() -> Numbers:
    """A greedy answer of 14 tokens by a bf16 copy, alone and 64 at a time."""
    model = GPT2(NANO).init_weights(0).bfloat16()
    sampler, ids = Sampler(model), prompts(64, PROMPT, NANO.vocab_size)
    settings = Sampling(temperature=0.0, max_new_tokens=14)
    one, many, floor = seconds(
        partial(sampler.sample, ids[:1], settings=settings, eos=NEVER, seed=0),
        partial(sampler.sample, ids, settings=settings, eos=NEVER, seed=0),
        partial(products, sampler.weights, len(ids), settings.max_new_tokens),
        repeats=8,
    )
    alone, ms, least = 1e3 * one, 1e3 * many / len(ids), 1e3 * floor / len(ids)
    print(f"cpu greedy answer: {alone:.1f} ms alone, {ms:.2f} ms of {len(ids)},")
    print(f"  the products by themselves {least:.2f} ms")
    return {"greedy_ms_alone": alone, "greedy_ms_of_64": ms, "greedy_products_ms_of_64": least}


def products(weights: InferenceWeights, prompts: int, new: int) -> None:
    """The matrix products of `prompts` answers and nothing else."""

    def block(layer: Layer, x: torch.Tensor) -> None:
        layer.project(x)
        layer.narrow(layer.widen(x, gelu=True))

    *others, last = weights.layers
    width = weights.config.n_embd
    x = torch.randn(prompts * PROMPT, width, dtype=weights.dtype)
    for layer in others:
        layer.attend(x)
        block(layer, x)
    last.key_value(x)
    x = x[:prompts]
    last.query(x)
    block(last, x)
    weights.logits(x)
    for _ in range(new - 1):
        for layer in weights.layers:
            layer.attend(x)
            block(layer, x)
        weights.logits(x)


def _parameters(model: GPT2) -> int:
    """Parameters that take part in a product: all but the positions."""
    return sum(p.numel() for p in model.parameters()) - model.wpe.weight.numel()


def _our_pass(model: GPT2, ids: torch.Tensor, answers: int) -> None:
    """Forward and backward with a loss on the last `answers` tokens, logits only there."""
    hidden = model(ids[:, :-1])[:, -answers:]
    logits = model.logits(hidden).float()
    F.cross_entropy(logits.flatten(0, 1), ids[:, -answers:].flatten()).backward()  # type: ignore[no-untyped-call]
    model.zero_grad()


def _their_pass(other: Any, ids: torch.Tensor, answers: int) -> None:
    labels = ids.clone()
    labels[:, :-answers] = -100
    other(ids, labels=labels).loss.backward()
    other.zero_grad()


def train_pass(config: GPT2Config, rows: int, length: int, answers: int, device: str) -> Numbers:
    """The passes of one update on plain rows, against the same by `transformers`."""
    model = GPT2(config).init_weights(0).to(device)
    other = twin(model, torch.float32, device).train()
    for module in other.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    ids = torch.tensor(prompts(rows, length, config.vocab_size), device=device)
    enabled = device == "cuda"
    with torch.autocast(device, dtype=torch.bfloat16, enabled=enabled):
        theirs, ours = seconds(
            partial(_their_pass, other, ids, answers), partial(_our_pass, model, ids, answers)
        )
    rate = flops_per_s(torch.bfloat16 if enabled else torch.float32, device)
    inside = _parameters(model) - model.lm_head.weight.numel()
    floor = 6.0 * rows * (inside * length + model.lm_head.weight.numel() * answers) / rate
    print(f"{device} pass {rows} × {length}: transformers {1e3 * theirs:.1f} ms, here")
    print(f"  {1e3 * ours:.1f} ms, {theirs / ours:.2f}× faster, {floor / ours:.0%} of the floor")
    suffix = "_cuda" if enabled else ""
    return {f"train_vs_transformers{suffix}": theirs / ours, f"train_ms{suffix}": 1e3 * ours}


def cpu_train() -> Numbers:
    return train_pass(NANO, 16, PROMPT + 16, 16, "cpu")


def cuda(variants: list[str], profiled: bool) -> Numbers:
    """Each part in a process of its own; what failed is printed and left out."""
    numbers: Numbers = {}
    # What matters first, should the time run out.
    parts = [variants[0], "transformers", "train", *(["profile"] if profiled else [])]
    parts += variants[1:]
    found = {part: _in_process(part) for part in parts}
    theirs = found["transformers"].get("ms_64")
    for name in variants:
        for key, value in found[name].items():
            numbers[f"{key}_{name}_cuda"] = value
    ours = found[variants[0]].get("ms_64")
    if ours and theirs:
        numbers["decode_vs_transformers_cuda"] = theirs / ours
    if ours:
        numbers["tokens_per_s_cuda"] = 64e3 / ours
    return numbers | found["train"]


def _in_process(part: str) -> Numbers:
    command = [sys.executable, __file__, part]
    print(f"— {part}", flush=True)
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S)
    except subprocess.TimeoutExpired:
        print(f"{part} took longer than {TIMEOUT_S} s")
        return {}
    if done.returncode:
        print(f"{part} failed:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}", flush=True)
        return {}
    *lines, last = done.stdout.strip().splitlines()
    print("\n".join(lines), flush=True)
    numbers: Numbers = json.loads(last)
    return numbers


def cuda_variant(name: str) -> Numbers:
    """Is it right, in fp32 and bf16, and how long does a token take?"""
    how, model = VARIANTS[name], GPT2(GPT2_124M).init_weights(0).cuda()
    numbers = agreement(model, how)
    bandwidth = bytes_per_s("cuda")
    sampler = Sampler(model.bfloat16(), **how)
    for rows in (64, 512):
        run = request(sampler, rows)
        start = time.perf_counter()
        run()
        first = time.perf_counter() - start
        ms = 1e3 * seconds(run)[0] / NEW_CUDA
        config = model.config
        cached = rows * (PROMPT_CUDA + NEW_CUDA / 2) * 4 * config.n_layer * config.n_embd
        floor = 1e3 * (2.0 * _parameters(model) + cached) / bandwidth
        print(f"{name} {rows} rows: {ms:.3f} ms a token, {floor / ms:.0%} of the bandwidth floor")
        print(f"  ({floor:.3f} ms at {bandwidth / 1e12:.2f} TB/s); first call {first:.1f} s")
        numbers |= {f"ms_{rows}": ms, f"floor_ms_{rows}": floor}
    return numbers


def request(sampler: Sampler, rows: int) -> Callable[[], Samples]:
    """Rows that all end at the maximum, so that every token is one of them all."""
    ids = prompts(rows // SAMPLES, PROMPT_CUDA, GPT2_124M.vocab_size)
    settings = Sampling(max_new_tokens=NEW_CUDA)
    return partial(sampler.sample, ids, k=SAMPLES, settings=settings, eos=NEVER, seed=0)


SHAPES = ((2, 32, 8), (3, 64, 3), (2, 128, 1), (4, 64, 20))
"""Heads, their size and the samples of a prompt, of small models that are checked too."""


def agreement(model: GPT2, how: dict[str, Any]) -> Numbers:
    """Tokens against the eager path in fp32; bf16 log-probs against a plain fp32 forward pass."""
    ids = [row[: 20 + 9 * i] for i, row in enumerate(prompts(6, 80, model.config.vocab_size))]
    numbers = {}
    for kind, temperature in (("greedy", 0.0), ("sampled", 1.0)):
        settings = [Sampling(temperature=temperature, max_new_tokens=40)] * len(ids)
        numbers[f"same_{kind}"] = _same(model, how, ids, settings, 4)
    for heads, size, k in SHAPES:
        # A small vocabulary: the end token comes at any time and rows are compacted away.
        small = GPT2Config(
            vocab_size=97, n_positions=160, n_embd=heads * size, n_layer=2, n_head=heads
        )
        ids_97 = [row[: 1 + 17 * i] for i, row in enumerate(prompts(7, 110, 97))]
        limits = [Sampling(max_new_tokens=12 + 9 * (i % 5)) for i in range(len(ids_97))]
        same = _same(GPT2(small).init_weights(0).cuda(), how, ids_97, limits, k)
        numbers[f"same_{heads}x{size}_k{k}"] = same
    numbers["logp_gap_bf16"] = _gap(model, how, ids)
    print("  ".join(f"{name} {value:.4f}" for name, value in numbers.items()), flush=True)
    return numbers


def _same(
    model: GPT2, how: dict[str, Any], ids: list[list[int]], settings: list[Sampling], k: int
) -> float:
    """The fraction of rows whose tokens are all those of the eager path."""
    eager, variant = (
        sampler.sample(ids, k=k, settings=settings, eos=0, seed=3).tokens
        for sampler in (Sampler(model, graph=False), Sampler(model, **how))
    )
    return float((eager == variant).all(1).float().mean()) if eager.shape == variant.shape else 0.0


def _gap(model: GPT2, how: dict[str, Any], ids: list[list[int]], k: int = 4) -> float:
    """How far bf16 log-probs are from those of a plain fp32 pass over the same tokens."""
    half = Sampler(model, dtype=torch.bfloat16, **how)
    drawn = half.sample(ids, k=k, settings=Sampling(max_new_tokens=40), eos=NEVER, seed=3)
    gaps = []
    for row, tokens in enumerate(drawn.tokens):
        prompt = torch.tensor(ids[row // k], device=model.device)
        with torch.no_grad():
            hidden = model(torch.cat([prompt, tokens])[None])[0, len(prompt) - 1 : -1]
            logp = model.logits(hidden).log_softmax(-1).gather(-1, tokens[:, None])[:, 0]
        gaps.append((logp - drawn.logp[row]).abs())
    return float(torch.cat(gaps).mean())


def cuda_transformers() -> Numbers:
    other = twin(GPT2(GPT2_124M).init_weights(0), torch.bfloat16, "cuda")
    numbers = {}
    for rows in (64, 512):
        ids = prompts(rows // SAMPLES, PROMPT_CUDA, GPT2_124M.vocab_size)
        (time_s,) = seconds(partial(generate, other, ids, NEW_CUDA), repeats=1)
        numbers[f"ms_{rows}"] = 1e3 * time_s / NEW_CUDA
        print(f"transformers {rows} rows: {numbers[f'ms_{rows}']:.2f} ms a token")
    return numbers


def cuda_profile(shown: int = 14) -> Numbers:
    """Where the time of a Triton step goes, kernel by kernel."""
    from torch.profiler import ProfilerActivity, profile

    model = GPT2(GPT2_124M).init_weights(0).cuda().bfloat16()
    sampler = Sampler(model)
    for rows in (64, 512):
        run = request(sampler, rows)
        run()
        with profile(activities=[ProfilerActivity.CUDA]) as seen:
            run()
            _wait()
        events = sorted(seen.key_averages(), key=lambda event: -event.self_device_time_total)
        whole = sum(event.self_device_time_total for event in events) / NEW_CUDA
        print(f"{rows} rows, {whole:.0f} µs a token:")
        for event in events[:shown]:
            time_us = event.self_device_time_total / NEW_CUDA
            print(f"  {time_us:8.1f} {event.count:6} {event.key[:76]}")
    return {}


if __name__ == "__main__":
    if sys.argv[1:]:
        part = sys.argv[1]
        parts: dict[str, Callable[[], Numbers]] = {
            "transformers": cuda_transformers,
            "train": partial(train_pass, GPT2_124M, 64, 224, NEW_CUDA, "cuda"),
            "profile": cuda_profile,
            **{name: partial(cuda_variant, name) for name in VARIANTS},
        }
        print(json.dumps(parts[part]()))
    else:
        main()
