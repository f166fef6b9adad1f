"""Sweeps on databases that a cluster has: PostgreSQL, and Optuna's gRPC proxy before one.

A server of the test's own: in a temporary folder, on a free port of this machine, as a user that
is not root, which `initdb` refuses. Skipped and counted where PostgreSQL or its driver is missing.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from test_sweep import lines_of, process, waited_for

pytestmark = pytest.mark.slow
SIX = Counter(f"{event} {number:04d}" for event in ("start", "end") for number in range(6))


def programs() -> Path | None:
    """The folder of PostgreSQL's programs; Debian keeps them off the PATH."""
    found = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"))
    named = shutil.which("initdb")
    return found[-1].parent if found else Path(named).parent if named else None


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port: int = one.getsockname()[1]
    return port


def unprivileged() -> list[str]:
    """What a command of the server begins with: root may not run it."""
    return ["runuser", "-u", "postgres", "--"] if os.getuid() == 0 else []


@pytest.fixture(scope="module")
def postgres() -> Iterator[str]:
    """The address of a database of our own."""
    folder = programs()
    if folder is None or find_spec("psycopg") is None:
        pytest.skip("no PostgreSQL, or no psycopg")
    home = Path(tempfile.mkdtemp(prefix="rookworld-postgres-"))
    try:
        if os.getuid() == 0:
            shutil.chown(home, "postgres")
        port, data = free_port(), str(home / "data")
        user = unprivileged()
        trusted = ["--auth=trust", "--username=sweeper", "--no-sync", "-E", "UTF8"]
        subprocess.run(
            [*user, str(folder / "initdb"), "-D", data, *trusted], check=True, capture_output=True
        )
        options = f"-p {port} -k {home} -c listen_addresses=127.0.0.1 -c fsync=off"
        control = [*user, str(folder / "pg_ctl"), "-D", data, "-w"]
        begin = [*control, "-l", str(home / "log"), "-o", options, "start"]
        subprocess.run(begin, check=True, stdout=subprocess.DEVNULL)
        try:
            yield f"postgresql://sweeper@127.0.0.1:{port}/postgres"
        finally:
            subprocess.run([*control, "-m", "immediate", "stop"], check=True, capture_output=True)
    finally:
        shutil.rmtree(home, ignore_errors=True)


@pytest.fixture(params=["postgres", "grpc"])
def storage(request: pytest.FixtureRequest) -> Iterator[str]:
    """A database's address, its own or a proxy's; each test its own study, by the file's name."""
    database: str = request.getfixturevalue("postgres")
    empty(database)
    if request.param == "postgres":
        yield database
        return
    if find_spec("grpc") is None:
        pytest.skip("no grpcio")
    port = free_port()
    code = (
        "import optuna; from optuna.storages import RDBStorage, run_grpc_proxy_server\n"
        f"run_grpc_proxy_server(RDBStorage({database!r}), host='127.0.0.1', port={port})"
    )
    proxy = subprocess.Popen([sys.executable, "-W", "ignore", "-c", code])
    try:
        listening(port)
        yield f"grpc://127.0.0.1:{port}"
    finally:
        proxy.kill()
        proxy.wait()


def empty(url: str) -> None:
    """Drop every table."""
    import psycopg

    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute("DROP SCHEMA public CASCADE")
        connection.execute("CREATE SCHEMA public")


def listening(port: int) -> None:
    deadline = time.monotonic() + 60
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
            return
        except OSError:
            assert time.monotonic() < deadline, "the proxy does not listen"
            time.sleep(0.1)


def test_two_processes_never_run_the_same_trial(tmp_path: Path, storage: str) -> None:
    log, outs = tmp_path / "log", (tmp_path / "a", tmp_path / "b")
    pair = [process(tmp_path, log, 0.3, out=out, storage=storage, parallel=2) for out in outs]
    assert [one.wait(timeout=120) for one in pair] == [0, 0]
    assert Counter(lines_of(log)) == SIX
    for out in outs:
        record = json.loads((out / "sweep.json").read_text())
        assert [one["state"] for one in record["trials"]] == ["done"] * 6


def test_killed_it_goes_on_where_it_was(tmp_path: Path, storage: str) -> None:
    log, out = tmp_path / "log", tmp_path / "sweep"
    sweep = process(tmp_path, log, 1.0, out=out, storage=storage, parallel=2)
    waited_for(log, 2, "start")
    sweep.send_signal(signal.SIGKILL)
    sweep.wait()
    assert process(tmp_path, log, 0.1, out=out, storage=storage, parallel=2).wait(timeout=120) == 0
    assert Counter(lines_of(log)) == SIX
    record = json.loads((out / "sweep.json").read_text())
    assert [one["state"] for one in record["trials"]] == ["done"] * 6
