"""Games of a model against itself -> rows that the rules or an engine vouch for.

Laws: who won, and what a move does, python-chess says, whatever the model said; a row is verified
or left out; no held-out position becomes a row. A game is what the model answered, replayed.

An analysis row comes from a winner's turn: by rules it is the model's own answer, if it is legal,
complete, chooses the move that it evaluates highest, and announces no false mate; by an engine it
is the engine's view of the position. An environment row is a move of any game, and its truth.
Left out on purpose: weighing rows by how the game was won, and analyses of drawn games.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

import chess

from rookworld.data.rows import row_key
from rookworld.evaluation.generator import Answer, Answerer
from rookworld.tasks.environment import HISTORY_PLIES, transition
from rookworld.tasks.notation import position_key
from rookworld.tasks.policy import POLICY, PolicyAnswer
from rookworld.tasks.registry import task_of_text
from rookworld.tasks.structure import fault_by_rules
from rookworld.tasks.task import EnvironmentRow, Judge, PolicyRow, Row, Style, legal_moves


class Recorder:
    """An answerer that keeps what was answered to analysis prompts, game by game."""

    def __init__(self, answerer: Answerer) -> None:
        self.answerer = answerer
        self.answers: dict[int, list[Answer]] = {}

    @property
    def style(self) -> Style:
        return self.answerer.style

    @property
    def samples(self) -> int:
        return self.answerer.samples

    def answer(self, prompts: Sequence[str], salts: Sequence[int] = ()) -> list[Answer]:
        """What the answerer says; `salts` are the games' numbers."""
        found = self.answerer.answer(prompts, salts)
        for prompt, game, one in zip(prompts, salts, found, strict=True):
            if task_of_text(prompt) is POLICY:
                self.answers.setdefault(game, []).append(one)
        return found


@dataclass(frozen=True, slots=True)
class Ply:
    """A turn: the position, the plies before it, and what the model said."""

    fen: str
    history: tuple[str, ...]
    said: PolicyAnswer


@dataclass(frozen=True, slots=True)
class Replay:
    """A game by the rules; `winner` is None where nobody won."""

    plies: tuple[Ply, ...]
    winner: chess.Color | None


def replay(opening: Sequence[str], answers: Sequence[Answer]) -> Replay:
    """The game that these answers played, up to its end or their first illegal move."""
    board = chess.Board()
    for move in opening:
        board.push_uci(move)
    plies: list[Ply] = []
    for answer in answers:
        said = POLICY.parse(answer.text if answer.finished else "")
        history = tuple(move.uci() for move in board.move_stack[-(HISTORY_PLIES - 1) :])
        plies.append(Ply(board.fen(), history, said))
        if said.best not in legal_moves(board.fen()):
            return Replay(tuple(plies), not board.turn)
        board.push_uci(said.best)
    outcome = board.outcome()
    return Replay(tuple(plies), None if outcome is None else outcome.winner)


def replays(
    answers: Mapping[int, Sequence[Answer]], starts: Sequence[Sequence[str]]
) -> list[Replay]:
    """All games, by their numbers."""
    return [replay(starts[number], answers[number]) for number in sorted(answers)]


def harvest(
    games: Sequence[Replay], judge: Judge | None = None, left_out: Collection[str] = ()
) -> list[Row]:
    """Verified rows of the games, each once; `left_out` are keys of positions.

    Without a judge the rules verify.
    """
    kept: dict[str, Row] = {}
    rows: list[Row] = [*policy_rows(games, judge), *environment_rows(games)]
    for row in rows:
        if position_key(row.fen) not in left_out:
            kept.setdefault(f"{type(row).__name__} {row_key(row)}", row)
    return list(kept.values())


def policy_rows(games: Sequence[Replay], judge: Judge | None) -> list[PolicyRow]:
    """An analysis of each winner's turn that can be vouched for."""
    won = [
        ply
        for game in games
        for ply in game.plies
        if game.winner is not None and (ply.fen.split(" ")[1] == "w") == game.winner
    ]
    if judge is None:
        return [row for ply in won if (row := row_by_rules(ply)) is not None]
    asked = list(dict.fromkeys(PolicyRow(ply.fen, (), ()) for ply in won))
    judge.prefetch(asked)
    found = ((row.fen, judge.analyse(row)) for row in asked)
    return [PolicyRow(fen, analysis.moves, analysis.cp) for fen, analysis in found]


def row_by_rules(ply: Ply) -> PolicyRow | None:
    """The model's own analysis as a row, best first; None if the rules find fault with it."""
    said = ply.said
    if said.fault is not None or fault_by_rules(ply.fen, said) is not None:
        return None
    known = dict(zip(said.moves, said.cp, strict=True))
    if known[said.best] < max(said.cp):
        return None
    ranked = sorted(said.moves, key=lambda move: (-known[move], move != said.best))
    return PolicyRow(ply.fen, tuple(ranked), tuple(known[move] for move in ranked))


def environment_rows(games: Sequence[Replay]) -> Iterator[EnvironmentRow]:
    """Every move that was written, and what the rules say that it does."""
    for game in games:
        for ply in game.plies:
            if ply.said.best:
                yield transition(ply.fen, ply.said.best, ply.history)
