"""Who may ask the page's server, how much, and for what: this machine, a little, nothing else."""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

import child_process
from made_runs import made_run, step_metrics
from rookworld.runtime.errors import RookworldError
from rookworld.web import server
from rookworld.web.protection import MOST_BYTES
from rookworld.web.subject import Subject, find_subject
from web_desk import ANALYSIS, START, Says, Scripted, add_checkpoint, client, served

TEN_MB = 10_000_000
EMPTY = Subject("none", run=Path("/nonexistent-run"))
"""Nothing to load: the server starts at once."""


@pytest.fixture
def page() -> Iterator[TestClient]:
    with client(Scripted(Subject("nano", "nano"), lambda name: Says(ANALYSIS, ""))) as found:
        yield found


ASK = {"fen": START, "move": "e4"}


@pytest.mark.parametrize(
    "host",
    ["evil.example", "127.0.0.1.evil.example", "evil@127.0.0.1", "127.0.0.1:8000/x", "", "[::1"],
)
def test_a_foreign_host_is_refused(page: TestClient, host: str) -> None:
    for path in ("/", "/api/state"):
        answer = page.get(path, headers={"host": host})
        assert answer.status_code == 403
        assert answer.json() == {"error": "this server speaks to its own machine only"}


@pytest.mark.parametrize("host", ["127.0.0.1:8000", "localhost", "localhost:9000", "[::1]:8000"])
def test_this_machine_is_answered_by_its_names(page: TestClient, host: str) -> None:
    assert page.get("/", headers={"host": host}).status_code == 200
    own = {"host": host, "origin": f"http://{host}"}
    assert page.post("/api/move", json=ASK, headers=own).status_code == 200


@pytest.mark.parametrize(
    "headers",
    [
        {"origin": "http://evil.example"},
        {"origin": "null"},
        {"origin": "https://127.0.0.1:8000"},
        {"origin": "http://127.0.0.1:9000"},
        {"sec-fetch-site": "cross-site"},
        {"sec-fetch-site": "same-site"},
    ],
)
def test_another_page_cannot_ask(page: TestClient, headers: dict[str, str]) -> None:
    assert page.post("/api/move", json=ASK, headers=headers).status_code == 403
    assert page.get("/api/state", headers=headers).status_code == 403


def test_a_link_to_the_page_may_be_anywhere(page: TestClient) -> None:
    followed = {"sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate"}
    assert page.get("/", headers=followed).status_code == 200


def test_a_form_cannot_ask(page: TestClient) -> None:
    assert page.post("/api/move", data=ASK).status_code == 415
    text = {"content-type": "text/plain"}
    assert page.post("/api/move", content=json.dumps(ASK), headers=text).status_code == 415


@pytest.mark.parametrize("body", [b"", b"{", b"\xff", b"[]", b"5", b"[" * 100_000])
def test_a_body_that_is_no_object_is_refused(page: TestClient, body: bytes) -> None:
    kind = {"content-type": "application/json"}
    answer = page.post("/api/move", content=body, headers=kind)
    assert answer.status_code == 400
    assert "error" in answer.json()


def test_a_long_body_is_refused_with_and_without_a_length(page: TestClient) -> None:
    kind = {"content-type": "application/json"}
    taken: list[int] = []

    def pieces() -> Iterator[bytes]:
        for _ in range(100):
            taken.append(1)
            yield b" " * (TEN_MB // 100)

    for body in (b" " * TEN_MB, pieces()):
        assert page.post("/api/read", content=body, headers=kind).status_code == 413
    fits = json.dumps({"text": "x" * (MOST_BYTES - 20)}).encode()
    assert page.post("/api/read", content=fits, headers=kind).status_code == 200


def test_every_answer_says_what_the_page_may_load(page: TestClient) -> None:
    for answer in (page.get("/"), page.get("/nothing"), page.get("/", headers={"host": "x"})):
        policy = answer.headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "unsafe-inline" not in policy and "unsafe-eval" not in policy
        assert answer.headers["x-content-type-options"] == "nosniff"


# --- files ---


@pytest.mark.parametrize(
    "path",
    [
        "/../pyproject.toml",
        "/..%2f..%2fetc%2fpasswd",
        "/%2e%2e/%2e%2e/etc/passwd",
        "//etc/passwd",
        "/..\\..\\etc\\passwd",
        "/api/..%2fstate%00",
        "/config.json",
        "/checkpoints/step-000000/config.json",
        "/report_exports.js",
    ],
)
def test_no_path_leads_to_a_file(path: str) -> None:
    with served(EMPTY) as port:
        assert ask(port, path)[0] == 404


def test_links_out_of_a_run_are_not_followed(tmp_path: Path, tiny_folder: Path) -> None:
    run = tmp_path / "run"
    add_checkpoint(run, "step-000001", tiny_folder)
    (run / "checkpoints" / "step-000002").symlink_to(tiny_folder)
    linked = add_checkpoint(run, "step-000003", tiny_folder)
    (linked / "config.json").unlink()
    (linked / "config.json").symlink_to(tiny_folder / "config.json")
    (run / "final").symlink_to(tiny_folder)
    (run / "checkpoints" / "step-000004").symlink_to("step-000001")
    found = find_subject([str(run)])
    assert [one.name for one in found.checkpoints()] == ["step-000001", "step-000004"]
    for name in ("step-000002", "final", "../../secret", "step-000001/../step-000002"):
        with pytest.raises(RookworldError, match="no checkpoint"):
            found.checkpoint(name)


def test_a_log_that_lies_elsewhere_is_refused(tmp_path: Path) -> None:
    run = made_run(tmp_path / "run", steps=1)
    secret = tmp_path / "secret.jsonl"
    (run / "metrics.jsonl").rename(secret)
    (run / "metrics.jsonl").symlink_to(secret)
    with pytest.raises(RookworldError, match="leads out of the run"):
        find_subject([str(run)])


# --- the real server ---


def ask(port: int, path: str, **headers: str) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    try:
        connection.request("GET", path, headers=headers)
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


def connected(port: int) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), timeout=10)


HEAD = "POST /api/read HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"


@pytest.mark.parametrize("length", [f"Content-Length: {TEN_MB}", "Transfer-Encoding: chunked"])
def test_ten_megabytes_are_refused_before_they_have_come(length: str) -> None:
    with served(EMPTY) as port, connected(port) as line:
        line.sendall(f"{HEAD}{length}\r\n\r\n".encode())
        if "chunked" in length:
            piece = b"10000\r\n" + b" " * 0x10000 + b"\r\n"
            for _ in range(MOST_BYTES // 0x10000 + 1):
                line.sendall(piece)
        answer = line.recv(1000).decode()
        assert answer.startswith("HTTP/1.1 413")
        assert "connection: close" in answer.lower()


def test_a_connection_that_asks_nothing_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "IDLE_S", 0.2)
    with served(EMPTY) as port:
        for begun in (b"", b"GET / HTTP/1.1\r\nHost: 127"):
            with connected(port) as line:
                line.sendall(begun)
                assert closed_by_peer(line)
        assert ask(port, "/")[0] == 200


def closed_by_peer(line: socket.socket) -> bool:
    try:
        return line.recv(1) == b""
    except ConnectionResetError:
        return True


def test_connections_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "MOST_CONNECTIONS", 3)
    with served(EMPTY) as port:
        idle = [connected(port) for _ in range(3)]
        assert ask(port, "/")[0] == 503
        for one in idle:
            one.close()
        deadline = time.monotonic() + 10
        while ask(port, "/")[0] != 200:
            assert time.monotonic() < deadline
            time.sleep(0.02)


def test_only_this_machine_is_listened_to() -> None:
    with server.listening(0) as listener:
        home, port = listener.getsockname()
        assert home == "127.0.0.1"
        with pytest.raises(RookworldError, match=f"--port {port}"), server.listening(port):
            pass


def test_a_live_run_is_seen_to_move(tmp_path: Path) -> None:
    run = made_run(tmp_path / "run", steps=5, done=False)
    with served(find_subject([str(run)])) as port:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
        connection.request("GET", "/api/live")
        stream = connection.getresponse()
        assert stream.getheader("content-type", "").startswith("text/event-stream")
        assert len(next_event(stream)["runs"][0]["x"]) == 5
        with (run / "metrics.jsonl").open("a") as file:
            file.write(json.dumps(step_metrics(6, 1.0)) + "\n")
        assert len(next_event(stream)["runs"][0]["x"]) == 6
        connection.close()


def next_event(stream: http.client.HTTPResponse) -> dict[str, Any]:
    while not (line := stream.readline()).startswith(b"data: "):
        assert line
    found: dict[str, Any] = json.loads(line.removeprefix(b"data: "))
    return found


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_it_with_130(tmp_path: Path, number: int, tiny_folder: Path) -> None:
    log = tmp_path / "log"
    child = child_process.start(["web", str(tiny_folder), "--port", "0"], log)
    deadline = time.monotonic() + 60
    while not log.exists() or "http://" not in log.read_text():
        assert child.is_alive() and time.monotonic() < deadline, log.read_text()
        time.sleep(0.05)
    port = int(log.read_text().split("http://127.0.0.1:")[1].split("/")[0])
    with connected(port):  # a reader that stays keeps nobody from ending
        assert child.pid is not None
        os.kill(child.pid, number)
        assert child_process.ended(child) == 130
    assert "Traceback" not in log.read_text()
    assert log.read_text().endswith("rookworld: interrupted\n")
