"""How chess is written here: moves, evaluations, castling rights, and the symmetries of a position.

The law: every text that a task writes or reads is spelled by this module, and `text_cp` reads a
number strictly (no nan, no infinity, no exponent), because model output arrives here. Evaluations
are centipawns of the side to move; mate in n is ±(100000 − n). Left out on purpose: SAN, Chess960,
and any knowledge of which moves are legal (python-chess knows that).
"""

from __future__ import annotations

import re
from bisect import bisect_left
from functools import lru_cache
from typing import Final

MATE: Final = 100_000
"""Centipawns of a mate in 0; mate in n is MATE − n, being mated in n is n − MATE."""

_MATE_FROM = 90_000  # any evaluation at or above is a mate: engines score material far below it
_FILES, _RANKS = "abcdefgh", "12345678"
_QUEEN = ((0, 1), (1, 0), (1, 1), (1, -1), (0, -1), (-1, 0), (-1, -1), (-1, 1))
_KNIGHT = ((1, 2), (2, 1), (2, -1), (1, -2), (-1, -2), (-2, -1), (-2, 1), (-1, 2))


def _every_move() -> tuple[str, ...]:
    """Each UCI move that a queen, a knight or a promoting pawn can make on an empty board."""
    found: set[str] = set()
    for x in range(8):
        for y in range(8):
            steps = [(dx * n, dy * n) for dx, dy in _QUEEN for n in range(1, 8)]
            for dx, dy in (*steps, *_KNIGHT):
                if not (0 <= x + dx < 8 and 0 <= y + dy < 8):
                    continue
                move = f"{_FILES[x]}{_RANKS[y]}{_FILES[x + dx]}{_RANKS[y + dy]}"
                found.add(move)
                if abs(dx) <= 1 and (y, y + dy) in ((6, 7), (1, 0)):
                    found.update(move + piece for piece in "qrbn")
    return tuple(sorted(found))


MOVES: Final = _every_move()
"""The 1,968 moves, sorted."""

CASTLING: Final = tuple(
    "".join(right for bit, right in enumerate("KQkq") if mask >> bit & 1) or "-"
    for mask in range(16)
)
"""The 16 castling fields of a FEN, "-" first."""

EN_PASSANT: Final = tuple(f"{file}{rank}" for rank in "36" for file in _FILES)
"""The 16 squares that an en passant field can name."""


def _grid() -> tuple[int, ...]:
    """0.1 pawn steps to 2, 0.25 to 5, 0.5 to 10, 1 to 20, then 30, 50 and mates in 10 … 1."""
    positive = [
        *range(10, 201, 10),
        *range(225, 501, 25),
        *range(550, 1001, 50),
        *range(1100, 2001, 100),
        3000,
        5000,
        *range(MATE - 10, MATE),
    ]
    return (*(-cp for cp in reversed(positive)), 0, *positive)


GRID_CP: Final = _grid()
"""The 129 evaluations of the grid in centipawns, ascending."""

EVALS: Final = tuple(str(cp / 100) for cp in GRID_CP)
"""The grid as it is written, in pawns: "-999.99" … "0.0" … "999.99"."""

_HIGHEST_EVAL = 5000
_LONGEST_MATE, _SHORTEST_MATE = MATE - 10, MATE - 1
_NUMBER = re.compile(r"(-?)([0-9]{1,4})(?:\.([0-9]{1,2}))?")
_MOVE = re.compile(r"[a-h][1-8][a-h][1-8][qrbn]?")


def is_mate(cp: int) -> bool:
    """Whether an evaluation announces a mate, for either side."""
    return abs(cp) >= _MATE_FROM


def grid_index(cp: int) -> int:
    """Place of the nearest grid value; longer mates clamp to mate in 10, a tie goes towards 0."""
    size = abs(cp)
    if size >= _MATE_FROM:
        size = min(max(size, _LONGEST_MATE), _SHORTEST_MATE)
    else:
        size = min(size, _HIGHEST_EVAL)
    above = bisect_left(GRID_CP, size)
    if GRID_CP[above] - size >= size - GRID_CP[above - 1]:
        above -= 1
    return above if cp >= 0 else len(GRID_CP) - 1 - above


def grid_text(cp: int) -> str:
    """An evaluation as the compact style writes it: the nearest grid value, in pawns."""
    return EVALS[grid_index(cp)]


def cp_text(cp: int) -> str:
    """An evaluation as the padded style writes it: raw, in pawns."""
    return str(cp / 100)


def text_cp(text: str) -> int | None:
    """Centipawns of a number in pawns (at most two decimals, |x| ≤ 1000); None if it is not one."""
    match = _NUMBER.fullmatch(text)
    if match is None:
        return None
    sign, whole, fraction = match.groups()
    cp = int(whole) * 100 + int((fraction or "").ljust(2, "0"))
    if cp > MATE:
        return None
    return -cp if sign else cp


def is_move_text(text: str) -> bool:
    """Whether a text is spelled like a UCI move; `a1a1` is, `e4`, `0000` and `E2E4` are not."""
    return _MOVE.fullmatch(text) is not None


_BOARD = re.compile(r"[1-8pnbrqkPNBRQK/]+")
_TWO_DIGITS = re.compile(r"[1-8][1-8]")
_COUNTER = re.compile(r"0|[1-9][0-9]{0,3}")
_EMPTY = {ord(digit): "." * int(digit) for digit in _RANKS}


@lru_cache(maxsize=65_536)
def squares(placement: str) -> str | None:
    """The 64 squares of a FEN's board field, "." for an empty one; None if it is not one."""
    if _BOARD.fullmatch(placement) is None or _TWO_DIGITS.search(placement):
        return None
    ranks = placement.translate(_EMPTY).split("/")
    if len(ranks) != 8 or any(len(rank) != 8 for rank in ranks):
        return None
    return "".join(ranks)


def read_fen(text: str) -> str | None:
    """A FEN with single spaces between its six fields; None if it is not spelled like one."""
    parts = [part for part in text.split(" ") if part]
    if len(parts) != 6:
        return None
    placement, side, rights, passant, *counters = parts
    if side not in ("w", "b") or rights not in CASTLING:
        return None
    if passant != "-" and passant not in EN_PASSANT:
        return None
    if not all(_COUNTER.fullmatch(counter) for counter in counters):
        return None
    return " ".join(parts) if squares(placement) is not None else None


_COLOUR = str.maketrans("pnbrqkPNBRQK", "PNBRQKpnbrqk")
_FLIP_RANK = str.maketrans("12345678", "87654321")
_MIRROR_FILE = str.maketrans("abcdefgh", "hgfedcba")


def flip_fen(fen: str) -> str:
    """The same position with colours exchanged and the board turned top to bottom."""
    board, side, castling, passant, *counters = fen.split()
    turned = "/".join(reversed(board.translate(_COLOUR).split("/")))
    rights = "".join(right for right in "KQkq" if right.swapcase() in castling) or "-"
    other = "b" if side == "w" else "w"
    return " ".join([turned, other, rights, passant.translate(_FLIP_RANK), *counters])


def flip_move(move: str) -> str:
    """The move that corresponds to `move` after `flip_fen`."""
    return move.translate(_FLIP_RANK)


def mirror_fen(fen: str) -> str:
    """The same position left to right; only a position without castling rights has one."""
    board, side, castling, passant, *counters = fen.split()
    if castling != "-":
        raise ValueError(f"a position with castling rights ({castling}) has no mirror image: {fen}")
    turned = "/".join(rank[::-1] for rank in board.split("/"))
    return " ".join([turned, side, castling, passant.translate(_MIRROR_FILE), *counters])


def mirror_move(move: str) -> str:
    """The move that corresponds to `move` after `mirror_fen`."""
    return move[:4].translate(_MIRROR_FILE) + move[4:]


def position_key(fen: str) -> str:
    """The first four FEN fields: what makes two positions the same for a data split."""
    return " ".join(fen.split()[:4])
