"""Games that the user gives: PGN files, or text files with one game of UCI moves a line.

They are read once, kept beside the chunks as UCI moves, one game a line, and looked up by number.
A game is kept up to its first illegal move; games that do not begin at the initial position are
left out, since a move list alone could not be replayed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from pathlib import Path

import chess
import chess.pgn

from rookworld.runtime.atomic_files import write_text
from rookworld.runtime.errors import DataError


def kept_games(folder: Path, files: Sequence[Path]) -> Path | None:
    """The file in `folder` that holds the games of `files`, written if it is not there yet."""
    if not files:
        return None
    store = folder / "games.txt"
    if not store.exists():
        games = [game for path in files for game in _games_of(path) if game]
        if not games:
            raise DataError(f"no game in {', '.join(map(str, files))}")
        write_text(store, "".join(game + "\n" for game in games))
    return store


@lru_cache(maxsize=1)
def read_games(store: Path) -> list[str]:
    """All games of a store, each as UCI moves separated by spaces."""
    return store.read_text().splitlines()


def _games_of(path: Path) -> Iterator[str]:
    if not path.is_file():
        raise DataError(f"{path}: no such file of games")
    with path.open(encoding="utf-8", errors="replace") as file:
        if path.suffix == ".pgn":
            while (game := chess.pgn.read_game(file)) is not None:
                if game.board() == chess.Board():
                    yield " ".join(move.uci() for move in game.mainline_moves())
        else:
            for line in file:
                yield " ".join(_legal_prefix(line.split()))


def _legal_prefix(moves: Sequence[str]) -> list[str]:
    board, kept = chess.Board(), []
    for text in moves:
        try:
            board.push_uci(text)
        except ValueError:
            break
        kept.append(text)
    return kept
