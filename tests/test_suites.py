"""`run_eval` on model folders and files: one number whatever the batch, one line for bad input."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import chess.pgn
import pytest
from rich.console import Console

from rookworld.data.rows import MateRow
from rookworld.data.sources import write_rows
from rookworld.evaluation.suites import EvalSettings, run_eval
from rookworld.evaluation.tables import render_table, render_tables
from rookworld.model.weights import save_model
from rookworld.runtime.errors import ConfigError, DataError, ModelError, RookworldError
from rookworld.tasks.environment import transition
from rookworld.tasks.task import PolicyRow, Row
from tiny import tiny_model

START = "rnbqkbnr/pppppppp/8/8/8/8/PPPPPPPP/RNBQKBNR w KQkq - 0 1"
AFTER_E4 = "rnbqkbnr/pppppppp/8/8/4P3/8/PPPP1PPP/RNBQKBNR b KQkq - 0 1"
MATE_FEN = "7k/5ppp/8/8/8/8/8/R3R1K1 w - - 1 2"
ROWS: list[Row] = [
    PolicyRow(START, ("e2e4", "d2d4", "g1f3", "c2c4", "b1c3"), (40, 30, 30, 20, 10)),
    PolicyRow(AFTER_E4, ("e7e5", "c7c5", "e7e6", "c7c6", "d7d5"), (-20, -20, -30, -40, -60)),
    transition(START, "e2e4"),
    transition(START, "e2e5"),
    transition(MATE_FEN, "a1a8"),
]
PUZZLE = f"1,6k1/5ppp/8/8/8/8/8/R3R1K1 b - - 0 1,g8h8 a1a8,700\n2,{START},e2e4 e7e5,1600\n"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two models, rows, mates and puzzles."""
    path = tmp_path_factory.mktemp("eval")
    for seed in (0, 1):
        model, tokenizer = tiny_model(seed)
        save_model(model, path / f"model{seed}", tokenizer=tokenizer)
    write_rows(path / "rows.jsonl", ROWS)
    write_rows(path / "mates.jsonl", [MateRow(MATE_FEN, ("a1a8", "e1e8"))])
    (path / "puzzles.csv").write_text(PUZZLE)
    return path


def settings(folder: Path, **changes: Any) -> EvalSettings:
    given = EvalSettings(
        data=str(folder / "rows.jsonl"),
        mates=str(folder / "mates.jsonl"),
        puzzles=folder / "puzzles.csv",
        device="cpu",
        games=2,
        max_plies=3,
    )
    return replace(given, **changes)


def test_default_suites_are_one_json_object(folder: Path) -> None:
    seen: list[tuple[str, int, int]] = []
    result = run_eval(
        [str(folder / "model0")], settings(folder), progress=lambda *one: seen.append(one)
    )
    found = json.loads(json.dumps(result.to_json()))
    assert found.pop("model") == str(folder / "model0")
    assert {"reward/greedy", "reward/sampled", "P/format", "A/exact", "mate1/accuracy"} <= set(
        found
    )
    assert all(set(one) == {"value", "n", "low", "high"} for one in found.values())
    assert (found["P/format"]["n"], found["A/exact"]["n"], found["mate1/accuracy"]["n"]) == (
        2,
        3,
        1,
    )
    assert found["A/baseline/truncated"]["value"] == pytest.approx(2 / 3)
    assert seen


def test_batch_size_and_order_change_no_number(folder: Path, tmp_path: Path) -> None:
    model = str(folder / "model0")
    given = settings(folder, suite=("policy", "arbiter", "mate", "passk"), samples=2)
    expected = run_eval([model], given).to_json()
    assert "passk/2" in expected
    write_rows(tmp_path / "rows.jsonl", ROWS[::-1])
    other = replace(given, batch_size=1, data=str(tmp_path / "rows.jsonl"))
    assert run_eval([model], other).to_json() == expected


def test_two_models_are_compared_in_pairs(folder: Path) -> None:
    models = [str(folder / "model0"), str(folder / "model1")]
    result = run_eval(models, settings(folder))
    found = json.loads(json.dumps(result.to_json()))
    assert [one["model"] for one in found["models"]] == models
    (compared,) = found["paired"]
    assert (compared["model"], compared["minus"]) == (models[1], models[0])
    assert set(compared["A/exact"]) == {"difference", "low", "high", "p", "n"}
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(render_table(result))
    text = console.export_text()
    for expected in ("P/format", "1.000", "[0.0, 65.8]", "[+0.0, +0.0]"):
        assert expected in text


def test_many_models_are_shown_two_at_a_time(folder: Path) -> None:
    """Side by side they would be cut to pieces."""
    models = [str(folder / f"model{which}") for which in (0, 1, 0, 1, 1)]
    tables = render_tables(run_eval(models, settings(folder)))
    assert len(tables) == 4
    console = Console(width=80, record=True, file=io.StringIO())
    for table in tables:
        console.print(table)
    text = console.export_text()
    assert text.count("[0.0, 65.8]") >= 4
    assert "…" not in text
    heads = [[str(column.header) for column in table.columns] for table in tables]
    assert [(head[1], head[2]) for head in heads] == [
        tuple("/".join(Path(model).parts[-2:]) for model in (models[0], other))
        for other in models[1:]
    ]
    pair = render_table(run_eval([models[0], models[3]], settings(folder)))
    shown = [[list(column.cells) for column in one.columns] for one in (tables[2], pair)]
    assert shown[0] == shown[1]


def test_a_model_against_itself_differs_nowhere(folder: Path) -> None:
    model = str(folder / "model0")
    (differences,) = run_eval([model, model], settings(folder)).differences
    assert differences and all(one.p == 1.0 and one.difference == 0 for one in differences.values())


def test_games_puzzles_and_worlds(folder: Path, tmp_path: Path) -> None:
    given = settings(
        folder,
        suite=("puzzles", "selfplay", "world", "match"),
        opponent=str(folder / "model1"),
        pgn=tmp_path / "games.pgn",
    )
    found = run_eval([str(folder / "model0")], given).to_json()
    names = "puzzles/solved puzzles/rating selfplay/legal_plies world/plies match/score match/elo"
    assert set(names.split()) <= set(found)
    assert found["puzzles/solved/0-999"]["n"] == found["puzzles/solved/1500-1999"]["n"] == 1
    assert "P/format" not in found
    with (tmp_path / "games.pgn").open() as file:
        events = [game.headers["Event"] for game in iter(lambda: chess.pgn.read_game(file), None)]
    assert [event.split()[0] for event in events] == ["selfplay"] * 2 + ["match"] * 2


def test_a_sampled_evaluation_does_not_call_itself_greedy(folder: Path) -> None:
    found = run_eval([str(folder / "model0")], settings(folder, temperature=1.0)).to_json()
    assert "reward/sampled" in found and "reward/greedy" not in found


@pytest.mark.engine
def test_live_stockfish_judges_instead_of_the_labels(folder: Path) -> None:
    given = settings(folder, suite=("policy",), judge="stockfish", nodes=200, sampled=False)
    assert run_eval([str(folder / "model0")], given).to_json()["P/win_loss"]["value"] > 0


@pytest.mark.parametrize(
    ("changes", "kind", "message"),
    [
        ({"data": "none.jsonl"}, DataError, "none.jsonl"),
        ({"mates": "none.csv"}, DataError, "no such file"),
        ({"suite": ("puzzles",), "puzzles": Path("none.csv")}, DataError, "no such file"),
        ({"device": "tpu"}, ConfigError, "tpu"),
    ],
)
def test_bad_input_is_one_line(
    folder: Path, changes: dict[str, Any], kind: type[RookworldError], message: str
) -> None:
    with pytest.raises(kind, match=message) as caught:
        run_eval([str(folder / "model0")], settings(folder, **changes))
    assert "\n" not in str(caught.value)


def test_files_of_the_wrong_kind_are_one_line(folder: Path, tmp_path: Path) -> None:
    model = [str(folder / "model0")]
    empty, games = tmp_path / "empty.jsonl", tmp_path / "games.csv"
    empty.write_text("")
    games.write_text('[Event "x"]\n\n1. e4 *\n')
    with pytest.raises(DataError, match="no rows"):
        run_eval(model, settings(folder, data=str(empty)))
    with pytest.raises(DataError, match="not a Lichess puzzle"):
        run_eval(model, settings(folder, mates=str(games)))
    with pytest.raises(DataError, match="no mate in one"):
        run_eval(model, settings(folder, mates=str(folder / "rows.jsonl")))
    with pytest.raises(DataError, match="no P row"):
        run_eval(model, settings(folder, data=str(folder / "mates.jsonl")))
    with pytest.raises(ModelError):
        run_eval([str(tmp_path)], settings(folder))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"n_policy": 0}, "n_policy is 0"),
        ({"games": 1}, "games is 1"),
        ({"skill": 21}, "skill is 21"),
        ({"suite": ()}, "suite is empty"),
        ({"suite": ("puzzles",)}, "needs --puzzles"),
        ({"max_plies": 0}, "max_plies is 0"),
    ],
)
def test_settings_speak_of_both_numbers(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        EvalSettings(**changes)
