"""A training small enough for a test: a model of two layers, rows of one game, settings."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import chess
import pytest
import torch
import torch.nn.functional as F

from rookworld.data.rows import row_record
from rookworld.evaluation.evaluate import Evaluation
from rookworld.evaluation.statistics import Estimate
from rookworld.model.gpt2 import GPT2, GPT2Config
from rookworld.model.tokenizer import Tokenizer, chess_tokenizer
from rookworld.model.weights import load_model, save_model
from rookworld.rl.settings import TrainSettings
from rookworld.runtime.run_folder import read_lines
from rookworld.tasks import scorer
from rookworld.tasks.environment import transition
from rookworld.tasks.notation import CASTLING, EN_PASSANT, EVALS, MOVES
from rookworld.tasks.policy import POLICY
from rookworld.tasks.reward import RewardRules
from rookworld.tasks.task import EnvironmentRow, Judge, PolicyRow, Verdict

GAME = (
    "e2e4 e7e5 g1f3 b8c6 f1c4 g8f6 d2d3 f8c5 c2c3 d7d6 "
    "e1g1 a7a6 a2a4 c5a7 h2h3 e8g8 f1e1 h7h6 b1d2 c8e6"
)
Rows = list[PolicyRow | EnvironmentRow]


def tiny_rows(policy: int = 8, environment: int = 4) -> Rows:
    """Positions of one game with made-up analyses, and its moves as transitions."""
    board = chess.Board()
    rows: Rows = []
    transitions: Rows = []
    played = tuple(GAME.split())
    for ply, move in enumerate(played):
        legal = sorted(move.uci() for move in board.legal_moves)
        best = [move, *[other for other in legal if other != move][:4]]
        rows.append(PolicyRow(board.fen(), tuple(best), tuple(30 - 15 * i for i in range(5))))
        transitions.append(
            transition(board.fen(), move, tuple(GAME.split()[max(0, ply - 9) : ply + 1]))
        )
        board.push_uci(move)
    return [*rows[:policy], *transitions[:environment]]


def tiny_tokenizer() -> Tokenizer:
    return chess_tokenizer(MOVES, EVALS, CASTLING, EN_PASSANT)


def save_tiny(folder: Path, *, width: int = 32, seed: int = 0) -> GPT2:
    """A random model of two layers with the chess tokenizer."""
    tokenizer = tiny_tokenizer()
    shape = GPT2Config(
        vocab_size=tokenizer.vocab_size, n_positions=192, n_embd=width, n_layer=2, n_head=2
    )
    model = GPT2(shape).init_weights(seed)
    save_model(model, folder, tokenizer=tokenizer)
    return model


def save_warm(folder: Path, source: Path, steps: int = 30) -> None:
    """The tiny model, taught the analyses of `tiny_rows` well enough to know their format."""
    tokenizer, model = Tokenizer.load(source), load_model(source)
    rows = [row for row in tiny_rows() if isinstance(row, PolicyRow)]
    texts = [POLICY.prompt(row, "compact") + POLICY.answer(row, "compact") for row in rows]
    ids = torch.tensor([[*tokenizer.encode(text), tokenizer.eos] for text in texts])
    answers = len(tokenizer.encode(POLICY.prompt(rows[0], "compact")))
    with torch.no_grad():
        model.wte.weight.mul_(10)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for _ in range(steps):
        scores = model.logits(model(ids[:, :-1])[:, answers - 1 :])
        F.cross_entropy(scores.flatten(0, 1), ids[:, answers:].flatten()).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
    save_model(model, folder, tokenizer=tokenizer)


def tiny_settings(model: Path, out: Path, **changes: Any) -> TrainSettings:
    """Steps of a few hundredths of a second."""
    small: dict[str, Any] = {
        "model": str(model),
        "out": out,
        "steps": 4,
        "batch_size": 2,
        "k_samples": 3,
        "mix_env_ratio": 0.0,
        "lr": 1e-3,
        "lr_warmup_steps": 0,
        "eval_every": 2,
        "save_every": 2,
        "max_new_tokens": 16,
        "device": "cpu",
    }
    return TrainSettings.of(**(small | changes))


def no_evaluation(model: GPT2, tokenizer: Tokenizer) -> Evaluation:
    return Evaluation()


def evaluation(reward: float, valid: float = 1.0) -> Evaluation:
    """An evaluation that says just this."""
    values = {"reward/greedy": reward, "P/format": valid}
    return Evaluation({n: Estimate(value=v, n=1, low=v, high=v) for n, v in values.items()})


def weight_evaluation(model: GPT2, tokenizer: Tokenizer) -> Evaluation:
    """Quick, and another number for other weights."""
    return evaluation(float(model.wte.weight.detach().abs().mean()))


def judge_by(monkeypatch: pytest.MonkeyPatch, reward: Any) -> None:
    """Let `reward(text)` be the reward of every answer."""

    def verdict(
        row: PolicyRow | EnvironmentRow,
        text: str,
        finished: bool,
        rules: RewardRules,
        judge: Judge | None,
        progress: float,
    ) -> Verdict:
        return Verdict(reward(text), {"format": 1.0, "legal": 0.0}, "")

    monkeypatch.setattr(scorer, "judge_answer", verdict)


def share_of_low_moves(text: str) -> float:
    """Share of the answer's words that begin with a…d: half of them at first, all in the end."""
    words = text.split() or ["-"]
    return sum(word[0] in "abcd" for word in words) / len(words)


def metrics_of(folder: Path) -> list[dict[str, Any]]:
    """metrics.jsonl without what depends on the machine."""
    return [
        {name: value for name, value in line.items() if not name.startswith(("time/", "mem/"))}
        for line in read_lines(folder / "metrics.jsonl")
    ]


def weights_of(folder: Path) -> bytes:
    return (folder / "model.safetensors").read_bytes()


def write_jsonl(path: Path, rows: Sequence[PolicyRow | EnvironmentRow]) -> Path:
    path.write_text("".join(json.dumps(row_record(row)) + "\n" for row in rows))
    return path


@contextmanager
def one_thread() -> Iterator[None]:
    """Sums of floats depend on the number of threads, and the machine is shared."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def relative(found: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> float:
    """|found - expected| / |expected| over all tensors."""
    off = math.sqrt(
        sum(float((a - b).square().sum()) for a, b in zip(found, expected, strict=True))
    )
    return off / math.sqrt(sum(float(b.square().sum()) for b in expected))
