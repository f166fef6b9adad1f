"""A model in other people's programs: the exported folder and its card."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import ModelCard

from rookworld.cli.dispatch import main
from rookworld.model.tokenizer import Tokenizer
from rookworld.model.weights import load_model
from rookworld.report.model_card import card_name, model_card
from rookworld.runtime.atomic_files import write_json
from rookworld.runtime.run_folder import Run


def test_export_writes_the_same_model_and_a_card(
    tiny_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "mine"
    assert main(["export", str(tiny_folder), "--out", str(out), "--dtype", "float32"]) == 0
    assert capsys.readouterr().out.strip() == str(out)
    for ours, theirs in zip(
        load_model(tiny_folder).parameters(), load_model(out).parameters(), strict=True
    ):
        assert torch.equal(ours, theirs)
    assert Tokenizer.load(out).style == "compact"
    card = (out / "README.md").read_text()
    assert card.startswith("---\nlicense: gpl-3.0")
    assert "# mine" in card and "M:" in card


def test_a_card_tells_what_the_run_knows(tmp_path: Path) -> None:
    run = Run(tmp_path / "run")
    model = run.folder / "final"
    model.mkdir()
    told = {"lr": 2e-5, "steps": 7, "model": "jrahn/RookWorld-LM-124M", "held_out": "rows.jsonl"}
    told |= {"data": ["jrahn/rookworld_7m:train", "own.jsonl"]}
    write_json(run.folder / "config.json", told)
    origin = {"version": "9.9", "commit": "abc", "machine": "a laptop"}
    write_json(run.folder / "origin.json", origin)
    for step, value in ((0, 0.25), (7, 0.5)):
        estimate = {"value": value, "n": 40, "low": value - 0.1, "high": value + 0.1}
        run.append("eval.jsonl", {"step": step, "P/best": estimate})
    card = model_card(model, "m", 8_300_000, "compact")
    assert "8.3M parameters" in card
    assert "| `lr` | 2e-05 |" in card and "commit abc" in card
    best = "| Best moves (`P/best`) | 0.250 [0.150, 0.350] | 0.500 [0.400, 0.600] | 40 |"
    assert best in card and 'from_pretrained("m")' in card
    read: Any = ModelCard(card).data
    assert read.base_model == "jrahn/RookWorld-LM-124M"
    assert read.datasets == ["jrahn/rookworld_7m"]
    (found,) = read.eval_results
    assert (found.metric_type, found.metric_value) == ("P/best", 0.5)


def test_a_card_goes_back_to_the_first_model_and_is_called_as_its_run(tmp_path: Path) -> None:
    """A run from a run's model was begun with that run's model."""
    for name, model in (("one", "nano"), ("two", str(tmp_path / "one" / "final"))):
        run = Run(tmp_path / name)
        (run.folder / "final").mkdir()
        write_json(run.folder / "config.json", {"model": model, "data": ["embedded:train"]})
        write_json(run.folder / "origin.json", {"version": "9", "commit": None, "machine": "m"})
    card = model_card(tmp_path / "two" / "final", "m", 8_300_000, "compact")
    assert "Trained from `nano`, the small model that plays" in card
    read: Any = ModelCard(card).data
    assert read.base_model is None  # no model of the hub
    default = Path("export")
    assert card_name(tmp_path / "two" / "final", default, default) == "rookworld-two"
    assert card_name(tmp_path / "two" / "final", Path("x/mine"), default) == "mine"


def test_export_without_a_model_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["export"]) == 2
    assert "name one model folder" in capsys.readouterr().err
