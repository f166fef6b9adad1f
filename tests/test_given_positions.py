"""Rows from given positions: each once, in the order of the files, whatever happens meanwhile."""

from __future__ import annotations

import json
import random
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import chess
import pytest

from legal_engine import install_legal
from rookworld.data.files import file_origin, iterate_parquet, write_records
from rookworld.data.generate.chunks import ChunkFolder
from rookworld.data.generate.generator import chunk_origin, generate, make_chunk
from rookworld.data.generate.mates import mate_records, mates_in_one
from rookworld.data.generate.moves import (
    FEW_MEN,
    SHARES,
    blocked_moves,
    chosen_move,
    cornering_moves,
    drawing_moves,
    special_moves,
    tense_moves,
)
from rookworld.data.generate.playouts import ENDING, HUNT, WALKS, walk
from rookworld.data.generate.positions import kept_positions
from rookworld.data.generate.settings import GenerateSettings
from rookworld.data.rows import MATE_COLUMNS
from rookworld.runtime.errors import ConfigError, DataError
from rookworld.tasks.environment import KINDS, transition
from rookworld.tasks.notation import position_key

MATED = "rnb1kbnr/pppp1ppp/8/4p3/6Pq/5P2/PPPPP2P/RNBQKBNR w KQkq - 1 3"
IMPOSSIBLE = "4k3/4R3/8/8/8/8/8/4K3 w - - 0 1"


def quiet(done: int, rows: int) -> None:
    """Progress that nobody watches."""


def walked(count: int, seed: int = 0) -> list[dict[str, Any]]:
    """Positions of half-random games, half of them with two listed moves."""
    rng = random.Random(seed)
    found: dict[str, dict[str, Any]] = {}
    while len(found) < count:
        for board in walk(rng, rng.choice(WALKS)):
            listed = [move.uci() for move in list(board.legal_moves)[: rng.choice((0, 2))]]
            if rng.random() < 0.3:
                found[position_key(board.fen())] = {"fen": board.fen(), "moves": listed}
    return list(found.values())[:count]


def jsonl(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def settings_of(folder: Path, task: Any, given: list[Any], **changes: Any) -> GenerateSettings:
    settings = GenerateSettings(
        out=folder / "rows.parquet",
        task=task,
        workers=1,
        engine=str(install_legal(folder)),
        positions=(jsonl(folder / "given.jsonl", given),),
    )
    return replace(settings, **changes)


def made(settings: GenerateSettings) -> list[dict[str, Any]]:
    generate(settings, quiet)
    return list(iterate_parquet(settings.out))


# What a run promises


@pytest.mark.parametrize(("task", "count"), [("P", 450), ("A", 2300)])
def test_workers_kills_and_shards_do_not_change_the_rows(
    tmp_path: Path, task: Any, count: int
) -> None:
    settings = settings_of(tmp_path, task, walked(count))
    one = made(settings)
    assert one == made(replace(settings, out=tmp_path / "two.parquet", workers=2))

    # A run that was killed after its first chunk: what is there is used, the rest is made.
    begun = replace(settings, out=tmp_path / "begun.parquet")
    folder = ChunkFolder(tmp_path / "begun.parquet.parts")
    with folder.opened(chunk_origin(begun)):
        store = kept_positions(folder.path, begun.positions)
        folder.write(0, make_chunk(begun, store, 0))
    begun.positions[0].unlink()
    assert made(begun) == one and not folder.path.exists()

    jsonl(settings.positions[0], walked(count))
    shards = [
        made(replace(settings, out=tmp_path / f"{i}.parquet", shard=f"{i}/2")) for i in (0, 1)
    ]
    assert sorted(map(str, shards[0] + shards[1])) == sorted(map(str, one))


@pytest.mark.parametrize("task", ["P", "A"])
def test_each_position_once_in_order_up_to_the_rows_asked_for(tmp_path: Path, task: Any) -> None:
    given = walked(250)
    settings = settings_of(tmp_path, task, [given[0], {"fen": MATED}, *given, {"fen": IMPOSSIBLE}])
    report = generate(settings, quiet)
    rows = list(iterate_parquet(settings.out))
    assert report.asked == 253 and report.rows == len(rows) >= 250
    if task == "P":
        assert [row["fen"] for row in rows] == [row["fen"] for row in given]
        assert report.repeated == 1
    few = made(replace(settings, rows=7, out=tmp_path / "few.parquet"))
    assert few == rows[:7]
    origin = file_origin(settings.out)
    assert origin is not None and origin["positions"] == ["given.jsonl"]
    with pytest.raises(ConfigError, match="holds rows of other settings"):
        generate(replace(settings, positions=(tmp_path / "other.jsonl",)), quiet)


@pytest.mark.parametrize("task", ["P", "A"])
def test_excluded_positions_are_left_out(tmp_path: Path, task: Any) -> None:
    given = walked(120)
    held = jsonl(tmp_path / "held.jsonl", given[:40])
    settings = settings_of(tmp_path, task, given, exclude=(held,))
    report = generate(settings, quiet)
    rows = list(iterate_parquet(settings.out))
    assert (report.rows, report.excluded, report.asked) == (80, 40, 120)
    excluded = {position_key(row["fen"]) for row in given[:40]}
    assert not excluded & {position_key(row["fen"]) for row in rows}


@pytest.mark.parametrize("task", ["P", "A"])
def test_positions_are_written_as_python_chess_writes_them(tmp_path: Path, task: Any) -> None:
    # No pawn can capture there, and no game begins at move 0.
    passant = "rnbqkbnr/pppppppp/8/8/4P3/8/PPPP1PPP/RNBQKBNR  b KQkq e3 0 1"
    zeroth = "4k3/8/8/8/8/8/4P3/4K3 w - - 7 0"
    rows = made(settings_of(tmp_path, task, [{"fen": passant}, {"fen": zeroth}]))
    assert [row["fen"] for row in rows] == [
        "rnbqkbnr/pppppppp/8/8/4P3/8/PPPP1PPP/RNBQKBNR b KQkq - 0 1",
        "4k3/8/8/8/8/8/4P3/4K3 w - - 7 1",
    ]


def test_plies_before_the_move_are_its_history(tmp_path: Path) -> None:
    given = walked(600)
    rows = made(settings_of(tmp_path, "A", given, plies=4))
    lengths = Counter(len(row["history"]) for row in rows)
    assert sorted(lengths) == [1, 2, 3, 4, 5] and min(lengths.values()) > 60
    starts = {" ".join(row["fen"].split()[:3]) for row in given}
    for row in rows:
        *before, _ = row["history"]
        here = " ".join(row["fen"].split()[:3])
        assert transition(row["fen"], row["move"], before).next_fen == row["next_fen"]
        assert bool(before) or here in starts
    # no more than asked for, and the rows of earlier commands stay as they are
    plain = made(settings_of(tmp_path, "A", given, out=tmp_path / "plain.parquet"))
    assert {len(row["history"]) for row in plain} == {1}


def test_what_cannot_be_is_named(tmp_path: Path) -> None:
    settings = settings_of(tmp_path, "A", walked(3))
    with pytest.raises(ConfigError, match="--positions and --games"):
        replace(settings, games=(tmp_path / "games.pgn",))
    with pytest.raises(ConfigError, match="--moves ends needs --task A"):
        replace(settings, task="P", moves="ends")
    with pytest.raises(ConfigError, match="--plies 3 needs --task A and --positions"):
        replace(settings, positions=(), plies=3)
    wrong: list[tuple[list[Any], str]] = [
        ([{"fen": "8/8 w - -"}], "row 0: not a FEN.*8/8 w"),
        ([{"fen": chess.STARTING_FEN}, {"move": "e2e4"}], "row 1: no 'fen'"),
        ([["fen"]], "row 0: no 'fen'"),
        ([{"fen": chess.STARTING_FEN, "moves": "e2e4"}], "not a list of moves: 'e2e4'"),
        ([], "no position in"),
    ]
    for number, (rows, message) in enumerate(wrong):
        jsonl(settings.positions[0], rows)
        with pytest.raises(DataError, match=message):
            generate(replace(settings, out=tmp_path / f"{number}.parquet"), quiet)


# P rows


def test_mates_are_varied(tmp_path: Path) -> None:
    given = mate_records(random.Random(1), 1, 30)
    settings = settings_of(tmp_path, "mate", given)
    assert generate(settings, quiet).asked == 30
    rows = list(iterate_parquet(settings.out))
    assert 5 <= len(rows) < 30
    assert not {row["fen"] for row in rows} & {row["fen"] for row in given}
    assert all(mates_in_one(chess.Board(row["fen"])) == row["mates"] for row in rows)


def test_mates_become_analysed_rows(tmp_path: Path) -> None:
    mates = mate_records(random.Random(1), 1, 30)
    file = tmp_path / "mates.parquet"
    write_records(file, mates, MATE_COLUMNS)
    rows = made(settings_of(tmp_path, "P", [], positions=(file,)))
    assert [row["fen"] for row in rows] == list(dict.fromkeys(row["fen"] for row in mates))
    for row in rows:
        board = chess.Board(row["fen"])
        assert len(set(row["moves"])) == len(row["cp"]) == min(5, board.legal_moves.count())
        assert all(chess.Move.from_uci(move) in board.legal_moves for move in row["moves"])
        assert row["cp"] == sorted(row["cp"], reverse=True)


def test_the_hash_is_cleared_for_each_chunk_or_each_label(tmp_path: Path) -> None:
    # The engine's evaluations depend on the searches since its hash was cleared.
    given = walked(202)
    settings = settings_of(tmp_path, "P", given)
    kept = made(settings)
    cleared = made(replace(settings, clear_hash=True, out=tmp_path / "cleared.parquet"))
    same = [number for number in range(202) if kept[number] == cleared[number]]
    assert same == [0, 200]


def test_a_dying_engine_costs_no_row(tmp_path: Path) -> None:
    settings = settings_of(tmp_path, "P", walked(20))
    rows = made(settings)
    install_legal(tmp_path, faults=2)
    assert made(replace(settings, out=tmp_path / "faulty.parquet")) == rows


# A rows


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Rows of positions of every stage of a game."""
    return made(settings_of(tmp_path_factory.mktemp("played"), "A", walked(3000)))


def test_rows_say_what_the_rules_say(played: list[dict[str, Any]]) -> None:
    for row in played[:1000]:
        assert chess.Board(row["fen"]).fen() == row["fen"]
        assert row["history"] == [row["move"]]
        true = transition(row["fen"], row["move"])
        assert {**row, "history": true.history} == {name: getattr(true, name) for name in row}


def test_all_classes_and_counters_occur(played: list[dict[str, Any]]) -> None:
    kinds = Counter(row["kind"] for row in played)
    assert set(kinds) == set(KINDS)
    assert 0.15 < kinds["illegal"] / len(played) < 0.25
    clocks = {int(row["fen"].split()[4]) for row in played}
    assert (min(clocks), max(clocks)) == (0, 149) and len(clocks) > 130
    numbers = {int(row["fen"].split()[5]) for row in played}
    assert (min(numbers), max(numbers)) == (1, 198) and len(numbers) > 170
    passant = [row["fen"].split() for row in played if row["fen"].split()[3] != "-"]
    assert passant and all(fields[4] == "0" for fields in passant)


def test_moves_are_drawn_by_their_shares() -> None:
    rng, legal = random.Random(3), {move.uci() for move in chess.Board(TOWERS).legal_moves}
    moves = Counter(chosen_move(chess.Board(TOWERS), ["a1a2"], rng) for _ in range(4000))
    assert abs(moves["a1a2"] / 4000 - SHARES["all"]["listed"]) < 0.03
    assert 0.10 < (moves["a1a8"] + moves["h1h8"]) / 4000 < 0.17
    assert 0.10 < (moves["e1g1"] + moves["e1c1"]) / 4000 < 0.20
    unknown = sum(n for move, n in moves.items() if move not in legal) / 4000
    assert abs(unknown - SHARES["all"]["illegal"] - SHARES["all"]["unparsable"]) < 0.03
    start = Counter(chosen_move(chess.Board(), [], rng) for _ in range(2000))
    assert {move.uci() for move in chess.Board().legal_moves} < set(start)


TOWERS = "r3k2r/8/8/8/8/8/8/R3K2R w KQkq - 0 1"


@pytest.mark.parametrize(
    ("fen", "allowed", "forbidden"),
    [
        ("k7/4r3/8/8/8/8/3P4/4K3 w - - 0 1", "e1d1 e1f1 e1f2", "d2d3 d2d4 e1e2"),
        ("k7/8/8/8/7b/6P1/8/4K3 w - - 0 1", "e1d1 e1d2 e1e2 e1f1 e1f2 g3h4", "g3g4"),
        ("k7/8/8/8/8/1n6/3P4/4K3 w - - 0 1", "e1d1 e1e2 e1f1 e1f2", ""),
    ],
)
def test_tense_moves_hang_on_the_king(fen: str, allowed: str, forbidden: str) -> None:
    for wanted, bad in ((allowed, False), (forbidden, True)):
        found = tense_moves(chess.Board(fen), forbidden=bad)
        assert sorted(move.uci() for move in found) == wanted.split()


def test_drawing_moves_stalemate_or_leave_nothing() -> None:
    stale = chess.Board("7k/8/5K2/6Q1/8/8/8/8 w - - 0 1")
    assert {move.uci() for move in drawing_moves(stale)} == {"g5g6"}
    bare = chess.Board("7k/8/8/8/8/8/1p6/K7 w - - 0 1")
    assert {move.uci() for move in drawing_moves(bare)} == {"a1b2"}
    assert drawing_moves(chess.Board()) == []


def test_cornering_moves_leave_hardly_a_reply() -> None:
    rng, met = random.Random(5), Counter[bool]()
    for style in (HUNT, ENDING, ENDING):
        for board in walk(rng, style):
            few, found = len(board.piece_map()) <= FEW_MEN, cornering_moves(board)
            for move in list(board.legal_moves):
                board.push(move)
                cornered = board.legal_moves.count() <= 2 and (few or board.is_check())
                board.pop()
                assert (move in found) == cornered
                met[cornered] += 1
    assert met[True] > 20 and met[False] > 20
    assert cornering_moves(chess.Board()) == []


def test_blocked_moves_would_be_legal_on_an_empty_board() -> None:
    rng = random.Random(4)
    for board in walk(rng, WALKS[0]):
        found = blocked_moves(board)
        assert not set(found) & set(board.pseudo_legal_moves)
        for move in found[:8]:
            alone = chess.Board(None)
            alone.set_piece_at(move.from_square, board.piece_at(move.from_square))
            alone.turn = board.turn
            if board.piece_type_at(move.from_square) == chess.PAWN:
                capture = chess.square_file(move.from_square) != chess.square_file(move.to_square)
                man = chess.Piece(chess.PAWN, not board.turn)
                alone.set_piece_at(move.to_square, man if capture else None)
            assert move in alone.pseudo_legal_moves
    start = {move.uci() for move in blocked_moves(chess.Board())}
    assert {"a1a2", "a1a8", "c1h6", "d1h5", "e2d3"} < start and "e2e4" not in start


def test_special_moves_are_the_legal_ones() -> None:
    rng, seen = random.Random(4), 0
    for style in WALKS * 2:
        for board in walk(rng, style):
            special = {
                move
                for move in board.legal_moves
                if move.promotion or board.is_castling(move) or board.is_en_passant(move)
            }
            found = special_moves(board)
            assert set(found) == special and len(found) == len(special)
            seen += bool(special)
    assert seen > 30


def test_ends_are_mates_and_checks_and_draws(tmp_path: Path) -> None:
    given = mate_records(random.Random(1), 1, 120)
    rows = {
        moves: made(
            settings_of(tmp_path, "A", given, moves=moves, out=tmp_path / f"{moves}.parquet")
        )
        for moves in ("all", "ends")
    }
    shares = {moves: Counter(row["kind"] for row in found) for moves, found in rows.items()}
    assert shares["ends"]["mate"] > 1.3 * shares["all"]["mate"] > 0
    checks = sum(
        chess.Board(row["next_fen"]).is_check() and row["kind"] != "mate" for row in rows["ends"]
    )
    assert checks > 15
    assert shares["ends"]["illegal"] < shares["all"]["illegal"]
    ending, rng = chess.Board("7k/5Q2/8/8/8/8/8/K7 w - - 0 1"), random.Random(0)
    drawing = {move.uci() for move in drawing_moves(ending)}
    played = [chosen_move(ending, [], rng, "ends") for _ in range(1000)]
    assert "f7g6" in drawing
    assert sum(move in drawing for move in played) > 190
