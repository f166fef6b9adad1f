"""What the rules of chess alone say of an analysis: a verdict that needs no label and no engine.

The law: nothing is paid here that a label could refute. The rules see whether an answer can be
read, whether its moves are legal and as many as they should be, and whether it announces a mate
that is none; which move is good they do not say, so the content parts stay 0. The scale is that of
the structural parts: an analysis without a fault earns 1. Left out on purpose: material counts and
other guesses at quality, which a policy would learn to please.
"""

from __future__ import annotations

from typing import Final

import chess

from rookworld.tasks.notation import MATE
from rookworld.tasks.policy import MOST_MOVES, POLICY, PolicyAnswer
from rookworld.tasks.reward import RewardRules
from rookworld.tasks.task import PolicyRow, Verdict, legal_moves

STRUCTURE: Final = ("format", "legal")
"""The parts that the rules can fill."""

MATE_IN_ONE: Final = MATE - 1


def verdict_by_rules(
    row: PolicyRow, completion: str, rules: RewardRules, *, finished: bool = True
) -> Verdict:
    """The verdict on an analysis of a position of which nobody knows the best moves."""
    said = POLICY.parse(completion)
    fault = said.fault if finished else "no end token"
    parts = dict.fromkeys(POLICY.parts, 0.0)
    if fault is not None:
        return Verdict(POLICY.malformed(rules), parts, f"malformed: {fault}")
    parts |= {"format": 1.0, "legal": legal_share(row.fen, said)}
    wrong = fault_by_rules(row.fen, said)
    weights = {name: rules.part_weights[name] for name in STRUCTURE}
    paid = sum(weights[name] * parts[name] for name in STRUCTURE)
    total = paid / max(sum(weights.values()), 1e-9)
    if wrong is not None:
        # whatever is wrong, less is earned than by a list without a fault
        total = min(total, rules.part_weights["format"] / max(sum(weights.values()), 1e-9))
    return Verdict(total, parts, wrong or "legal, complete; nobody knows the best move")


def legal_share(fen: str, said: PolicyAnswer) -> float:
    """Share of the moves that should be listed which are listed and legal."""
    legal = legal_moves(fen)
    expected = min(MOST_MOVES, len(legal))
    return sum(move in legal for move in said.moves) / max(expected, len(said.moves))


def fault_by_rules(fen: str, said: PolicyAnswer) -> str | None:
    """What the rules find wrong with a readable analysis, in words; None if nothing."""
    legal = legal_moves(fen)
    expected = min(MOST_MOVES, len(legal))
    illegal = next((move for move in (*said.moves, said.best) if move not in legal), None)
    if illegal is not None:
        return f"illegal move {illegal}"
    if len(said.moves) != expected:
        return f"{len(said.moves)} moves listed where {expected} exist"
    if said.best not in said.moves:
        return f"B {said.best} is not among the moves"
    for move, cp in zip(said.moves, said.cp, strict=True):
        if cp == MATE_IN_ONE and not mates(fen, move):
            return f"{move} is no mate in one"
    return None


def mates(fen: str, move: str) -> bool:
    """Whether a legal move mates."""
    board = chess.Board(fen)
    board.push_uci(move)
    return board.is_checkmate()
