"""Answers that show no chess, or spoil a perfect one, and the most that each may earn.

The law: with the default rules no row pays one of them more than its limit; `rookworld check` and
`benchmarks/reward_table.py` go through them. Left out on purpose: answers made without looking
that can be right by luck (random moves, one evaluation everywhere): their limit is a mean.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from rookworld.tasks.environment import ENVIRONMENT
from rookworld.tasks.notation import EVALS, cp_text, grid_index
from rookworld.tasks.policy import MOST_MOVES, POLICY, win_loss
from rookworld.tasks.reward import FORMAT_ONLY, MISTAKE, ONE_WRONG
from rookworld.tasks.task import Analysis, EnvironmentRow, PolicyRow, Row, legal_moves


class Hack(NamedTuple):
    """An answer and the most that it may earn."""

    name: str
    text: str
    limit: float


def hacks(row: Row) -> Iterator[Hack]:
    """The answers to a row that earlier rewards paid for."""
    if isinstance(row, PolicyRow):
        return _analyses(row)
    return _transitions(row) if isinstance(row, EnvironmentRow) else iter(())


def _analyses(row: PolicyRow) -> Iterator[Hack]:
    best, zeros = row.moves[0], ["0.0"] * MOST_MOVES
    true = [cp_text(cp) for cp in row.cp]
    yield Hack("an illegal move", analysis(["a1a1"] * MOST_MOVES, zeros, "a1a1"), FORMAT_ONLY)
    if len(row.moves) > 1:
        text = analysis([best] * MOST_MOVES, zeros, best)
        yield Hack("one move five times", text, FORMAT_ONLY)
    text = analysis(row.moves, ["nan"] * len(row.moves), best)
    yield Hack("NaN", text, FORMAT_ONLY)
    yield Hack("text after the answer", POLICY.answer(row, "compact") + " and more", FORMAT_ONLY)
    loss = win_loss(row, row.moves[-1], Analysis(row.moves, row.cp), None)
    if loss is not None and loss >= MISTAKE:
        yield Hack("a mistake as B", analysis(row.moves, true, row.moves[-1]), ONE_WRONG)
    if row.moves and len(legal_moves(row.fen)) <= len(row.moves):
        yield from _flat(row)
    junk = sorted(legal_moves(row.fen) - set(row.moves))[:MOST_MOVES]
    if len(junk) == MOST_MOVES:
        yield Hack("legal junk", analysis(junk, true, junk[0]), FORMAT_ONLY)


def _flat(row: PolicyRow) -> Iterator[Hack]:
    """One evaluation for all of few legal moves, unless it happens to be true of all."""
    true = {grid_index(cp) for cp in row.cp}
    for value in ("0.0", "-9.0", "-999.97", EVALS[min(true)], EVALS[max(true)]):
        if true != {EVALS.index(value)}:
            text = analysis(row.moves, [value] * len(row.moves), row.moves[0])
            yield Hack("one evaluation for every legal move", text, FORMAT_ONLY)


def _transitions(row: EnvironmentRow) -> Iterator[Hack]:
    gold = ENVIRONMENT.answer(row, "compact")
    fen, reward, *flags = gold.split("+")
    board, *fields = row.fen.split(" ")
    moved, *updated = fen.split(" ")
    yield Hack("text after the answer", gold + " and more", FORMAT_ONLY)
    wrong = "0.5" if reward == "1.0" else "1.0"
    yield Hack("wrong reward", "+".join([fen, wrong, *flags]), ONE_WRONG)
    yield Hack(
        "wrong flag", "+".join([fen, reward, f"{not row.terminated:d}", flags[1]]), ONE_WRONG
    )
    counted = " ".join([moved, *updated[:-1], str(int(updated[-1]) + 1)])
    yield Hack("wrong counter", "+".join([counted, reward, *flags]), ONE_WRONG)
    if not row.truncated:
        copied = " ".join([board, *updated])
        yield Hack("copy the board", "+".join([copied, reward, *flags]), FORMAT_ONLY)
        only_moved = " ".join([moved, *fields])
        yield Hack("move the man alone", "+".join([only_moved, reward, *flags]), ONE_WRONG)


def analysis(moves: list[str] | tuple[str, ...], evals: list[str], best: str) -> str:
    """A completion of a P prompt."""
    return f" {' '.join(moves)} E: {' '.join(evals)} B: {best}"
