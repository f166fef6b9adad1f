"""What answers without chess, and perfect answers with one thing spoilt, earn on average.

    python benchmarks/reward_table.py [--p FILE] [--a FILE] [--rows 500]

The default rewards, judged by the rows' labels: mean, highest, share above the limit. The tables
of docs/rewards.md are this command's.
"""

from __future__ import annotations

import argparse
import random
from collections import defaultdict
from collections.abc import Iterator

import chess

from rookworld.data.sources import load_rows
from rookworld.tasks.environment import ENVIRONMENT
from rookworld.tasks.hacks import Hack, analysis, hacks
from rookworld.tasks.notation import cp_text
from rookworld.tasks.policy import MOST_MOVES, POLICY
from rookworld.tasks.reward import RewardRules
from rookworld.tasks.task import EnvironmentRow, PolicyRow

RULES = RewardRules()
BLIND, BESIDE = 0.2, 0.6
VALUES = {chess.PAWN: 1, chess.KNIGHT: 3, chess.BISHOP: 3, chess.ROOK: 5, chess.QUEEN: 9}


def guesses(row: PolicyRow, rng: random.Random) -> Iterator[Hack]:
    """Answers whose limit holds on average only."""
    legal = sorted(move.uci() for move in chess.Board(row.fen).legal_moves)
    few, true = len(legal) <= MOST_MOVES, [cp_text(cp) for cp in row.cp]
    best, most = row.moves[0], min(MOST_MOVES, len(legal))
    drawn = rng.sample(legal, most)
    if few:
        lost = analysis(drawn, ["-999.97"] * most, drawn[0])
        yield Hack("at most five legal moves: all, -999.97", lost, BLIND)
        zero = analysis(drawn, ["0.0"] * most, drawn[0])
        yield Hack("at most five legal moves: all, 0.0", zero, BLIND)
        return
    yield Hack("five random moves, 0.0", analysis(drawn, ["0.0"] * most, drawn[0]), BLIND)
    yield Hack("captures and checks, material", forcing(row.fen), BLIND)
    yield Hack("second as B", analysis(row.moves, true, row.moves[1]), 1.0)
    yield Hack("worst of five as B", analysis(row.moves, true, row.moves[-1]), 1.0)
    yield Hack("true moves and B, 0.0", analysis(row.moves, ["0.0"] * len(true), best), BESIDE)
    yield Hack("true moves and B, 9.9", analysis(row.moves, ["9.9"] * len(true), best), BESIDE)
    junk = rng.sample([move for move in legal if move != best], most - 1)
    yield Hack(
        "right B, random moves, true evaluation of B",
        analysis([best, *junk], [true[0], *["0.0"] * (most - 1)], best),
        BESIDE,
    )


def forcing(fen: str) -> str:
    """Captures first, then checks, by what they take; the material balance as evaluation."""
    board = chess.Board(fen)
    ranked = sorted(
        board.legal_moves,
        key=lambda move: (-taken(board, move), not board.gives_check(move), move.uci()),
    )[:MOST_MOVES]
    balance = sum(
        value * (len(board.pieces(kind, board.turn)) - len(board.pieces(kind, not board.turn)))
        for kind, value in VALUES.items()
    )
    evals = [cp_text(100 * (balance + taken(board, move))) for move in ranked]
    moves = [move.uci() for move in ranked]
    return analysis(moves, evals, moves[0])


def taken(board: chess.Board, move: chess.Move) -> int:
    """Value of the piece that a move captures."""
    victim = board.piece_type_at(move.to_square)
    return VALUES.get(victim, 0) if victim else int(board.is_en_passant(move))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--p", default="evaluation/test-5k.parquet")
    parser.add_argument("--a", default="evaluation/test-A.parquet")
    parser.add_argument("--rows", type=int, default=500)
    asked = parser.parse_args()
    rng, earned = random.Random(0), defaultdict[tuple[str, str, float], list[float]](list)
    rows = load_rows(asked.p)
    few = [row for row in rows if isinstance(row, PolicyRow) and few_moves(row)]
    kept = [row for row in rows if isinstance(row, PolicyRow) and not few_moves(row)]
    for row in (*kept[: asked.rows], *few[: asked.rows]):
        for hack in (*hacks(row), *guesses(row, rng)):
            reward = POLICY.verify(row, hack.text, RULES).total
            earned["P", hack.name, hack.limit].append(reward)
    for played in load_rows(asked.a)[: asked.rows]:
        if isinstance(played, EnvironmentRow):
            for hack in hacks(played):
                reward = ENVIRONMENT.verify(played, hack.text, RULES).total
                earned["A", hack.name, hack.limit].append(reward)
    print("| task | answer | rows | limit | mean | highest | above the limit |")
    print("|---|---|---|---|---|---|---|")
    for (task, name, limit), rewards in earned.items():
        over = sum(reward > limit + 1e-9 for reward in rewards) / len(rewards)
        mean = sum(rewards) / len(rewards)
        line = f"{len(rewards)} | {limit} | {mean:.3f} | {max(rewards):.3f} | {over:.1%}"
        print(f"| {task} | {name} | {line} |")


def few_moves(row: PolicyRow) -> bool:
    """Whether every legal move has to be listed."""
    return chess.Board(row.fen).legal_moves.count() <= MOST_MOVES


if __name__ == "__main__":
    main()
