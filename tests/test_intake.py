"""One door for rows, whatever they are written in: what passes it is true, and cannot raise later.

`ROOKWORLD_FUZZED_ROWS=100000 pytest tests/test_intake.py -m slow` asks about more of them.
"""

from __future__ import annotations

import json
import math
import os
import random
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest

from rookworld.cli.dispatch import main
from rookworld.data.intake import Intake
from rookworld.data.rows import is_mate_row, row_key, row_record, row_text
from rookworld.data.show import position_svg, row_class
from rookworld.data.sources import load_rows
from rookworld.data.splits import position_hash
from rookworld.runtime.errors import DataError
from rookworld.tasks.environment import transition
from rookworld.tasks.hacks import hacks
from rookworld.tasks.notation import flip_fen
from rookworld.tasks.policy import POLICY
from rookworld.tasks.registry import task_of
from rookworld.tasks.reward import RewardRules
from rookworld.tasks.task import PolicyRow, legal_moves
from rookworld.trl.rewards import reward_function

START = "rnbqkbnr/pppppppp/8/8/8/8/PPPPPPPP/RNBQKBNR w KQkq - 0 1"
FIVE = {"moves": ["e2e4", "d2d4", "g1f3", "c2c4", "g2g3"], "cp": [30, 25, 20, 1, 0], "depth": 9}
GOOD = {"fen": START, **FIVE}
PLAYED = row_record(transition(START, "e2e4"))
MATE = {"fen": "6k1/5ppp/8/8/8/8/8/R5K1 w - - 0 1", "mates": ["a1a8"]}

REFUSED: dict[str, dict[str, Any]] = {
    "no position": {**GOOD, "fen": None},
    "a number for a position": {**GOOD, "fen": 7},
    "no kings": {**GOOD, "fen": "8/8/8/8/8/8/8/8 w - - 0 1"},
    "two kings of a side": {**GOOD, "fen": "4k3/8/8/8/8/8/8/K3K3 w - - 0 1"},
    "the king can be taken": {**GOOD, "fen": "4k3/8/8/8/8/8/8/K3R3 w - - 0 1"},
    "nine files": {**GOOD, "fen": START.replace("8/8", "9/8", 1)},
    "four fields": {**GOOD, "fen": START.rsplit(" ", 2)[0]},
    "mated": {**GOOD, "fen": "R5k1/5ppp/8/8/8/8/8/6K1 b - - 1 1", "moves": [], "cp": []},
    "an illegal move": {**GOOD, "moves": ["e2e5", *FIVE["moves"][1:]]},  # type: ignore[index]
    "a move twice": {**GOOD, "moves": ["e2e4", "e2e4", *FIVE["moves"][2:]]},  # type: ignore[index]
    "six moves": {**GOOD, "moves": [*FIVE["moves"], "a2a3"], "cp": [5, 4, 3, 2, 1, 0]},  # type: ignore[misc]
    "four moves": {**GOOD, "moves": FIVE["moves"][:4], "cp": [5, 4, 3, 2]},  # type: ignore[index]
    "moves that are a text": {**GOOD, "moves": "e2e4"},
    "no evaluation": {**GOOD, "cp": [None] * 5},
    "NaN": {**GOOD, "cp": [math.nan] * 5},
    "infinity": {**GOOD, "cp": [math.inf, 4, 3, 2, 1]},
    "half a centipawn": {**GOOD, "cp": [0.5, 0, 0, 0, 0]},
    "beyond mate": {**GOOD, "cp": [10**20, 4, 3, 2, 1]},
    "truth for a number": {**GOOD, "cp": [True] * 5},
    "a depth in words": {**GOOD, "depth": "deep"},
    "a history without the move": {**PLAYED, "history": ["d2d4"]},
    "an empty history": {**PLAYED, "history": []},
    "a move with a blank": {**PLAYED, "move": "e2 e4", "history": ["e2 e4"]},
    "a move that ends its field": {**PLAYED, "move": "e2+", "history": ["e2+"]},
    "a long move": {**PLAYED, "move": "x" * 9, "history": ["x" * 9]},
    "a history in words": {**PLAYED, "history": ["hello", "e2e4"]},
    "a lone surrogate": {**PLAYED, "move": "\ud800", "history": ["\ud800"]},
    "no move": {**PLAYED, "move": None},
    "a transition without kings": {**PLAYED, "fen": "8/8/8/8/8/8/P7/8 w - - 0 1"},
    "no mates": {**MATE, "mates": []},
    "a mate that is no move": {**MATE, "mates": ["a1b2"]},
    "mates that are numbers": {**MATE, "mates": [1]},
    "mates without kings": {**MATE, "fen": "8/8/8/8/8/8/8/R7 w - - 0 1"},
    "nothing": {},
    "a text that is a number": {"text": 5},
}


@pytest.mark.parametrize("name", REFUSED)
def test_columns_are_refused_as_texts_are(name: str) -> None:
    intake = Intake()
    assert intake.line(json.dumps(REFUSED[name]), "here") is None
    assert intake.record(REFUSED[name], "there") is None
    assert [bad.place for bad in intake.malformed] == ["here", "there"]
    assert intake.rows == 0


def test_what_is_good_passes_as_it_is() -> None:
    for record in (GOOD, PLAYED, MATE):
        row = Intake().record(record, "here")
        assert row is not None and row_record(row) == record
    row = Intake().record({**GOOD, "cp": [30.0, 25.0, 20.0, 1.0, 0.0], "depth": None}, "here")
    assert row is not None and row_record(row) == {**GOOD, "depth": 0}


@pytest.mark.parametrize(
    "text",
    [
        "P: 8/8/8/8/8/8/P7/8 w - - 0 1 M: a2a3 a2a4 E: 0.1 0.0 B: a2a3",
        "A: 8/8/8/8/8/8/P7/8 w - - 0 1+a2a3+a2a3+8/8/8/8/8/P7/8/8 b - - 0 1+0.001+0+0",
        "[" * 10_000,
        '{"fen": ' * 10_000,
    ],
)
def test_texts_are_refused_as_columns_are(text: str) -> None:
    intake = Intake()
    assert intake.text(text, "here") is None and intake.line(text, "there") is None
    assert len(intake.malformed) == 2


def test_a_false_label_follows_the_rules() -> None:
    for wrong in (
        {"next_fen": START},
        {"reward": math.nan},
        {"terminated": True, "reward": 1.0},
        {"kind": "mate"},
        {"truncated": True},
    ):
        intake = Intake()
        row = intake.record({**PLAYED, **wrong}, "here")
        assert row is not None and row_record(row) == PLAYED
        assert "labels against the rules" in next(intake.notes())


def test_moves_are_put_best_first() -> None:
    intake = Intake()
    row = intake.record({**GOOD, "cp": [0, 25, 20, 1, 30]}, "here")
    assert isinstance(row, PolicyRow)
    assert row.moves == ("g2g3", "d2d4", "g1f3", "c2c4", "e2e4") and row.cp == (30, 25, 20, 1, 0)
    assert "not best first" in next(intake.notes())


def test_a_byte_order_mark_is_no_part_of_a_row(tmp_path: Path) -> None:
    for name, line in {"a.jsonl": json.dumps(GOOD), "a.txt": "P: " + START}.items():
        (tmp_path / name).write_bytes(b"\xef\xbb\xbf" + line.encode() + b"\n")
    assert [row_record(row) for row in load_rows(tmp_path / "a.jsonl")] == [GOOD]


def test_import_writes_no_false_label(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = tmp_path / "rows.jsonl"
    records = [{**PLAYED, "reward": 1.0, "terminated": True}, REFUSED["an illegal move"], GOOD]
    source.write_text("".join(json.dumps(record) + "\n" for record in records))
    out = tmp_path / "own.jsonl"
    assert main(["data", "import", str(source), "--out", str(out)]) == 0
    assert [json.loads(line) for line in out.read_text().splitlines()] == [PLAYED, GOOD]
    aside = json.loads((tmp_path / "own.malformed.jsonl").read_text())
    assert aside["place"] == f"{source}:2" and "e2e5" in aside["reason"]


def test_rewards_for_trl_refuse_them_too() -> None:
    columns = {name: [value] for name, value in REFUSED["an illegal move"].items()}
    with pytest.raises(DataError, match="e2e5"):
        reward_function(POLICY.letter)(prompts=[""], completions=[""], **columns)


# --- many of them -------------------------------------------------------------------------------

ODD: list[Any] = [
    None, "", 0, -1, 1.5, math.nan, math.inf, 10**30, True, [], {}, [[]], "x" * 5000, "\x00", "é",
    "8/8/8/8/8/8/8/8 w - - 0 1", "a1a1", "0000", "e1h1", "e7e8q", "P: ", "A: ", "+", " ",
]  # fmt: skip


@lru_cache(maxsize=1)
def sound_records() -> tuple[dict[str, Any], ...]:
    parts = ("embedded:validation", "embedded:mate")
    return tuple(row_record(row) for part in parts for row in load_rows(part))


def fuzzed(rng: random.Random) -> dict[str, Any] | str:
    """A sound row with up to three things spoilt, as columns or as text."""
    record = dict(rng.choice(sound_records()))
    if "mates" not in record and rng.random() < 0.4:
        row = Intake().record(record, "")
        assert row is not None
        text = list(row_text(row, rng.choice(("padded", "compact"))))
        for _ in range(rng.randint(0, 3)):
            at = rng.randrange(len(text))
            text[at] = rng.choice(["", text[at] * 2, rng.choice("0189abhkKQ/+ -:.\x00é\n"), "9"])
        return "".join(text)
    for _ in range(rng.randint(0, 3)):
        name = rng.choice(list(record))
        value = record[name]
        if isinstance(value, list) and value and rng.random() < 0.7:
            changed = list(value)
            changed[rng.randrange(len(value))] = rng.choice([*ODD, rng.choice(value)])
            rng.shuffle(changed)
            record[name] = changed[: rng.randint(0, 6)]
        elif isinstance(value, str) and value and rng.random() < 0.7:
            at = rng.randrange(len(value))
            record[name] = value[:at] + rng.choice("0189abhkKQ/+ -wbé") + value[at + 1 :]
        elif rng.random() < 0.1:
            del record[name]
        else:
            record[name] = rng.choice(ODD)
        if not record:
            break
    return record


def use(row: Any) -> None:
    """Everything that is done with a row after the door."""
    position_hash(row.fen), row_key(row), row_class(row), row_record(row)
    position_svg(row), flip_fen(row.fen), legal_moves(row.fen)
    if is_mate_row(row):
        return
    task, rules = task_of(row), RewardRules()
    for style in ("padded", "compact"):
        gold = task.answer(row, style)
        assert task.verify(row, gold, rules).total == 1.0
        assert all(
            value is None or math.isfinite(value) for value in task.metrics(row, gold).values()
        )
        assert len(task.prompt(row, style)) < 220
        task.public_text(row, style, random.Random(0))
    for hack in hacks(row):
        assert task.verify(row, hack.text, rules).total <= hack.limit + 1e-9
    task.draw_truth(row_record(row)), task.draw_answer(row_record(row), task.answer(row, "compact"))


def pass_many(count: int) -> Iterator[Any]:
    rng, intake = random.Random(count), Intake()
    for number in range(count):
        raw = fuzzed(rng)
        row = intake.text(raw, "") if isinstance(raw, str) else intake.record(raw, "")
        assert (row is None) + intake.rows + len(intake.malformed) > number
        if not isinstance(raw, str):
            again = Intake().line(json.dumps(raw), "")
            assert again == row
        if row is not None:
            use(row)
            yield row


def test_what_passes_the_door_raises_nowhere() -> None:
    assert 100 < len(list(pass_many(400))) < 390


@pytest.mark.slow
def test_what_passes_the_door_raises_nowhere_in_many() -> None:
    count = int(os.environ.get("ROOKWORLD_FUZZED_ROWS", "10000"))
    assert 0.25 * count < sum(1 for _ in pass_many(count)) < 0.95 * count


def test_one_malformed_row_is_one_row() -> None:
    intake = Intake()
    for count in ("1 malformed row left out", "2 malformed rows left out"):
        assert intake.line("{", "here") is None
        assert next(intake.notes()).startswith(count)
