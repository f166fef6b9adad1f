"""The sampling distribution: by hand, row by row, and safe at its edges."""

from __future__ import annotations

import math

import pytest
import torch

from rookworld.model.sampling.token_choice import entropy_of, truncated_logits

PROBABILITIES = torch.tensor([0.1, 0.4, 0.2, 0.3])
LOGITS = PROBABILITIES.log()


def kept(*settings: object, **more: object) -> list[float]:
    out = truncated_logits(LOGITS, *settings, **more).softmax(-1)  # type: ignore[arg-type]
    return [round(p, 4) for p in out.tolist()]


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p", "expected"),
    [
        (1.0, 0, 1.0, [0.1, 0.4, 0.2, 0.3]),
        (0.0, 0, 1.0, [0, 1, 0, 0]),
        (1.0, 2, 1.0, [0, 0.5714, 0, 0.4286]),
        (1.0, 9, 1.0, [0.1, 0.4, 0.2, 0.3]),
        (1.0, 0, 0.6, [0, 0.5714, 0, 0.4286]),
        (1.0, 0, 0.69, [0, 0.5714, 0, 0.4286]),
        (1.0, 0, 0.75, [0, 0.4444, 0.2222, 0.3333]),
        (1.0, 0, 0.0, [0, 1, 0, 0]),
        # top-k first: of 4/7 and 3/7, the first alone reaches 0.5
        (1.0, 2, 0.5, [0, 1, 0, 0]),
        (0.5, 0, 1.0, [0.0333, 0.5333, 0.1333, 0.3]),
    ],
)
def test_by_hand(temperature: float, top_k: int, top_p: float, expected: list[float]) -> None:
    assert kept(temperature, top_k, top_p) == expected


def test_one_setting_per_row_equals_one_row_at_a_time() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(5, 3, 11, generator=generator)
    temperature = torch.tensor([1.0, 0.0, 0.7, 1.3, 1.0])
    top_k = torch.tensor([0, 0, 4, 0, 3])
    top_p = torch.tensor([1.0, 1.0, 1.0, 0.8, 0.5])
    together = truncated_logits(logits, temperature, top_k, top_p)
    for row in range(5):
        alone = truncated_logits(
            logits[row], float(temperature[row]), int(top_k[row]), float(top_p[row])
        )
        torch.testing.assert_close(together[row], alone)


def test_equal_scores_rank_by_id_and_never_more_than_k_stay() -> None:
    out = truncated_logits(torch.zeros(2, 6), top_k=2)
    assert out.isfinite().tolist() == [[True, True, False, False, False, False]] * 2
    assert truncated_logits(torch.zeros(6), 0.0).isfinite().sum() == 1


def test_the_nucleus_is_the_smallest_set_that_reaches_p() -> None:
    assert truncated_logits(torch.zeros(4), top_p=0.5).isfinite().sum() == 2
    assert truncated_logits(torch.zeros(4), top_p=0.51).isfinite().sum() == 3


def test_a_tail_of_tiny_probabilities_survives_top_p_1() -> None:
    logits = torch.cat([torch.tensor([50.0]), torch.zeros(99)])
    assert truncated_logits(logits, top_p=torch.tensor(1.0)).isfinite().all()


def test_a_kept_id_has_finite_log_prob_and_gradient() -> None:
    logits = LOGITS.clone().requires_grad_()
    out = truncated_logits(logits, 1.0, 0, 0.6, keep=torch.tensor(0)).log_softmax(-1)
    assert [round(p, 4) for p in out.exp().tolist()] == [0.125, 0.5, 0, 0.375]
    (out[0] + entropy_of(out)).backward()  # type: ignore[no-untyped-call]
    assert logits.grad is not None
    assert logits.grad.isfinite().all()
    assert logits.grad[2] == 0


def test_entropy_counts_what_can_be_drawn() -> None:
    four, one = truncated_logits(torch.zeros(8), top_k=4), truncated_logits(torch.zeros(8), 0.0)
    assert entropy_of(four.log_softmax(-1)).item() == pytest.approx(math.log(4))
    assert entropy_of(one.log_softmax(-1)).item() == 0
