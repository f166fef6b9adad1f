"""Every KL against enumeration on seven outcomes; chunked = whole; the controller by hand."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from rookworld.grpo.kl import (
    ESTIMATORS,
    EXACT,
    KL_TYPES,
    AdaptiveThreshold,
    Draw,
    KLControl,
    k1_penalty,
    token_stats,
)
from rookworld.grpo.settings import KLSettings

POLICY = torch.tensor([1.2, -0.4, 0.3, -1.5, 0.8, -0.2, 0.1], dtype=torch.float64)
REFERENCE = torch.tensor([-0.6, 0.9, -0.8, 0.5, -1.1, 0.7, 0.2], dtype=torch.float64)


def enumerated_kl(p: Tensor, q: Tensor) -> float:
    return float(sum(a * math.log(a / b) for a, b in zip(p.tolist(), q.tolist(), strict=True)))


def gradient(loss: Callable[[Tensor], Tensor]) -> Tensor:
    logits = POLICY.clone().requires_grad_()
    (grad,) = torch.autograd.grad(loss(logits.log_softmax(-1)), logits)
    return grad


LOG_REF = REFERENCE.log_softmax(-1)
TRUE_GRADIENT = gradient(lambda log_pi: EXACT["forward"](log_pi, LOG_REF))


def error(grad: Tensor) -> float:
    return float((grad - TRUE_GRADIENT).norm() / TRUE_GRADIENT.norm())


def expected_gradient(per_token: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """Gradient of a per-sample loss, averaged over all outcomes with the policy's weights."""
    return gradient(lambda log_pi: (log_pi.exp().detach() * per_token(log_pi, LOG_REF)).sum())


def test_exact_kl_equals_enumeration_in_both_directions() -> None:
    pi, ref = POLICY.softmax(-1), REFERENCE.softmax(-1)
    forward, reverse = enumerated_kl(pi, ref), enumerated_kl(ref, pi)
    assert 0.7 < forward < 1.1
    found = {name: kl(pi.log(), ref.log()).item() for name, kl in EXACT.items()}
    mean = (forward + reverse) / 2
    expected = {"forward": forward, "reverse": reverse, "symmetric": mean}
    assert found == pytest.approx(expected, abs=1e-12)


def test_forward_gradient_equals_finite_differences() -> None:
    for i in range(7):
        step = torch.zeros(7, dtype=torch.float64)
        step[i] = 1e-6
        up, down = (
            enumerated_kl((POLICY + sign * step).softmax(-1), LOG_REF.exp()) for sign in (1, -1)
        )
        assert TRUE_GRADIENT[i].item() == pytest.approx((up - down) / 2e-6, abs=1e-8)


def test_the_table_of_expected_gradients() -> None:
    assert error(expected_gradient(ESTIMATORS["k2"])) < 1e-12
    k1_as_loss = expected_gradient(lambda logp, ref: logp - ref)
    assert k1_as_loss.norm() < 1e-12
    assert error(k1_as_loss) == pytest.approx(1.0)
    k3 = expected_gradient(ESTIMATORS["k3"])
    assert error(k3) > 0.3
    torch.testing.assert_close(k3, gradient(lambda log_pi: EXACT["reverse"](log_pi, LOG_REF)))


def test_k1_in_the_reward_has_the_exact_gradient() -> None:
    mask = torch.ones(7, 1, dtype=torch.bool)

    def surrogate(log_pi: Tensor) -> Tensor:
        penalty = k1_penalty(log_pi.unsqueeze(-1), LOG_REF.unsqueeze(-1), mask)
        assert not penalty.requires_grad
        return (log_pi.exp().detach() * penalty * log_pi).sum()

    assert error(gradient(surrogate)) < 1e-12


# --- of sequences: two tokens, three words ------------------------------------------------------

WORDS = 3
WEIGHTS = torch.tensor(
    [[0.4, -0.9, 0.6], [1.1, 0.2, -0.5], [-0.7, 0.8, 0.3], [0.1, -0.2, 1.3]], dtype=torch.float64
)
"""Logits of the first word, and of the second behind each first."""
ITS_WEIGHTS = WEIGHTS.flip(0) * 0.7


def log_probabilities(weights: Tensor) -> tuple[Tensor, Tensor]:
    """[9, 2] of both tokens of every sequence, and [9, 2, 3] of all that could stand there."""
    table = weights.log_softmax(-1)
    first, second = torch.cartesian_prod(*[torch.arange(WORDS)] * 2).unbind(1)
    of_all = torch.stack([table[torch.zeros_like(first)], table[1 + first]], 1)
    ids = torch.stack([first, second], 1)[..., None]
    return of_all.gather(-1, ids).squeeze(-1), of_all


def sequence_gradient(loss: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    weights = WEIGHTS.clone().requires_grad_()
    (grad,) = torch.autograd.grad(loss(*log_probabilities(weights)), weights)
    return grad


REF_LOGP, REF_ALL = log_probabilities(ITS_WEIGHTS)


def kl_of_sequences(logp: Tensor, of_all: Tensor) -> Tensor:
    """D(π‖ref) between whole sequences, by the definition."""
    return (logp.sum(-1).exp() * (logp - REF_LOGP).sum(-1)).sum()


def exact_per_token(logp: Tensor, of_all: Tensor) -> Tensor:
    """What a step averages: the exact KL behind each sampled prefix."""
    return (logp.sum(-1).exp().detach()[:, None] * EXACT["forward"](of_all, REF_ALL)).sum()


def test_the_exact_kl_has_the_value_of_the_sequences_and_the_gradient_of_its_tokens() -> None:
    """Missing is what an earlier token does to which prefixes are met later."""
    both = log_probabilities(WEIGHTS)
    torch.testing.assert_close(exact_per_token(*both), kl_of_sequences(*both))
    behind = EXACT["forward"](log_probabilities(WEIGHTS)[1], REF_ALL)[:, 1]

    def missing(logp: Tensor, of_all: Tensor) -> Tensor:
        return (logp.sum(-1).exp().detach() * behind * logp[:, 0]).sum()

    whole, found = sequence_gradient(kl_of_sequences), sequence_gradient(exact_per_token)
    assert (whole - found).norm() > 0.03 * whole.norm()
    torch.testing.assert_close(found + sequence_gradient(missing), whole)
    torch.testing.assert_close(found[1:], whole[1:])  # nothing stands behind the last token


def test_k2_has_the_gradient_of_the_exact_kl_per_token() -> None:
    def loss(logp: Tensor, of_all: Tensor) -> Tensor:
        k2 = ESTIMATORS["k2"](logp, REF_LOGP)
        return (logp.sum(-1).exp().detach()[:, None] * k2).sum()

    torch.testing.assert_close(sequence_gradient(loss), sequence_gradient(exact_per_token))


def test_k1_in_the_reward_has_the_gradient_of_the_sequences() -> None:
    def loss(logp: Tensor, of_all: Tensor) -> Tensor:
        penalty = k1_penalty(logp, REF_LOGP, torch.ones_like(logp))
        return (logp.sum(-1).exp().detach() * penalty * logp.sum(-1)).sum()

    torch.testing.assert_close(sequence_gradient(loss), sequence_gradient(kl_of_sequences))


def test_k1_as_a_loss_is_never_offered() -> None:
    assert KL_TYPES == ("forward", "reverse", "symmetric", "k2", "k3", "k1_reward")


def test_estimators_are_zero_when_the_models_agree_and_k3_estimates_the_kl() -> None:
    for estimator in ESTIMATORS.values():
        assert estimator(LOG_REF, LOG_REF).abs().max() == 0
    pi = POLICY.softmax(-1)
    mean = (pi * ESTIMATORS["k3"](pi.log(), LOG_REF)).sum().item()
    assert mean == pytest.approx(enumerated_kl(pi, LOG_REF.exp()), abs=1e-12)


def test_the_k1_penalty_sees_only_the_mask() -> None:
    mask = torch.tensor([[True, True, False], [False, False, False]])
    logp = torch.tensor([[1.0, 2.0, math.nan], [math.nan] * 3])
    assert k1_penalty(logp, torch.zeros(2, 3), mask).tolist() == [3, 0]


# --- from hidden states -------------------------------------------------------------------------


def hidden_case() -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden, ref_hidden = torch.randn(2, 10, 4, generator=generator)
    head, ref_head = torch.randn(2, 7, 4, generator=generator)
    ids = torch.randint(7, (10,), generator=generator)
    return hidden.requires_grad_(), head.requires_grad_(), ids, ref_hidden, ref_head


DRAWS = [
    Draw(),
    Draw(temperature=0.7, top_p=0.8),
    Draw(temperature=torch.linspace(0, 1, 10), top_k=torch.arange(10), top_p=0.9),
]


@pytest.mark.parametrize("kind", EXACT)
@pytest.mark.parametrize("draw", DRAWS)
@pytest.mark.parametrize("chunk", [1, 3, 10, 64])
def test_chunked_equals_whole_with_its_gradient(kind: str, draw: Draw, chunk: int) -> None:
    def run(chunk: int) -> list[Tensor]:
        hidden, head, ids, ref_hidden, ref_head = hidden_case()
        stats = token_stats(
            hidden,
            head,
            ids,
            draw=draw,
            ref_hidden=ref_hidden,
            ref_head=ref_head,
            kind=kind,
            chunk=chunk,
        )
        assert stats.kl is not None
        assert stats.ref_logp is not None
        assert not stats.ref_logp.requires_grad
        loss = (stats.logp + 0.3 * stats.entropy + 2 * stats.kl).sum()
        loss.backward()  # type: ignore[no-untyped-call]
        assert hidden.grad is not None
        assert head.grad is not None
        return [*vars(stats).values(), hidden.grad, head.grad]

    for cut, whole in zip(run(chunk), run(0), strict=True):
        assert whole.isfinite().all()
        torch.testing.assert_close(cut, whole)


@pytest.mark.parametrize("kind", sorted(EXACT))
def test_a_plain_draw_is_the_general_one(kind: str) -> None:
    hidden, ref_hidden = torch.randn(2, 5, 4, dtype=torch.float64).unbind()
    head, ids = torch.randn(7, 4, dtype=torch.float64), torch.randint(7, (5,))
    rows: Any = {"ref_hidden": ref_hidden, "ref_head": head, "kind": kind}
    plain = token_stats(hidden, head, ids, **rows)
    drawn = token_stats(hidden, head, ids, draw=Draw(temperature=torch.ones(5)), **rows)
    for name in ("logp", "entropy", "kl", "ref_logp"):
        torch.testing.assert_close(getattr(plain, name), getattr(drawn, name))


@pytest.mark.parametrize("names", [("logp",), ("entropy",), ("kl",), ("logp", "entropy", "kl")])
def test_a_plain_draw_has_the_gradient_of_the_general_one(names: tuple[str, ...]) -> None:
    def gradients(draw: Draw) -> tuple[Tensor, ...]:
        hidden, head, ids, ref_hidden, ref_head = hidden_case()
        stats = token_stats(hidden, head, ids, draw=draw, ref_hidden=ref_hidden, ref_head=ref_head)
        weighted = [getattr(stats, name) @ torch.linspace(-1, 2, 10) for name in names]
        return torch.autograd.grad(torch.stack(weighted).sum(), (hidden, head))

    general = gradients(Draw(temperature=torch.ones(10)))
    torch.testing.assert_close(gradients(Draw()), general)


def test_token_stats_by_definition() -> None:
    hidden, head, ids, ref_hidden, ref_head = hidden_case()
    stats = token_stats(hidden, head, ids, ref_hidden=ref_hidden, ref_head=ref_head)
    log_pi = (hidden @ head.T).log_softmax(-1)
    log_ref = (ref_hidden @ ref_head.T).log_softmax(-1)
    row = torch.arange(10)
    assert stats.kl is not None
    assert stats.ref_logp is not None
    torch.testing.assert_close(stats.logp, log_pi[row, ids])
    torch.testing.assert_close(stats.ref_logp, log_ref[row, ids])
    torch.testing.assert_close(stats.entropy, -(log_pi.exp() * log_pi).sum(-1))
    torch.testing.assert_close(stats.kl, EXACT["forward"](log_pi, log_ref))
    assert token_stats(hidden, head, ids).kl is None


@pytest.mark.parametrize("draw", DRAWS)
def test_equal_models_are_at_distance_zero_however_sampled(draw: Draw) -> None:
    hidden, head, ids, *_ = hidden_case()
    stats = token_stats(hidden, head, ids, draw=draw, ref_hidden=hidden, ref_head=head)
    assert stats.kl is not None
    assert stats.ref_logp is not None
    assert stats.kl.abs().max() < 1e-6
    torch.testing.assert_close(stats.logp, stats.ref_logp)


def test_no_rows_are_no_error() -> None:
    stats = token_stats(torch.zeros(0, 4), torch.zeros(7, 4), torch.zeros(0).long(), chunk=8)
    assert stats.logp.shape == (0,)


# --- control ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kl", "expected"),
    [(0.16, 0.03), (0.15, 0.02), (0.07, 0.02), (0.066, 0.02 / 1.5), (math.nan, 0.02)],
)
def test_adaptive_coefficient_by_hand(kl: float, expected: float) -> None:
    control = KLControl(KLSettings(kl_coef=0.02, adaptive_kl=True, target_kl=0.1))
    control.observe(0, 0.1)
    control.observe(1, kl)
    assert control.coef == pytest.approx(expected)


def test_the_coefficient_stays_until_the_kl_has_reached_its_target() -> None:
    """A run starts at KL 0: that it is there yet is no reason to let go."""
    control = KLControl(KLSettings(kl_coef=0.02, adaptive_kl=True, target_kl=0.1))
    for step in range(50):
        control.observe(step, 0.099 * step / 50)
    assert control.coef == 0.02
    control.observe(50, 0.1)
    for step in range(51, 99):
        control.observe(step, 0.01)
    assert control.coef == pytest.approx(0.002)  # a tenth of the start, however long
    control.restart()
    control.coef = 0.02
    control.observe(99, 0.01)
    assert control.coef == 0.02


@pytest.mark.parametrize(("given", "floor"), [(None, 0.002), (1e-4, 1e-4), (0.01, 0.01)])
def test_the_floor_is_a_share_of_the_start_unless_given(given: float | None, floor: float) -> None:
    control = KLControl(
        KLSettings(kl_coef=0.02, adaptive_kl=True, target_kl=0.1, kl_coef_min=given)
    )
    for step in range(40):
        control.observe(step, 0.1 if step == 0 else 0.0)
    assert control.coef == pytest.approx(floor)


def test_whether_the_target_was_reached_survives_a_checkpoint() -> None:
    settings = KLSettings(kl_coef=0.02, adaptive_kl=True, target_kl=0.1)
    whole, first, second = (KLControl(settings) for _ in range(3))
    for control in (whole, first):
        control.observe(0, 0.12)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    for control in (whole, second):
        control.observe(1, 0.0)
    assert second.coef == whole.coef < 0.02
    second.load_state_dict({"coef": 1e-4})  # of a version that knew no such thing
    second.observe(2, 0.0)
    assert second.coef == pytest.approx(0.002)


def test_the_coefficient_stays_in_its_range_and_fixed_stays_fixed() -> None:
    settings = KLSettings(
        kl_coef=0.02, adaptive_kl=True, target_kl=0.1, kl_coef_min=0.01, kl_coef_max=0.05
    )
    control, fixed = KLControl(settings), KLControl(KLSettings(kl_coef=0.02))
    for step in range(5):
        control.observe(step, 9.0)
        fixed.observe(step, 9.0)
    assert (control.coef, fixed.coef) == (0.05, 0.02)
    for step in range(9):
        control.observe(step, 0.0)
    assert control.coef == 0.01
    again = KLControl(settings)
    again.load_state_dict(json.loads(json.dumps(control.state_dict())))
    assert again.coef == control.coef


def test_warm_up_scales_the_coefficient_and_teaches_it_nothing() -> None:
    control = KLControl(
        KLSettings(
            kl_coef=0.02, adaptive_kl=True, target_kl=0.1, kl_warmup_steps=2, kl_warmup_factor=0.1
        )
    )
    control.observe(1, 9.0)
    assert [control.coef_at(step) for step in range(3)] == pytest.approx([0.002, 0.002, 0.02])
    assert KLControl(KLSettings(kl_coef=0.02)).coef_at(0) == 0.02
    free = KLControl(KLSettings(kl_coef=0.02, kl_warmup_steps=1))
    assert (free.coef_at(0), free.coef_at(1)) == (0, 0.02)


def test_the_threshold_follows_within_bounds() -> None:
    threshold = AdaptiveThreshold(1.0, multiple=3.0, ceiling=4.0, window=3)
    assert threshold.limit == 1.0
    for value in (0.1, 0.5, 0.6):
        threshold.accept(value)
    assert threshold.limit == pytest.approx(1.5)
    again = AdaptiveThreshold(1.0, multiple=3.0, ceiling=4.0, window=3)
    again.load_state_dict(json.loads(json.dumps(threshold.state_dict())))
    assert again.limit == threshold.limit
    for _ in range(3):
        threshold.accept(9.0)
    assert threshold.limit == 4.0
