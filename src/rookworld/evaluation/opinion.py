"""What a model thinks of a position, and the move that it comes to: for whoever plays or shows it.

The law: the move of an opinion is legal whenever there is a legal move, and a `note` says where it
is not the model's own best move. Positions are asked side by side; an opinion depends on its
position, the model, the way it is asked (`Thinking`) and the seed alone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import chess

from rookworld.evaluation.generator import Answerer, ModelAnswerer, analyses
from rookworld.evaluation.move_shares import (
    Shares,
    choose,
    images_of,
    legal_moves_only,
    move_shares,
    require_whole_moves,
)
from rookworld.runtime.config import require
from rookworld.tasks.policy import POLICY, PolicyAnswer
from rookworld.tasks.task import PolicyRow, legal_moves

BY_NAME = ": the first legal move by name"
BY_SHARE = ": the legal move it finds most probable"


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
    by_name: bool = False
    """Whether `move` is the first by name, because nothing that was said can be played."""
    asked: int = 1
    """Prompts that the model was given for it."""

    @property
    def ranked(self) -> tuple[Candidate, ...]:
        """Legal candidates, what is played first, the others by evaluation."""
        legal = [one for one in self.candidates if one.legal]
        return tuple(sorted(legal, key=lambda one: (one.move != self.move, -one.cp)))


@dataclass(frozen=True, kw_only=True)
class Thinking:
    """How a model is asked for an opinion."""

    temperature: float = 0.0
    """Temperature of what it says; 0 is greedy."""
    top_p: float = 1.0
    """Draw from the most probable tokens that reach this mass; 1 is all of them."""
    sides: bool = False
    """Average the first move over the position and its images: stronger, and slower."""
    legal_only: bool = False
    """Let the model write no illegal move."""

    def __post_init__(self) -> None:
        at_least_zero = self.temperature >= 0 and math.isfinite(self.temperature)
        require(at_least_zero, f"temperature {self.temperature}: give 0 (greedy) or more")
        require(0 < self.top_p <= 1, f"top_p {self.top_p}: give more than 0 and at most 1")


class Thinker:
    """A model that forms opinions, and what it is asked by."""

    def __init__(self, answerer: Answerer, thinking: Thinking | None = None) -> None:
        self.thinking = thinking = thinking or Thinking()
        self.answerer = answerer
        if not isinstance(answerer, ModelAnswerer):
            return
        model = self.answerer = answerer.sampling(thinking.temperature, top_p=thinking.top_p)
        if thinking.sides:
            require_whole_moves(model, "looking from all sides")
        if thinking.legal_only:
            require_whole_moves(model, "legal moves only")
            model.constraint = legal_moves_only(model)

    def but(self, thinking: Thinking) -> Thinker:
        """The same model asked in another way."""
        return self if thinking == self.thinking else Thinker(self.answerer, thinking)

    def opinions(
        self, boards: Sequence[chess.Board], salts: Sequence[int] = (), only: Sequence[str] = ()
    ) -> list[Opinion]:
        """The model's opinion of each position; `only` are the moves it may come to, if any."""
        fens = [board.fen() for board in boards]
        model = self.answerer
        if not isinstance(model, ModelAnswerer):
            return [opinion(*one, only) for one in zip(fens, analyses(model, fens), strict=True)]
        if self.thinking.sides:
            found = self._from_all_sides(model, fens, salts or [0] * len(fens), only)
        else:
            said = analyses(model, fens, salts)
            found = [opinion(*one, only) for one in zip(fens, said, strict=True)]
        return [self._constrained(model, one, only) if one.by_name else one for one in found]

    def _from_all_sides(
        self, model: ModelAnswerer, fens: Sequence[str], salts: Sequence[int], only: Sequence[str]
    ) -> list[Opinion]:
        """The first move from all sides, the rest of the list as the model goes on from it."""
        firsts = []
        shares = move_shares(model, fens, sides=True)
        for fen, salt, share in zip(fens, salts, shares, strict=True):
            allowed = {move: share[move] for move in playable(fen, only)}
            firsts.append(self._choice(model, allowed, fen, salt))
        found = self._go_on(model, fens, firsts, salts, only)
        return [replace(one, asked=1 + images_of(one.fen)) for one in found]

    def _go_on(
        self,
        model: ModelAnswerer,
        fens: Sequence[str],
        firsts: Sequence[str],
        salts: Sequence[int],
        only: Sequence[str],
    ) -> list[Opinion]:
        """Lists as the model goes on from their first moves, which are what it plays."""
        prompts = [
            f"{POLICY.prompt(PolicyRow(fen, (), ()), model.style)} {first}".rstrip()
            for fen, first in zip(fens, firsts, strict=True)
        ]
        found = []
        for fen, first, answer in zip(fens, firsts, model.answer(prompts, salts), strict=True):
            said = POLICY.parse(f" {first}{answer.text}" if answer.finished else "")
            found.append(opinion(fen, replace(said, best=first), only))
        return found

    def _constrained(self, model: ModelAnswerer, one: Opinion, only: Sequence[str]) -> Opinion:
        """The most probable legal move, where nothing that was said can be played."""
        (shares,) = move_shares(model, [one.fen])
        allowed = {move: shares[move] for move in playable(one.fen, only)}
        move = self._choice(model, allowed, one.fen, 0)
        (found,) = self._go_on(model, [one.fen], [move], [0], only)
        note = one.note.removesuffix(BY_NAME) + BY_SHARE
        return replace(found, best=one.best, note=note, asked=one.asked + 2)

    def _choice(self, model: ModelAnswerer, shares: Shares, fen: str, salt: int) -> str:
        asked = self.thinking
        return choose(
            shares,
            temperature=asked.temperature,
            top_p=asked.top_p,
            seed=model.seed,
            fen=fen,
            salt=salt,
        )


def opinions(
    answerer: Answerer, boards: Sequence[chess.Board], salts: Sequence[int] = ()
) -> list[Opinion]:
    """The model's opinion of each position, as the model itself would say it."""
    fens = [board.fen() for board in boards]
    return list(map(opinion, fens, analyses(answerer, fens, salts)))


def playable(fen: str, only: Sequence[str] = ()) -> frozenset[str]:
    """The legal moves, or those of `only` that are legal if there are any."""
    legal = legal_moves(fen)
    return legal & frozenset(only) or legal


def opinion(fen: str, said: PolicyAnswer, only: Sequence[str] = ()) -> Opinion:
    """What follows from an analysis: B, else the best legal move it lists, else any legal one."""
    legal, allowed = legal_moves(fen), playable(fen, only)
    listed = tuple(
        Candidate(move, cp, move in legal)
        for move, cp in zip(said.moves, said.cp, strict=True)
        if not only or move in only
    )
    if not allowed:
        return Opinion(fen, listed, said.best, "")
    if said.best in allowed:
        return Opinion(fen, listed, said.best, said.best)
    illegal = "not among those asked for" if said.best in legal else "not legal"
    why = said.fault or f"{said.best} is {illegal}"
    options = [one for one in listed if one.move in allowed]
    if options:
        move = max(options, key=lambda one: one.cp).move
        return Opinion(fen, listed, said.best, move, f"{why}: the best legal move of the list")
    return Opinion(fen, listed, said.best, min(allowed), why + BY_NAME, by_name=True)
