"""A third task in one file: named in the registry, it is trained, evaluated, scored and shown."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest

from rookworld.cli.dispatch import main
from rookworld.data.rows import record_row, row_key, row_record, row_text, task_name, text_row
from rookworld.data.sources import load_rows, write_rows
from rookworld.report.page_data import page_data
from rookworld.rollout.prompts import Prompts
from rookworld.runtime.metric_info import Metric
from rookworld.runtime.run_folder import read_lines
from rookworld.tasks.notation import grid_text, read_fen, text_cp
from rookworld.tasks.registry import TASKS, task_of
from rookworld.tasks.reward import RewardRules, evaluation_accuracy
from rookworld.tasks.task import Judge, Row, Style, Task, Verdict, strip_end
from rookworld.trl.rewards import records, reward_function
from tiny_training import save_tiny, tiny_rows, tiny_tokenizer

SOURCE = Path(__file__).parents[1] / "src" / "rookworld"


@dataclass(frozen=True, slots=True)
class ValueRow:
    """A position and its evaluation in centipawns, for the side to move."""

    fen: str
    cp: int


@dataclass(frozen=True, slots=True)
class ValueAnswer:
    cp: int = 0
    fault: str | None = None


class ValueTask(Task[ValueRow, ValueAnswer]):
    """Ask for the value of a position."""

    letter = "V"
    title = "Value"
    row_type = ValueRow
    columns: ClassVar = {"fen": "string", "cp": "int32"}
    key_column = "cp"
    parts = ("format", "accuracy")
    new_tokens: ClassVar = {"compact": 2, "padded": 8}
    shown_metrics: ClassVar = {"accuracy": Metric(label="accuracy", headline=True)}

    def prompt(self, row: ValueRow, style: Style) -> str:
        return f"V: {row.fen}"

    def answer(self, row: ValueRow, style: Style) -> str:
        return f" {grid_text(row.cp)}"

    def parse(self, text: str) -> ValueAnswer:
        cp = text_cp(strip_end(text).strip(" "))
        return ValueAnswer(fault="not a number in pawns") if cp is None else ValueAnswer(cp)

    def row_from_text(self, text: str) -> ValueRow | None:
        match = re.fullmatch(r"V: (.*) (\S+)", strip_end(text.strip()))
        if match is None or read_fen(match[1]) is None or text_cp(match[2]) is None:
            return None
        return ValueRow(match[1], text_cp(match[2]) or 0)

    def score(
        self,
        row: ValueRow,
        said: ValueAnswer,
        rules: RewardRules,
        judge: Judge | None,
        progress: float,
    ) -> Verdict:
        accuracy = evaluation_accuracy(said.cp, row.cp)
        return Verdict(0.1 + 0.9 * accuracy, {"format": 1.0, "accuracy": accuracy}, "")

    def measure(
        self, row: ValueRow, said: ValueAnswer | None, judge: Judge | None
    ) -> dict[str, float | None]:
        accuracy = None if said is None else evaluation_accuracy(said.cp, row.cp)
        return {"format": float(said is not None), "accuracy": accuracy}


VALUE = ValueTask()


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(TASKS, VALUE.letter, VALUE)


def value_rows() -> list[ValueRow]:
    return [ValueRow(row.fen, 30 - 10 * n) for n, row in enumerate(tiny_rows(6, 0))]


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    """Rows of all three tasks in one file."""
    file = tmp_path / "rows.jsonl"
    write_rows(file, [*tiny_rows(3, 2), *value_rows()])
    return file


def test_its_rows_go_through_files(tmp_path: Path, rows: Path) -> None:
    made = value_rows()
    assert VALUE.select(load_rows(rows)) == made
    assert [record_row(row_record(row)) for row in made] == made
    for name in ("rows.parquet", "rows.txt"):
        out = tmp_path / "out" / name
        assert main(["data", "import", str(rows), "--out", str(out)]) == 0
    assert load_rows(tmp_path / "out" / "rows-V.parquet") == made
    assert VALUE.select(load_rows(tmp_path / "out" / "rows.txt")) == made
    row = made[0]
    assert task_of(row) is VALUE and task_name(row) == "V" and text_row(row_text(row)) == row
    assert row_key(row) == row_key(tiny_rows(1, 0)[0])


def test_its_answers_are_scored(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    row, file = value_rows()[0], tmp_path / "answers.jsonl"
    texts = [VALUE.answer(row, "compact"), " -9.0", "?"]
    lines = [json.dumps({"row": row_text(row), "completion": text}) for text in texts]
    file.write_text("\n".join(lines))
    assert main(["score", str(file)]) == 0
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [one["reward"] for one in found] == [1.0, 0.1, RewardRules().p_malformed]
    assert found[0]["parts"] == {"format": 1.0, "accuracy": 1.0}


def test_its_rewards_are_trls(rows: Path) -> None:
    made = records(load_rows(rows))
    columns = {name: [record[name] for record in made] for name in made[0]}
    gold = [task_of(row).answer(row, "compact") for row in load_rows(rows)]
    rewards = reward_function("V")(columns.pop("prompt"), gold, **columns)
    assert rewards == [None] * 5 + [1.0] * 6


def test_tasks_share_the_prompts() -> None:
    """A takes its ratio; the others share the rest by how many rows they have."""
    mixed: list[Row] = [*tiny_rows(3, 2), *value_rows()]
    letters = [one.letter for one in Prompts(mixed, tiny_tokenizer(), 0.25, 0).take(120)]
    assert {letter: letters.count(letter) for letter in TASKS} == {"P": 30, "A": 30, "V": 60}
    alone = Prompts(value_rows(), tiny_tokenizer(), 0.0, 0).take(6)
    assert sorted(one.row.fen for one in alone) == sorted(row.fen for row in value_rows())


@pytest.fixture
def run(tmp_path: Path, rows: Path) -> Path:
    save_tiny(tmp_path / "model")
    asked: dict[str, Any] = {
        "model": tmp_path / "model",
        "data": rows,
        "held-out": rows,
        "out": tmp_path / "run",
        "steps": 2,
        "batch-size": 4,
        "k-samples": 2,
        "eval-every": 2,
        "sample-every": 1,
        "flat-tries": 0,
        "device": "cpu",
    }
    flags = [text for name, value in asked.items() for text in (f"--{name}", str(value))]
    assert main(["train", *flags]) == 0
    return tmp_path / "run"


def test_it_is_trained_evaluated_and_shown(
    run: Path, rows: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    steps = list(read_lines(run / "metrics.jsonl"))
    assert all({"reward/V", "reward/V/accuracy"} <= set(step) for step in steps)
    last = list(read_lines(run / "eval.jsonl"))[-1]
    assert last["V/format"]["n"] == 6 and last["P/format"]["n"] == 3

    capsys.readouterr()
    flags = ["--data", str(rows), "--suite", "policy", "--device", "cpu", "--json"]
    assert main(["eval", str(run / "final"), *flags]) == 0
    assert "V/format" in capsys.readouterr().out

    page = page_data([run])
    assert "Parts: value" in {panel["title"] for panel in page["panels"]}
    assert page["metrics"]["reward/V/accuracy"]["label"] == "V accuracy"
    cards = [card for card in page["runs"][0]["gallery"] if card["task"] == "V"]
    assert cards and cards[0]["title"] == "Value" and "<svg" in cards[0]["boards"][0]
    assert main(["report", str(run), "--out", str(tmp_path / "report.html")]) == 0
    assert "reward/V" in (tmp_path / "report.html").read_text()


LETTER = re.compile(r"""["'][PA](?:/|(?::\s?)?["'])""")
ROW_TYPE = re.compile(r"isinstance\([^)]*(?:PolicyRow|EnvironmentRow)")
VOCABULARY = SOURCE / "model" / "tokenizer.py"
"""It lists the tokens of a vocabulary, not tasks."""


def test_only_tasks_tell_tasks_apart() -> None:
    assert LETTER.search('task == "P"') and LETTER.search('"A/exact"')
    assert LETTER.search("startswith('A: ')")
    assert ROW_TYPE.search("isinstance(row, PolicyRow)")
    files = [path for path in SOURCE.rglob("*.py") if path.parent.name != "tasks"]
    found = [
        f"{path.relative_to(SOURCE)}: {line.strip()}"
        for path in files
        for line in path.read_text(encoding="utf-8").splitlines()
        if ROW_TYPE.search(line) or (LETTER.search(line) and path != VOCABULARY)
    ]
    assert found == []
