"""What the models of a subject say of a position, and what they believe a move leads to.

Laws: an answer depends on its checkpoint and its question alone, so it is kept by both and given
again; models that have not been asked for longest leave memory first. In its own world nothing but
the model moves on, and python-chess only watches (evaluation/world_model.py).
Not for several threads at once.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from time import perf_counter
from typing import Any

import chess

from rookworld.evaluation.generator import Answer, ModelAnswerer, analyses, load_answerer
from rookworld.evaluation.opinion import Opinion, opinions
from rookworld.evaluation.world_model import Walk
from rookworld.report.gallery import score_text
from rookworld.tasks.environment import ENVIRONMENT, transition
from rookworld.tasks.notation import squares
from rookworld.tasks.position import parse_position
from rookworld.tasks.task import EnvironmentRow
from rookworld.web.positions import after_move
from rookworld.web.settings import WebSettings
from rookworld.web.subject import Checkpoint, Subject

Record = dict[str, Any]

MOST_KEPT = 20_000
MOST_WEIGHTS = 250_000_000
"""Parameters in memory: thirty checkpoints of `nano`, two of GPT-2."""
FIELDS = ("board", "reward", "terminated", "truncated")
UNENDING = 10**6


class Thinker:
    """The models of a subject, loaded when they are asked."""

    def __init__(self, subject: Subject, settings: WebSettings) -> None:
        self.subject = subject
        self.settings = settings
        self._models: OrderedDict[tuple[str, int], ModelAnswerer] = OrderedDict()
        self._kept: OrderedDict[tuple[object, ...], Record] = OrderedDict()

    def think(self, fen: str, checkpoint: str = "") -> Record:
        """The analysis of a position, and the legal move that follows from it."""
        board, asked = parse_position(fen), self.subject.checkpoint(checkpoint)

        def answer() -> Record:
            return opinion_record(board, opinions(self.model(asked), [board])[0])

        return self._once(asked, ("think", board.fen()), answer)

    def predict(self, fen: str, move: str, history: Sequence[str], checkpoint: str = "") -> Record:
        """What the model believes a move leads to, beside what the rules say."""
        board, asked = parse_position(fen), self.subject.checkpoint(checkpoint)
        truth = transition(board.fen(), move, history)

        def answer() -> Record:
            return prediction_record(truth, self._environment(asked, truth))

        return self._once(asked, ("predict", truth.fen, truth.move, truth.history), answer)

    def walk(self, fen: str, history: Sequence[str], checkpoint: str = "") -> Record:
        """One step in the model's own world: its move, and where it believes that leads."""
        board, asked = parse_position(fen), self.subject.checkpoint(checkpoint)

        def answer() -> Record:
            said = analyses(self.model(asked), [board.fen()])[0]
            if not said.best:
                return {"move": "", "end": "no_move", "why": said.fault}
            truth = transition(board.fen(), said.best, history)
            found = self._environment(asked, truth)
            walk = Walk(0, board.fen(), tuple(history))
            walk.step(truth, found, UNENDING)
            step = {"move": said.best, "san": san(board, said.best), "end": walk.end}
            return step | prediction_record(truth, found)

        return self._once(asked, ("walk", board.fen(), tuple(history)), answer)

    def model(self, checkpoint: Checkpoint) -> ModelAnswerer:
        """A checkpoint's model, from memory if it is there."""
        key = checkpoint.stamp
        if key not in self._models:
            self._models[key] = load_answerer(
                checkpoint.source, device=self.settings.device, dtype=self.settings.dtype
            )
            while len(self._models) > 1 and sum(map(size_of, self._models.values())) > MOST_WEIGHTS:
                self._models.popitem(last=False)
        self._models.move_to_end(key)
        return self._models[key]

    def _environment(self, checkpoint: Checkpoint, truth: EnvironmentRow) -> Answer:
        answerer = self.model(checkpoint)
        return answerer.answer([ENVIRONMENT.prompt(truth, answerer.style)])[0]

    def _once(
        self, checkpoint: Checkpoint, question: tuple[object, ...], answer: Callable[[], Record]
    ) -> Record:
        key = (checkpoint.stamp, *question)
        if key not in self._kept:
            begun = perf_counter()
            found = answer() | {"checkpoint": checkpoint.name}
            self._kept[key] = found | {"ms": round(1000 * (perf_counter() - begun), 1)}
            if len(self._kept) > MOST_KEPT:
                self._kept.popitem(last=False)
        self._kept.move_to_end(key)
        return self._kept[key]


def size_of(answerer: ModelAnswerer) -> int:
    """Parameters of a model."""
    return sum(parameter.numel() for parameter in answerer.model.parameters())


def opinion_record(board: chess.Board, found: Opinion) -> Record:
    """An opinion as the page draws it: candidates as listed, the move, the position after it."""
    candidates = [
        {
            "move": one.move,
            "san": san(board, one.move),
            "cp": one.cp,
            "score": score_text(one.cp),
            "legal": one.legal,
        }
        for one in found.candidates
    ]
    return {
        "fen": found.fen,
        "candidates": candidates,
        "best": found.best,
        "move": found.move,
        "san": san(board, found.move),
        "note": found.note,
        "after": after_move(board.fen(), found.move) if found.move else None,
    }


def prediction_record(truth: EnvironmentRow, answer: Answer) -> Record:
    """A transition as the model has it and as the rules have it, and where they part."""
    said = ENVIRONMENT.parse(answer.text)
    right = ENVIRONMENT.metrics(truth, answer.text, finished=answer.finished)
    fault = said.fault or ("" if answer.finished else "the answer does not end")
    return {
        "text": answer.text.strip(),
        "fault": fault,
        "exact": bool(right["exact"]),
        "wrong": [] if fault else [name for name in FIELDS if not right[name]],
        "squares": [] if fault else wrong_squares(said.fen, truth.next_fen),
        "kind": truth.kind,
        "said": {
            "fen": said.fen,
            "reward": said.reward,
            "terminated": said.terminated,
            "truncated": said.truncated,
        },
        "rules": {
            "fen": truth.next_fen,
            "reward": truth.reward,
            "terminated": truth.terminated,
            "truncated": truth.truncated,
        },
    }


def wrong_squares(said: str, true: str) -> list[str]:
    """Names of the squares on which two FENs differ."""
    here, there = squares(said.split(" ", 1)[0]), squares(true.split(" ", 1)[0])
    if here is None or there is None:
        return []
    pairs = enumerate(zip(here, there, strict=True))
    return [f"{'abcdefgh'[place % 8]}{8 - place // 8}" for place, (a, b) in pairs if a != b]


def san(board: chess.Board, move: str) -> str:
    """A move as a player writes it; what is no legal move stays as it is."""
    legal = next((one for one in board.legal_moves if one.uci() == move), None)
    return board.san(legal) if legal else move
