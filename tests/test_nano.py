"""The embedded model: standard files that `transformers` loads, and answers worth improving."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Iterator
from importlib import import_module
from pathlib import Path

import chess
import pytest
import torch

from rookworld.cli.dispatch import main
from rookworld.data.generate.playouts import recent
from rookworld.data.sources import load_rows
from rookworld.evaluation.evaluate import task_scores
from rookworld.evaluation.generator import load_answerer
from rookworld.model.sampling.sampler import Sampling
from rookworld.model.tokenizer import Tokenizer
from rookworld.model.weights import load_model, resolve_folder
from rookworld.rl.presets import TRAIN_PRESETS
from rookworld.rollout.prompts import prompt_text
from rookworld.tasks.environment import transition
from rookworld.tasks.reward import RewardRules
from rookworld.tasks.task import EnvironmentRow, PolicyRow
from tiny import sample

MOST_BYTES = 16 * 2**20


@pytest.fixture(scope="module")
def nano() -> Path:
    return resolve_folder("nano")


def rows(policy: int, environment: int) -> list[PolicyRow | EnvironmentRow]:
    found = load_rows("embedded:test")
    analyses = [row for row in found if isinstance(row, PolicyRow)][:policy]
    moves = [row for row in found if isinstance(row, EnvironmentRow)][:environment]
    return [*analyses, *moves]


def test_the_folder_is_small_and_standard(nano: Path) -> None:
    assert (nano / "model.safetensors").stat().st_size <= MOST_BYTES
    config = json.loads((nano / "config.json").read_text())
    assert config["model_type"] == "gpt2" and config["dtype"] == "bfloat16"
    card = (nano / "README.md").read_text()
    for heading in ("## Evaluation", "## Data", "## Recipe", "## Limits", "## Licence"):
        assert heading in card


def test_transformers_gives_the_same_greedy_answers(nano: Path) -> None:
    transformers = import_module("transformers")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(nano, dtype=torch.float32).eval()
    cutter = transformers.PreTrainedTokenizerFast.from_pretrained(nano)
    model, tokenizer = load_model(str(nano)), Tokenizer.load(nano)
    prompts = [tokenizer.encode(prompt_text(row, tokenizer)) for row in rows(85, 15)]
    assert len(prompts) == 100
    greedy = Sampling(temperature=0.0, max_new_tokens=90)
    ours = sample(model, prompts, k=1, settings=greedy, eos=tokenizer.eos, seed=0)
    for row, prompt, ids, length in zip(
        rows(85, 15), prompts, ours.tokens.tolist(), ours.lengths.tolist(), strict=True
    ):
        assert cutter(prompt_text(row, tokenizer), add_special_tokens=False)["input_ids"] == prompt
        said = ids[:length]
        with torch.no_grad():
            # token by token `generate` says the same, and takes minutes
            scores = theirs(torch.tensor([prompt + said])).logits[0, len(prompt) - 1 : -1]
        assert scores.argmax(-1).tolist() == said


def test_its_answers_are_worth_improving(nano: Path) -> None:
    """Far below what the card says, far above what a broken file would give."""
    answerer = load_answerer(str(nano))
    asked = rows(200, 100)
    scored = task_scores(answerer, asked, RewardRules())
    analyses, moves = scored["P"], scored["A"]

    def mean(name: str, scored: list[dict[str, float | None]]) -> float:
        values = [one[name] for one in scored if one[name] is not None]
        return sum(value for value in values if value is not None) / len(values)

    assert mean("format", analyses) > 0.98
    assert mean("legal", analyses) > 0.97
    assert mean("best", analyses) > 0.25
    assert mean("top5", analyses) > 0.45
    assert mean("exact", moves) > 0.9


def after_two_plies(fens: Iterable[str], rng: random.Random) -> Iterator[EnvironmentRow]:
    """A move in the middle of a game of which the prompt shows two plies, that move included."""
    for fen in fens:
        board = chess.Board(fen)
        board.push(rng.choice(list(board.legal_moves)))
        if not board.is_game_over():
            move = rng.choice(list(board.legal_moves)).uci()
            yield transition(board.fen(), move, recent(board))


def test_it_knows_games_that_begin_in_the_middle(nano: Path) -> None:
    """Trained on histories of one ply and of ten it once got every sixth of these wrong."""
    fens = [row.fen for row in rows(100, 0)]
    asked = list(after_two_plies(fens, random.Random(0)))
    scored = task_scores(load_answerer(str(nano)), asked, RewardRules())["A"]
    assert len(asked) > 90
    assert sum(one["exact"] == 1 for one in scored) >= 0.97 * len(asked)


FEW = [
    "--steps",
    "1",
    "--batch-size",
    "2",
    "--k-samples",
    "2",
    "--device",
    "cpu",
    "--eval-policy-rows",
    "4",
    "--eval-environment-rows",
    "2",
    "--eval-mates",
    "0",
    "--distill-prompts",
    "4",
]


@pytest.mark.slow
@pytest.mark.parametrize("preset", TRAIN_PRESETS)
def test_every_preset_trains_it(preset: str, tmp_path: Path) -> None:
    assert main(["train", "--preset", preset, *FEW, "--out", str(tmp_path / "run")]) == 0


def test_without_a_gpu_the_one_to_be_repaired_is_trained(tmp_path: Path) -> None:
    expected = "nano" if torch.cuda.is_available() else "apprentice"
    assert main(["train", *FEW, "--out", str(tmp_path / "run")]) == 0
    assert json.loads((tmp_path / "run" / "config.json").read_text())["model"] == expected
    assert load_model(str(tmp_path / "run" / "final")).config.n_embd == 320
