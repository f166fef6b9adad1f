"""A model that is player and board at once: it plays inside its own predictions of what happens.

The law: nothing but the model moves the world on; python-chess only watches, and the walk is over
at the first prediction that is not exactly what the rules say. Until then every position was
right, so the plies before it measure how long the world can be trusted.

Left out on purpose: going on after a departure, when nothing could be called right or wrong.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import chess

from rookworld.evaluation.generator import Answer, Answerer, analyses
from rookworld.evaluation.statistics import Estimate, known, mean_estimate, share
from rookworld.tasks.environment import ENVIRONMENT, transition
from rookworld.tasks.task import EnvironmentRow


@dataclass(eq=False)
class Walk:
    """One game inside the model's world; `end` says how it ended, empty while it goes on."""

    number: int
    fen: str = chess.STARTING_FEN
    history: tuple[str, ...] = ()
    plies: int = 0
    steps: int = 0
    end: str = ""

    def step(self, truth: EnvironmentRow, answer: Answer, max_plies: int) -> None:
        """Go where the model says the move leads, as long as the rules agree."""
        self.steps += 1
        right = ENVIRONMENT.metrics(truth, answer.text, finished=answer.finished)
        if not right["exact"]:
            wrong = ("format", "board", "truncated", "terminated", "reward")
            self.end = "wrong_" + next(name for name in wrong if not right[name])
            return
        self.fen, self.history = ENVIRONMENT.parse(answer.text).fen, truth.history
        self.plies += not truth.truncated
        if truth.truncated:
            self.end = "illegal"
        elif truth.terminated:
            self.end = "game_over"
        elif self.plies >= max_plies:
            self.end = "max_plies"


def walk_worlds(
    answerer: Answerer,
    n: int,
    *,
    starts: Sequence[Sequence[str]] = (),
    max_plies: int = 300,
) -> list[Walk]:
    """`n` walks from the initial position, or after the moves of given openings."""
    walks = [_begun(i, starts[i] if starts else ()) for i in range(n)]
    while active := [walk for walk in walks if not walk.end]:
        salts = [walk.number for walk in active]
        played = []
        found = analyses(answerer, (walk.fen for walk in active), salts)
        for walk, said in zip(active, found, strict=True):
            if said.best:
                played.append((walk, transition(walk.fen, said.best, walk.history)))
            else:
                walk.end = "no_move"
        prompts = [ENVIRONMENT.prompt(truth, answerer.style) for _, truth in played]
        answers = answerer.answer(prompts, [walk.number for walk, _ in played])
        for (walk, truth), answer in zip(played, answers, strict=True):
            walk.step(truth, answer, max_plies)
    return walks


def _begun(number: int, opening: Sequence[str]) -> Walk:
    board = chess.Board()
    for move in opening:
        board.push_uci(move)
    return Walk(number, board.fen(), tuple(opening))


def world_estimates(walks: Sequence[Walk]) -> dict[str, Estimate]:
    """How long worlds last, how many never depart from the rules, and how walks end."""
    departed = [walk.end.startswith("wrong_") for walk in walks]
    steps = sum(walk.steps for walk in walks)
    estimates = {
        "world/plies": mean_estimate(known(walk.plies for walk in walks)),
        "world/faithful": share(len(walks) - sum(departed), len(walks)),
    }
    if steps:
        estimates["world/exact"] = share(steps - sum(departed), steps)
    ends = Counter(walk.end for walk in walks)
    return estimates | {f"world/ends/{end}": share(ends[end], len(walks)) for end in sorted(ends)}
