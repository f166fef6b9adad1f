"""What a model thinks of a position, and the move that it comes to: for whoever plays or shows it.

The law: the move of an opinion is legal whenever there is a legal move, and a `note` says where it
is not the model's own best move. Positions are asked side by side; an opinion depends on its
position, the model, the temperature and the seed alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import chess

from rookworld.evaluation.generator import Answerer, analyses
from rookworld.tasks.policy import PolicyAnswer
from rookworld.tasks.task import legal_moves


@dataclass(frozen=True, slots=True)
class Candidate:
    """A move that an analysis lists, and its evaluation in centipawns for the side to move."""

    move: str
    cp: int
    legal: bool


@dataclass(frozen=True, slots=True)
class Opinion:
    """An analysis and the move that follows from it."""

    fen: str
    candidates: tuple[Candidate, ...]
    """In the order in which the model lists them."""
    best: str
    """B as the model wrote it; empty where the answer cannot be read."""
    move: str
    """What to play, in UCI; empty where the game is over."""
    note: str = ""
    """Why `move` is not `best`."""

    @property
    def ranked(self) -> tuple[Candidate, ...]:
        """Legal candidates, what is played first, the others by evaluation."""
        legal = [one for one in self.candidates if one.legal]
        return tuple(sorted(legal, key=lambda one: (one.move != self.move, -one.cp)))


def opinions(
    answerer: Answerer, boards: Sequence[chess.Board], salts: Sequence[int] = ()
) -> list[Opinion]:
    """The model's opinion of each position."""
    fens = [board.fen() for board in boards]
    return list(map(opinion, fens, analyses(answerer, fens, salts)))


def opinion(fen: str, said: PolicyAnswer) -> Opinion:
    """What follows from an analysis: B, else the best legal move it lists, else any legal one."""
    legal = legal_moves(fen)
    listed = tuple(
        Candidate(move, cp, move in legal) for move, cp in zip(said.moves, said.cp, strict=True)
    )
    if not legal:
        return Opinion(fen, listed, said.best, "")
    if said.best in legal:
        return Opinion(fen, listed, said.best, said.best)
    why = said.fault or f"{said.best} is not legal"
    playable = [one for one in listed if one.legal]
    if playable:
        move = max(playable, key=lambda one: one.cp).move
        return Opinion(fen, listed, said.best, move, f"{why}: the best legal move of the list")
    return Opinion(fen, listed, said.best, min(legal), f"{why}: the first legal move by name")
