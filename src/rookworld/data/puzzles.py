"""Readers of chess benchmarks: Lichess puzzles and BIG-bench checkmate-in-one.

The law: a position that a reader hands out is legal and its solution was replayed by python-chess;
anything else is one line that names the file, the place and what was expected.
A Lichess file is read only as far as puzzles are wanted; it is sorted by an arbitrary id, so its
beginning is a fair sample of it.

Left out on purpose: decompressing (`zstd -d` does it) and fetching.
"""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import chess

from rookworld.data.generate.mates import mates_in_one
from rookworld.runtime.errors import DataError

COLUMNS = ("PuzzleId", "FEN", "Moves", "Rating")
"""Columns that a Lichess puzzle file must have; those behind them are optional."""

_MOVE_NUMBER = re.compile(r"\d+\.(\.\.)?")
_RESULTS = ("1-0", "0-1", "1/2-1/2", "*")


class Mate(NamedTuple):
    """A position with every move that mates, and the one a benchmark expects, if it names one."""

    fen: str
    mates: tuple[str, ...]
    target: str | None = None


class Puzzle(NamedTuple):
    """A Lichess puzzle: `moves` begins with the opponent's, the solver has every second one."""

    name: str
    fen: str
    moves: tuple[str, ...]
    rating: int


def read_mates(path: Path, limit: int | None = None) -> list[Mate]:
    """Mates in one of a BIG-bench `task.json`, or of a Lichess CSV."""
    read = _big_bench if path.suffix == ".json" else _lichess_mates
    mates = list(islice(read(_existing(path)), limit))
    if not mates:
        raise DataError(f"{path}: no mate in one in this file")
    return mates


def read_puzzles(path: Path, limit: int | None = None) -> list[Puzzle]:
    """Puzzles of a Lichess CSV, the first `limit` of them."""
    puzzles = list(islice(_lichess(_existing(path)), limit))
    if not puzzles:
        raise DataError(f"{path}: no puzzle in this file; expected columns {', '.join(COLUMNS)}, …")
    return puzzles


def _existing(path: Path) -> Path:
    if not path.is_file():
        raise DataError(f"{path}: no such file of puzzles")
    if path.suffix == ".zst":
        raise DataError(f"{path} is compressed: unpack it first with `zstd -d {path.name}`")
    return path


def mate_of(fen: str, target: str | None = None) -> Mate:
    """A position as a mate in one; `mates` is empty if there is none."""
    return Mate(fen, tuple(mates_in_one(chess.Board(fen))), target)


def _board(fen: object, where: str) -> chess.Board:
    try:
        board = chess.Board(str(fen))
    except ValueError as error:
        raise DataError(f"{where}: not a FEN: {fen!r}") from error
    if not board.is_valid():
        raise DataError(f"{where}: not a legal position: {fen!r}")
    return board


def _big_bench(path: Path) -> Iterator[Mate]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise DataError(f"{path}: not a JSON file ({error})") from error
    examples = content.get("examples") if isinstance(content, dict) else None
    if not isinstance(examples, list):
        raise DataError(f"{path}: no list of examples, so not a BIG-bench task.json")
    for number, example in enumerate(examples, 1):
        where = f"{path}: example {number}"
        if not isinstance(example, dict) or not isinstance(example.get("input"), str):
            raise DataError(f"{where}: no text under 'input'")
        board = _played(example["input"], where)
        yield mate_of(board.fen(), _uci(board, _target(example, where), where))


def _target(example: Mapping[str, Any], where: str) -> str:
    """The expected move in SAN: `target`, or the highest of `target_scores`."""
    target, scores = example.get("target"), example.get("target_scores")
    if isinstance(target, list) and target:
        target = target[0]
    if target is None and isinstance(scores, dict) and scores:
        target = max(scores, key=lambda move: scores[move])
    if not isinstance(target, str):
        raise DataError(f"{where}: neither 'target' nor 'target_scores'")
    return target


def _played(text: str, where: str) -> chess.Board:
    """The position after a PGN-like prefix such as `1. e4 e5 2.`; a line of words may precede."""
    # The prompt of some copies begins with a sentence; the moves start at the first number.
    start = re.search(r"\b1\.", text)
    if start is None:
        raise DataError(f"{where}: no '1.' in {text[:40]!r}, so not a list of moves")
    board = chess.Board()
    words = _MOVE_NUMBER.sub(" ", text[start.start() :]).split()
    for word in words:
        if word not in _RESULTS:
            board.push(_san(board, word, where))
    return board


def _san(board: chess.Board, text: str, where: str) -> chess.Move:
    try:
        return board.parse_san(text)
    except ValueError as error:
        raise DataError(f"{where}: {text!r} is not a move in {board.fen()}") from error


def _uci(board: chess.Board, san: str, where: str) -> str:
    return _san(board, san.strip(), where).uci()


def _lichess_mates(path: Path) -> Iterator[Mate]:
    """The puzzles of one move that mates."""
    for puzzle in _lichess(path):
        if len(puzzle.moves) == 2:
            board = chess.Board(puzzle.fen)
            board.push_uci(puzzle.moves[0])
            mate = mate_of(board.fen(), puzzle.moves[1])
            if mate.target in mate.mates:
                yield mate


def _lichess(path: Path) -> Iterator[Puzzle]:
    with path.open(encoding="utf-8", errors="replace", newline="") as file:
        yield from _puzzles(path, csv.reader(file))


def _puzzles(path: Path, lines: Iterable[list[str]]) -> Iterator[Puzzle]:
    """Puzzles line by line; old files have no header."""
    places = dict(zip(COLUMNS, range(4), strict=True))
    for number, fields in enumerate(_readable(path, lines), 1):
        where = f"{path}:{number}"
        if number == 1 and fields[:1] == ["PuzzleId"]:
            if missing := [name for name in COLUMNS if name not in fields]:
                raise DataError(f"{where}: no column {missing[0]!r} in {', '.join(fields)}")
            places = {name: fields.index(name) for name in COLUMNS}
        elif fields:
            yield _puzzle(fields, places, where)


def _readable(path: Path, lines: Iterable[list[str]]) -> Iterator[list[str]]:
    try:
        yield from lines
    except csv.Error as error:
        raise DataError(f"{path}: not a CSV file ({error})") from error


def _puzzle(fields: list[str], places: Mapping[str, int], where: str) -> Puzzle:
    if len(fields) <= max(places.values()):
        raise DataError(
            f"{where}: {len(fields)} fields, so not a Lichess puzzle: expected "
            f"{','.join(COLUMNS)},…"
        )
    name, fen, moves, rating = (fields[places[column]] for column in COLUMNS)
    if not rating.strip().isdecimal():
        raise DataError(f"{where}: rating {rating!r} is not a whole number")
    board = _board(fen, where)
    plies = tuple(moves.split())
    if len(plies) < 2 or len(plies) % 2:
        raise DataError(f"{where}: {len(plies)} moves; a puzzle has the opponent's and a reply")
    for move in plies:
        try:
            board.push_uci(move)
        except ValueError as error:
            raise DataError(f"{where}: {move!r} is not a legal move in {board.fen()}") from error
    return Puzzle(name, fen, plies, int(rating))
