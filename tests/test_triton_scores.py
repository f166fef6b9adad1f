"""The Triton scores against plain torch: compiled where CUDA is, interpreted elsewhere."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from rookworld.grpo.kl import Draw, TokenStats, stats_from_logits

pytest.importorskip("triton")
CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"

from rookworld.model.kernels import triton_scores  # noqa: E402

ROWS, WIDTH, VOCABULARY = 13, 24, 2500
"""More tokens than a block holds, and no multiple of anything."""


def _made(seed: int, *shape: int, size: float = 1.0) -> Tensor:
    return (size * torch.randn(shape, generator=torch.Generator().manual_seed(seed))).to(DEVICE)


def _inputs() -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    hidden, head = _made(0, ROWS, WIDTH), _made(1, VOCABULARY, WIDTH, size=0.7)
    ids = torch.arange(ROWS, device=DEVICE) * 190 + 3
    near = hidden + _made(2, ROWS, WIDTH, size=0.1), head + _made(3, VOCABULARY, WIDTH, size=0.05)
    return hidden, head, ids, *near


def _fused(*inputs: Any, temperature: Tensor | None = None, kind: str = "forward") -> TokenStats:
    apply: Any = triton_scores.FusedTokenStats.apply
    logp, entropy, kl, ref_logp = apply(*inputs, temperature, kind)
    return TokenStats(logp=logp, entropy=entropy, kl=kl, ref_logp=ref_logp)


def _mixed(stats: TokenStats) -> Tensor:
    """A loss in which every row wants something else of each number."""
    weights = [_made(seed, ROWS) for seed in (4, 5, 6)]
    assert stats.kl is not None
    numbers = (stats.logp, stats.entropy, stats.kl)
    return torch.stack([(w * n).sum() for w, n in zip(weights, numbers, strict=True)]).sum()


def _both(
    frozen_head: bool = False, temperature: Tensor | None = None, kind: str = "forward"
) -> list[tuple[TokenStats, list[Tensor | None]]]:
    draw = Draw() if temperature is None else Draw(temperature=temperature)
    found = []
    for fused in (False, True):
        hidden, head, ids, ref_hidden, ref_head = _inputs()
        hidden.requires_grad_()
        head.requires_grad_(not frozen_head)
        if fused:
            given = (hidden, head, ids, ref_hidden, ref_head, torch.float32)
            stats = _fused(*given, temperature=temperature, kind=kind)
        else:
            reference = ref_hidden @ ref_head.T
            stats = stats_from_logits(hidden @ head.T, ids, draw, reference, kind)
        torch.autograd.backward(_mixed(stats))
        found.append((stats, [hidden.grad, head.grad]))
    return found


@pytest.mark.parametrize("rows_at_once", [ROWS, 5])
def test_numbers_and_gradients_are_those_of_plain_torch(
    monkeypatch: pytest.MonkeyPatch, rows_at_once: int
) -> None:
    width = len(triton_scores.pad_vocabulary(_inputs()[1], torch.float32))
    monkeypatch.setattr(triton_scores, "CHUNK_BYTES", rows_at_once * 2 * width * 4)
    (plain, slopes), (fused, fused_slopes) = _both()
    for name in ("logp", "entropy", "kl", "ref_logp"):
        torch.testing.assert_close(getattr(fused, name), getattr(plain, name), atol=2e-5, rtol=1e-5)
    for own, other in zip(fused_slopes, slopes, strict=True):
        torch.testing.assert_close(own, other, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("kind", ["forward", "reverse", "symmetric"])
@pytest.mark.parametrize("tempered", [False, True])
def test_any_temperature_and_kind_of_kl_is_that_of_plain_torch(kind: str, tempered: bool) -> None:
    temperature = torch.linspace(0.4, 1.6, ROWS, device=DEVICE) if tempered else None
    (plain, slopes), (fused, fused_slopes) = _both(temperature=temperature, kind=kind)
    for name in ("logp", "entropy", "kl", "ref_logp"):
        torch.testing.assert_close(getattr(fused, name), getattr(plain, name), atol=5e-5, rtol=1e-5)
    for own, other in zip(fused_slopes, slopes, strict=True):
        torch.testing.assert_close(own, other, atol=5e-5, rtol=2e-4)


def test_a_frozen_head_gets_no_gradient() -> None:
    (_, slopes), (_, fused_slopes) = _both(frozen_head=True)
    assert fused_slopes[1] is None and slopes[0] is not None
    torch.testing.assert_close(fused_slopes[0], slopes[0], atol=2e-5, rtol=1e-4)


def test_equal_models_are_at_distance_zero_exactly() -> None:
    hidden, head, ids, _, _ = _inputs()
    half = torch.bfloat16 if CUDA else torch.float16
    kl = _fused(hidden, head, ids, hidden, head, half).kl
    assert kl is not None and torch.equal(kl, torch.zeros_like(kl))


@pytest.mark.skipif(not CUDA, reason="needs a GPU")
def test_token_stats_takes_this_way_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    from rookworld.grpo.kl import token_stats

    hidden, head, ids, ref_hidden, ref_head = _inputs()
    called = []
    fused: Any = triton_scores.FusedTokenStats.apply

    def counted(*given: Any) -> Any:
        called.append(1)
        return fused(*given)

    monkeypatch.setattr(triton_scores.FusedTokenStats, "apply", counted)
    reference: Any = {"ref_hidden": ref_hidden, "ref_head": ref_head}
    by_row = torch.linspace(0.4, 1.6, ROWS, device=DEVICE)
    for draw in (Draw(), Draw(temperature=0.5), Draw(temperature=by_row)):
        for kind in ("forward", "reverse", "symmetric"):
            token_stats(hidden, head, ids, draw=draw, **reference, kind=kind)
    assert len(called) == 9
    for draw in (Draw(top_k=5), Draw(top_p=0.9)):
        token_stats(hidden, head, ids, draw=draw, **reference)
    assert len(called) == 9


@pytest.mark.skipif(not CUDA, reason="needs a GPU")
def test_token_stats_under_autocast_are_those_of_plain_torch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from rookworld.grpo import kl

    found = []
    for fused in (True, False):
        if not fused:
            monkeypatch.setattr(kl, "on_one_gpu", lambda *tensors: False)
        hidden, head, ids, ref_hidden, ref_head = _inputs()
        hidden.requires_grad_()
        head.requires_grad_()
        with torch.autocast("cuda", dtype=torch.bfloat16):
            stats = kl.token_stats(hidden, head, ids, ref_hidden=ref_hidden, ref_head=ref_head)
        torch.autograd.backward(_mixed(stats))
        found.append((stats, hidden.grad, head.grad))
    (own, *slopes), (plain, *plain_slopes) = found
    for name in ("logp", "entropy", "kl"):
        torch.testing.assert_close(getattr(own, name), getattr(plain, name), atol=2e-3, rtol=2e-3)
    for one, other in zip(slopes, plain_slopes, strict=True):
        torch.testing.assert_close(one, other, atol=3e-2, rtol=3e-2)
