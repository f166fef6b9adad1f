"""The JSON interface of `rookworld web`: positions, thoughts, the model's world, checkpoints."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path
from typing import Any

import chess
import pytest
from starlette.testclient import TestClient

from legal_engine import install_legal
from made_runs import made_run
from rookworld.cli.dispatch import main
from rookworld.tasks.environment import ENVIRONMENT, transition
from rookworld.web.assets import read_assets
from rookworld.web.engine import SecondOpinion
from rookworld.web.live import MOST_SAMPLES, run_record, samples
from rookworld.web.settings import WebSettings
from rookworld.web.subject import Subject, find_subject
from rookworld.web.thinking import Thinker
from web_desk import ANALYSIS, START, Says, Scripted, add_checkpoint, client

AFTER_E4 = ENVIRONMENT.answer(transition(START, "e2e4"), "compact")
MODEL = Subject("nano", "nano")


@pytest.fixture
def page() -> Iterator[TestClient]:
    with client(Scripted(MODEL, lambda name: Says(ANALYSIS, AFTER_E4))) as found:
        yield found


def asked(page: TestClient, what: str, status: int = 200, **fields: Any) -> dict[str, Any]:
    answer = page.post(f"/api/{what}", json=fields)
    assert answer.status_code == status, answer.text
    found: dict[str, Any] = answer.json()
    return found


# --- positions ---


@pytest.mark.parametrize("text", ["e4", "e2e4", " E2E4 "])
def test_a_move_is_read_as_people_type_it(page: TestClient, text: str) -> None:
    found = asked(page, "move", fen=START, move=text)
    assert (found["played"], found["san"], found["turn"]) == ("e2e4", "e4", "black")
    assert found["moves"]["g8f6"] == "Nf6"


@pytest.mark.parametrize("text", ["e5", "e2e5", "Ke2", "--", "0000", "e1g1", "hello", "<b>"])
def test_what_is_no_legal_move_is_refused(page: TestClient, text: str) -> None:
    said = asked(page, "move", fen=START, move=text)
    assert said == {"refused": f"{text!r} is not a legal move here"}


def test_a_move_that_could_be_two_says_so(page: TestClient) -> None:
    said = asked(page, "move", fen="3k4/8/8/8/8/8/1K6/R6R w - - 0 1", move="Rd1")["refused"]
    assert said == "'Rd1' could be several moves: say which piece"


def test_the_end_of_a_game_is_told(page: TestClient) -> None:
    mate = asked(page, "read", text="1. f3 e5 2. g4 Qh4#")["positions"][-1]
    assert (mate["over"], mate["result"], mate["moves"]) == ("checkmate", "0-1", {})


ODD = (
    '\ufeff%remark\r\n[Event "{x"]\r\n[Site "?"]\r\n\r\n'
    "1.e4! e5?! {two\n\nlines; so} 2. Nf3$1 (2. f4 exf4 ½-½) "
    "2... Nc6 ; to the end 9z\r\n3.Bb5 a6 $3 4. 0-0 ± Nf6 5.d2d4 exd4 ... 1/2-1/2\n\nthe rest"
)
"""What programs and people write, and one text more."""


def test_a_fen_and_a_pgn_are_loaded(page: TestClient) -> None:
    assert asked(page, "read", text=f" {START}\n")["positions"][0]["fen"] == START
    pgn = '[White "Ann"]\n[Black "Bob"]\n\n1. e4 {good} e5 (1... c5 2. Nf3) 2. Nf3 *\n'
    assert len(asked(page, "read", text=ODD)["positions"]) == 11
    found = asked(page, "read", text=pgn)
    assert found["title"] == "Ann – Bob"
    assert [one["san"] for one in found["positions"]] == ["", "e4", "e5", "Nf3"]
    fen = "4k3/8/8/8/8/8/4P3/4K3 w - - 0 1"
    study = asked(page, "read", text=f'[SetUp "1"]\n[FEN "{fen}"]\n\n1. e4 *')
    assert study["positions"][0]["fen"] == fen


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("hello", "neither a FEN nor a PGN"),
        ("1. e4 e5 2. Ke3", "illegal san"),
        ("1. e4 rubbish e5", "PGN that can be read: cannot read 'rubbish'"),
        ("1. e4 e5 {fine}\n2. Nf9 d6", "cannot read 'Nf9'"),
        ("8/8/8/8/8/8/8/8 w - - 0 1", "not a legal position"),
        ("rnbqkbnr/pppppppp/8/8/8/8/PPPPPPPP/RNBQKBNX w KQkq - 0 1", "not a FEN"),
        ('[FEN "8/8/8/8/8/8/8/8 w - - 0 1"]\n\n*', "not a legal position"),
        ("1. Nf3 Nf6 2. Ng1 Ng8 " * 400, "at most 1200"),
    ],
)
def test_what_cannot_be_loaded_says_why(
    page: TestClient, text: str, why: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert why in asked(page, "read", text=text)["refused"]
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"fen": 5},
        {"fen": "x"},
        {"fen": START + " " * 200},
        {"fen": START, "history": "e2e4"},
        {"fen": START, "history": ["e2e4"] * 11},
        {"fen": START, "history": ["A: x"]},
        {"fen": START, "checkpoint": "../../nano"},
        {"fen": START, "checkpoint": {"a": 1}},
        {"fen": START, "move": "  "},
    ],
)
def test_fields_that_are_not_right_are_refused(page: TestClient, fields: dict[str, Any]) -> None:
    assert asked(page, "move" if "move" in fields else "walk", 400, **fields)["error"]


# --- what the model says ---


def test_candidates_come_with_evaluations_and_legality(page: TestClient) -> None:
    found = asked(page, "think", fen=START)
    shown = [(one["san"], one["score"], one["legal"]) for one in found["candidates"]]
    assert shown == [("e4", "+0.40", True), ("e2e5", "+0.90", False), ("d4", "+0.30", True)]
    assert (found["move"], found["san"], found["note"]) == ("e2e4", "e4", "")
    assert found["after"] == asked(page, "move", fen=START, move="e4")


def test_an_unreadable_answer_still_plays_a_legal_move() -> None:
    with client(Scripted(MODEL, lambda name: Says("junk", "junk"))) as page:
        found = asked(page, "think", fen=START)
        assert found["candidates"] == []
        assert found["move"] in {move.uci() for move in chess.Board().legal_moves}
        assert found["note"]


def test_a_right_prediction_is_exact(page: TestClient) -> None:
    found = asked(page, "predict", fen=START, move="e2e4", history=[])
    assert (found["exact"], found["squares"], found["wrong"]) == (True, [], [])


def test_a_wrong_prediction_names_squares_and_fields(page: TestClient) -> None:
    found = asked(page, "predict", fen=START, move="d2d4", history=[])
    assert not found["exact"]
    assert found["squares"] == ["d4", "e4", "d2", "e2"]
    assert found["wrong"] == ["board"]
    assert found["rules"]["fen"].startswith("rnbqkbnr/pppppppp/8/8/3P4/")


def test_a_prediction_that_cannot_be_read_says_why() -> None:
    with client(Scripted(MODEL, lambda name: Says(ANALYSIS, "junk"))) as page:
        found = asked(page, "predict", fen=START, move="e2e4", history=[])
        assert found["fault"] == "1 fields where 4 belong"
        assert (found["exact"], found["squares"]) == (False, [])


def test_a_walk_goes_on_where_the_model_believes_and_ends_where_it_departs() -> None:
    thinker = Scripted(MODEL, lambda name: Says(ANALYSIS, AFTER_E4))
    with client(thinker) as page:
        first = asked(page, "walk", fen=START, history=[])
        assert (first["move"], first["end"], first["exact"]) == ("e2e4", "", True)
        asked(page, "walk", fen=first["said"]["fen"], history=["e2e4"])
        assert thinker.made["model"].asked[-1].startswith(f"A: {first['said']['fen']}+e2e4+")
        again = asked(page, "walk", fen=first["said"]["fen"], history=["e2e4"])
        assert again["end"].startswith("wrong_")


def test_a_walk_ends_without_a_move() -> None:
    with client(Scripted(MODEL, lambda name: Says("junk", AFTER_E4))) as page:
        assert asked(page, "walk", fen=START, history=[])["end"] == "no_move"


def test_stockfish_stands_beside_or_is_missed(page: TestClient, tmp_path: Path) -> None:
    assert asked(page, "compare", 400, fen=START)["error"] == "no engine is installed here"
    engine = SecondOpinion(install_legal(tmp_path), 100)
    with client(Scripted(MODEL, lambda name: Says(ANALYSIS, AFTER_E4)), engine) as other:
        first = asked(other, "compare", fen=START)
        assert len(first["candidates"]) == 5
        assert asked(other, "compare", fen=START) == first
    engine.close()


# --- checkpoints ---


def test_each_checkpoint_is_asked_once(tmp_path: Path, tiny_folder: Path) -> None:
    for name in ("step-000100", "step-000020", "final"):
        add_checkpoint(tmp_path, name, tiny_folder)
    thinker = Scripted(
        find_subject([str(tmp_path)]),
        lambda name: Says(f" e2e4 E: 0.{len(name)} B: e2e4", AFTER_E4),
    )
    with client(thinker) as page:
        for _ in range(2):
            found = asked(page, "think", fen=START, checkpoint="step-000020")
            assert found["candidates"][0]["score"] == "+0.11"
            assert asked(page, "think", fen=START)["checkpoint"] == "final"
        assert [len(one.asked) for one in thinker.made.values()] == [1, 1]
        said = asked(page, "think", 400, fen=START, checkpoint="step-000021")["error"]
        assert said.endswith("there are step-000020, step-000100, final")


def test_state_tells_what_the_page_is_about(tmp_path: Path, tiny_folder: Path) -> None:
    run = tmp_path / "walk"
    for name in ("step-000000", "step-000010"):
        add_checkpoint(run, name, tiny_folder)
    with client(Thinker(find_subject([str(run)]), WebSettings(device="cpu"))) as page:
        found = page.get("/api/state").json()
        assert (found["name"], found["run"], found["engine"]) == ("walk", True, None)
        assert [one["step"] for one in found["checkpoints"]] == [0, 10]
        assert found["parameters"] > 1000
        assert asked(page, "think", fen=START, checkpoint="step-000000")["move"]
        assert asked(page, "walk", fen=START)["checkpoint"] == "step-000010"


def test_a_run_without_a_checkpoint_says_so(tmp_path: Path) -> None:
    run = made_run(tmp_path / "young", steps=2)
    with client(Thinker(find_subject([str(run)]), WebSettings())) as page:
        assert page.get("/api/state").json()["parameters"] == 0
        assert "no checkpoint yet" in asked(page, "think", 503, fen=START)["error"]


def test_a_model_is_no_run(page: TestClient, tiny_folder: Path) -> None:
    assert find_subject([str(tiny_folder)]).run is None
    assert find_subject([]).model == "nano"
    assert page.get("/api/live").status_code == 404
    assert page.get("/api/nothing").status_code == 405
    assert page.post("/api/nothing", json={}).status_code == 404


# --- a live run ---


def test_a_run_is_shown_with_its_curves_and_sampled_answers(tmp_path: Path) -> None:
    run = made_run(tmp_path / "run", steps=12)
    found = run_record(run, find_subject([str(run)]))
    assert found["runs"][0]["x"] == list(range(1, 13))
    assert found["checkpoints"] == []
    assert [one["step"] for one in found["samples"]] == [12, 12, 1, 1]
    assert found["samples"][1]["reward"] == 1.0
    assert {one["task"] for one in found["samples"]} == {"P", "A"}


@pytest.mark.parametrize("odd", [None, 5, "x", [], [5], [{"reward": "x"}], {"fen": 5}])
@pytest.mark.parametrize("field", ["truth", "answers", "task"])
def test_odd_samples_are_left_out(tmp_path: Path, field: str, odd: object) -> None:
    from rookworld.report.run_reader import read_run

    record = read_run(made_run(tmp_path / "run", steps=1))
    for one in record.rollouts:
        one[field] = odd
    assert samples(record) == []
    assert len(samples(record)) <= MOST_SAMPLES


# --- the page's files, and the command ---


def test_whatever_the_page_names_is_served(page: TestClient) -> None:
    names = set(read_assets())
    index = page.get("/")
    assert index.headers["content-type"].startswith("text/html")
    wanted = set(re.findall(r'(?:src|href)="([\w.]+\.\w+)"', index.text))
    for name in sorted(names):
        answer = page.get(f"/{name}")
        assert answer.status_code == 200
        if name.endswith(".js") and "min" not in name:
            assert answer.headers["content-type"].startswith("text/javascript")
            wanted |= set(re.findall(r'from "\./([\w.]+)"', answer.text))
    assert {"main.js", "report.js", "chessground.min.js", "web.css"} <= wanted
    assert wanted <= names


def test_chessground_comes_with_its_licence() -> None:
    licence = files("rookworld").joinpath("assets", "web", "chessground.LICENSE").read_text()
    assert "GNU GENERAL PUBLIC LICENSE" in licence


def test_help_loads_neither_torch_nor_the_server() -> None:
    code = (
        "import sys\nfrom rookworld.cli.dispatch import main\n"
        "try:\n    main(['web', '--help'])\nexcept SystemExit as stop:\n    assert not stop.code\n"
        "assert not {'torch', 'starlette', 'uvicorn'} & set(sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "web [MODEL | RUN]" in done.stdout


@pytest.mark.parametrize("missing", ["starlette", "uvicorn"])
def test_a_missing_extra_is_one_line(missing: str) -> None:
    code = (
        f"import sys\nsys.modules[{missing!r}] = None\nfrom rookworld.cli.dispatch import main\n"
        "sys.exit(main(['web']))\n"
    )
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=False
    )
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "pip install 'rookworld[web]'" in done.stderr


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        (["--port", "70000"], "--port 70000: not in 0…65535"),
        (["no/such/model"], "no model folder no/such/model"),
        (["a", "b"], "one model or run at a time, not a b"),
        (["--engine", "no-such-engine"], "not an executable file"),
    ],
)
def test_mistakes_are_one_line(
    args: list[str], expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["web", *args]) == 2
    shown = capsys.readouterr()
    assert expected in shown.err
    assert shown.err.count("\n") == 1
