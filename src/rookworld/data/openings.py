"""A small book of openings from which matches start, and as many more starts as are asked for.

The law: the n-th start is the same for a seed however many are asked for, and no two are equal, so
that two players without chance never play the same game twice.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import islice

import chess

BOOK: dict[str, str] = {
    "Ruy Lopez": "e2e4 e7e5 g1f3 b8c6 f1b5 a7a6",
    "Italian Game": "e2e4 e7e5 g1f3 b8c6 f1c4 f8c5",
    "Two Knights Defence": "e2e4 e7e5 g1f3 b8c6 f1c4 g8f6",
    "Scotch Game": "e2e4 e7e5 g1f3 b8c6 d2d4 e5d4",
    "Four Knights Game": "e2e4 e7e5 g1f3 b8c6 b1c3 g8f6",
    "Petrov Defence": "e2e4 e7e5 g1f3 g8f6",
    "Vienna Game": "e2e4 e7e5 b1c3 g8f6",
    "King's Gambit": "e2e4 e7e5 f2f4 e5f4",
    "Sicilian, Najdorf": "e2e4 c7c5 g1f3 d7d6 d2d4 c5d4 f3d4 g8f6 b1c3 a7a6",
    "Sicilian, Sveshnikov": "e2e4 c7c5 g1f3 b8c6 d2d4 c5d4 f3d4 g8f6 b1c3 e7e5",
    "Sicilian, Alapin": "e2e4 c7c5 c2c3 d7d5",
    "French, Advance": "e2e4 e7e6 d2d4 d7d5 e4e5 c7c5",
    "French, Winawer": "e2e4 e7e6 d2d4 d7d5 b1c3 f8b4",
    "Caro-Kann, Classical": "e2e4 c7c6 d2d4 d7d5 b1c3 d5e4 c3e4 c8f5",
    "Caro-Kann, Advance": "e2e4 c7c6 d2d4 d7d5 e4e5 c8f5",
    "Scandinavian": "e2e4 d7d5 e4d5 d8d5 b1c3 d5a5",
    "Pirc Defence": "e2e4 d7d6 d2d4 g8f6 b1c3 g7g6",
    "Alekhine Defence": "e2e4 g8f6 e4e5 f6d5 d2d4 d7d6",
    "Queen's Gambit Declined": "d2d4 d7d5 c2c4 e7e6 b1c3 g8f6",
    "Queen's Gambit Accepted": "d2d4 d7d5 c2c4 d5c4 g1f3 g8f6",
    "Slav Defence": "d2d4 d7d5 c2c4 c7c6 g1f3 g8f6",
    "Nimzo-Indian Defence": "d2d4 g8f6 c2c4 e7e6 b1c3 f8b4",
    "Queen's Indian Defence": "d2d4 g8f6 c2c4 e7e6 g1f3 b7b6",
    "King's Indian Defence": "d2d4 g8f6 c2c4 g7g6 b1c3 f8g7 e2e4 d7d6",
    "Grünfeld Defence": "d2d4 g8f6 c2c4 g7g6 b1c3 d7d5",
    "Modern Benoni": "d2d4 g8f6 c2c4 c7c5 d4d5 e7e6",
    "Dutch Defence": "d2d4 f7f5 g2g3 g8f6 f1g2 e7e6",
    "London System": "d2d4 d7d5 g1f3 g8f6 c1f4 c7c5",
    "English, Symmetrical": "c2c4 c7c5 b1c3 b8c6 g2g3 g7g6",
    "English, Reversed Sicilian": "c2c4 e7e5 b1c3 g8f6",
    "Réti Opening": "g1f3 d7d5 c2c4 d5d4",
    "King's Indian Attack": "g1f3 d7d5 g2g3 g8f6 f1g2 e7e6",
}
"""Name → moves."""

EXTRA_PLIES = 2
"""Random plies behind a line of the book once each line has been used."""


def openings(n: int, seed: int = 0) -> list[tuple[str, ...]]:
    """`n` different starts: the book in a shuffled order, then its lines with random plies."""
    return list(islice(_starts(random.Random(seed)), n))


def _starts(rng: random.Random) -> Iterator[tuple[str, ...]]:
    book = [tuple(line.split()) for line in BOOK.values()]
    rng.shuffle(book)
    seen = set(book)
    yield from book
    while True:
        for line in book:
            extended = _extended(line, rng)
            if extended not in seen:
                seen.add(extended)
                yield extended


def _extended(line: tuple[str, ...], rng: random.Random) -> tuple[str, ...]:
    board = chess.Board()
    for text in line:
        board.push_uci(text)
    extra = []
    for _ in range(EXTRA_PLIES):
        move = rng.choice(list(board.legal_moves))
        board.push(move)
        extra.append(move.uci())
    return (*line, *extra)
