"""Rows from positions that the user gives: P labels each, A plays a move in each, mate varies it.

They are read once from files of rows (P, A or mates alike), kept beside the chunks in the order of
the files, one a line, and looked up by number, so that no worker holds them all.

The law: a position gives one row at most; one that is over, or that the rules do not allow, gives
none. What a move does is decided by `transition` alone.

Left out on purpose: histories. A position alone does not say how it came about.
"""

from __future__ import annotations

import random
from array import array
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

import chess

from rookworld.data.analyses import AnalysisSettings, analysis_record, label
from rookworld.data.files import iterate_records, write_text
from rookworld.data.mates import checking_moves
from rookworld.data.playouts import MAX_FULLMOVE
from rookworld.data.rows import row_record
from rookworld.data.sources import source_files
from rookworld.data.transitions import illegal_moves, unparsable_move
from rookworld.errors import DataError
from rookworld.tasks.engine import Engine
from rookworld.tasks.environment import transition
from rookworld.tasks.notation import read_fen

Record = dict[str, Any]

POSITIONS_PER_CHUNK = {"P": 200, "A": 1_000, "mate": 1_000}

Moves = Literal["all", "ends"]

SHARES: dict[Moves, dict[str, float]] = {
    "all": {
        "listed": 0.25,
        "any": 0.13,
        "tense": 0.22,
        "check": 0.12,
        "special": 0.11,
        "drawing": 0.05,
        "illegal": 0.09,
        "unparsable": 0.03,
    },
    "ends": {"listed": 0.3, "check": 0.3, "drawing": 0.2, "tense": 0.1, "any": 0.1},
}
"""A: how a row's move is drawn; any legal one where a position has none of the sort.

`ends` is for positions with a mate or few men: whether a game is over is the hardest to learn.
"""

FEW_MEN = 9
"""A: with more men than this a move hardly ever draws, and looking costs time."""

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
        if fen is None or not isinstance(listed, list):
            wrong = record["fen"] if fen is None else listed
            raise DataError(f"{path}, row {number}: not a FEN, or not a list of moves: {wrong!r}")
        yield " ".join((_as_written_here(fen), *listed)) + "\n"


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
    fen: str, listed: Sequence[str], rng: random.Random, moves: Moves = "all"
) -> Record | None:
    """One move in a position as an A row, with the move alone for a history."""
    if rng.random() < OTHER_COUNTERS:
        fen = with_counters(fen, rng.randrange(MAX_HALFMOVE), rng.randrange(1, MAX_FULLMOVE))
    board = playable(fen)
    if board is None or board.fullmove_number >= MAX_FULLMOVE:
        return None
    return row_record(transition(fen, chosen_move(board, listed, rng, moves)))


def with_counters(fen: str, halfmove: int, fullmove: int) -> str:
    """The position at another time; the same if an en passant square says that the clock is 0."""
    *fields, _, _ = fen.split()
    return fen if fields[3] != "-" else " ".join([*fields, str(halfmove), str(fullmove)])


def chosen_move(
    board: chess.Board, listed: Sequence[str], rng: random.Random, moves: Moves = "all"
) -> str:
    """A move of a sort drawn by `SHARES`.

    Lists hold good moves: alone they would teach that every check mates and every move is legal.
    """
    shares = SHARES[moves]
    sort = rng.choices(list(shares), list(shares.values()))[0]
    match sort:
        case "unparsable":
            return unparsable_move(board, rng)
        case "illegal":
            while not (illegal := illegal_moves(board, rng)):
                pass
            return rng.choice(illegal)
        case "listed" if listed:
            return rng.choice(listed)
    return rng.choice(_moves_of(sort, board, rng) or list(board.legal_moves)).uci()


def _moves_of(sort: str, board: chess.Board, rng: random.Random) -> list[chess.Move]:
    match sort:
        case "tense":
            return tense_moves(board, forbidden=rng.random() < 0.5)
        case "check":
            return [move for move in checking_moves(board) if board.gives_check(move)]
        case "special":
            return special_moves(board)
        case "drawing":
            return drawing_moves(board)
    return []


def tense_moves(board: chess.Board, *, forbidden: bool) -> list[chess.Move]:
    """Moves that the own king's safety allows or forbids.

    Allowed: his own, those of pinned men, and those out of check. Forbidden: those that would
    leave him in check, as hard to tell from legal ones as anything in the rules.
    """
    legal = list(board.legal_moves)
    if forbidden:
        return sorted(set(board.pseudo_legal_moves) - set(legal), key=chess.Move.uci)
    if board.is_check():
        return legal
    pinned = chess.SquareSet(board.kings & board.occupied_co[board.turn])
    men = chess.SquareSet(board.occupied_co[board.turn])
    pinned |= chess.SquareSet(man for man in men if board.is_pinned(board.turn, man))
    return [move for move in legal if move.from_square in pinned]


def drawing_moves(board: chess.Board) -> list[chess.Move]:
    """Moves of an ending that stalemate, or leave too little to mate with."""
    if chess.popcount(board.occupied) > FEW_MEN:
        return []
    found = []
    for move in list(board.legal_moves):
        board.push(move)
        if board.is_stalemate() or board.is_insufficient_material():
            found.append(move)
        board.pop()
    return found


def special_moves(board: chess.Board) -> list[chess.Move]:
    """The legal castlings, en passant captures and promotions."""
    last_step = chess.BB_RANK_7 if board.turn else chess.BB_RANK_2
    promoting = board.pawns & board.occupied_co[board.turn] & last_step
    moves = list(board.generate_legal_moves(promoting)) if promoting else []
    if board.ep_square is not None:
        moves += board.generate_legal_ep()
    if board.castling_rights:
        moves += board.generate_castling_moves()
    return moves
