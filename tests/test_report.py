"""The page: what is in it, what cannot get into it, and that a real browser draws it."""

from __future__ import annotations

import http.client
import json
import re
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from made_runs import ANALYSIS, JUNK, made_evolution, made_run, step_metrics
from rookworld.report import gallery
from rookworld.report.page import (
    ReportSettings,
    fingerprint,
    folders_of,
    page,
    serving,
    write_report,
)
from rookworld.report.page_data import all_panels, page_data, thin
from rookworld.report.run_reader import read_run
from rookworld.runtime.atomic_files import write_json
from rookworld.runtime.errors import RookworldError
from rookworld.runtime.run_folder import read_lines

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser"))), None)
SCREENSHOTS = Path(__file__).parent.parent / "test-output"
MOST_BYTES = 6_000_000


def data_in(text: str) -> dict[str, object]:
    found = re.search(r'<script id="data" type="application/json">(.*?)</script>', text, re.DOTALL)
    assert found is not None
    value: dict[str, object] = json.loads(found[1])
    return value


def test_the_file_needs_nothing_else(tmp_path: Path) -> None:
    target = write_report(ReportSettings(runs=(made_run(tmp_path / "run"),)))
    text = target.read_text()
    assert target == tmp_path / "run" / "report.html"
    assert len(text) < MOST_BYTES
    assert "{{" not in text.replace("{{data}}", "", 6)
    links = re.findall(r"""(?:src|href|url)\s*[=(]\s*["']?(https?:[^"')\s]*)""", text)
    assert links == []


def test_text_of_a_model_is_never_markup(tmp_path: Path) -> None:
    folder = made_run(tmp_path / "<b>run")
    text = page(page_data([folder]))
    assert "<script>alert" not in text
    assert "<b>run" not in text
    cards = data_in(text)["runs"][0]["gallery"]  # type: ignore[index]
    assert JUNK in {answer["text"] for card in cards for answer in card["answers"]}


def test_every_logged_metric_is_in_a_panel(tmp_path: Path) -> None:
    data = page_data([made_run(tmp_path / "run")])
    shown = {name for panel in data["panels"] for name in panel["metrics"]}
    assert shown == set(step_metrics(1, 0.0)) - {"step"}
    assert data["panels"][-1]["title"] == "novel"


def test_every_metric_of_a_panel_is_explained() -> None:
    text = (Path(__file__).parent.parent / "docs" / "metrics.md").read_text()
    named = {name for panel in all_panels() for name in panel.metrics}
    assert [name for name in sorted(named) if f"`{name}`" not in text] == []


def test_limits_come_from_the_runs_own_settings(tmp_path: Path) -> None:
    run = page_data([made_run(tmp_path / "run")])["runs"][0]
    assert run["limits"]["KL to the reference"] == [["guard acts", 0.9], ["guard warns", 0.8]]


def test_before_and_after_marks_only_clear_changes(tmp_path: Path) -> None:
    rows = page_data([made_run(tmp_path / "run")])["runs"][0]["held_out"]
    assert {row["name"]: row["change"]["clear"] for row in rows} == {
        "reward/greedy": True,
        "reward/sampled": True,
        "P/best": False,
        "P/win_loss": True,
        "A/by_kind/castle": False,
    }


def test_settings_that_differ(tmp_path: Path) -> None:
    one, two = made_run(tmp_path / "one"), made_run(tmp_path / "two", lr=1e-5)
    data = page_data([one, two])
    assert data["diff"] == [{"key": "lr", "values": [2e-5, 1e-5]}]
    changed = {row["key"]: row["value"] for row in data["runs"][1]["changed"]}
    assert changed == {"steps": 40, "lr": 1e-5}


def test_long_series_are_means_of_neighbours(tmp_path: Path) -> None:
    import numpy as np

    steps = np.arange(1, 2501, dtype=np.float64)
    kept, series = thin(steps, {"x": steps, "gone": np.full(2500, np.nan)})
    assert kept[:2] == [1, 4]
    assert series["x"][:2] == [2.0, 5.0]
    assert list(series) == ["x"]


def test_an_empty_run_beside_a_whole_one(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    old = made_run(tmp_path / "old")
    write_json(old / "origin.json", {"version": "0.0.1"})
    data = page_data([tmp_path / "empty", old])
    assert [len(run["notes"]) for run in data["runs"]] == [1, 1]
    page(data)


def test_nothing_to_show_is_the_users_to_know(tmp_path: Path) -> None:
    with pytest.raises(RookworldError, match="no run folder given"):
        write_report(ReportSettings())


# --- positions ---


def test_an_analysis_becomes_arrows(tmp_path: Path) -> None:
    card = gallery.card(read_run(made_run(tmp_path / "run")).rollouts[0])
    assert card is not None
    good, illegal, junk = card["answers"]
    assert good["arrows"].count("<line") == 5
    assert good["lines"][0] == {
        "move": "e4",
        "legal": True,
        "score": "+0.40",
        "known": True,
        "chosen": True,
    }
    assert gallery.WRONG in illegal["arrows"]
    assert not illegal["lines"][0]["legal"]
    assert junk["arrows"] == ""
    assert card["truth"]["arrows"].count(gallery.ENGINE) == 10


def test_a_film_shows_a_row_as_training_went_on(tmp_path: Path) -> None:
    analysis, move = gallery.films(read_run(made_run(tmp_path / "run")).probes)
    assert [one["step"] for one in analysis["answers"]] == [0, 20, 40]
    assert [one["lines"][0]["legal"] for one in analysis["answers"]] == [False, True, True]
    assert [one["board"] for one in move["answers"]] == [1, 0, 0]


def test_a_transition_becomes_a_board_with_its_wrong_squares(tmp_path: Path) -> None:
    card = gallery.card(read_run(made_run(tmp_path / "run")).rollouts[1])
    assert card is not None
    assert card["caption"] == "after e4 (quiet)"
    assert sorted((one["board"] is None, one["board"] or 0) for one in card["answers"]) == [
        (False, 0),
        (False, 1),
        (True, 0),
    ]
    assert card["boards"][1].count(gallery.WRONG) == 2
    assert "<defs" not in card["boards"][0]


def test_a_record_that_cannot_be_drawn_is_left_out() -> None:
    assert gallery.card({"step": 1, "task": "P", "truth": {"fen": "no position"}}) is None
    assert gallery.card({"step": 1, "task": "P"}) is None
    empty = gallery.card({"step": 1, "task": "P", "truth": {"fen": ANALYSIS.fen}})
    assert empty is not None
    assert empty["answers"] == []


@pytest.mark.parametrize(
    ("cp", "text"), [(40, "+0.40"), (-130, "−1.30"), (99_997, "#3"), (-99_999, "−#1"), (0, "+0.00")]
)
def test_scores_as_players_write_them(cp: int, text: str) -> None:
    assert gallery.score_text(cp) == text


# --- following ---


@contextmanager
def served(*runs: Path) -> Iterator[http.client.HTTPConnection]:
    with serving(ReportSettings(runs=runs, watch=True, port=0)) as (address, serve):
        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        port = int(address.rstrip("/").rsplit(":", 1)[1])
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
        try:
            yield connection
        finally:
            connection.close()
            serve.__self__.shutdown()  # type: ignore[attr-defined]
            thread.join()


def asked(
    connection: http.client.HTTPConnection, path: str, **headers: str
) -> tuple[int, str, str]:
    connection.request("GET", path, headers={k.replace("_", "-"): v for k, v in headers.items()})
    answer = connection.getresponse()
    return answer.status, answer.getheader("ETag") or "", answer.read().decode()


def test_watching_sees_a_run_grow(tmp_path: Path) -> None:
    folder = made_run(tmp_path / "run", done=False)
    with served(folder) as connection:
        assert asked(connection, "/")[0] == 200
        status, tag, body = asked(connection, "/data")
        assert status == 200
        assert len(json.loads(body)["runs"][0]["x"]) == 40
        assert asked(connection, "/data", If_None_Match=tag)[0] == 304
        with (folder / "metrics.jsonl").open("a") as file:
            file.write(json.dumps(step_metrics(41, 1.0)) + "\n")
        status, _, body = asked(connection, "/data", If_None_Match=tag)
        assert status == 200
        assert len(json.loads(body)["runs"][0]["x"]) == 41


def test_watching_serves_its_own_machine_and_two_paths(tmp_path: Path) -> None:
    with served(made_run(tmp_path / "run")) as connection:
        assert asked(connection, "/data", Host="evil.example")[0] == 403
        assert asked(connection, "/../config.json")[0] == 404


def request_of(connection: http.client.HTTPConnection, path: str) -> socket.socket:
    """A connection of its own on which `path` is asked for, or nothing if it is empty."""
    asking = socket.create_connection((connection.host, connection.port), timeout=20)
    if path:
        asking.sendall(f"GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
    return asking


def test_two_hundred_requests_at_once_are_all_answered(tmp_path: Path) -> None:
    with served(made_run(tmp_path / "run")) as connection:
        asking = [request_of(connection, "/data") for _ in range(200)]
        answers = [one.recv(12) for one in asking]
        assert answers == [b"HTTP/1.1 200"] * 200
        for one in asking:
            one.close()


def test_idle_connections_are_closed_and_hold_nobody_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rookworld.report.page.IDLE_S", 1.0)
    with served(made_run(tmp_path / "run")) as connection:
        assert asked(connection, "/data")[0] == 200
        idle = [request_of(connection, "") for _ in range(200)]
        assert asked(connection, "/")[0] == 200
        began = time.monotonic()
        assert [one.recv(1) for one in idle] == [b""] * 200
        assert time.monotonic() - began < 10
        body = request_of(connection, "")
        head = b"GET /data HTTP/1.1\r\nHost: localhost\r\nContent-Length: 10000000\r\n\r\n"
        body.sendall(head)
        assert body.recv(12) == b"HTTP/1.1 200"
        for one in (*idle, body):
            one.close()


def test_more_connections_than_the_server_takes_are_turned_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rookworld.report.page.MOST_CONNECTIONS", 3)
    with served(made_run(tmp_path / "run")) as connection:
        idle = [request_of(connection, "") for _ in range(3)]
        time.sleep(0.3)
        turned_away = request_of(connection, "")
        assert turned_away.recv(1) == b""
        for one in (*idle, turned_away):
            one.close()


def test_a_taken_port_is_one_line(tmp_path: Path) -> None:
    folder = made_run(tmp_path / "run")
    with serving(ReportSettings(runs=(folder,), port=0)) as (address, _):
        port = int(address.rstrip("/").rsplit(":", 1)[1])
        with (
            pytest.raises(RookworldError, match=f"--port {port}"),
            serving(ReportSettings(runs=(folder,), port=port)),
        ):
            pass


# --- a real browser ---


def browse(file: Path, profile: Path, *flags: str) -> tuple[str, list[str]]:
    """Open a page in Chromium; what it printed and the lines of its console."""
    assert CHROMIUM is not None
    command = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
    command += [f"--user-data-dir={profile}", "--enable-logging=stderr"]
    command += ["--virtual-time-budget=3000", *flags, file.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    return done.stdout, [line for line in done.stderr.splitlines() if "CONSOLE" in line]


def made_sweep(folder: Path) -> Path:
    """A sweep of three trials, one of which failed, with the run of the best."""
    trials = [
        {
            "number": number,
            "params": {"lr": lr, "batch_size,k_samples": [1, 2]},
            "state": "done" if value is not None else "failed",
            "value": value,
            "cause": None if value is not None else "diverged_kl",
            "folder": f"trials/{number:04d}",
        }
        for number, (lr, value) in enumerate(((1e-5, 0.5), (2e-5, 0.6), (1e-3, None)))
    ]
    made_run(folder / "trials" / "0001")
    write_json(
        folder / "sweep.json",
        {"name": "small", "metric": "reward/sampled", "planned": 4, "trials": trials},
    )
    return folder


def test_a_sweep_shows_its_best_runs(tmp_path: Path) -> None:
    data = page_data([made_sweep(tmp_path / "sweep")])
    assert data["sweep"]["survival"] == pytest.approx(2 / 3)
    assert data["sweep"]["causes"] == {"diverged_kl": 1}
    assert [run["name"] for run in data["runs"]] == ["0001"]


@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")
def test_a_browser_draws_a_sweep(tmp_path: Path) -> None:
    target = write_report(ReportSettings(runs=(made_sweep(tmp_path / "sweep"),)))
    document, console = browse(target, tmp_path / "profile", "--dump-dom")
    assert console == []
    assert document.count("<path d=") >= 3
    assert "What mattered" in document


@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")
def test_a_browser_draws_a_run_that_is_empty_or_foreign(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    old = made_run(tmp_path / "old", steps=1)
    (old / "metrics.jsonl").write_text('{"step": 1, "mean_reward": 0.5}\n{"step": 2, "mean_r')
    for name in ("config.json", "origin.json", "rollouts.jsonl"):
        (old / name).unlink()
    target = tmp_path / "report.html"
    write_report(ReportSettings(runs=(tmp_path / "empty", old), out=target))
    document, console = browse(target, tmp_path / "profile", "--dump-dom")
    assert console == []
    assert "nothing has been logged yet" in document
    assert "1 of 2 lines cut off" in document
    assert "mean_reward" in document


@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")
def test_a_browser_draws_curves_and_boards(tmp_path: Path) -> None:
    one, two = made_run(tmp_path / "one"), made_run(tmp_path / "two", lr=1e-5)
    target = tmp_path / "report.html"
    write_report(ReportSettings(runs=(one, two), out=target))
    document, console = browse(target, tmp_path / "profile", "--dump-dom")
    assert console == []
    panels = len(page_data([one, two])["panels"])
    assert document.count("<canvas") == panels + 1
    assert document.count('<div class="board"><svg') >= 4
    assert "After step 40" in document
    assert document.count('class="arrow"') >= 20
    SCREENSHOTS.mkdir(exist_ok=True)
    for name, flags in (("light", ()), ("dark", ("--blink-settings=preferredColorScheme=0",))):
        picture = SCREENSHOTS / f"report-{name}.png"
        picture.unlink(missing_ok=True)
        shot = ("--window-size=1280,3600", f"--screenshot={picture}", *flags)
        assert browse(target, tmp_path / "profile", *shot)[1] == []
        assert picture.stat().st_size > 50_000


@pytest.mark.parametrize("odd", [5, "x", None, {"a": 5}, ["x"], [None], 1e300, 10**400])
@pytest.mark.parametrize("place", ["step", "truth", "truth moves", "truth cp", "answers"])
def test_odd_rollouts_are_left_out_of_the_page(tmp_path: Path, place: str, odd: object) -> None:
    run = made_run(tmp_path / "run", steps=2)
    records = list(read_lines(run / "rollouts.jsonl"))
    *outer, last = place.split()
    for record in records[:2]:
        (record[outer[0]] if outer else record)[last] = odd
    lines = (json.dumps(record) for record in records)
    (run / "rollouts.jsonl").write_text("\n".join(lines) + "\n")
    assert page(page_data([run]))


# --- an evolution ---


def test_an_evolution_shows_what_became_of_its_rounds(tmp_path: Path) -> None:
    folder = made_evolution(tmp_path / "loop")
    data = page_data(folders_of([folder]))
    (found,) = data["evolutions"]
    assert (found["name"], found["planned"]) == ("loop", 6)
    assert [one["kept"] for one in found["rounds"]] == [True, False, False, False]
    assert [one["from"] for one in found["rounds"]] == [None, 1, 1, 1]
    first, *_, last = found["rounds"]
    assert first["change"] == {"difference": 0.08, "low": 0.03, "high": 0.13}
    assert (first["games"], first["won"], first["rows"]["policy"]) == (8, 3, 34)
    assert (last["change"], last["after"], last["rows"]) == (None, None, {})
    assert last["why"] == "no game gave a row to learn from"
    assert data["metrics"]["reward/greedy"]["label"] != "reward/greedy"
    assert [run["name"] for run in data["runs"]] == ["round-001", "round-002", "round-003"]
    assert "<title>loop · " in page(data)


def test_an_evolution_is_one_before_its_first_round_is_over(tmp_path: Path) -> None:
    folder = made_evolution(tmp_path / "loop")
    before = fingerprint(folders_of([folder]))
    (folder / "rounds.jsonl").unlink()
    assert fingerprint(folders_of([folder])) != before
    data = page_data(folders_of([folder]))
    assert data["evolutions"] == [{"name": "loop", "planned": 6, "rounds": []}]
    assert [run["name"] for run in data["runs"]] == ["round-001", "round-002", "round-003"]


@pytest.mark.parametrize("odd", ["x", None, 5, ["x"], {"a": 5}, 10**400])
@pytest.mark.parametrize("place", ["round", "played", "paired", "before", "select_by", "kept"])
def test_odd_rounds_are_drawn_as_far_as_they_go(tmp_path: Path, place: str, odd: object) -> None:
    folder = made_evolution(tmp_path / "loop")
    record = next(read_lines(folder / "rounds.jsonl"))
    (folder / "rounds.jsonl").write_text(json.dumps(record | {place: odd}) + "\nbroken")
    page(page_data(folders_of([folder])))


@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")
def test_a_browser_draws_an_evolution(tmp_path: Path) -> None:
    loop, begun = made_evolution(tmp_path / "loop"), made_evolution(tmp_path / "begun")
    (begun / "rounds.jsonl").unlink()
    shutil.rmtree(begun / "rounds")
    (begun / "rounds").mkdir()
    target = write_report(ReportSettings(runs=(loop, begun)))
    document, console = browse(target, tmp_path / "profile", "--dump-dom")
    assert console == []
    text = re.sub(r"\s+", " ", re.sub(r"<[^>]*>", " ", document.split("<script", 1)[0]))
    assert "4 of 6 rounds played, 1 kept" in text
    assert "+0.080 +0.030 … +0.130" in text
    assert "refused no game gave a row to learn from" in text
    assert "begun: 0 of 6 rounds played, 0 kept No round is over yet" in text
    assert document.count('class="zero"') == 4
    SCREENSHOTS.mkdir(exist_ok=True)
    picture = SCREENSHOTS / "report-rounds.png"
    picture.unlink(missing_ok=True)
    shot = ("--window-size=1400,1000", f"--screenshot={picture}")
    assert browse(target, tmp_path / "profile", *shot)[1] == []
    assert picture.stat().st_size > 30_000
