"""The UCI driver and its pool: finished depths only, and no failure of an engine is silent."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import chess
import pytest

from fake_engine import install_fake
from rookworld.runtime.errors import DataError, EngineError
from rookworld.tasks.engine import (
    Engine,
    EngineDead,
    EngineGarbage,
    EngineHung,
    Line,
    Query,
    find_engine,
)
from rookworld.tasks.engine_pool import EnginePool

START = chess.STARTING_FEN
KIWIPETE = "r3k2r/p1ppqpb1/bn2pnp1/3PN3/1p2P3/2N2Q1p/PPPBBPPP/R3K2R w KQkq - 0 1"
STALEMATE = "7k/5Q2/6K1/8/8/8/8/8 b - - 0 1"
MATED = "7k/6Q1/6K1/8/8/8/8/8 b - - 0 1"


MakeFake = Callable[..., Path]


def running_pids(pool: EnginePool) -> list[int]:
    """Process ids of a pool's engines."""
    return [engine.pid for engine in pool._engines if engine.pid is not None]


def numbered_start(number: int) -> str:
    """The start position with another move counter: another FEN that the fake engine can play."""
    return f"{START.rsplit(' ', 1)[0]} {number}"


@pytest.fixture
def make_fake(tmp_path: Path) -> MakeFake:
    return partial(install_fake, tmp_path)


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def random_positions(count: int, seed: int) -> list[str]:
    rng, board = random.Random(seed), chess.Board()
    fens: list[str] = []
    while len(fens) < count:
        if board.is_game_over() or board.ply() > 80:
            board.reset()
        board.push(rng.choice(list(board.legal_moves)))
        fens.append(board.fen())
    return fens


# The driver, with the fake engine


def test_only_the_last_finished_depth_counts(make_fake: MakeFake) -> None:
    with Engine(make_fake()) as engine:
        lines = engine.search(START, 1000)
    assert engine.name == "Fake 1"
    assert [line.depth for line in lines] == [2] * 5
    assert len({line.move for line in lines}) == 5
    assert [line.cp for line in lines] == sorted((line.cp for line in lines), reverse=True)
    assert lines[0].cp < 500


def test_lines_are_as_many_as_asked_or_legal(make_fake: MakeFake) -> None:
    with Engine(make_fake()) as engine:
        assert len(engine.search(START, 1000, 3)) == 3
        only = engine.search(START, 1000, moves=["g2g3"])
        assert [(line.move, line.depth) for line in only] == [("g2g3", 2)]
        assert engine.search(STALEMATE, 1000) == engine.search(MATED, 1000) == []


@pytest.mark.parametrize(
    "fen",
    [
        f"{START}\nquit",
        START.replace(" w ", "\nw\n"),
        f"{START}\rgo infinite",
        f"{START}\x00",
        "",
        "rubbish",
        "8/8/8/8/8/8/8/8 w - - 0 1",
        "7k/8/8/8/8/8/8/7K w - - 0 x",
        "4k3/8/8/8/8/8/8/QQQQQQQQ w - - 0 1",
    ],
)
def test_an_unsafe_position_is_refused_before_any_engine_starts(
    make_fake: MakeFake, fen: str
) -> None:
    engine = Engine(make_fake())
    with pytest.raises(DataError):
        engine.search(fen, 1000)
    assert engine.starts == 0


@pytest.mark.parametrize("move", ["e2e5", "e2e4\nquit", "0000", ""])
def test_only_legal_moves_are_searched(make_fake: MakeFake, move: str) -> None:
    with pytest.raises(DataError, match="not a legal move"):
        Engine(make_fake()).search(START, 1000, moves=[move])


@pytest.mark.parametrize(
    ("mode", "error"),
    [
        ("die", EngineDead),
        ("hang", EngineHung),
        ("garbage", EngineGarbage),
        ("illegal", EngineGarbage),
    ],
)
def test_a_failure_is_named_and_the_next_call_gets_a_new_process(
    make_fake: MakeFake, mode: str, error: type[EngineError]
) -> None:
    engine = Engine(make_fake(mode, faults=3 if mode == "illegal" else 1))
    engine.start()
    pid = engine.pid
    assert pid is not None
    with pytest.raises(error):
        engine.search(START, 1000, timeout_s=0.3)
    assert engine.pid is None and not is_running(pid)
    assert len(engine.search(START, 1000)) == 5
    assert engine.starts == 2
    engine.close()


def test_a_program_that_is_no_engine_is_an_error() -> None:
    with pytest.raises(EngineDead):
        Engine("/bin/true").start()
    with pytest.raises(EngineError, match="cannot start engine"):
        Engine("/no/such/engine").start()
    with pytest.raises(EngineHung):
        Engine("/bin/cat").start(timeout_s=0.1)


def test_endless_output_is_cut_off(tmp_path: Path) -> None:
    script = tmp_path / "yes.sh"
    script.write_text("#!/bin/sh\nexec yes\n")
    script.chmod(0o755)
    with pytest.raises(EngineGarbage, match="bytes without uciok"):
        Engine(script).start()


def test_an_interrupted_search_leaves_no_answer_behind(make_fake: MakeFake) -> None:
    engine = Engine(make_fake("hang", faults=1))
    engine.start()
    previous = signal.signal(signal.SIGALRM, signal.default_int_handler)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.1)
        with pytest.raises(KeyboardInterrupt):
            engine.search(START, 1000, timeout_s=1)
    finally:
        signal.signal(signal.SIGALRM, previous)
    assert engine.pid is None


def test_engines_end_with_their_owner(make_fake: MakeFake) -> None:
    program = (
        "import sys; from rookworld.tasks.engine import Engine; e = Engine(sys.argv[1]);"
        "e.start(); print(e.pid)"
    )
    command = [sys.executable, "-c", program, str(make_fake())]
    pid = int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    assert not is_running(pid)
    engine = Engine(make_fake())
    engine.start()
    pid = engine.pid or 0
    del engine
    assert not is_running(pid)


# The pool, with the fake engine


@pytest.mark.parametrize("mode", ["die", "hang", "garbage"])
def test_the_pool_survives_bad_engines(make_fake: MakeFake, mode: str) -> None:
    queries = [Query(numbered_start(n), 1000) for n in range(1, 9)]
    with EnginePool(make_fake(), 2) as healthy:
        expected = healthy.spread(healthy.search, queries)
    with EnginePool(make_fake(mode, faults=2), 2, timeout_s=0.5) as pool:
        assert pool.spread(pool.search, queries) == expected
        assert pool.starts > 2


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_the_pool_survives_signals(make_fake: MakeFake, how: signal.Signals) -> None:
    query = Query(START, 1000)
    with EnginePool(make_fake(), 1, timeout_s=0.5) as pool:
        expected = pool.search(query)
        os.kill(running_pids(pool)[0], how)
        assert pool.search(query) == expected
        assert pool.starts == 2


@pytest.mark.parametrize("mode", ["die", "garbage"])
def test_retries_are_bounded_and_the_position_is_named(make_fake: MakeFake, mode: str) -> None:
    with (
        EnginePool(make_fake(mode, faults=99), 1, retries=2, timeout_s=0.5) as pool,
        pytest.raises(EngineError, match=r"gave up on rnbqkbnr.* 7 after 3 attempts"),
    ):
        pool.search(Query(numbered_start(7), 1000))
    assert pool.starts == 3 and running_pids(pool) == []


def test_the_pool_starts_what_it_needs_and_bad_queries_are_not_retried(
    make_fake: MakeFake,
) -> None:
    with EnginePool(make_fake(), 4) as pool:
        for number in range(1, 5):
            pool.search(Query(numbered_start(number), 1000))
        assert pool.starts == 1
        with pytest.raises(DataError):
            pool.spread(pool.search, [Query("8/8/8/8/8/8/8/8 w - - 0 1", 1000)])
        assert pool.starts == 1


def test_many_threads_share_a_small_pool(make_fake: MakeFake) -> None:
    queries = [Query(numbered_start(n), 1000) for n in range(1, 25)]
    answers: dict[str, list[Line]] = {}
    with EnginePool(make_fake(), 2) as pool:
        expected = pool.spread(pool.search, queries)

        def ask(query: Query) -> None:
            answers[query.fen] = pool.search(query)

        threads = [threading.Thread(target=ask, args=(query,)) for query in queries]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert pool.starts <= 2
    assert [answers[query.fen] for query in queries] == expected


# Finding it


def test_the_engine_is_found_in_order(
    make_fake: MakeFake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, named = make_fake("asked"), make_fake("named")
    on_path = tmp_path / "stockfish"
    on_path.write_text("#!/bin/sh\n")
    on_path.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("STOCKFISH_PATH", str(named))
    assert find_engine(str(asked)) == asked
    assert find_engine() == named
    monkeypatch.delenv("STOCKFISH_PATH")
    assert find_engine() == on_path


def test_a_missing_engine_is_one_line_that_says_how_to_install_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PATH", "")
    with pytest.raises(EngineError, match=r"^--engine: '/no/such' is not an executable file$"):
        find_engine("/no/such")
    monkeypatch.setenv("STOCKFISH_PATH", "/no/such")
    with pytest.raises(EngineError, match=r"^STOCKFISH_PATH: '/no/such'"):
        find_engine()
    monkeypatch.delenv("STOCKFISH_PATH")
    monkeypatch.setattr("rookworld.tasks.engine.SYSTEM_FOLDERS", "/no/such")
    with pytest.raises(EngineError, match="apt install stockfish") as caught:
        find_engine()
    assert "\n" not in str(caught.value)


# The real one


@pytest.fixture
def stockfish() -> Path:
    return find_engine()


@pytest.mark.engine
def test_stockfish_lines_are_sorted_distinct_and_legal(stockfish: Path) -> None:
    with Engine(stockfish) as engine:
        for fen in random_positions(40, seed=3):
            lines, legal = engine.search(fen, 2000), list(chess.Board(fen).legal_moves)
            moves, cps = [line.move for line in lines], [line.cp for line in lines]
            assert len(lines) == len(set(moves)) == min(5, len(legal))
            assert cps == sorted(cps, reverse=True)
            assert len({line.depth for line in lines}) <= 1


@pytest.mark.engine
def test_stockfish_scores_are_for_the_side_to_move(stockfish: Path) -> None:
    with Engine(stockfish) as engine:
        mate = engine.search("6k1/5ppp/8/8/8/8/8/K2R4 w - - 0 1", 2000)[0]
        mated = engine.search("6k1/5ppp/8/8/8/8/1q6/K1q5 w - - 0 1", 2000)
        losing = engine.search("7k/8/5KQ1/8/8/8/8/8 b - - 0 1", 2000)
        behind = engine.search("4k3/8/8/8/8/8/8/QQ2K3 b - - 0 1", 5000)[0]
        assert (mate.move, mate.cp) == ("d1d8", 99_999)
        assert mated == [] and losing == []
        assert behind.cp < -500
        assert len(engine.search(START, 20, 5)) == 5


@pytest.mark.engine
def test_stockfish_answers_do_not_depend_on_what_was_asked_before(stockfish: Path) -> None:
    queries = [Query(fen, 3000) for fen in random_positions(24, seed=5)]
    queries += [Query(KIWIPETE, 3000, 1, ("a2a3",)), Query(KIWIPETE, 3000)]
    shuffled = random.Random(7).sample(queries, len(queries))
    with EnginePool(stockfish, 2) as first, EnginePool(stockfish, 1) as second:
        expected = dict(zip(queries, first.spread(first.search, queries), strict=True))
        assert dict(zip(shuffled, first.spread(first.search, shuffled), strict=True)) == expected
        assert dict(zip(shuffled, second.spread(second.search, shuffled), strict=True)) == expected


@pytest.mark.engine
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_lost_stockfish_is_replaced(stockfish: Path, how: signal.Signals) -> None:
    query = Query(KIWIPETE, 3000)
    with EnginePool(stockfish, 1, timeout_s=1) as pool:
        expected = pool.search(query)
        os.kill(running_pids(pool)[0], how)
        assert pool.search(query) == expected
        assert pool.starts == 2


@pytest.mark.engine
def test_a_stockfish_stopped_in_mid_search_is_noticed(stockfish: Path) -> None:
    with Engine(stockfish) as engine:
        pid = engine.pid or 0
        timer = threading.Timer(0.1, os.kill, (pid, signal.SIGSTOP))
        timer.start()
        begin = time.monotonic()
        with pytest.raises(EngineHung):
            engine.search(KIWIPETE, 10**9, timeout_s=0.4)
        timer.join()
        assert time.monotonic() - begin < 2 and not is_running(pid)


@pytest.mark.engine
def test_a_stockfish_that_starts_to_print_garbage_is_replaced(
    stockfish: Path, tmp_path: Path
) -> None:
    first = tmp_path / "first"
    first.touch()
    script = tmp_path / "garbled.sh"
    script.write_text(
        f"#!/bin/sh\n[ -e {first} ] || exec {stockfish}\nrm {first}\n"
        f"{stockfish} | sed -u 's/^info depth/noise/'\n"
    )
    script.chmod(0o755)
    with EnginePool(script, 1, timeout_s=1) as pool, EnginePool(stockfish, 1) as healthy:
        query = Query(KIWIPETE, 3000)
        assert pool.search(query) == healthy.search(query)
        assert pool.starts == 2
