"""Readers of public benchmarks, on files written here in their formats."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rookworld.data.puzzles import Mate, Puzzle, read_mates, read_puzzles
from rookworld.runtime.errors import DataError

SCHOLAR = "1. e4 e5 2. Bc4 Nc6 3. Qh5 Nf6 4."
SCHOLAR_FEN = "r1bqkb1r/pppp1ppp/2n2n2/4p2Q/2B1P3/8/PPPP1PPP/RNB1K1NR w KQkq - 4 4"
BACK_RANK = "6k1/5ppp/8/8/8/8/8/R3R1K1 b - - 0 1"
"""After a king move to h8 both rooks mate on the back rank."""
HEADER = "PuzzleId,FEN,Moves,Rating,RatingDeviation,Popularity,NbPlays,Themes,GameUrl,OpeningTags\n"
LONG_FEN = "r1bqkbnr/pppp1ppp/2n5/4p3/2B1P3/8/PPPP1PPP/RNBQK1NR w KQkq - 2 3"


def write(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


def lichess(tmp_path: Path, *lines: str, header: str = HEADER) -> Path:
    return write(tmp_path / "puzzles.csv", header + "".join(line + "\n" for line in lines))


@pytest.mark.parametrize(
    "extra",
    [
        {"target": "Qxf7#"},
        {"target": ["Qxf7#"]},
        {"target_scores": {"Qxf7+": 0, "Qxf7#": 1, "Qxe5+": 0}},
    ],
)
def test_big_bench_prefixes_become_positions(tmp_path: Path, extra: dict[str, object]) -> None:
    sentence = "In the following chess position, find a checkmate-in-one move.\n\n"
    for text in (SCHOLAR, sentence + SCHOLAR):
        task = {"name": "checkmate_in_one", "examples": [{"input": text, **extra}]}
        path = write(tmp_path / "task.json", json.dumps(task))
        assert read_mates(path) == [Mate(SCHOLAR_FEN, ("h5f7",), "h5f7")]


def test_black_to_move_after_a_white_move(tmp_path: Path) -> None:
    examples = [{"input": "1. f3 e5 2. g4", "target": "Qh4#"}]
    path = write(tmp_path / "task.json", json.dumps({"examples": examples}))
    (mate,) = read_mates(path)
    assert mate.mates == ("d8h4",)
    assert mate.fen.split()[1] == "b"


def test_lichess_mates_hold_every_mating_move(tmp_path: Path) -> None:
    path = lichess(
        tmp_path,
        f"00001,{BACK_RANK},g8h8 a1a8,800,80,90,100,mate mateIn1,https://x,",
        f"00002,{LONG_FEN},d1h5 g7g6 h5e5 c6e5,600,80,90,100,short,https://x,",
        f"00003,{LONG_FEN},d1h5 g8f6,600,80,90,100,oneMove,https://x,",
    )
    assert read_mates(path) == [
        Mate("7k/5ppp/8/8/8/8/8/R3R1K1 w - - 1 2", ("a1a8", "e1e8"), "a1a8")
    ]


@pytest.mark.parametrize("header", [HEADER, ""])
def test_lichess_puzzles_with_and_without_header(tmp_path: Path, header: str) -> None:
    line = f"00002,{LONG_FEN},d1h5 g8f6,600,80,90,100,short,https://x,"
    path = lichess(tmp_path, line, line, header=header)
    expected = Puzzle("00002", LONG_FEN, ("d1h5", "g8f6"), 600)
    assert read_puzzles(path) == [expected, expected]
    assert read_puzzles(path, limit=1) == [expected]


PGN = '[Event "Casual"]\n[Site "?"]\n\n1. e4 e5 *\n'


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.csv", PGN, "not a Lichess puzzle"),
        ("a.csv", "", "no puzzle"),
        ("a.csv", HEADER, "no puzzle"),
        ("a.csv", "PuzzleId,FEN,Moves\n", "no column 'Rating'"),
        ("a.csv", f"1,{LONG_FEN},d1h5 e8e6,600\n", "not a legal move"),
        ("a.csv", f"1,{LONG_FEN},d1h5,600\n", "1 moves"),
        ("a.csv", f"1,{LONG_FEN},d1h5 g8f6,many\n", "not a whole number"),
        ("a.csv", "1,8/8/8/8 w - - 0 1,d1h5 g8f6,600\n", "not a FEN"),
        ("a.csv", "1,8/8/8/8/8/8/8/8 w - - 0 1,d1h5 g8f6,600\n", "not a legal position"),
        ("a.csv", "\x00\x01\n", "not a"),
        ("a.csv.zst", "", "zstd -d"),
    ],
)
def test_a_bad_puzzle_file_is_one_line(tmp_path: Path, name: str, text: str, message: str) -> None:
    path = write(tmp_path / name, text)
    with pytest.raises(DataError, match=message) as caught:
        read_puzzles(path)
    assert "\n" not in str(caught.value) and name in str(caught.value)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("task.json", "", "not a JSON file"),
        ("task.json", "[]", "no list of examples"),
        ("task.json", '{"examples": []}', "no mate in one"),
        ("task.json", '{"examples": [3]}', "no text under 'input'"),
        ("task.json", '{"examples": [{"input": "1. e4"}]}', "neither 'target'"),
        ("task.json", '{"examples": [{"input": "hello", "target": "e4"}]}', "no '1.'"),
        ("task.json", '{"examples": [{"input": "1. e5", "target": "e4"}]}', "'e5' is not a move"),
        ("task.json", '{"examples": [{"input": "1. e4", "target": "Kd3"}]}', "'Kd3' is not"),
        ("games.csv", PGN, "not a Lichess puzzle"),
    ],
)
def test_a_bad_mate_file_is_one_line(tmp_path: Path, name: str, text: str, message: str) -> None:
    path = write(tmp_path / name, text)
    with pytest.raises(DataError, match=message) as caught:
        read_mates(path)
    assert "\n" not in str(caught.value) and name in str(caught.value)


def test_a_missing_file_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no such file"):
        read_puzzles(tmp_path / "none.csv")
