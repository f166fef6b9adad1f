"""Policy losses by hand, by finite differences, and the same however a step is cut; a bandit."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from rookworld.grpo.advantages import (
    batch_std,
    flat_groups,
    group_advantages,
    moments,
    scaled_advantages,
)
from rookworld.grpo.kl import forward_kl
from rookworld.grpo.loss import (
    LOSSES,
    Batch,
    RatioStats,
    StepTotals,
    entropy_loss,
    policy_loss,
    ratio_stats,
    token_mean,
    value_loss,
)
from rookworld.grpo.settings import AdvantageSettings, LossSettings

# Two sequences of three and one token. Ratios 1.5, 1, 0.5 | 0.5; probabilities .6/.4, .5/.5, …
RATIO = torch.tensor([[1.5, 1.0, 0.5], [0.5, math.nan, math.nan]], dtype=torch.float64)
OLD = torch.tensor([[0.4, 0.5, 0.8], [0.9, math.nan, math.nan]], dtype=torch.float64).log()
MASK = torch.tensor([[True, True, True], [True, False, False]])
ADVANTAGES = torch.tensor([2.0, -1.0], dtype=torch.float64)
TOTALS = StepTotals(tokens=4, sequences=2, max_tokens=5)
SETTINGS = LossSettings(clip_range=0.2, clip_range_high=0.28)

GEOMETRIC = (1.5 * 1.0 * 0.5) ** (1 / 3)
LOG_PI = {"a": math.log(0.6), "b": math.log(0.5), "c": math.log(0.4), "d": math.log(0.45)}

# name -> contributions of the four tokens before division, held back, divisor of each token
BY_HAND: dict[str, tuple[list[float], list[bool], list[float]]] = {
    "token": ([-2.56, -2, -1, 0.8], [True, False, False, True], [4, 4, 4, 4]),
    "grpo": ([-2.56, -2, -1, 0.8], [True, False, False, True], [6, 6, 6, 2]),
    "dr_grpo": ([-2.56, -2, -1, 0.8], [True, False, False, True], [10, 10, 10, 10]),
    "gspo": ([-2 * GEOMETRIC] * 3 + [0.8], [False] * 3 + [True], [6, 6, 6, 2]),
    "cispo": (
        [-2.56 * LOG_PI["a"], -2 * LOG_PI["b"], -1 * LOG_PI["c"], 0.5 * LOG_PI["d"]],
        [True, False, False, False],
        [4, 4, 4, 4],
    ),
    # probability moved by +.2, 0, -.4 under A > 0 and by -.45 under A < 0
}


def hand_batch() -> Batch:
    return Batch(OLD + RATIO.log(), OLD, ADVANTAGES, MASK)


def test_every_loss_has_a_hand_made_answer() -> None:
    assert set(BY_HAND) == set(LOSSES)


@pytest.mark.parametrize("name", LOSSES)
def test_by_hand(name: Any) -> None:
    values, held, divisors = BY_HAND[name]
    loss, clipped = policy_loss(hand_batch(), TOTALS, replace(SETTINGS, loss=name))
    expected = [value / divisor for value, divisor in zip(values, divisors, strict=True)]
    assert loss[MASK].tolist() == pytest.approx(expected)
    assert clipped[MASK].tolist() == held
    assert loss[~MASK].tolist() == [0, 0]
    assert clipped[~MASK].tolist() == [False, False]


def random_step(seed: int = 0) -> tuple[Tensor, Batch]:
    """Logits [6, 5, 9] as parameters, and the batch without its log-probs."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(6, 5, 9, dtype=torch.float64, generator=generator)
    noise = 0.4 * torch.randn(6, 5, 9, dtype=torch.float64, generator=generator)
    ids = torch.randint(9, (6, 5, 1), generator=generator)
    mask = torch.arange(5) < torch.tensor([[5], [1], [3], [4], [2], [5]])
    old = (logits + noise).log_softmax(-1).gather(-1, ids).squeeze(-1)
    logp = logits.log_softmax(-1).gather(-1, ids).squeeze(-1)
    advantages = torch.randn(6, dtype=torch.float64, generator=generator)
    return ids, Batch(logp, old, advantages, mask)


STEP_TOTALS = StepTotals(tokens=20, sequences=6, max_tokens=8)


def gspo_token_by_definition(logp: Tensor, batch: Batch) -> Tensor:
    """-min(s A, clip(s) A) / |o| / sequences, s = sg[(Π π/μ)^(1/|o|)] π / sg[π], token by token."""
    losses = []
    for row, length in enumerate(batch.mask.sum(-1).tolist()):
        mine, old = logp[row, :length], batch.old_logp[row, :length]
        whole = (mine - old).mean().exp().detach()
        for at in range(length):
            s = whole * mine[at].exp() / mine[at].exp().detach()
            advantage = batch.per_token()[row, at]
            held = torch.minimum(s * advantage, s.clamp(0.8, 1.28) * advantage)
            losses.append(-held / length / STEP_TOTALS.sequences)
    return torch.stack(losses)


@pytest.mark.parametrize("name", LOSSES)
def test_token_advantages_that_sum_to_zero_still_teach(name: Any) -> None:
    """What a token is paid must not be spread over its sequence."""
    logp = torch.full((1, 4), -1.0, dtype=torch.float64, requires_grad=True)
    advantages = torch.tensor([[1.0, 1.0, -1.0, -1.0]], dtype=torch.float64)
    batch = Batch(logp, logp.detach(), advantages, torch.ones(1, 4, dtype=torch.bool))
    totals = StepTotals(tokens=4, sequences=1, max_tokens=4)
    loss, _ = policy_loss(batch, totals, LossSettings(loss=name))
    (grad,) = torch.autograd.grad(loss.sum(), logp)
    torch.testing.assert_close(grad, -advantages / 4)


@pytest.mark.parametrize("per_token", [False, True])
@pytest.mark.parametrize("name", LOSSES)
def test_gradient_equals_finite_differences(name: Any, per_token: bool) -> None:
    _, batch = random_step()
    if per_token:
        spread = torch.linspace(0.5, 1.5, 5, dtype=torch.float64)
        batch = replace(batch, advantages=batch.advantages[:, None] * spread)
    settings = LossSettings(loss=name)

    def total(logp: Tensor) -> Tensor:
        return policy_loss(replace(batch, logp=logp), STEP_TOTALS, settings)[0].sum()

    logp = batch.logp.clone().requires_grad_()
    (grad,) = torch.autograd.grad(total(logp), logp)
    if name == "gspo" and per_token:  # the sequence's ratio is a constant, a token pays for itself
        slope = torch.autograd.grad(gspo_token_by_definition(logp, batch).sum(), logp)[0]
        torch.testing.assert_close(grad, slope)
        return
    if name == "cispo":  # its weight is a constant by definition: the gradient is -min(w, c) A
        weight = batch.log_ratio().exp().clamp(max=1.28)
        expected = torch.where(batch.mask, -weight * batch.per_token(), 0.0) / 20
        torch.testing.assert_close(grad, expected)
        return
    for index in batch.mask.nonzero().tolist():
        step = torch.zeros_like(batch.logp)
        step[tuple(index)] = 1e-6
        slope = (total(batch.logp + step) - total(batch.logp - step)) / 2e-6
        assert grad[tuple(index)].item() == pytest.approx(slope.item(), abs=1e-7)
    assert (grad[~batch.mask] == 0).all()


@pytest.mark.parametrize("name", LOSSES)
def test_gradient_is_the_same_however_a_step_is_cut(name: Any) -> None:
    ids, batch = random_step(1)
    weights = torch.randn(6, 5, 9, generator=torch.Generator().manual_seed(2)).double()
    extra = torch.randn(6, 5, generator=torch.Generator().manual_seed(3)).double()

    def gradient(cuts: list[list[int]]) -> Tensor:
        scale = torch.ones(9, dtype=torch.float64, requires_grad=True)
        for rows in cuts:
            log_pi = (weights[rows] * scale).log_softmax(-1)
            logp = log_pi.gather(-1, ids[rows]).squeeze(-1)
            mask = batch.mask[rows]
            part = Batch(logp, batch.old_logp[rows], batch.advantages[rows], mask)
            loss, _ = policy_loss(part, STEP_TOTALS, LossSettings(loss=name))
            entropy = -(log_pi.exp() * log_pi).sum(-1)
            loss = loss + 0.1 * entropy_loss(entropy, mask, STEP_TOTALS)
            loss = loss + value_loss(scale.sum() * logp, extra[rows], mask, STEP_TOTALS)
            loss.sum().backward()  # type: ignore[no-untyped-call]
        assert scale.grad is not None
        return scale.grad

    whole = gradient([[0, 1, 2, 3, 4, 5]])
    for cuts in ([[0], [1], [2], [3], [4], [5]], [[5, 1], [0, 4, 2], [3]]):
        assert (gradient(cuts) - whole).abs().max() < 1e-12


def test_without_an_update_in_between_every_ratio_loss_has_the_policy_gradient() -> None:
    """At w = 1 nothing is clipped: -A/N for the token mean, whatever the variant's trust region."""
    _, batch = random_step()
    for name in ("token", "cispo"):
        logp = batch.old_logp.clone().requires_grad_()
        fresh = replace(batch, logp=logp)
        loss, clipped = policy_loss(fresh, STEP_TOTALS, LossSettings(loss=name))
        (grad,) = torch.autograd.grad(loss.sum(), logp)
        torch.testing.assert_close(grad, torch.where(batch.mask, -batch.per_token(), 0.0) / 20)
        assert not clipped.any()


def test_value_and_entropy_terms_by_hand() -> None:
    values = torch.tensor([[1.0, 3.0, 0.0], [2.0, math.nan, math.nan]], dtype=torch.float64)
    returns = torch.ones(2, 3, dtype=torch.float64)
    assert value_loss(values, returns, MASK, TOTALS).sum() == (0 + 2 + 0.5 + 0.5) / 4
    assert entropy_loss(values, MASK, TOTALS).sum() == -6 / 4
    assert token_mean(values, MASK, TOTALS).sum() == 6 / 4


def test_statistics_merge_like_the_whole() -> None:
    batch = hand_batch()
    _, held = policy_loss(batch, TOTALS, SETTINGS)
    whole = ratio_stats(batch, held)
    assert (whole.clipped.item(), whole.tokens.item()) == (2, 4)
    assert whole.ratio_max.item() == pytest.approx(1.5)
    assert whole.gap.item() == pytest.approx(math.log(1.5) + 2 * math.log(2))
    parts: list[RatioStats] = []
    for row in (0, 1):
        rows = slice(row, row + 1)
        part = Batch(batch.logp[rows], OLD[rows], ADVANTAGES[rows], MASK[rows])
        parts.append(ratio_stats(part, held[rows]))
    assert vars(parts[0].merge(parts[1])) == vars(whole)


def test_an_empty_step_is_refused() -> None:
    with pytest.raises(ValueError, match="tokens=0"):
        StepTotals(tokens=0, sequences=1, max_tokens=1)


# --- a bandit with a known answer ---------------------------------------------------------------

ARMS = torch.tensor([0.1, 0.3, 0.9, 0.5, 0.0], dtype=torch.float64)


def play(name: Any, kl_coef: float, scale: Any, groups: int, rate: float) -> Tensor:
    """200 updates of a softmax over five arms; its final probabilities."""
    generator = torch.Generator().manual_seed(7)
    logits = torch.zeros(5, dtype=torch.float64, requires_grad=True)
    reference = torch.zeros(5, dtype=torch.float64).log_softmax(-1)
    advantage = AdvantageSettings(advantage_scale=scale)
    for _ in range(200):
        log_pi = logits.log_softmax(-1)
        arms = torch.multinomial(log_pi.exp(), groups * 8, replacement=True, generator=generator)
        rewards = ARMS[arms].view(groups, 8)
        kept = ~flat_groups(rewards)
        rewards, arms = rewards[kept], arms.view(groups, 8)[kept].flatten()
        if not len(arms):
            continue
        centred = group_advantages(rewards, torch.zeros(len(rewards)), advantage)
        std = batch_std(*moments(centred).tolist())
        advantages = scaled_advantages(centred, std, advantage).flatten()
        logp = log_pi[arms].unsqueeze(-1)
        batch = Batch(logp, logp.detach(), advantages, torch.ones_like(logp, dtype=torch.bool))
        totals = StepTotals(tokens=len(arms), sequences=len(arms), max_tokens=1)
        loss = policy_loss(batch, totals, LossSettings(loss=name))[0].sum()
        loss = loss + kl_coef * forward_kl(log_pi, reference)
        (grad,) = torch.autograd.grad(loss, logits)
        with torch.no_grad():
            logits -= rate * grad
    return logits.detach().softmax(-1)


@pytest.mark.parametrize("name", LOSSES)
def test_a_bandit_finds_its_best_arm(name: Any) -> None:
    final = play(name, kl_coef=0.0, scale="batch", groups=4, rate=0.3)
    assert final.argmax() == ARMS.argmax()
    assert final.max() > 0.95


def test_a_bandit_under_kl_reaches_the_known_optimum() -> None:
    """Maximising E[r] - β KL(π‖uniform) has the answer softmax(r / β)."""
    beta = 0.4
    # The group mean holds the sample itself: 8 samples see 7/8 of the reward's gradient.
    final = play("token", kl_coef=beta * 7 / 8, scale="none", groups=512, rate=1.0)
    torch.testing.assert_close(final, (ARMS / beta).softmax(-1), atol=0.02, rtol=0)
