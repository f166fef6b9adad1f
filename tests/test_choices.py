"""Learning from everything a token could have been: the gradient by enumeration, and its noise."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
from tokenizers import models
from torch import Tensor

from rookworld.grpo.expected_value import ChoiceValues, expected_value
from rookworld.grpo.kl import Draw
from rookworld.model.tokenizer import END, Tokenizer, chess_tokenizer
from rookworld.model.weights import load_model
from rookworld.rl.state import fits, with_credit
from rookworld.rl.trainer import train
from rookworld.runtime.errors import ConfigError
from rookworld.runtime.run_folder import read_json
from rookworld.tasks.notation import CASTLING, EN_PASSANT, EVALS, MOVES
from tiny_training import no_evaluation, tiny_rows, tiny_settings, weights_of

VOCABULARY, WIDTH = 12, 5


def made(seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(6, WIDTH, generator=generator, dtype=torch.float64)
    return hidden, torch.randn(VOCABULARY, WIDTH, generator=generator, dtype=torch.float64)


LETTERS = {letter: number for number, letter in enumerate(("e", "2", "4", "Ġ", END))}
PIECES = Tokenizer(tokenizers.Tokenizer(models.WordLevel(LETTERS, unk_token="e")))
CHOICES = ChoiceValues(
    rows=torch.tensor([1, 4]),
    ids=torch.tensor([[3, 7, 2], [5, 0, 0]]),
    values=torch.tensor([[1.0, -0.5, 0.25], [2.0, 0.0, 0.0]]),
)


def test_a_mean_worth_is_that_by_enumeration() -> None:
    hidden, head = made()
    found = expected_value(hidden, head, Draw(temperature=0.5), CHOICES)
    drawn = ((hidden @ head.T) / 0.5).softmax(-1)
    first = drawn[1, 3] - 0.5 * drawn[1, 7] + 0.25 * drawn[1, 2]
    assert torch.allclose(found, torch.stack([first, 2.0 * drawn[4, 5]]).float(), atol=1e-6)


def test_rows_keep_their_own_temperature_and_what_is_cut_off_is_never_drawn() -> None:
    hidden, head = made()
    temperature = torch.tensor([9.0, 0.5, 9.0, 9.0, 2.0, 9.0])
    found = expected_value(hidden, head, Draw(temperature=temperature), CHOICES)
    cold, hot = (
        expected_value(hidden, head, Draw(temperature=one), CHOICES)[place]
        for place, one in enumerate((0.5, 2.0))
    )
    assert torch.allclose(found, torch.stack([cold, hot]))
    best = int((hidden[4] @ head.T).argmax())
    only = expected_value(hidden, head, Draw(top_k=1), CHOICES)[1]
    assert float(only) == (2.0 if best == 5 else 0.0)
    nucleus = expected_value(hidden, head, Draw(top_p=0.01), CHOICES)[1]
    assert float(nucleus) == float(only)


def test_the_gradient_is_the_policy_gradient_without_its_noise() -> None:
    """Σ p(a) A(a) ∇log p(a), with what has no worth of its own at 0 and any baseline."""
    hidden, head = made(1)
    hidden.requires_grad_()
    expected_value(hidden, head, Draw(), CHOICES).sum().backward()  # type: ignore[no-untyped-call]
    by_hand = torch.zeros_like(hidden)
    for row, ids, worths in zip(CHOICES.rows.tolist(), CHOICES.ids, CHOICES.values, strict=True):
        worth = torch.zeros(VOCABULARY, dtype=torch.float64)
        worth[ids] += worths
        drawn = (hidden[row] @ head.T).softmax(-1).detach()
        for token in range(VOCABULARY):
            slope = head[token] - drawn @ head
            by_hand[row] += drawn[token] * (worth[token] - 0.3) * slope
    assert hidden.grad is not None
    assert torch.allclose(hidden.grad, by_hand, atol=1e-6)
    untouched = [row for row in range(6) if row not in CHOICES.rows.tolist()]
    assert not hidden.grad[untouched].any()


@pytest.mark.parametrize("clip", [0.3, 100.0])
def test_advantages_of_choices_are_clipped(clip: float) -> None:
    """Σ p(a) clip(A(a)) ∇log p(a), A being above the row's own mean."""
    hidden, head = made(2)
    hidden.requires_grad_()
    choices = replace(CHOICES, clip=clip)
    expected_value(hidden, head, Draw(), choices).sum().backward()  # type: ignore[no-untyped-call]
    by_hand = torch.zeros_like(hidden)
    for row, ids, worths in zip(CHOICES.rows.tolist(), CHOICES.ids, CHOICES.values, strict=True):
        worth = torch.zeros(VOCABULARY, dtype=torch.float64)
        worth[ids] += worths
        drawn = (hidden[row] @ head.T).softmax(-1).detach()
        paid = (worth - drawn @ worth).clamp(-clip, clip)
        slopes = head - drawn @ head
        by_hand[row] = (drawn * paid) @ slopes
    assert hidden.grad is not None
    assert torch.allclose(hidden.grad, by_hand, atol=1e-6)


@pytest.mark.parametrize(
    ("flags", "decided"),
    [
        ({}, "choices"),
        ({"loss": "cispo"}, "choices"),
        ({"loss": "gspo"}, "fields"),
        ({"kl_type": "k1_reward"}, "fields"),
        ({"gae": True}, "fields"),
    ],
)
def test_auto_learns_from_choices_where_everything_allows_it(
    flags: dict[str, Any], decided: str, tiny_folder: Path, tmp_path: Path
) -> None:
    settings = tiny_settings(tiny_folder, tmp_path, credit="auto", **flags)
    found = with_credit(settings, Tokenizer.load(tiny_folder))
    assert found.advantages.credit == decided
    assert found.but(credit="auto") == settings
    assert with_credit(settings, PIECES).advantages.credit == "fields"
    by_answer = settings.but(credit="answer")
    assert with_credit(by_answer, Tokenizer.load(tiny_folder)) == by_answer


def test_a_vocabulary_that_spells_moves_in_pieces_is_refused(
    tiny_folder: Path, tmp_path: Path
) -> None:
    model, settings = load_model(tiny_folder), tiny_settings(tiny_folder, tmp_path)
    fits(model.config, settings, PIECES)
    by_choice = tiny_settings(tiny_folder, tmp_path, credit="choices")
    fits(model.config, by_choice, Tokenizer.load(tiny_folder))
    without_promotions = chess_tokenizer(
        [move for move in MOVES if len(move) == 4], EVALS, CASTLING, EN_PASSANT
    )
    for tokenizer in (PIECES, without_promotions):
        with pytest.raises(ConfigError, match="spells moves in pieces"):
            fits(model.config, by_choice, tokenizer)
    # a value head decides for itself
    fits(model.config, tiny_settings(tiny_folder, tmp_path, credit="choices", gae=True), PIECES)


def test_auto_trains_as_what_it_stands_for_and_says_so(warm_folder: Path, tmp_path: Path) -> None:
    for credit in ("auto", "choices"):
        settings = tiny_settings(warm_folder, tmp_path / credit, credit=credit, steps=2)
        train(settings, tiny_rows(), no_evaluation)
        assert read_json(settings.out / "config.json")["credit"] == "choices"
    assert weights_of(tmp_path / "auto/final") == weights_of(tmp_path / "choices/final")
