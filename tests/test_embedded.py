"""The rows that come with the package: gold is gold, parts are disjoint, tokens round-trip."""

from __future__ import annotations

from functools import cache
from importlib.resources import files
from itertools import combinations
from pathlib import Path

import pytest

from rookworld.data.rows import MateRow, row_text
from rookworld.data.sources import load_rows
from rookworld.pretrain.sources import pick_tokenizer
from rookworld.tasks.environment import ENVIRONMENT, KINDS, transition
from rookworld.tasks.notation import position_key
from rookworld.tasks.policy import POLICY
from rookworld.tasks.reward import RewardRules
from rookworld.tasks.task import EnvironmentRow, PolicyRow, Row, Style, legal_moves

PARTS = ("train", "validation", "test")
RULES = RewardRules()


@cache
def rows(part: str) -> list[Row]:
    return load_rows(f"embedded:{part}")


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("style", ["compact", "padded"])
def test_gold_scores_exactly_one(part: str, style: Style) -> None:
    for row in rows(part):
        if isinstance(row, PolicyRow):
            assert POLICY.verify(row, POLICY.answer(row, style), RULES).total == 1.0, row
        elif isinstance(row, EnvironmentRow):
            assert ENVIRONMENT.verify(row, ENVIRONMENT.answer(row, style), RULES).total == 1.0, row


def test_no_position_is_in_two_parts() -> None:
    every = (*PARTS, "rare", "mate")
    keys = {part: {position_key(row.fen) for row in rows(part)} for part in every}
    for one, other in combinations(keys, 2):
        assert not keys[one] & keys[other], (one, other)


@pytest.mark.parametrize("part", PARTS)
def test_there_is_enough_of_everything(part: str) -> None:
    policy = [row for row in rows(part) if isinstance(row, PolicyRow)]
    environment = [row for row in rows(part) if isinstance(row, EnvironmentRow)]
    assert len(policy) >= 1_000 - 5 and len(environment) >= 1_000
    assert {row.kind for row in environment} == set(KINDS)
    whites = sum(row.fen.split()[1] == "w" for row in policy)
    assert 0.4 < whites / len(policy) < 0.6


@pytest.mark.parametrize("part", [*PARTS, "rare"])
def test_environment_rows_are_what_the_rules_say(part: str) -> None:
    for row in rows(part):
        if isinstance(row, EnvironmentRow):
            assert transition(row.fen, row.move, row.history[:-1]) == row


def test_mates_are_legal_and_counted() -> None:
    found = [row for row in rows("mate") if isinstance(row, MateRow)]
    assert len(found) >= 1_000
    for row in found[:200]:
        assert set(row.mates) <= legal_moves(row.fen)


def test_every_row_round_trips_through_the_chess_tokenizer() -> None:
    tokenizer = pick_tokenizer("chess")
    texts = [
        row_text(row, "compact")
        for part in PARTS
        for row in rows(part)
        if not isinstance(row, MateRow)
    ]
    assert tokenizer.decode_batch(tokenizer.encode_batch(texts)) == texts


def test_the_rows_are_small() -> None:
    folder = files("rookworld") / "assets" / "data"
    size = sum(len(path.read_bytes()) for path in folder.iterdir())
    assert size <= 2_000_000


def test_evaluation_rows_are_disjoint_from_the_embedded_ones() -> None:
    folder = Path(__file__).parents[1] / "evaluation"
    ours = {position_key(row.fen) for part in (*PARTS, "rare", "mate") for row in rows(part)}
    found = [
        {position_key(row.fen) for row in load_rows(path)}
        for path in sorted(folder.glob("*.parquet"))
    ]
    assert [len(keys) for keys in found] == [6_200, 6_500, 7_998, 4_000]
    assert not any(keys & ours for keys in found)
    assert not any(one & other for one, other in combinations(found, 2))
