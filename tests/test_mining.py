"""Rows that a model gets wrong, picked out of many for it to learn from."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from rookworld.cli.dispatch import main
from rookworld.data.sources import load_rows
from rookworld.model.gpt2 import GPT2, GPT2Config
from rookworld.model.tokenizer import Tokenizer
from rookworld.model.weights import resolve_folder
from rookworld.pretrain import dataset
from rookworld.pretrain.dataset import TokenizedRows, load_packed, save_packed
from rookworld.pretrain.hard_rows import environment_rows, hardest, worst_losses
from rookworld.runtime.errors import DataError
from rookworld.tasks.task import EnvironmentRow, PolicyRow


@pytest.fixture(scope="module")
def packed() -> TokenizedRows:
    rows = [row for row in load_rows("embedded:train") if isinstance(row, EnvironmentRow)][:9]
    return dataset.pack_environment(rows, Tokenizer.load(resolve_folder("nano")))


@pytest.fixture(scope="module")
def untrained(packed: TokenizedRows) -> GPT2:
    shape = GPT2Config(vocab_size=2496, n_positions=192, n_embd=16, n_layer=1, n_head=2)
    return GPT2(shape).init_weights(0)


def test_a_row_is_as_hard_as_its_least_likely_answer_token(
    untrained: GPT2, packed: TokenizedRows
) -> None:
    found = worst_losses(untrained, packed, at_once=4)
    for row, (length, prompt) in enumerate(zip(packed.lengths, packed.prompts, strict=True)):
        ids = torch.from_numpy(packed.tokens[row, :length].astype(np.int64))
        with torch.no_grad():
            logp = untrained.logits(untrained(ids[None]))[0].log_softmax(-1)
        losses = -logp[torch.arange(length - 1), ids[1:]][prompt - 1 :]
        assert found[row] == pytest.approx(float(losses.max()), rel=1e-4)
        assert found[row] > 1.01 * float(losses.mean())


def test_the_hardest_stay_in_their_order(packed: TokenizedRows) -> None:
    losses = np.array([0.0, 3.0, 0.2, 9.0, 0.05, 0.1, 2.0, 0.0, 0.0], np.float32)
    kept = hardest(packed, losses, least=0.1, most=3)
    assert (kept.tokens == packed.tokens[[1, 3, 6], : kept.tokens.shape[1]]).all()
    assert len(hardest(packed, losses, least=0.09, most=99)) == 5
    assert len(hardest(packed, losses, least=10.0, most=3)) == 0


def test_rows_the_model_cannot_read_are_refused(untrained: GPT2, packed: TokenizedRows) -> None:
    few = GPT2(GPT2Config(vocab_size=99, n_positions=192, n_embd=16, n_layer=1, n_head=2))
    with pytest.raises(DataError, match="packed with another tokenizer"):
        worst_losses(few, packed)
    short = GPT2(GPT2Config(vocab_size=2496, n_positions=9, n_embd=16, n_layer=1, n_head=2))
    with pytest.raises(DataError, match="the model 9 positions"):
        worst_losses(short, packed)
    with pytest.raises(DataError, match="not finite"):
        hardest(packed, np.full(9, np.nan, np.float32), least=0.1, most=9)


def test_analyses_are_passed_over(packed: TokenizedRows) -> None:
    rows = [row for row in load_rows("embedded:train") if isinstance(row, PolicyRow)][:3]
    analyses = dataset.pack_policy(rows, Tokenizer.load(resolve_folder("nano")))
    assert len(environment_rows(analyses)) == 0
    assert len(environment_rows(dataset.join([analyses, packed]))) == len(packed)


def test_the_command_writes_what_pretraining_reads(
    tmp_path: Path, packed: TokenizedRows, capsys: pytest.CaptureFixture[str]
) -> None:
    given, out = tmp_path / "rows.npz", tmp_path / "hard.npz"
    save_packed(packed, given)
    flags = ["--least", "0", "--most", "4", "--out", str(out), "--device", "cpu"]
    assert main(["data", "mine", "nano", str(given), str(given), *flags]) == 0
    assert len(load_packed(out)) == 4
    assert "4 of 18 rows" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["nano"], "a model and rows"),
        (["nano", "embedded:validation", "--most", "0"], "--most"),
        (["nano", "embedded:validation", "--least", "-1"], "--least"),
        (["nano", "embedded:validation", "--out", "hard"], "--out"),
        (["no-such-model", "--sources", "embedded:validation"], "no-such-model"),
        (["nano", "embedded:mate"], "no A rows"),
    ],
)
def test_what_cannot_be_mined_is_refused(
    flags: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["data", "mine", *flags]) == 2
    assert words in capsys.readouterr().err


def test_nothing_hard_enough_is_an_error(
    tmp_path: Path, packed: TokenizedRows, capsys: pytest.CaptureFixture[str]
) -> None:
    save_packed(packed, tmp_path / "rows.npz")
    flags = ["--least", "99", "--out", str(tmp_path / "hard.npz")]
    assert main(["data", "mine", "nano", str(tmp_path / "rows.npz"), *flags]) == 2
    assert "no row" in capsys.readouterr().err
