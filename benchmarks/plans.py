"""Which plan of the Triton step is fastest on this GPU: attention in several cuts, then a token.

One run answers: are the tokens those of the eager path, how long does each plan take, what does the
best one make of a whole token, against the present defaults and against `transformers`, and where
does the time go. GPT-2 124M in bf16, groups of 8; times of plans are those of all layers together.

    python benchmarks/plans.py
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

import decode
from rookworld.model import triton_attention, triton_choice, triton_step
from rookworld.model.batch import Batch, Shape
from rookworld.model.decoder import Weights, _attend_parts
from rookworld.model.gpt2 import GPT2
from rookworld.model.sampling import Sampler
from rookworld.model.triton_attention import Plan

ROWS = (64, 512)
HOW: dict[str, Any] = {"kernels": "triton", "graph": True}
MIDDLE = 73
"""The token at which plans are timed: half of the answer is there."""
# rows, prefix, own, warps, stages
PLANS = [
    Plan(1, 64, 64, 4, 2),
    Plan(1, 128, 128, 4, 2),
    Plan(1, 128, 64, 4, 1),
    Plan(1, 64, 64, 4, 3),
    Plan(2, 64, 64, 4, 2),
    Plan(2, 128, 128, 4, 2),
    Plan(2, 64, 128, 4, 2),
    Plan(2, 64, 64, 4, 3),
    Plan(2, 64, 64, 2, 2),
    Plan(4, 64, 64, 4, 2),
    Plan(4, 64, 128, 4, 2),
    Plan(4, 64, 64, 4, 3),
    Plan(8, 64, 64, 4, 2),
    Plan(8, 64, 64, 4, 1),
    Plan(8, 64, 64, 4, 3),
    Plan(8, 64, 128, 4, 2),
    Plan(8, 64, 128, 8, 2),
    Plan(8, 128, 256, 8, 2),
]
SEARCHES = [(2048, 8, 1024), (1024, 4, 1024), (1024, 8, 2048), (4096, 8, 1024)]


def main() -> None:
    began = time.perf_counter()
    lines: list[str] = []
    model = GPT2(decode.GPT2_124M).init_weights(0).cuda()
    # As many rows in a program as there are: plans below are checked against torch again.
    wanted, triton_attention.PROGRAMS = triton_attention.PROGRAMS, 1
    same = decode.agreement(model, HOW)
    triton_attention.PROGRAMS = wanted
    lines += ["right: " + "  ".join(f"{name} {value:.4f}" for name, value in same.items())]
    _clock(began, "agreement")
    model = model.bfloat16()
    batches = {rows: _batch(Weights(model), rows) for rows in ROWS}
    best = {rows: _try_plans(batch, lines) for rows, batch in batches.items()}
    for batch in batches.values():
        _try_searches(batch, lines)
    batches.clear()
    _clock(began, "plans")
    lines += _tokens(model, best)
    _clock(began, "tokens")
    decode.cuda_profile(shown=11)
    _clock(began, "profile")
    print("\n".join(lines))


def _clock(began: float, part: str) -> None:
    print(f"— {part} done at {time.perf_counter() - began:.0f} s", flush=True)


def _batch(weights: Weights, rows: int) -> Batch:
    """A batch in the middle of its answers, its cache full of noise."""
    shape = Shape(rows // decode.SAMPLES, decode.SAMPLES, 128, decode.NEW_CUDA)
    batch = Batch(weights, shape, truncated=False, random=True)
    cache = batch.cache
    cache.resize_own(shape.new)
    for part in (cache.prefix_keys, cache.prefix_values, cache.own_keys, cache.own_values):
        part.normal_()
    batch.lengths.fill_(decode.PROMPT_CUDA)
    batch.rows.done.fill_(False)
    batch.rows.limits.fill_(shape.new)
    batch.rows.rules.greedy.fill_(False)
    batch.eos.fill_(decode.NEVER)
    batch.index.fill_(MIDDLE)
    return batch


def _us(run: Callable[[], None], repeats: int = 30) -> float:
    """The median time of a captured `run`, in microseconds; not a number where it cannot run."""
    kernels: Any = triton_attention
    try:
        run()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run()
    except (kernels.triton.TritonError, RuntimeError) as error:
        print(f"  {str(error)[-300:]}", flush=True)
        return float("nan")
    times: list[float] = []
    event: Any = torch.cuda.Event
    for _ in range(repeats):
        start, end = event(enable_timing=True), event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(1e3 * start.elapsed_time(end))
    return statistics.median(times[repeats // 3 :])


def _try_plans(batch: Batch, lines: list[str]) -> Plan:
    """Time attention under every plan; the fastest whose numbers are those of torch."""
    config, rows = batch.weights.config, batch.shape.rows
    qkv = torch.randn(rows, 3 * config.n_embd, device="cuda", dtype=torch.bfloat16)
    default = triton_attention.plan
    found: dict[Plan, float] = {}
    expected = _expected(batch, qkv)
    for plan in [default(batch), *PLANS]:
        seen = torch.full((rows, config.n_embd), torch.nan, device="cuda", dtype=torch.bfloat16)
        _set_plan(plan)
        found[plan] = _us(partial(_attend, batch, qkv, seen))
        off = float((seen.float() - expected).norm() / expected.norm())
        mark = "" if off < 1e-2 else f"  WRONG by {off:.3g}"
        lines.append(f"attention {rows:4} rows  {found[plan]:8.1f} µs  {tuple(plan)}{mark}")
        print(lines[-1], flush=True)
        if mark:
            found[plan] = float("nan")
    setattr(triton_attention, "plan", default)  # noqa: B010
    return min(found, key=lambda plan: found[plan] if found[plan] > 0 else float("inf"))


def _set_plan(plan: Plan) -> None:
    setattr(triton_attention, "plan", lambda batch: plan)  # noqa: B010


def _expected(batch: Batch, qkv: torch.Tensor) -> torch.Tensor:
    """What the last layer sees, by torch in fp32."""
    (groups, width, _, _), cache, slot = batch.shape, batch.cache, MIDDLE - 1
    config = batch.weights.config
    parts = qkv.view(groups, width, 3, config.n_head, config.head_size).permute(2, 0, 3, 1, 4)
    length = decode.PROMPT_CUDA
    prefix = (cache.prefix_keys[-1, :, :, :length], cache.prefix_values[-1, :, :, :length])
    own = []
    for old, new in zip((cache.own_keys, cache.own_values), parts[1:], strict=True):
        own.append(torch.cat([old[-1, :, :, :, :slot], new[:, :, :, None]], 3).float())
    seen = _attend_parts(
        parts[0].float(), (prefix[0].float(), prefix[1].float()), (own[0], own[1]), None
    )
    return seen.transpose(1, 2).reshape(batch.shape.rows, -1)


def _attend(batch: Batch, qkv: torch.Tensor, seen: torch.Tensor) -> None:
    for index in range(batch.weights.config.n_layer):
        triton_attention.attend(batch, index, qkv, seen)


def _try_searches(batch: Batch, lines: list[str]) -> None:
    rows, vocabulary = batch.shape.rows, batch.weights.config.vocab_size
    logits = torch.randn(rows, batch.weights.head.weight.shape[0], device="cuda")[:, :vocabulary]

    def run() -> None:
        batch.index.fill_(MIDDLE)
        triton_choice.choose(batch, logits)

    names = ("TOKENS_PER_BLOCK", "SEARCH_WARPS", "PROGRAMS")
    for values in SEARCHES:
        for name, value in zip(names, values, strict=True):
            setattr(triton_choice, name, value)
        lines.append(f"choice    {rows:4} rows  {_us(run):8.1f} µs  {values}")
        print(lines[-1], flush=True)
    for name, value in zip(names, SEARCHES[0], strict=True):
        setattr(triton_choice, name, value)


def _tokens(model: GPT2, best: dict[int, Plan]) -> list[str]:
    """Whole tokens: the defaults, the best plan, and the best plan with a gelu of its own."""
    theirs = decode.cuda_transformers()
    default, fused, lines = triton_attention.plan, triton_step._widen, []
    for rows in ROWS:
        ms = {}
        for name in ("default", "best plan", "best plan, gelu apart"):
            if name != "default":
                _set_plan(best[rows])
            if name.endswith("apart"):
                setattr(triton_step, "_widen", lambda dense, h: dense(h, gelu=True))  # noqa: B010
            run = decode.request(Sampler(model, **HOW), rows)
            ms[name] = 1e3 * decode.seconds(run)[0] / decode.NEW_CUDA
            setattr(triton_attention, "plan", default)  # noqa: B010
            setattr(triton_step, "_widen", fused)  # noqa: B010
        for name, value in ms.items():
            ratio = theirs[f"ms_{rows}"] / value
            lines.append(
                f"token     {rows:4} rows  {value:8.3f} ms  {ratio:5.1f} × transformers  {name}"
            )
        lines.append(f"          best plan at {rows} rows: {tuple(best[rows])}")
    return lines


if __name__ == "__main__":
    if not torch.cuda.is_available():
        sys.exit("needs CUDA")
    main()
