"""Verdicts per second on one core, judged by labels: a batch of answers, good and bad, per row.

Rows are random positions with made-up labels, since speed does not depend on what they say. Each
is answered eight times, as a group of samples would: gold, near misses, illegal moves, garbage.
Rows are new to every cache at the start of the clock.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator

import chess

from rookworld.tasks.environment import ENVIRONMENT, transition
from rookworld.tasks.notation import squares
from rookworld.tasks.policy import POLICY
from rookworld.tasks.reward import RewardRules
from rookworld.tasks.task import EnvironmentRow, PolicyRow, Verdict, legal_moves

RULES = RewardRules()


def positions(count: int, seed: int = 0) -> Iterator[chess.Board]:
    """Boards of random games, one position in three plies."""
    rng, found = random.Random(seed), 0
    while found < count:
        board = chess.Board()
        for ply in range(120):
            if board.is_game_over() or found == count:
                break
            if ply % 3 == 0:
                found += 1
                yield board
            board.push(rng.choice(list(board.legal_moves)))


def policy_rows(count: int) -> list[PolicyRow]:
    """Random positions whose first five moves carry made-up evaluations."""
    rng, rows = random.Random(1), []
    for board in positions(count):
        moves = tuple(move.uci() for move in board.legal_moves)[:5]
        cp = sorted((rng.randint(-300, 300) for _ in moves), reverse=True)
        rows.append(PolicyRow(board.fen(), moves, tuple(cp)))
    return rows


def environment_rows(count: int) -> list[EnvironmentRow]:
    """A random legal move in each of some random positions."""
    rng = random.Random(2)
    return [
        transition(board.fen(), rng.choice([move.uci() for move in board.legal_moves]))
        for board in positions(count)
    ]


def policy_answers(row: PolicyRow) -> list[str]:
    """Eight completions of one row."""
    gold = POLICY.answer(row, "compact")
    near = f"{gold.rsplit(' ', 1)[0]} {row.moves[-1]}"
    illegal = gold.replace(row.moves[0], "a1a1")
    return [gold, near, gold.replace("0.", "1."), illegal, gold + " e2e4", near, gold, near]


def environment_answers(row: EnvironmentRow) -> list[str]:
    """Eight completions of one row."""
    gold = ENVIRONMENT.answer(row, "compact")
    copied = f"{row.fen}+0.001+0+0"
    flags = f"{row.next_fen}+1.0+1+0"
    return [gold, copied, flags, gold.replace(" - ", " e3 "), gold + "+0", copied, gold, flags]


def rate(verdicts: Callable[[], list[Verdict]], repeats: int) -> float:
    """Best verdicts per second of some repeats, caches emptied before each."""
    best = 0.0
    for _ in range(repeats):
        legal_moves.cache_clear()
        squares.cache_clear()
        start = time.perf_counter()
        count = len(verdicts())
        best = max(best, count / (time.perf_counter() - start))
    return best


def main(quick: bool = False) -> dict[str, float]:
    """Measure both tasks."""
    count, repeats = (100, 1) if quick else (1000, 3)
    analyses = [(row, policy_answers(row)) for row in policy_rows(count)]
    moves = [(row, environment_answers(row)) for row in environment_rows(count)]
    return {
        "verdicts_per_s_P": rate(
            lambda: [POLICY.verify(row, text, RULES) for row, texts in analyses for text in texts],
            repeats,
        ),
        "verdicts_per_s_A": rate(
            lambda: [
                ENVIRONMENT.verify(row, text, RULES) for row, texts in moves for text in texts
            ],
            repeats,
        ),
    }


if __name__ == "__main__":
    for name, value in main().items():
        print(f"{name} {value:.0f}")
