"""Pre-training on documents one by one, and on a model cut down from a larger one."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import cast

import numpy as np
import pytest
import torch

from rookworld.model.gpt2 import GPT2, Block, GPT2Config
from rookworld.model.prune import cut_down, largest_units
from rookworld.model.weights import load_model
from rookworld.pretrain import trainer
from rookworld.pretrain.corpus import Apart, cut_by_tokens
from rookworld.pretrain.documents import Documents
from rookworld.pretrain.settings import PretrainSettings
from rookworld.pretrain.sources import pick_tokenizer
from rookworld.runtime.errors import ConfigError

CHESS = pick_tokenizer("chess")
END = CHESS.eos
TINY = PretrainSettings.of(
    documents=True, apart=True, flip=False, mirror=False, n_layer=2, n_embd=32, n_head=2,
    n_positions=16, steps=4, batch_size=3, log_every=1, eval_every=0, device="cpu",
    lr_warmup_steps=1,
)  # fmt: skip
TEXTS = [[5, 6, 7], [8, 9], [10, 11, 12, 13, 14], [15]]
ASKED = [1, 1, 2, 0]
"""Tokens of each text that are its prompt."""


@pytest.fixture
def line() -> Documents:
    tokens = np.array([t for text in TEXTS for t in (END, *text)], dtype=np.uint16)
    answers = [
        mark
        for text, asked in zip(TEXTS, ASKED, strict=True)
        for mark in (True, *(place >= asked for place in range(len(text))))
    ]
    return Documents(tokens, len(TEXTS), np.array(answers))


def apart(line: Documents, settings: PretrainSettings) -> Apart:
    device = torch.device("cpu")
    model = trainer.new_state(settings, CHESS, device).model
    return Apart(line, model, settings, device)


def test_each_document_begins_at_position_0_and_ends_with_the_end_token(line: Documents) -> None:
    tokens, weights = apart(line, TINY).padded(np.arange(4))
    for text, ids, counted in zip(TEXTS, tokens, weights, strict=True):
        assert ids.tolist() == text + [END] * (6 - len(text))
        # the first token is no target; the end token is the last
        expected = [1.0] * len(text) + [0.0] * (5 - len(text))
        assert counted.tolist() == expected
    settings = replace(TINY, prompt_weight=0.25)
    tokens, weights = apart(line, settings).padded(np.array([2, 1]))
    assert weights.tolist() == [[0.25, 1, 1, 1, 1], [1, 1, 0, 0, 0]]


def test_a_step_takes_each_document_once_however_it_is_cut(line: Documents) -> None:
    found = []
    for budget in (1, 8, 1_000):
        placed = apart(line, replace(TINY, batch_size=4, micro_tokens=budget))
        weights = []
        for loss, (weight, *_) in placed.losses(0):
            loss.backward()  # type: ignore[no-untyped-call]
            weights.append(float(weight))
        assert sum(weights) == sum(map(len, TEXTS))
        found.append([p.grad for p in placed.model.parameters() if p.grad is not None])
    for gradients in found[1:]:
        for one, other in zip(found[0], gradients, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


def test_passes_hold_no_more_tokens_than_they_may() -> None:
    lengths = np.array([2, 3, 3, 9, 4])
    order = np.argsort(lengths, kind="stable")
    cuts = [part.tolist() for part in cut_by_tokens(order, lengths, 9)]
    assert cuts == [[0, 1, 2], [4], [3]]
    assert [part.tolist() for part in cut_by_tokens(order, lengths, 1)] == [[0], [1], [2], [4], [3]]
    assert list(cut_by_tokens(order[:0], lengths, 9)) == []


def test_what_is_too_long_is_refused(line: Documents) -> None:
    with pytest.raises(ConfigError, match="6 tokens does not fit --n-positions 4"):
        apart(line, replace(TINY, n_positions=4))
    with pytest.raises(ConfigError, match="--apart without --documents"):
        PretrainSettings(apart=True)


# --- a model cut down -----------------------------------------------------------------------------


@pytest.fixture
def large() -> GPT2:
    shape = GPT2Config(vocab_size=50, n_positions=8, n_embd=16, n_layer=4, n_head=2)
    return GPT2(shape).init_weights(1)


def block(model: GPT2, number: int) -> Block:
    return cast(Block, model.h[number])


def test_cut_to_its_own_shape_a_model_is_itself(large: GPT2) -> None:
    same = cut_down(large, 4, 64)
    ids = torch.arange(8)[None]
    torch.testing.assert_close(same.logits(same(ids)), large.logits(large(ids)))


def test_first_layers_and_the_last_are_kept_with_their_largest_units(large: GPT2) -> None:
    with torch.no_grad():
        block(large, 3).mlp.c_fc.weight[5] *= 100
        block(large, 3).mlp.c_proj.weight[:, 9] *= 100
    small = cut_down(large, 3, 2)
    assert (small.config.n_layer, small.config.inner) == (3, 2)
    assert torch.equal(block(small, 2).attn.c_attn.weight, block(large, 3).attn.c_attn.weight)
    assert torch.equal(block(small, 1).ln_2.weight, block(large, 1).ln_2.weight)
    assert torch.equal(block(small, 2).mlp.c_fc.weight, block(large, 3).mlp.c_fc.weight[[5, 9]])
    assert torch.equal(
        block(small, 2).mlp.c_proj.weight, block(large, 3).mlp.c_proj.weight[:, [5, 9]]
    )
    assert largest_units(block(large, 3).mlp, 2).tolist() == [5, 9]
    assert torch.equal(small.lm_head.weight, large.wte.weight)
    with pytest.raises(ConfigError, match="cannot be cut down to 5 layers and 64"):
        cut_down(large, 5, None)


def test_a_run_begins_from_a_model_cut_down_and_is_resumed(tmp_path: Path, line: Documents) -> None:
    model = trainer.pretrain(replace(TINY, n_layer=3, steps=1, out=tmp_path / "large"), line, CHESS)
    small = replace(TINY, model=str(model), n_layer=2, n_inner=40, steps=2, out=tmp_path / "small")
    trainer.pretrain(small, line, CHESS)
    final = trainer.pretrain(replace(small, steps=4, resume=True), line, CHESS)
    whole = trainer.pretrain(replace(small, steps=4, out=tmp_path / "whole"), line, CHESS)
    shape = load_model(final).config
    assert (shape.n_layer, shape.inner) == (2, 40)
    assert load_model(whole).config == shape
    with pytest.raises(ConfigError, match="cannot be cut down"):
        trainer.pretrain(replace(small, n_inner=400, out=tmp_path / "wide"), line, CHESS)
