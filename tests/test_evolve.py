"""Evolve: rows that are verified, rounds that are compared, a loop that goes on where it died."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import chess
import pytest

from rookworld.cli.dispatch import main
from rookworld.data.rows import record_row
from rookworld.data.sources import load_rows
from rookworld.evaluation.generator import Answer
from rookworld.evaluation.statistics import known, paired_difference
from rookworld.evolve import rounds
from rookworld.evolve.harvest import Recorder, harvest, replay
from rookworld.evolve.rounds import decide, evolve, rounds_of
from rookworld.evolve.settings import EvolveSettings
from rookworld.evolve.training import mixed, sources
from rookworld.runtime.atomic_files import write_json
from rookworld.runtime.config import resolved
from rookworld.runtime.errors import ConfigError, RookworldError
from rookworld.runtime.run_folder import read_lines
from rookworld.runtime.run_lock import locked
from rookworld.tasks.environment import ENVIRONMENT
from rookworld.tasks.notation import position_key
from rookworld.tasks.policy import POLICY
from rookworld.tasks.registry import task_of
from rookworld.tasks.reward import RewardRules
from rookworld.tasks.task import Analysis, PolicyRow, Style
from tiny_training import one_thread, save_warm, tiny_rows, weights_of, write_jsonl

pytestmark = pytest.mark.usefixtures("single_thread")

FOOLS_MATE = ("f2f3", "e7e5", "g2g4", "d8h4")


def analysis(fen: str, best: str, cp: int = 30) -> str:
    """A legal, complete analysis that evaluates `best` highest and names it last."""
    legal = sorted(move.uci() for move in chess.Board(fen).legal_moves)
    moves = [*[move for move in legal if move != best][:4], best]
    evals = [(cp - 10 * (4 - place)) / 100 for place in range(5)]
    return f"{' '.join(moves)} E: {' '.join(map(str, evals))} B: {best}"


def answers_of(moves: Sequence[str]) -> list[Answer]:
    """What a model that plays these moves says."""
    board, found = chess.Board(), []
    for move in moves:
        found.append(Answer(analysis(board.fen(), move)))
        board.push_uci(move)
    return found


def test_a_winners_analyses_and_every_move_become_rows() -> None:
    played = replay((), answers_of(FOOLS_MATE))
    assert played.winner is chess.BLACK
    rows = harvest([played])
    policy, environment = POLICY.select(rows), ENVIRONMENT.select(rows)
    assert [row.moves[0] for row in policy] == ["e7e5", "d8h4"]
    assert all(row.cp == (30, 20, 10, 0, -10) for row in policy)
    assert [row.kind for row in environment] == ["quiet", "quiet", "quiet", "mate"]
    assert environment[-1].history == FOOLS_MATE
    for row in rows:
        task = task_of(row)
        assert task.verify(row, task.answer(row, "padded"), RewardRules()).total == 1.0


def test_an_illegal_or_unreadable_move_loses_and_a_game_cut_short_has_no_winner() -> None:
    opening, rest = FOOLS_MATE[:1], answers_of(FOOLS_MATE)[1:]
    assert replay(opening, rest[:2]).winner is None
    assert replay(opening, [*rest[:2], Answer("what?")]).winner is chess.WHITE
    assert replay(opening, [*rest[:2], Answer(rest[2].text, finished=False)]).winner is chess.WHITE
    illegal = replay(opening, [Answer(rest[0].text.replace("e7e5", "e7e4"))])
    assert illegal.winner is chess.WHITE
    assert [row.kind for row in ENVIRONMENT.select(harvest([illegal]))] == ["illegal"]


@pytest.mark.parametrize(
    ("said", "instead"),
    [
        ("-0.1 ", "0.5 "),  # evaluated higher than the one that is chosen
        ("a7a5 ", "a7a4 "),  # illegal
        ("-0.1 ", "999.99 "),  # no mate in one
    ],
)
def test_an_analysis_with_a_fault_is_no_row(said: str, instead: str) -> None:
    answers = answers_of(FOOLS_MATE)
    assert said in answers[3].text
    twice = [*answers[:3], Answer(answers[3].text.replace(said, instead))]
    moves = [row.moves[0] for row in POLICY.select(harvest([replay((), twice)]))]
    assert moves == ["e7e5"]


def test_no_row_comes_twice_or_from_a_held_out_position() -> None:
    played = replay((), answers_of(FOOLS_MATE))
    rows = harvest([played, played])
    assert len(rows) == 6
    left_out = position_key(rows[0].fen)
    found = harvest([played, played], left_out={left_out})
    assert {position_key(row.fen) for row in rows} - {position_key(row.fen) for row in found} == {
        left_out
    }


def test_every_position_of_the_held_out_source_is_left_out(tmp_path: Path) -> None:
    source = str(write_jsonl(tmp_path / "held.jsonl", tiny_rows()))
    # a loop that goes on may be told to compare on more rows than its first rounds were
    few = EvolveSettings(held_out=source, eval_policy_rows=1, eval_environment_rows=1)
    found = rounds.tested_positions(few)
    assert {position_key(row.fen) for row in tiny_rows()} <= found
    assert {position_key(row.fen) for row in load_rows("embedded:test")} <= found


@pytest.mark.parametrize("name", ["model", "held_out"])
def test_a_loop_goes_on_with_what_it_began_with(tmp_path: Path, name: str) -> None:
    began = EvolveSettings(out=tmp_path / "loop")
    (began.out / "rounds").mkdir(parents=True)
    write_json(began.out / "config.json", resolved(began))
    other = began.but(resume=True, **{name: "embedded:mate"})
    with pytest.raises(ConfigError, match=f"--{name.replace('_', '-')} embedded:mate: the rounds"):
        rounds.begin(other, lambda line: None)
    assert json.loads((began.out / "config.json").read_text())[name] == getattr(began, name)
    rounds.begin(began.but(resume=True, rounds=9), lambda line: None)


class LegalJudge:
    """Thinks that the alphabet orders moves."""

    def analyse(self, row: PolicyRow) -> Analysis:
        legal = sorted(move.uci() for move in chess.Board(row.fen).legal_moves)[:5]
        return Analysis(tuple(legal), tuple(range(50, 50 - 10 * len(legal), -10)))

    def move_cp(self, row: PolicyRow, move: str) -> int | None:
        return None

    def prefetch(self, rows: Sequence[PolicyRow], *, every_move: bool = False) -> None:
        """Nothing to warm up."""


def test_a_judge_labels_the_winners_positions_anew() -> None:
    rows = POLICY.select(harvest([replay((), answers_of(FOOLS_MATE))], LegalJudge()))
    assert [row.moves[0] for row in rows] == ["a7a5", "a7a5"]
    assert {row.cp[0] for row in rows} == {50}


class Book:
    """Plays the fool's mate, whoever asks; says nothing of what moves do."""

    style: Style = "compact"
    samples = 1

    def answer(self, prompts: Sequence[str], salts: Sequence[int] = ()) -> list[Answer]:
        found = []
        for prompt in prompts:
            row = next(
                one
                for one in POLICY.select(harvest_all())
                if POLICY.prompt(one, "compact") == prompt
            )
            found.append(Answer(POLICY.answer(row, "compact")))
        return found


def harvest_all() -> list[Any]:
    """Rows of both sides of the fool's mate."""
    board, rows = chess.Board(), []
    for move in FOOLS_MATE:
        rows.append(PolicyRow(board.fen(), *moves_and_cp(board.fen(), move)))
        board.push_uci(move)
    return rows


def moves_and_cp(fen: str, move: str) -> tuple[tuple[str, ...], tuple[int, ...]]:
    said = POLICY.parse(analysis(fen, move))
    return said.moves[::-1], said.cp[::-1]


def test_games_are_recorded_by_their_number() -> None:
    recorder = Recorder(Book())
    settings = EvolveSettings(games=2, max_plies=10)
    found = rounds.play_games(recorder, [(), FOOLS_MATE[:2]], settings)
    assert [len(recorder.answers[number]) for number in (0, 1)] == [4, 2]
    assert found["selfplay/ends/checkmate"]["value"] == 1.0


@pytest.mark.parametrize(
    ("changes", "kept", "why"),
    [
        ([1.0] * 30 + [0.0] * 30, True, "better"),
        ([-1.0] * 30 + [0.0] * 30, False, "worse"),
        ([1.0] * 5 + [-1.0] * 4 + [0.0] * 30, False, "no clear"),
        ([0.0] * 60, False, "no clear"),
        ([math.nan] * 3, False, "nothing"),
    ],
)
def test_only_what_is_better_beyond_its_interval_is_kept(
    changes: list[float], kept: bool, why: str
) -> None:
    after = known(changes)
    found, said = decide(paired_difference(0 * after, after))
    assert (found, said.startswith(why)) == (kept, True)


def test_own_rows_have_their_share() -> None:
    own, others = tiny_rows(8, 0), tiny_rows(0, 12)
    assert len(mixed(own, others, 0.5)) == 16
    assert len(mixed(own, others, 0.8)) == 10
    assert mixed(own, others, 1.0) == own
    assert sources(EvolveSettings(share=0.25, data=("a", "b")), Path("r")) == (
        "r=0.25",
        "a=0.375",
        "b=0.375",
    )


@pytest.fixture(scope="module")
def taught(tiny_folder: Path) -> Path:
    """The tiny model, taught so long that it writes readable analyses anywhere."""
    folder = tiny_folder.with_name("taught")
    with one_thread():
        save_warm(folder, tiny_folder, steps=120)
    return folder


@pytest.fixture
def small(tmp_path: Path, taught: Path) -> dict[str, Any]:
    """Settings of rounds that take a second."""
    return small_settings(tmp_path, taught)


@pytest.fixture(scope="module")
def unstopped(tmp_path_factory: pytest.TempPathFactory, taught: Path) -> dict[str, Any]:
    """Such rounds, played without a stop."""
    with one_thread():
        settings = small_settings(tmp_path_factory.mktemp("unstopped"), taught)
        evolve(EvolveSettings.of(**settings))
    return settings


def small_settings(tmp_path: Path, taught: Path) -> dict[str, Any]:
    rows = write_jsonl(tmp_path / "rows.jsonl", tiny_rows())
    return {
        "model": str(taught),
        "play_temperature": 0.0,
        "out": tmp_path / "out",
        "rounds": 2,
        "games": 2,
        "max_plies": 6,
        "data": (str(rows),),
        "steps": 2,
        "batch_size": 4,
        "held_out": str(rows),
        "device": "cpu",
    }


def test_a_worse_model_is_refused_and_the_one_before_goes_on(small: dict[str, Any]) -> None:
    lines: list[str] = []
    found = evolve(EvolveSettings.of(**small, lr=1.0), lines.append)
    assert [one["kept"] for one in found] == [False, False]
    assert all(one["why"] == "worse beyond the interval" for one in found)
    assert all(one["model"] == one["before_model"] == small["model"] for one in found)
    assert found[0]["after"]["value"] < found[0]["before"]["value"]
    assert "refused" in lines[-1]
    held = {position_key(row.fen) for row in tiny_rows()}
    for number in (1, 2):
        own = read_lines(small["out"] / f"rounds/round-00{number}/rows.jsonl")
        assert held.isdisjoint(position_key(record_row(one).fen) for one in own)


def test_a_better_model_is_kept_and_plays_the_next_round(
    small: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # what it was taught as the best moves are the worst ones here
    turned = [
        PolicyRow(row.fen, row.moves[::-1], (300, 150, 0, -150, -300))
        for row in POLICY.select(tiny_rows())
    ]
    source = str(write_jsonl(tmp_path / "turned.jsonl", turned))
    changes = {"data": (source,), "held_out": source, "steps": 40, "batch_size": 8}
    wanted = EvolveSettings.of(**small | changes, eval_environment_rows=0, lr=1e-2, share=0.1)
    found = evolve(wanted)
    assert found[0]["kept"]
    assert found[0]["paired"]["reward/greedy"]["low"] > 0
    assert found[1]["before_model"] == found[0]["model"]
    assert found[1]["before"] == found[0]["after"]
    assert main(["analyze", str(small["out"])]) == 0
    shown = capsys.readouterr().out
    assert "out: rounds" in shown
    assert "kept" in shown
    assert "round-002" in shown
    assert main(["analyze", str(small["out"]), "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["rounds"]) == 2


@pytest.mark.parametrize("part", ["play", "train_round", "evaluation_of", "told"])
def test_a_loop_that_was_killed_goes_on_with_the_same_rounds(
    part: str,
    small: dict[str, Any],
    unstopped: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    settings = EvolveSettings.of(**small)
    real, calls = getattr(rounds, part), []

    def killed(*args: Any) -> Any:
        found = real(*args)
        calls.append(part)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return found

    monkeypatch.setattr(rounds, part, killed)
    with pytest.raises(KeyboardInterrupt):
        evolve(settings)
    found = evolve(settings.but(resume=True))
    assert untold(found, settings.out) == untold(rounds_of(unstopped["out"]), unstopped["out"])
    for number in (1, 2):
        final = f"rounds/round-00{number}/final"
        assert weights_of(settings.out / final) == weights_of(unstopped["out"] / final)


def untold(records: list[dict[str, Any]], out: Path) -> Any:
    """Rounds without the name of their folder."""
    return json.loads(json.dumps(records).replace(str(out), "OUT"))


def test_more_rounds_may_be_asked_for_later(small: dict[str, Any]) -> None:
    first = evolve(EvolveSettings.of(**small | {"rounds": 1}))
    assert main(["evolve", "--out", str(small["out"]), "--resume", "--rounds", "2"]) == 0
    assert rounds_of(small["out"])[:1] == first
    assert len(rounds_of(small["out"])) == 2


def test_what_is_there_is_not_deleted_unasked(
    small: dict[str, Any], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    out = small["out"]
    (out / "rounds").mkdir(parents=True)
    with pytest.raises(ConfigError, match="move them"):
        evolve(EvolveSettings.of(**small, overwrite=True))
    assert (out / "rounds").exists()
    write_json(out / "config.json", resolved(EvolveSettings.of(**small)))
    with pytest.raises(ConfigError, match="--resume goes on"):
        evolve(EvolveSettings.of(**small))
    with (
        locked(out / ".lock", "evolving"),
        pytest.raises(RookworldError, match="is evolving here"),
    ):
        evolve(EvolveSettings.of(**small, resume=True))
    other = tmp_path / "other"
    other.mkdir()
    (other / "config.json").write_text('{"steps": 3, "k_samples": 2}')
    with pytest.raises(ConfigError, match="another command's run"):
        evolve(EvolveSettings.of(**small | {"out": other}))
    assert main(["evolve", "--select-by", "P/eval_mae"]) == 2
    assert "less of it is better" in capsys.readouterr().err
    with pytest.raises(ConfigError, match="not measured on the held-out rows"):
        evolve(EvolveSettings.of(**small, overwrite=True, select_by="match/score"))


def test_a_dry_run_says_what_would_be_done(
    small: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    flags = [f"--{name.replace('_', '-')}" for name in ("model", "data", "held_out")]
    values = [small["model"], small["data"][0], small["held_out"]]
    given = [word for pair in zip(flags, values, strict=True) for word in pair]
    assert main(["evolve", *given, "--out", str(small["out"]), "--world", "--dry-run"]) == 0
    shown = capsys.readouterr().out
    for text in ("2 layers", "0 of 3 done", "its own world", "12 others", "12 held-out rows"):
        assert text in shown
    assert not small["out"].exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    "flags",
    [
        "",
        "--world",
        "--method grpo",
        pytest.param("--judge stockfish --nodes 500", marks=pytest.mark.engine),
        pytest.param("--judge stockfish --nodes 500 --method grpo", marks=pytest.mark.engine),
    ],
)
def test_a_small_loop_from_end_to_end(
    flags: str, small: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    """By the command, killed by the kernel in its first training, and gone on with."""
    command = ["evolve", "--out", str(small["out"]), "--model", small["model"]]
    command += ["--data", small["data"][0], "--held-out", small["held_out"], *flags.split()]
    command += [
        "--rounds",
        "2",
        "--games",
        "4",
        "--max-plies",
        "20",
        "--steps",
        "30",
        "--batch-size",
        "4",
    ]
    command += ["--save-every", "2", "--device", "cpu", "--lr", "1e-4"]
    start = f"import sys; from rookworld.cli.dispatch import main; sys.exit(main({command!r}))"
    process = subprocess.Popen([sys.executable, "-c", start], stderr=subprocess.DEVNULL)
    saved = small["out"] / "rounds/round-001/checkpoints"
    deadline = time.monotonic() + 300
    while not list(saved.glob("step-0000[1-9]*")) and time.monotonic() < deadline:
        assert process.poll() is None
        time.sleep(0.02)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    assert main([*command, "--resume"]) == 0
    shown = capsys.readouterr()
    assert "resumed after step" in shown.err
    assert "model: " in shown.out
    assert [one["round"] for one in rounds_of(small["out"])] == [1, 2]
    assert all("paired" in one for one in rounds_of(small["out"]))
    assert main(["report", str(small["out"])]) == 0
