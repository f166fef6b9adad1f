"""Splits: decided by position and seed, by nothing else."""

from __future__ import annotations

import random
from collections.abc import Iterable

import chess
import pytest

from rookworld.data.splits import seen_positions, split_name, split_rows
from rookworld.runtime.errors import ConfigError
from rookworld.tasks.environment import transition
from rookworld.tasks.notation import position_key
from rookworld.tasks.task import PolicyRow, Row


def some_rows(count: int) -> list[Row]:
    rng, board = random.Random(0), chess.Board()
    rows: list[Row] = []
    while len(rows) < 2 * count:
        if board.is_game_over():
            board.reset()
        move = rng.choice(list(board.legal_moves))
        rows.append(transition(board.fen(), move.uci()))
        rows.append(PolicyRow(board.fen(), (move.uci(),), (0,)))
        board.push(move)
    return rows


def test_parts_are_disjoint_by_position_and_keep_every_row() -> None:
    rows = some_rows(600)
    parts = split_rows(rows, seed=1)
    keys = {name: {position_key(row.fen) for row in part} for name, part in parts.items()}
    assert not keys["train"] & keys["test"] and not keys["train"] & keys["validation"]
    assert not keys["validation"] & keys["test"]
    assert sum(map(len, parts.values())) == len(rows)
    assert 0.6 < len(parts["train"]) / len(rows) < 0.73


def test_order_counters_and_other_rows_do_not_matter() -> None:
    rows = some_rows(50)
    mixed = random.Random(1).sample(rows, 60)
    assert split_rows(mixed)["test"] == [row for row in mixed if row in split_rows(rows)["test"]]
    start = chess.STARTING_FEN
    assert {split_name(start, seed=3)} == {split_name(start.replace("0 1", "7 9"), seed=3)}
    assert len({split_name(start, seed) for seed in range(40)}) == 3


def test_shares_are_relative_and_checked() -> None:
    fens = [row.fen for row in some_rows(100)]
    a = [split_name(fen, 0, {"train": 0.5, "test": 0.5}) for fen in fens]
    assert a == [split_name(fen, 0, {"train": 50, "test": 50}) for fen in fens]
    assert {split_name(fen, 0, {"train": 0, "test": 1}) for fen in fens} == {"test"}
    for shares in ({}, {"train": -1.0, "test": 2.0}, {"train": 0.0}):
        with pytest.raises(ConfigError, match="shares of a split"):
            split_rows([], 0, shares)


def fens(rows: Iterable[Row]) -> list[str]:
    return [row.fen for row in rows]


def test_positions_are_seen_whatever_their_task_and_counters() -> None:
    rows = some_rows(20)
    later = PolicyRow(chess.STARTING_FEN.replace("0 1", "7 9"), (), ())
    assert seen_positions(fens(rows), fens([later, *rows[2:6]])) == (3, 3)
    parts = split_rows(rows)
    tested = len({position_key(row.fen) for row in parts["test"]})
    assert seen_positions(fens(parts["train"]), fens(parts["test"])) == (0, tested)
    assert seen_positions(fens(rows), []) == (0, 0)
