"""Rows that a model gets wrong, picked out of many for it to learn from."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from rookworld import packing
from rookworld.cli import main
from rookworld.data.sources import load_rows
from rookworld.mining import hardest, worst_losses
from rookworld.model.gpt2 import GPT2
from rookworld.model.tokenizer import Tokenizer
from rookworld.model.weights import load_model, resolve_folder
from rookworld.packing import Packed, load_packed, save_packed
from rookworld.tasks.task import EnvironmentRow


@pytest.fixture(scope="module")
def nano() -> GPT2:
    return load_model(resolve_folder("nano"))


@pytest.fixture(scope="module")
def packed() -> Packed:
    rows = [row for row in load_rows("embedded:train") if isinstance(row, EnvironmentRow)][:9]
    return packing.pack_environment(rows, Tokenizer.load(resolve_folder("nano")))


def test_a_row_is_as_hard_as_its_least_likely_answer_token(nano: GPT2, packed: Packed) -> None:
    found = worst_losses(nano, packed, at_once=4)
    for row in (0, 8):
        length, prompt = int(packed.lengths[row]), int(packed.prompts[row])
        ids = torch.from_numpy(packed.tokens[row, :length].astype(np.int64))
        with torch.no_grad():
            logp = nano.logits(nano(ids[None]))[0].log_softmax(-1)
        losses = -logp[torch.arange(length - 1), ids[1:]]
        assert found[row] == pytest.approx(float(losses[prompt - 1 :].max()), abs=1e-4)


def test_the_hardest_stay_in_their_order(packed: Packed) -> None:
    losses = np.array([0.0, 3.0, 0.2, 9.0, 0.05, 0.1, 2.0, 0.0, 0.0])
    kept = hardest(packed, losses, least=0.1, most=3)
    assert (kept.tokens == packed.tokens[[1, 3, 6], : kept.tokens.shape[1]]).all()
    assert len(hardest(packed, losses, least=0.1, most=99)) == 5
    assert len(hardest(packed, losses, least=10.0, most=3)) == 0


def test_the_command_writes_what_pretraining_reads(
    tmp_path: Path, packed: Packed, capsys: pytest.CaptureFixture[str]
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
    ],
)
def test_what_cannot_be_mined_is_refused(
    flags: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["data", "mine", *flags]) == 2
    assert words in capsys.readouterr().err


def test_nothing_hard_enough_is_an_error(
    tmp_path: Path, packed: Packed, capsys: pytest.CaptureFixture[str]
) -> None:
    save_packed(packed, tmp_path / "rows.npz")
    flags = ["--least", "99", "--out", str(tmp_path / "hard.npz")]
    assert main(["data", "mine", "nano", str(tmp_path / "rows.npz"), *flags]) == 2
    assert "no row" in capsys.readouterr().err
