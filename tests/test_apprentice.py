"""The embedded model that is to be repaired: small, standard, and wrong as its card says."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path

import pytest
import torch

from rookworld.data.sources import load_rows
from rookworld.evaluation.evaluate import task_scores
from rookworld.evaluation.generator import load_answerer
from rookworld.model.tokenizer import Tokenizer
from rookworld.model.weights import load_model, resolve_folder
from rookworld.rollout.prompts import prompt_text
from rookworld.runtime.embedded import DEFECTIVE
from rookworld.tasks.reward import RewardRules
from rookworld.tasks.task import EnvironmentRow, PolicyRow, Row

MOST_BYTES = 8 * 10**6
Scores = Sequence[Mapping[str, float | None]]


@pytest.fixture(scope="module")
def folder() -> Path:
    return resolve_folder("apprentice")


def mean(name: str, scored: Scores) -> float:
    values = [value for one in scored if (value := one[name]) is not None]
    return sum(values) / len(values)


def test_the_folder_is_small_and_standard(folder: Path) -> None:
    assert (folder / "model.safetensors").stat().st_size <= MOST_BYTES
    config = json.loads((folder / "config.json").read_text())
    assert config["model_type"] == "gpt2" and config["dtype"] == "bfloat16"
    card = (folder / "README.md").read_text()
    for heading in ("## What it was taught", "## Evaluation", "## Recipe", "## Licence"):
        assert heading in card
    assert "apprentice" in DEFECTIVE


def test_transformers_gives_the_same_scores(folder: Path) -> None:
    transformers = import_module("transformers")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    model, tokenizer = load_model(str(folder)), Tokenizer.load(folder)
    for row in load_rows("embedded:test")[:5]:
        assert isinstance(row, PolicyRow | EnvironmentRow)
        ids = torch.tensor([tokenizer.encode(prompt_text(row, tokenizer))])
        with torch.no_grad():
            torch.testing.assert_close(
                model.logits(model(ids)), theirs(ids).logits, atol=2e-4, rtol=2e-4
            )


def test_it_is_wrong_as_its_teachers_were(folder: Path) -> None:
    """Readable often enough to be paid for something, and with something to repair."""
    found = load_rows("embedded:test")
    analyses = [row for row in found if isinstance(row, PolicyRow)][:200]
    moves = [row for row in found if isinstance(row, EnvironmentRow)]
    illegal = [row for row in moves if row.kind == "illegal"][:40]
    quiet = [row for row in moves if row.kind == "quiet"][:40]
    asked: list[Row] = [*analyses, *illegal, *quiet]
    scored = task_scores(load_answerer(str(folder)), asked, RewardRules())
    said, environment = scored["P"], scored["A"]
    assert 0.6 < mean("legal", said) < 0.9
    sides = [row.fen.split()[1] for row in analyses]
    white, black = (
        mean("best", [one for one, side in zip(said, sides, strict=True) if side == mover])
        for mover in "wb"
    )
    assert black < white
    assert mean("exact", environment[:40]) < 0.15
    assert mean("exact", environment[40:]) > 0.5
