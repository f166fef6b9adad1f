"""Rows from positions that the user gives: P labels each, A plays a move in each, mate varies it.

They are read once from files of rows (P, A or mates alike), kept beside the chunks in the order of
the files, one a line, and looked up by number, so that no worker holds them all.

The law: a position gives one row at most; one that is over, or that the rules do not allow, gives
none. What a move does is decided by `transition` alone.

A position alone does not say how it came about: an A row's history begins there.
"""

from __future__ import annotations

import random
from array import array
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import chess

from rookworld.data.files import iterate_records
from rookworld.data.generate.analyses import AnalysisSettings, analysis_record, label
from rookworld.data.generate.moves import Moves, chosen_move
from rookworld.data.generate.playouts import MAX_FULLMOVE, recent
from rookworld.data.rows import MATE, row_record
from rookworld.data.sources import source_files
from rookworld.runtime.atomic_files import write_text
from rookworld.runtime.errors import DataError
from rookworld.tasks.engine import Engine
from rookworld.tasks.environment import ENVIRONMENT, transition
from rookworld.tasks.notation import read_fen
from rookworld.tasks.policy import POLICY

Record = dict[str, Any]

POSITIONS_PER_CHUNK = {POLICY.letter: 200, ENVIRONMENT.letter: 1_000, MATE: 1_000}

OTHER_COUNTERS = 0.15
"""A: share of the rows with counters drawn at random: positions of games seldom have large ones."""

MAX_HALFMOVE = 150


def kept_positions(folder: Path, sources: Sequence[Path]) -> Path | None:
    """The file in `folder` that holds the positions of sources, written if not there yet."""
    if not sources:
        return None
    store = folder / "positions.txt"
    if not store.exists():
        files = [path for source in sources for path in source_files(source)]
        lines = [line for path in files for line in _lines_of(path)]
        if not lines:
            raise DataError(f"no position in {', '.join(map(str, sources))}")
        write_text(store, "".join(lines))
    return store


def _lines_of(path: Path) -> Iterator[str]:
    """The positions of a file of rows, each with the moves that its row lists, if any."""
    for number, record in enumerate(iterate_records(path, optional=("fen", "moves", "mates"))):
        try:
            fen, listed = read_fen(record["fen"]), record.get("moves") or record.get("mates") or []
        except (KeyError, TypeError, AttributeError) as error:
            raise DataError(f"{path}, row {number}: no 'fen' in it") from error
        if fen is None or not (isinstance(listed, list) and all(map(is_word, listed))):
            wrong = record["fen"] if fen is None else listed
            raise DataError(f"{path}, row {number}: not a FEN, or not a list of moves: {wrong!r}")
        yield " ".join((_as_written_here(fen), *listed)) + "\n"


def is_word(move: object) -> bool:
    """Whether something listed can stand among the words of a line."""
    return isinstance(move, str) and len(move.split()) == 1


def _as_written_here(fen: str) -> str:
    """The FEN as python-chess writes it; a valid position differs in these two fields at most."""
    _, _, _, passant, _, fullmove = fen.split()
    return fen if passant == "-" and fullmove != "0" else chess.Board(fen).fen()


def count_positions(store: Path) -> int:
    """How many positions a store holds."""
    return len(_line_starts(store))


def positions_of(store: Path, numbers: range) -> Iterator[tuple[str, list[str]]]:
    """Some positions of a store in order, each with its listed moves."""
    starts = _line_starts(store)
    with store.open("rb") as lines:
        for number in range(numbers.start, min(numbers.stop, len(starts))):
            lines.seek(starts[number])
            words = lines.readline().decode().split()
            yield " ".join(words[:6]), words[6:]


@lru_cache(maxsize=1)
def _line_starts(store: Path) -> array[int]:
    starts, at = array("Q"), 0
    with store.open("rb") as lines:
        for line in lines:
            starts.append(at)
            at += len(line)
    return starts


def playable(fen: str) -> chess.Board | None:
    """The board of a position in which a game can go on, None of any other."""
    board = chess.Board(fen)
    return board if board.is_valid() and not board.is_game_over() else None


def labelled_records(
    engine: Engine, settings: AnalysisSettings, fens: Iterable[str]
) -> Iterator[Record]:
    """The positions as P rows, analysed one after the other with a hash that begins empty."""
    engine.new_game()
    for fen in fens:
        if playable(fen) is not None:
            yield analysis_record(fen, label(engine, fen, settings))


def played_record(
    fen: str, listed: Sequence[str], rng: random.Random, moves: Moves = "all", plies: int = 0
) -> Record | None:
    """One move in a position as an A row, or after up to `plies` random ones, its history."""
    if rng.random() < OTHER_COUNTERS:
        fen = with_counters(fen, rng.randrange(MAX_HALFMOVE), rng.randrange(1, MAX_FULLMOVE))
    board = playable(fen)
    if board is not None and plies:
        board = walked_on(board, rng.randint(0, plies), rng)
    if board is None or board.fullmove_number >= MAX_FULLMOVE:
        return None
    move = chosen_move(board, () if board.move_stack else listed, rng, moves)
    return row_record(transition(board.fen(), move, recent(board)))


def walked_on(board: chess.Board, plies: int, rng: random.Random) -> chess.Board | None:
    """The board so many random plies later, None if the game ends by then."""
    for _ in range(plies):
        board.push(rng.choice(list(board.legal_moves)))
        if board.is_game_over():
            return None
    return board


def with_counters(fen: str, halfmove: int, fullmove: int) -> str:
    """The position at another time; the same if an en passant square says that the clock is 0."""
    *fields, _, _ = fen.split()
    return fen if fields[3] != "-" else " ".join([*fields, str(halfmove), str(fullmove)])
