"""Rows that memory does not hold: converted once, read when drawn, the same as in memory."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rookworld.cli.dispatch import main
from rookworld.cli.train import read_rows
from rookworld.data import row_cache, sources
from rookworld.data.documents import ExportSettings, export_rows
from rookworld.data.intake import Intake
from rookworld.data.row_cache import CachedRows, cached_rows, folder_of
from rookworld.data.rows import row_text, task_rows
from rookworld.data.sources import load_rows, read_source, training_rows, write_rows
from rookworld.data.splits import position_hash, positions_of, seen_positions
from rookworld.rollout.prompts import Prompts
from rookworld.runtime.errors import DataError
from rookworld.tasks.registry import TASKS, by_task
from rookworld.tasks.task import EnvironmentRow, PolicyRow, Row, Task
from tiny_training import tiny_tokenizer


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A cache of the test's own, small parts, and a threshold that everything passes."""
    monkeypatch.setenv(row_cache.CACHE, str(tmp_path / "cache"))
    monkeypatch.setattr(row_cache, "PART", 30)
    monkeypatch.setattr(sources, "IN_MEMORY", 0)


@pytest.fixture(scope="module")
def rows() -> list[Row]:
    found = load_rows("embedded:validation")
    policy = [row for row in found if isinstance(row, PolicyRow)]
    environment = [row for row in found if isinstance(row, EnvironmentRow)]
    mixed = [row for pair in zip(policy[:60], environment[:60], strict=True) for row in pair]
    return [*mixed, *policy[60:80]]


def quiet(done: int, total: int) -> None:
    """Progress that nobody watches."""


def written(rows: Sequence[Row], folder: Path, name: str) -> Path:
    """The rows as a file of the format that its name says."""
    path = folder / name
    if name.startswith("columns"):
        write_rows(path, rows)
    else:
        write_rows(folder / "all.jsonl", rows)
        settings = ExportSettings(sources=(str(folder / "all.jsonl"),), out=path, defects=False)
        export_rows(settings, lambda count: None)
    return path


@pytest.mark.parametrize(
    "name", ["columns.jsonl", "columns.parquet", "rows.txt", "rows.txt.xz", "rows.parquet"]
)
def test_rows_are_those_that_memory_would_hold(tmp_path: Path, rows: list[Row], name: str) -> None:
    if name == "columns.parquet":
        rows = [row for row in rows if isinstance(row, PolicyRow)]
    path = written(rows, tmp_path, name)
    expected = task_rows(load_rows(path))
    told: list[tuple[int, int]] = []
    found = training_rows([str(path)], lambda done, total: told.append((done, total)))
    assert isinstance(found, CachedRows)
    assert list(found) == expected and found[-1] == expected[-1] and found[3:7] == expected[3:7]
    assert by_task(found).keys() == TASKS.keys()
    for letter, same in by_task(expected).items():
        assert list(by_task(found)[letter]) == list(same)
    assert told[-1] == (len(rows), len(rows)) and len(told) == -(-len(rows) // 30) + 1
    with pytest.raises(IndexError):
        found[len(rows)]


def test_prompts_are_those_of_rows_in_memory(tmp_path: Path, rows: list[Row]) -> None:
    path = str(written(rows, tmp_path, "rows.txt"))
    tokenizer = tiny_tokenizer()
    cached, plain = (
        Prompts(found, tokenizer, 0.3, seed=5) for found in (training_rows([path]), load_rows(path))
    )
    assert [cached.take(50) for _ in range(3)] == [plain.take(50) for _ in range(3)]


def test_few_rows_stay_in_memory(
    tmp_path: Path, rows: list[Row], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sources, "IN_MEMORY", 10_000)
    path = written(rows, tmp_path, "rows.txt")
    assert training_rows([str(path)]) == load_rows(path)
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize("name", ["columns.jsonl", "rows.txt", "rows.txt.xz", "rows.parquet"])
def test_the_number_of_rows_is_known_roughly_without_reading_them(
    tmp_path: Path, rows: list[Row], name: str
) -> None:
    found = row_cache.estimated_rows(written(rows, tmp_path, name))
    assert len(rows) / 4 < found < 4 * len(rows)
    (tmp_path / "empty.txt").touch()
    assert row_cache.estimated_rows(tmp_path / "empty.txt") == 0


def test_a_killed_conversion_goes_on_where_it_stopped(tmp_path: Path, rows: list[Row]) -> None:
    path = written(rows, tmp_path, "rows.txt")

    class Killed(Exception):
        pass

    def kill(done: int, total: int) -> None:
        if done == 60:
            raise Killed

    with pytest.raises(Killed):
        cached_rows([path], kill)
    parts = sorted(folder_of(path).glob("part-*.arrow"))
    assert [part.name for part in parts] == ["part-00000.arrow", "part-00001.arrow"]
    before = [part.stat().st_mtime_ns for part in parts]
    parts[0].with_name(f".{parts[0].name}.1").touch()
    assert list(cached_rows([path], quiet)) == load_rows(path)
    assert [part.stat().st_mtime_ns for part in parts] == before
    with (folder_of(path) / "index.json").open() as index:
        counts = json.load(index)["counts"]
    assert counts == {"P": 80, "A": 60}

    def never(done: int, total: int) -> None:
        raise AssertionError("converted again")

    assert len(cached_rows([path], never)) == len(rows)


def test_a_file_that_changed_is_another_file(tmp_path: Path, rows: list[Row]) -> None:
    path = written(rows, tmp_path, "rows.txt")
    assert len(cached_rows([path], quiet)) == len(rows)
    path.write_text(row_text(rows[0]) + "\n")
    assert list(cached_rows([path], quiet)) == load_rows(path)


def test_faults_are_mended_counted_and_told(
    tmp_path: Path, rows: list[Row], caplog: pytest.LogCaptureFixture
) -> None:
    """Also of rows that look well until they are drawn."""
    settings = ExportSettings(
        sources=(str(written(rows, tmp_path, "columns.jsonl")),),
        out=tmp_path / "rows.txt",
        defects=True,
    )
    export_rows(settings, lambda count: None)
    lines = settings.out.read_text().splitlines()
    illegal = lines[2].replace("M: ", "M: a1a1 ", 1)
    lines[2:2] = ["P: nonsense", "hello", illegal, '{"fen": null}', "[1]"]
    settings.out.write_text("\n".join(lines) + "\n")
    with caplog.at_level(logging.WARNING):
        found = cached_rows([settings.out], quiet)
        drawn = list(found)
    expected = list(read_source(settings.out, intake := Intake()))
    assert len(intake.malformed) == 5 and len(found) == len(expected) + 1
    assert drawn == [*expected[:2], expected[2], *expected[2:]]  # the next stands for it
    assert "4 malformed rows left out" in caplog.text
    assert "malformed rows are passed over: row 3" in caplog.text
    assert caplog.text.count("P rows with Black to move") == 1
    aside = folder_of(settings.out) / "part-00000.malformed.jsonl"
    places = [json.loads(line)["place"] for line in aside.read_text().splitlines()]
    assert places == [f"{settings.out}, row {number}" for number in (3, 4, 6, 7)]


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.parquet"])
def test_columns_are_checked_when_they_are_drawn(
    tmp_path: Path, rows: list[Row], name: str, caplog: pytest.LogCaptureFixture
) -> None:
    policy = [row for row in rows if isinstance(row, PolicyRow)]
    broken = replace(policy[1], moves=("a1a1", *policy[1].moves[1:]))
    path = tmp_path / name
    write_rows(
        path, [policy[0], broken, replace(policy[2], fen="8/8/8/8/8/8/8/8 w - - 0 1"), policy[3]]
    )
    with caplog.at_level(logging.WARNING):
        drawn = list(training_rows([str(path)]))
    assert drawn == [policy[0], policy[3], policy[3], policy[3]]
    assert "row 2: illegal move 'a1a1'" in caplog.text
    if name.endswith("jsonl"):
        path.write_text('{"fen": null, "moves": ["a1a1"], "cp": [0]}\n' + "[" * 9999 + "\n")
        with pytest.raises(DataError, match="no rows in it"):
            training_rows([str(path)])


def test_nothing_but_malformed_rows_is_one_line(tmp_path: Path, rows: list[Row]) -> None:
    path = tmp_path / "rows.txt"
    path.write_text("hello\n" * 40)
    with pytest.raises(DataError, match="no rows in it"):
        cached_rows([path], quiet)
    path.write_text(row_text(rows[0]).replace("M: ", "M: a1a1 ", 1) + "\n")
    with pytest.raises(DataError, match="none of the rows could be read"):
        cached_rows([path], quiet)[0]


def test_mates_are_left_out(tmp_path: Path) -> None:
    found = training_rows(["embedded:mate", "embedded:validation"])
    assert list(found) == task_rows(load_rows("embedded:validation"))


def test_overlap_is_found_by_hash(tmp_path: Path, rows: list[Row]) -> None:
    found = training_rows([str(written(rows, tmp_path, "rows.txt"))])
    asked = [row.fen for row in (*rows[5:9], *load_rows("embedded:test")[:50])]
    plain = seen_positions(positions_of(rows, asked), asked)
    assert seen_positions(positions_of(found, asked), asked) == plain and plain[0] > 0
    assert position_hash(rows[0].fen) == position_hash(rows[0].fen.rsplit(" ", 2)[0] + " 9 9")
    assert isinstance(found, CachedRows) and found.positions_among([]) == []


SHARED = """
import sys
from pathlib import Path
from rookworld.data import row_cache
row_cache.PART = 30
print(len(row_cache.cached_rows([Path(sys.argv[1])], lambda done, total: None)))
"""


def test_processes_share_one_conversion(tmp_path: Path, rows: list[Row]) -> None:
    path = written(rows, tmp_path, "rows.txt")
    args = [sys.executable, "-c", SHARED, str(path)]
    begun = [subprocess.Popen(args, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    assert [one.communicate()[0].strip() for one in begun] == [str(len(rows))] * 2
    assert len(list(folder_of(path).glob("part-*.arrow"))) == 5


def test_a_task_without_a_fast_look_is_read_whole(rows: list[Row]) -> None:
    for task in TASKS.values():
        same: Any = by_task(rows)[task.letter][0]
        text = row_text(same)
        slow = Task.fen_in_text(task, text)
        assert task.fen_in_text(text) == slow == same.fen
        assert task.fen_in_text("hello") is None


def test_the_command_trains_on_them(
    tmp_path: Path, rows: list[Row], warm_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = written(rows, tmp_path, "rows.txt")
    assert isinstance(read_rows([str(path)]), CachedRows)
    flags = f"--model {warm_folder} --data {path} --device cpu --dry-run --held-out {path}"
    assert main(["train", *flags.split()]) == 0
    shown = capsys.readouterr()
    assert "rows: 80 P, 60 A" in shown.out
    assert "are also in the data" in shown.err
