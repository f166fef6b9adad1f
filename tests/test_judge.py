"""Judges: labels as they came, Stockfish by position alone, and a cache that needs no engine."""

from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import chess
import pytest

from fake_engine import install_fake
from rookworld.runtime.errors import DataError, EngineError
from rookworld.tasks.engine import Line, Query, find_engine
from rookworld.tasks.engine_cache import EngineCache, default_cache_path
from rookworld.tasks.judge import StockfishJudge
from rookworld.tasks.task import PolicyRow, legal_moves

START = chess.STARTING_FEN
MIDDLE = "r1bqkbnr/pppp1ppp/2n5/4p3/2B1P3/5N2/PPPP1PPP/RNBQK2R b KQkq - 3 3"
HANGING = "rnb1kbnr/pppp1ppp/8/4p3/4P2q/5N2/PPPP1PPP/RNBQKB1R w KQkq - 2 3"


MakeFake = Callable[..., Path]


@pytest.fixture
def make_fake(tmp_path: Path) -> MakeFake:
    return partial(install_fake, tmp_path)


def unlabelled(fen: str) -> PolicyRow:
    return PolicyRow(fen, (), ())


def start_rows(count: int) -> list[PolicyRow]:
    """Rows the fake engine can play: the start position with other move counters."""
    return [unlabelled(f"{START[:-1]}{number}") for number in range(1, count + 1)]


def test_the_engine_judges_what_labels_do_not_know(make_fake: MakeFake) -> None:
    row = PolicyRow(START, ("e2e4",), (30,))
    with StockfishJudge(make_fake(), nodes=100, processes=1) as judge:
        best = judge.analyse(row)
        outside = next(
            f"{file}2{file}3" for file in "abcdefgh" if f"{file}2{file}3" not in best.moves
        )
        assert len(best.moves) == 5 and "e2e4" not in best.moves
        assert [judge.move_cp(row, move) for move in best.moves] == list(best.cp)
        assert judge.move_cp(row, outside) is not None
        assert judge.move_cp(row, "e2e5") is None
        assert judge.move_cp(row, "e2e4\nquit") is None


def test_a_position_is_searched_once_however_it_is_spelled(make_fake: MakeFake) -> None:
    after_push = "rnbqkbnr/pppppppp/8/8/4P3/8/PPPP1PPP/RNBQKBNR w KQkq e3 0 1"
    engine = make_fake("die", faults=0)
    with StockfishJudge(engine, nodes=100, processes=1) as judge:
        judge.prefetch([unlabelled(START), unlabelled(f" {START} ")])
        expected = judge.analyse(unlabelled(START))
        install_fake(engine.parent, "die", faults=99)
        assert judge.analyse(unlabelled(START.replace(" 0 1", "  0  1"))) == expected
        with pytest.raises(EngineError, match="gave up"):
            judge.analyse(unlabelled(START.replace(" 0 1", " 1 1")))
        with pytest.raises(DataError):
            judge.analyse(unlabelled(after_push + "\nquit"))


def test_every_move_can_be_searched_ahead(make_fake: MakeFake, tmp_path: Path) -> None:
    engine, row = make_fake(), start_rows(1)[0]
    cache = tmp_path / "cache.sqlite"
    with StockfishJudge(engine, nodes=100, processes=2, cache=cache) as judge:
        judge.prefetch([row], every_move=True)
        expected = {move: judge.move_cp(row, move) for move in legal_moves(row.fen)}
    install_fake(engine.parent, "die", faults=99)
    with StockfishJudge(engine, nodes=100, cache=cache) as judge:
        assert {move: judge.move_cp(row, move) for move in legal_moves(row.fen)} == expected
        assert len(expected) == 20 and None not in expected.values()
        assert judge.starts == 0


def test_a_cache_hit_starts_no_engine(make_fake: MakeFake, tmp_path: Path) -> None:
    engine, rows = make_fake(), start_rows(3)
    cache = tmp_path / "deep" / "cache.sqlite"
    with StockfishJudge(engine, nodes=100, processes=2, cache=cache) as judge:
        judge.prefetch(rows)
        judge.move_cp(rows[0], "a2a3")
        expected = [judge.analyse(row) for row in rows]
    with StockfishJudge(engine, nodes=100, cache=cache) as judge:
        judge.prefetch(rows)
        assert [judge.analyse(row) for row in rows] == expected
        assert judge.version == "Fake 1 hash 16"
        judge.move_cp(rows[0], "a2a3")
        assert judge.starts == 0
    with StockfishJudge(engine, nodes=101, processes=1, cache=cache) as judge:
        judge.analyse(rows[0])
        assert judge.starts == 1


def test_every_part_of_the_key_counts() -> None:
    cache, query = EngineCache(), Query(START, 100, 5, ("e2e4",))
    lines = [Line("e2e4", -99_997, 3), Line("d2d4", 12, 3)]
    cache.put("Fake 1", [(query, lines), (query._replace(nodes=7), [])])
    assert cache.get("Fake 1", query) == lines
    assert cache.get("Fake 1", query._replace(nodes=7)) == []
    assert cache.get("Fake 2", query) is None
    others: list[dict[str, object]] = [
        {"fen": MIDDLE},
        {"nodes": 101},
        {"multipv": 4},
        {"moves": ("d2d4",)},
        {"moves": None},
    ]
    for other in others:
        assert cache.get("Fake 1", query._replace(**other)) is None  # type: ignore[arg-type]


def test_a_new_engine_file_is_asked_for_its_version_again(
    make_fake: MakeFake, tmp_path: Path
) -> None:
    engine, cache = make_fake(), EngineCache()
    cache.put_engine_name(engine, "Fake 1")
    assert cache.engine_name(engine) == "Fake 1"
    engine.write_text(engine.read_text() + "# rebuilt\n")
    assert cache.engine_name(engine) is None


def test_several_processes_share_a_cache(make_fake: MakeFake, tmp_path: Path) -> None:
    program = (
        "import sys; from pathlib import Path; from rookworld.tasks.engine import Line, Query;"
        "from rookworld.tasks.engine_cache import EngineCache\n"
        "cache = EngineCache(Path(sys.argv[1]))\n"
        "for n in range(100): cache.put('x', [(Query(sys.argv[2], n), [Line('e2e4', n, 1)])])"
    )
    path = tmp_path / "cache.sqlite"
    writers = [
        subprocess.Popen([sys.executable, "-c", program, str(path), name]) for name in "abcd"
    ]
    assert [writer.wait() for writer in writers] == [0] * 4
    cache = EngineCache(path)
    for name in "abcd":
        answers = [cache.get("x", Query(name, nodes)) for nodes in range(100)]
        assert answers == [[Line("e2e4", nodes, 1)] for nodes in range(100)]
    cache.close()


def test_a_damaged_cache_is_one_line(tmp_path: Path) -> None:
    path = tmp_path / "cache.sqlite"
    path.write_bytes(b"this was a database once " * 100)
    with pytest.raises(EngineError, match="delete it") as caught:
        EngineCache(path)
    assert str(path) in str(caught.value) and "\n" not in str(caught.value)


def test_the_cache_lives_in_the_users_cache_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert default_cache_path() == Path("/somewhere/rookworld/engine.sqlite")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert default_cache_path() == Path.home() / ".cache/rookworld/engine.sqlite"


@pytest.mark.parametrize("mode", ["die", "hang", "garbage"])
def test_a_bad_engine_changes_no_verdict(make_fake: MakeFake, mode: str) -> None:
    rows = start_rows(6)
    with StockfishJudge(make_fake(), nodes=100, processes=1) as judge:
        expected = [judge.analyse(row) for row in rows]
    engine = make_fake(mode, faults=2)
    with StockfishJudge(engine, nodes=100, processes=2, timeout_s=0.5) as judge:
        judge.prefetch(rows)
        assert [judge.analyse(row) for row in rows] == expected


@pytest.fixture
def stockfish() -> Path:
    return find_engine()


@pytest.mark.engine
def test_stockfish_takes_the_hanging_queen(stockfish: Path) -> None:
    row = unlabelled(HANGING)
    with StockfishJudge(stockfish, nodes=3000, processes=1) as judge:
        best, blunder = judge.analyse(row), judge.move_cp(row, "a2a3")
        assert best.moves[0] == "f3h4" and best.cp[0] > 500
        assert blunder is not None and blunder < best.cp[0] - 300
        assert judge.version.startswith("Stockfish")


@pytest.mark.engine
def test_stockfish_verdicts_do_not_depend_on_order_threads_or_cache(
    stockfish: Path, tmp_path: Path
) -> None:
    rows = [unlabelled(fen) for fen in (START, MIDDLE, HANGING)]
    rows += [replace(row, fen=row.fen[:-1] + "9") for row in rows]
    shuffled = random.Random(1).sample(rows, len(rows))
    cache = tmp_path / "cache.sqlite"
    with StockfishJudge(stockfish, nodes=3000, processes=2, cache=cache) as judge:
        judge.prefetch(rows)
        expected = {row: (judge.analyse(row), judge.move_cp(row, "a2a3")) for row in rows}
    for stored in (cache, None):
        with StockfishJudge(stockfish, nodes=3000, processes=1, cache=stored) as judge:
            again = {row: (judge.analyse(row), judge.move_cp(row, "a2a3")) for row in shuffled}
            assert again == expected
            assert judge.starts == (0 if stored else 1)
