"""Generation: the rows are a function of the settings, whatever happens while they are made."""

from __future__ import annotations

import itertools
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import chess
import pytest

from legal_engine import install_legal
from rookworld.data.files import file_origin, iterate_parquet
from rookworld.data.generate.chunks import ChunkFolder
from rookworld.data.generate.generator import Generated, generate, make_chunk
from rookworld.data.generate.mates import (
    checking_moves,
    mate_records,
    mates_in_one,
    mates_in_two,
    may_check,
    varied_mate,
)
from rookworld.data.generate.moves import SHARES
from rookworld.data.generate.playouts import WALKS, walk
from rookworld.data.generate.settings import GenerateSettings
from rookworld.data.generate.transitions import Proportions, quotas, transition_records
from rookworld.data.sources import load_rows, write_rows
from rookworld.runtime.errors import ConfigError, DataError, EngineError, RookworldError
from rookworld.tasks.engine import find_engine
from rookworld.tasks.environment import KINDS, transition
from rookworld.tasks.notation import position_key

NONE: dict[str, Any] = dict.fromkeys(Proportions.__dataclass_fields__, 0.0)
CHEAP = Proportions(**{**NONE, "first": 1.0})
"""The class that is met soonest, so that a chunk is made at once."""

EASY = Proportions(**{**NONE, "quiet": 2.0, "first": 1.0, "capture": 1.0, "illegal": 1.0})

SCRIPT = """
from pathlib import Path
from rookworld.data.generate.generator import generate
from rookworld.data.generate.settings import GenerateSettings, Proportions

if __name__ == "__main__":
    generate({settings!r}, lambda done, rows: None)
"""


def quiet(done: int, rows: int) -> None:
    """Progress that nobody watches."""


def a_rows(folder: Path, **changes: Any) -> GenerateSettings:
    settings = GenerateSettings(
        out=folder / "rows.parquet", task="A", rows=700, workers=1, proportions=CHEAP
    )
    return replace(settings, **changes)


def walked_rows(folder: Path, **changes: Any) -> GenerateSettings:
    return replace(a_rows(folder, rows=2_500, moves="all"), **changes)


def p_rows(folder: Path, **changes: Any) -> GenerateSettings:
    folder.mkdir(exist_ok=True)
    settings = GenerateSettings(
        out=folder / "rows.parquet", rows=60, every=4, workers=1, engine=str(install_legal(folder))
    )
    return replace(settings, **changes)


def made(settings: GenerateSettings) -> list[dict[str, Any]]:
    generate(settings, quiet)
    return list(iterate_parquet(settings.out))


def keys(rows: list[dict[str, Any]]) -> list[str]:
    return [f"{position_key(row['fen'])} {row.get('move')}" for row in rows]


# What a run promises


@pytest.mark.parametrize("settings_of", [a_rows, walked_rows, p_rows])
def test_rows_do_not_depend_on_the_number_of_workers(tmp_path: Path, settings_of: Any) -> None:
    one = made(settings_of(tmp_path, workers=1))
    (tmp_path / "three").mkdir()
    assert made(settings_of(tmp_path / "three", workers=3)) == one
    assert len(set(keys(one))) == len(one) == settings_of(tmp_path).rows
    assert made(settings_of(tmp_path, out=tmp_path / "other.parquet", seed=1)) != one


@pytest.mark.parametrize("moves", list(SHARES))
def test_with_moves_every_position_of_a_game_gives_a_row(tmp_path: Path, moves: Any) -> None:
    rows = made(walked_rows(tmp_path, moves=moves))
    for row in rows:
        *before, _ = row["history"]
        assert asdict(transition(row["fen"], row["move"], before)) == {
            **row,
            "history": tuple(row["history"]),
        }
    lengths = Counter(len(row["history"]) for row in rows)
    assert lengths[10] > 0.7 * len(rows) and lengths[1] < 0.1 * len(rows)
    kinds = Counter(row["kind"] for row in rows)
    assert kinds["quiet"] + kinds["capture"] > 0.4 * len(rows)
    assert (kinds["illegal"] > 0.1 * len(rows)) == (moves != "ends")


def test_with_moves_given_games_give_a_row_for_every_ply(tmp_path: Path) -> None:
    games = tmp_path / "games.txt"
    games.write_text("e2e4 e7e5 g1f3 b8c6 f1b5\nd2d4 d7d5 c2c4\n")
    settings = walked_rows(tmp_path, rows=100, games=(games,))
    report = generate(settings, quiet)
    assert report.asked == 100 and report.rows + report.repeated == 8  # and then it ends
    rows = list(iterate_parquet(settings.out))
    assert len({row["fen"] for row in rows}) == 7  # the initial position twice
    assert {tuple(row["history"][:-1]) for row in rows if len(row["history"]) == 5} == {
        ("e2e4", "e7e5", "g1f3", "b8c6")
    }


def kill_and_rerun(folder: Path, settings: GenerateSettings, rng: random.Random) -> None:
    """Begin the run, kill it at a random moment of its work, three times; then let it end."""
    script = folder / "run.py"
    script.write_text(SCRIPT.format(settings=settings).replace("PosixPath", "Path"))
    parts = settings.out.with_name(settings.out.name + ".parts")
    for kill in range(4):
        before = len(list(parts.glob("chunk-*")))
        process = subprocess.Popen([sys.executable, script], start_new_session=True)
        if kill == 3:
            assert process.wait(120) == 0
            return
        until = time.monotonic() + 60
        while len(list(parts.glob("chunk-*"))) <= before and time.monotonic() < until:
            assert process.poll() is None, "ended before it could be killed"
            time.sleep(0.01)
        time.sleep(rng.random() * 0.3)
        process.send_signal(signal.SIGKILL)
        process.wait()
        wait_for_group(process.pid)
        assert not settings.out.exists()


def wait_for_group(group: int) -> None:
    """Workers must end with their parent; nobody else would ever end them."""
    for _ in range(1000):
        try:
            os.killpg(group, 0)
        except ProcessLookupError:
            return
        time.sleep(0.01)
    os.killpg(group, signal.SIGKILL)
    pytest.fail("workers outlived their parent")


@pytest.mark.parametrize("workers", [1, 2])
def test_killed_and_run_again_is_the_same_as_uninterrupted(tmp_path: Path, workers: int) -> None:
    (tmp_path / "killed").mkdir()
    settings = a_rows(tmp_path / "killed", rows=2000, workers=workers)
    kill_and_rerun(tmp_path, settings, random.Random())
    killed = list(iterate_parquet(settings.out))
    assert killed == made(a_rows(tmp_path, rows=2000))
    assert len(set(keys(killed))) == 2000
    assert [path.name for path in settings.out.parent.iterdir()] == ["rows.parquet"]


def test_what_a_kill_while_writing_left_is_taken_away(tmp_path: Path) -> None:
    settings = a_rows(tmp_path / "killed", rows=100)
    settings.out.parent.mkdir()
    (settings.out.parent / f".{settings.out.name}.2183").write_text("half a file")
    made(settings)
    assert [path.name for path in settings.out.parent.iterdir()] == ["rows.parquet"]


@pytest.mark.engine
@pytest.mark.slow
def test_killed_stockfish_run_is_the_same_as_uninterrupted(tmp_path: Path) -> None:
    small = {"engine": str(find_engine()), "nodes": 2000, "play_nodes": 500, "rows": 500}
    (tmp_path / "killed").mkdir()
    settings = p_rows(tmp_path / "killed", workers=2, **small)
    kill_and_rerun(tmp_path, settings, random.Random())
    assert list(iterate_parquet(settings.out)) == made(p_rows(tmp_path, **small))


def children(pid: int) -> list[int]:
    """The processes that a process has started; Linux tells."""
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@pytest.mark.parametrize("workers_first", [False, True])
def test_interrupt_ends_the_workers_too(tmp_path: Path, workers_first: bool) -> None:
    settings = a_rows(tmp_path, rows=10**6, workers=2)
    script = tmp_path / "run.py"
    script.write_text(SCRIPT.format(settings=settings).replace("PosixPath", "Path"))
    # A test run in the background of a script inherits that interrupts are ignored.
    heard = "import signal, sys; signal.signal(signal.SIGINT, signal.SIG_DFL); "
    again = "import os; os.execv(sys.executable, [sys.executable, *sys.argv[1:]])"
    process = subprocess.Popen(
        [sys.executable, "-c", heard + again, script],
        start_new_session=True,
        stderr=subprocess.PIPE,
        text=True,
    )
    parts = settings.out.with_name(settings.out.name + ".parts")
    while not list(parts.glob("chunk-*")):
        assert process.poll() is None
        time.sleep(0.01)
    if workers_first:
        for child in children(process.pid):
            os.kill(child, signal.SIGINT)
        time.sleep(0.2)
        os.kill(process.pid, signal.SIGINT)
    else:
        os.killpg(process.pid, signal.SIGINT)
    _, errors = process.communicate(timeout=30)
    assert errors.rstrip().endswith("KeyboardInterrupt") and errors.count("Traceback") == 1
    wait_for_group(process.pid)


def test_shards_make_the_chunks_of_the_whole_between_them(tmp_path: Path) -> None:
    settings = a_rows(tmp_path, rows=701)
    shards = [
        made(replace(settings, out=tmp_path / f"{i}.parquet", shard=f"{i}/3")) for i in (0, 1, 2)
    ]
    assert [len(rows) for rows in shards] == [234, 234, 233]
    assert len(set(itertools.chain(*map(keys, shards)))) > 600
    for number, rows in enumerate(shards):
        chunk = make_chunk(settings, None, number)
        assert [row for row in rows if row not in chunk] == []
    assert made(replace(settings, out=tmp_path / "3.parquet", shard="3/3")) == shards[0]


def test_run_again_after_the_end_changes_nothing(tmp_path: Path) -> None:
    settings = a_rows(tmp_path, rows=10)
    first = generate(settings, quiet)
    before = settings.out.stat()
    assert (
        generate(replace(settings, workers=2), quiet)
        == first
        == Generated(rows=10, repeated=first.repeated, excluded=0, asked=10)
    )
    assert settings.out.stat() == before
    with pytest.raises(ConfigError, match="holds rows of other settings"):
        generate(replace(settings, seed=1), quiet)
    foreign = tmp_path / "foreign.parquet"
    write_rows(foreign, [transition(chess.STARTING_FEN, "e2e4")])
    with pytest.raises(ConfigError, match="holds rows of other settings"):
        generate(replace(settings, out=foreign), quiet)
    origin = file_origin(settings.out)
    assert origin is not None and (origin["task"], origin["seed"]) == ("A", 0)


def test_a_run_begun_with_other_settings_is_not_continued(tmp_path: Path) -> None:
    folder = ChunkFolder(tmp_path / "rows.parquet.parts")
    begun = folder.opened({"task": "A", "seed": 5})
    with begun, pytest.raises(RookworldError, match="is generating here"), folder.opened({}):
        pass
    with pytest.raises(DataError, match="begun with seed 5, now it is 0"):
        generate(a_rows(tmp_path), quiet)


def test_excluded_positions_are_left_out_and_replaced(tmp_path: Path) -> None:
    before = made(a_rows(tmp_path, rows=300))
    after = a_rows(tmp_path, out=tmp_path / "b.parquet", rows=300, exclude=(a_rows(tmp_path).out,))
    report = generate(after, quiet)
    rows = list(iterate_parquet(after.out))
    assert len(rows) == 300 and report.excluded >= 250
    excluded = {position_key(row["fen"]) for row in before}
    assert not excluded & {position_key(row["fen"]) for row in rows}


def test_an_excluded_file_is_remembered_by_what_is_in_it(tmp_path: Path) -> None:
    held = tmp_path / "held.jsonl"
    write_rows(held, [transition(chess.STARTING_FEN, "e2e4")])
    settings = a_rows(tmp_path, rows=10, exclude=(held,))
    first = generate(settings, quiet)
    assert generate(settings, quiet) == first
    write_rows(held, [transition(row["fen"], row["move"]) for row in iterate_parquet(settings.out)])
    with pytest.raises(ConfigError, match="holds rows of other settings"):
        generate(settings, quiet)


def test_embedded_rows_may_be_excluded_or_lend_their_positions(tmp_path: Path) -> None:
    source = Path("embedded:test")
    given = a_rows(tmp_path, rows=20, positions=(source,))
    embedded = {position_key(row.fen) for row in load_rows("embedded:test")}
    assert {position_key(row["fen"]) for row in made(given)} <= embedded
    left = replace(given, exclude=(source,), out=tmp_path / "none.parquet")
    report = generate(left, quiet)
    assert report.rows == 0 and report.excluded > 2000


@pytest.mark.parametrize("flag", ["exclude", "positions"])
@pytest.mark.parametrize("name", ["nope.parquet", "nope.jsonl"])
def test_a_missing_file_is_said_to_be_missing(tmp_path: Path, flag: str, name: str) -> None:
    changes: dict[str, Any] = {flag: (tmp_path / name,)}
    with pytest.raises(DataError, match=f"{name}: no such file"):
        generate(a_rows(tmp_path, **changes), quiet)


def test_progress_ends_at_the_number_of_rows(tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    generate(a_rows(tmp_path, rows=300), lambda done, rows: seen.append((done, rows)))
    assert seen[0] == (0, 300) and seen[-1] == (300, 300) and seen == sorted(seen)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rows": 0}, "--rows: 0 is less than 1"),
        ({"shard": "4/3"}, "'4/3' is not i/n"),
        ({"shard": "0/0"}, "'0/0' is not i/n"),
        ({"shard": "1"}, "'1' is not i/n"),
        ({"mistakes": 1.5}, "--mistakes: 1.5 is not between 0 and 1"),
        ({"out": Path("rows.csv")}, "does not end in .parquet"),
    ],
)
def test_impossible_settings_are_named(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        a_rows(tmp_path, **changes)


# P rows


def test_analysed_rows_list_the_best_legal_moves(tmp_path: Path) -> None:
    rows = made(p_rows(tmp_path))
    for row in rows:
        board = chess.Board(row["fen"])
        assert board.fen() == row["fen"] and board.is_valid()
        assert len(row["moves"]) == len(row["cp"]) == min(5, board.legal_moves.count())
        assert len(set(row["moves"])) == len(row["moves"])
        assert all(chess.Move.from_uci(move) in board.legal_moves for move in row["moves"])
        assert row["cp"] == sorted(row["cp"], reverse=True)
    assert {row["fen"].split()[1] for row in rows} == {"w", "b"}


def test_a_dying_engine_costs_time_but_no_row(tmp_path: Path) -> None:
    (tmp_path / "faulty").mkdir()
    faulty = p_rows(tmp_path / "faulty", rows=20)
    install_legal(tmp_path / "faulty", faults=2)
    assert made(faulty) == made(p_rows(tmp_path, rows=20))
    install_legal(tmp_path / "faulty", faults=3)
    with pytest.raises(EngineError, match="died"):
        generate(replace(faulty, out=tmp_path / "never.parquet"), quiet)


def test_positions_of_given_games(tmp_path: Path) -> None:
    pgn = tmp_path / "games.pgn"
    pgn.write_text('[Event "?"]\n\n1. e4 e5 2. Nf3 Nc6 3. Bb5 a6 4. Bxc6 dxc6 5. O-O *\n\n' * 2)
    lists = tmp_path / "games.txt"
    lists.write_text("d2d4 d7d5 c2c4 e7e6 b1c3\ne2e4 e7e5 e1e3 g8f6\n")
    settings = p_rows(tmp_path, every=1, games=(pgn, lists), rows=1000)
    report = generate(settings, quiet)
    assert report.rows < report.asked == 1000 and report.repeated > 0
    board = chess.Board()
    for move in ("e2e4", "e7e5", "g1f3"):
        board.push_uci(move)
    fens = {row["fen"] for row in iterate_parquet(settings.out)}
    assert board.fen() in fens
    assert max(int(fen.split()[5]) for fen in fens) <= 6
    with pytest.raises(DataError, match="no such file of games"):
        generate(
            replace(settings, games=(tmp_path / "none.pgn",), out=tmp_path / "n.parquet"), quiet
        )


# A rows


def test_all_classes_in_set_proportions() -> None:
    count = 200
    rows = transition_records(random.Random(1), Proportions(), count, [])
    kinds = Counter(row["kind"] for row in rows)
    expected = quotas(Proportions(), count)
    for kind in ("castle", "en_passant", "promotion", "mate"):
        # A first move may be one of these as well.
        assert expected[kind] <= kinds[kind] <= expected[kind] + 5
    draws = expected["stalemate"] + expected["insufficient"] + expected["seventy_five"]
    assert kinds["draw"] == draws
    assert kinds["illegal"] == expected["illegal"] + expected["unparsable"]
    assert set(kinds) == set(KINDS) and kinds.total() == count
    castles = {row["move"] for row in rows if row["kind"] == "castle"}
    assert castles == {"e1g1", "e1c1", "e8g8", "e8c8"}
    drawn = [chess.Board(row["next_fen"]) for row in rows if row["kind"] == "draw"]
    reasons = Counter(outcome.termination for b in drawn if (outcome := b.outcome()))
    assert {reason.name for reason in reasons} == {
        "STALEMATE",
        "INSUFFICIENT_MATERIAL",
        "SEVENTYFIVE_MOVES",
    }


def test_rows_say_what_the_rules_say_and_histories_lead_to_the_position() -> None:
    for row in transition_records(random.Random(2), EASY, 100, []):
        true = transition(row["fen"], row["move"], row["history"][:-1])
        assert {**row, "history": tuple(row["history"])} == {
            name: getattr(true, name) for name in row
        }
        assert row["history"][-1] == row["move"] and len(row["history"]) <= 10
        if len(row["history"]) < 10 and "KQkq" in row["fen"]:
            board = chess.Board()
            for move in row["history"][:-1]:
                board.push_uci(move)
            assert board.fen() == row["fen"]


def test_given_games_lend_their_histories() -> None:
    game = ["e2e4", "e7e5", "g1f3", "b8c6", "f1b5", "a7a6", "b5a4", "g8f6"]
    rows = transition_records(random.Random(3), EASY, 40, [game] * 10)
    real = [row for row in rows if row["history"][:-1] == game[: len(row["history"]) - 1]]
    assert len([row for row in real if len(row["history"]) > 2]) >= 5


def test_quotas_add_up_for_any_count() -> None:
    for count in (1, 7, 250):
        assert quotas(Proportions(), count).total() == count
    assert quotas(EASY, 100) == {"quiet": 40, "first": 20, "capture": 20, "illegal": 20}
    with pytest.raises(ConfigError, match="all classes are 0"):
        Proportions(**NONE)
    with pytest.raises(ConfigError, match="--mate: -1"):
        Proportions(mate=-1)


@pytest.mark.parametrize("style", WALKS, ids=lambda style: style.name)
def test_walks_stay_legal(style: Any) -> None:
    rng = random.Random(4)
    for board in itertools.islice(walk(rng, style), 0, 300, 7):
        assert board.is_valid() and not board.is_game_over()
        assert board.fullmove_number < 199 and board.halfmove_clock < 150


# Mates


@pytest.mark.parametrize("mate_in", [1, 2])
def test_mates_are_all_there(mate_in: int) -> None:
    for row in mate_records(random.Random(5), mate_in, 3):
        board = chess.Board(row["fen"])
        solve = mates_in_one if mate_in == 1 else mates_in_two
        assert row["mates"] == solve(board) != []
        if mate_in == 2:
            assert mates_in_one(board) == []


def test_a_varied_mate_is_another_position_with_a_mate() -> None:
    rng, made = random.Random(7), 0
    for row in mate_records(random.Random(5), 1, 20):
        varied = varied_mate(row["fen"], 1, rng)
        if varied is not None:
            made += 1
            board = chess.Board(varied["fen"])
            assert board.is_valid() and varied["mates"] == mates_in_one(board) != []
            assert board.board_fen() != chess.Board(row["fen"]).board_fen()
    assert made >= 5
    assert varied_mate("4k3/8/8/8/8/8/8/4K3 w - - 0 1", 1, rng) is None, "bare kings do not mate"


def test_no_check_is_overlooked() -> None:
    checks = 0
    for style in WALKS:
        for board in itertools.islice(walk(random.Random(6), style), 150):
            listed = checking_moves(board)
            for move in board.legal_moves:
                if board.gives_check(move):
                    checks += 1
                    assert may_check(board, move) and move in listed, f"{board.fen()} {move}"
    assert checks > 500
    # Discovered by an en passant capture, and given by the rook of a castling king.
    for fen, text in (
        ("6k1/8/8/3pP3/8/8/B7/K7 w - d6 0 1", "e5d6"),
        ("5k2/8/8/8/8/8/8/4K2R w K - 0 1", "e1g1"),
    ):
        board, move = chess.Board(fen), chess.Move.from_uci(text)
        assert board.gives_check(move) and may_check(board, move)
        assert move in checking_moves(board)


def test_known_mates() -> None:
    ladder = chess.Board("7k/8/8/8/8/8/R7/1R5K w - - 0 1")
    assert mates_in_one(ladder) == []
    assert mates_in_two(ladder) == ["a2a7", "b1b7", "b1g1"]
    assert mates_in_one(chess.Board("7k/R7/8/8/8/8/8/1R5K w - - 0 1")) == ["b1b8"]
    stalemating = chess.Board("7k/8/5K2/6Q1/8/8/8/8 w - - 0 1")
    assert mates_in_one(stalemating) == ["g5g7"]
