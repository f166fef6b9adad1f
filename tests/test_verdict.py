"""The sentence that says what a training changed, and the paired differences behind it."""

from __future__ import annotations

import io
import json
from pathlib import Path

import numpy as np
from rich.console import Console

from made_runs import evaluation, made_run
from rookworld.cli.runs import story
from rookworld.evaluation.evaluate import Evaluation
from rookworld.report.analysis import analyze
from rookworld.report.page_data import page_data
from rookworld.report.run_reader import read_run
from rookworld.report.tables import changes_table
from rookworld.report.verdict import match_sentence, verdict_of
from rookworld.rl.before_after import keep_difference
from rookworld.rl.settings import TrainSettings
from rookworld.runtime.atomic_files import write_json
from rookworld.runtime.run_folder import MATCH, PAIRED, Run, read_json


def difference(value: float, half: float) -> dict[str, float]:
    return {"difference": value, "low": value - half, "high": value + half, "p": 0.01, "n": 400}


CHANGED = {
    "reward/greedy": difference(0.1, 0.02),
    "P/best": difference(0.01, 0.02),
    "P/win_loss": difference(-0.06, 0.01),
    "A/by_kind/castle": difference(-0.2, 0.05),
}


def with_differences(folder: Path, after: int = 40) -> Path:
    made_run(folder)
    write_json(folder / PAIRED, {"before": 0, "after": after, "metrics": CHANGED})
    return folder


def test_the_sentence_by_hand() -> None:
    before, after = evaluation(0.0), evaluation(1.0)
    before["A/by_kind/castle"], after["A/by_kind/castle"] = {"value": 0.9}, {"value": 0.7}
    assert verdict_of(before, after, CHANGED) == (
        "Better: win probability lost a move 10 → 4 % [−7, −5], "
        "reward of greedy answers 0.500 → 0.600 [+0.080, +0.120]. "
        "Worse: exact transitions, castle 90 → 70 % [−25, −15]. "
        "Not measurably changed: best moves."
    )
    assert verdict_of(before, after, {}) == ""


MATCHED = {
    "model": "after",
    "match/score": {"value": 0.75, "n": 40, "low": 0.6, "high": 0.85},
    "match/elo": {"value": 190.8, "n": 40, "low": -70.4, "high": 301.3},
}


def test_games_against_the_model_before_are_told(tmp_path: Path) -> None:
    sentence = (
        "In 40 games against the model before: 75 % of the points [60, 85], +191 Elo [−70, +301]."
    )
    assert match_sentence(MATCHED) == sentence
    strict = MATCHED | {"match/ends/illegal": {"value": 0.8}, "match/forfeits": {"value": 0.1}}
    assert match_sentence(strict) == sentence[:-1] + ", 70 % of them by its illegal moves."
    assert match_sentence({}) == match_sentence({"match/score": 3, "match/elo": {}}) == ""
    assert match_sentence({"match/score": {}, "match/elo": {}}) == ""
    folder = with_differences(tmp_path / "run")
    assert analyze(read_run(folder)).match == ""
    write_json(folder / MATCH, MATCHED)
    assert page_data([folder])["runs"][0]["match"] == sentence
    assert story([folder])[-1] == sentence and len(story([folder])) == 2
    (folder / MATCH).write_text("[")
    assert analyze(read_run(folder)).match == ""


def test_differences_of_other_evaluations_are_not_told(tmp_path: Path) -> None:
    assert read_run(with_differences(tmp_path / "a")).paired == CHANGED
    assert read_run(with_differences(tmp_path / "b", after=30)).paired == {}
    folder = with_differences(tmp_path / "c")
    (folder / PAIRED).write_text('{"before": 0, "aft')
    run = read_run(folder)
    assert run.paired == {}
    assert any(PAIRED in note for note in run.notes)


def test_readers_tell_the_paired_difference(tmp_path: Path) -> None:
    folder = with_differences(tmp_path / "run")
    found = analyze(read_run(folder))
    console = Console(width=110, file=io.StringIO())
    with console.capture() as captured:
        console.print(changes_table(found))
    shown = captured.get()
    assert "−6.0 [−7.0, −5.0] *" in shown
    assert "+1.0 [−1.0, +3.0]  " in shown
    run = page_data([folder])["runs"][0]
    assert run["verdict"] == found.verdict
    assert {row["name"]: row["change"]["clear"] for row in run["held_out"]} == {
        "reward/greedy": True,
        "reward/sampled": True,
        "P/best": False,
        "P/win_loss": True,
        "A/by_kind/castle": True,
    }


def test_a_run_keeps_what_changed_row_by_row(tmp_path: Path) -> None:
    run, settings = Run(tmp_path / "run"), TrainSettings()
    rng = np.random.default_rng(0)
    hard = rng.random(400)  # most of the spread is between rows, not within
    first = Evaluation.of({"P/win_loss": hard, "mate1/accuracy": np.ones(9)})
    last = Evaluation.of({"P/win_loss": hard - 0.01 * rng.random(400), "P/best": np.ones(9)})
    keep_difference(run, 0, first, settings)
    keep_difference(run, 5, last, settings)
    kept = read_json(run.folder / PAIRED)
    assert (kept["before"], kept["after"], list(kept["metrics"])) == (0, 5, ["P/win_loss"])
    assert -0.006 < kept["metrics"]["P/win_loss"]["low"] < -0.005 + 0.001
    # other rules, other numbers: nothing is compared
    keep_difference(run, 6, last, TrainSettings.of(p_malformed=-0.5))
    assert not (run.folder / PAIRED).exists()
    assert json.dumps(kept)
