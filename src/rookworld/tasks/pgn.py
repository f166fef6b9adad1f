"""The first game of a PGN, or a reason why it is none.

The law: python-chess passes over what it cannot read, so a cut game would look like a whole
one; here every word is a move, a number, a sign or a result, or the text is refused with that word.
Left out on purpose: further games of a text, which are not looked at.
"""

from __future__ import annotations

import re
from io import StringIO

import chess.pgn

from rookworld.runtime.errors import DataError
from rookworld.tasks.position import parse_position

NOTHING = "no game in it"
_HEADERS = re.compile(r"\ufeff?(?:[^\S\n]*\n|[%;\[][^\n]*(?:\n|$))*")
_REMARK = re.compile(r"\{[^}]*\}?|;[^\n]*|^%[^\n]*", re.MULTILINE)
_BLANK_LINE = re.compile(r"\n\s*\n")
_MOVE = r"[NBKRQP]?[a-h]?[1-8]?[-x]?[a-h][1-8](?:=?[nbrqkNBRQK])?|--|Z0|0000|O-O(?:-O)?|0-0(?:-0)?"
_WORD = re.compile(
    rf"(?:\d{{1,4}}\.{{0,3}})?(?:{_MOVE})?(?:[^\w$]|\$\d+)*"  # 12. · 12.e4 · e4+!? · e4$1
    r"|\*|1-0|0-1|1/2-1/2|½-½|(?:e\.?p\.?)"
)


def read_pgn(text: str) -> chess.pgn.Game:
    """The first game, with a move or a position to begin with, or a `DataError`."""
    game = chess.pgn.read_game(StringIO(text), Visitor=_Builder)
    if game is None or not (game.variations or game.errors or "FEN" in game.headers):
        raise DataError(NOTHING)
    if word := unreadable(text):
        raise DataError(f"cannot read {word[:40]!r}")
    if game.errors:
        raise DataError(str(game.errors[0]))
    parse_position(game.board().fen())
    return game


def unreadable(text: str) -> str | None:
    """The first word among the moves of the first game that means nothing in PGN."""
    moves = text[headers.end() :] if (headers := _HEADERS.match(text)) else text
    # a remark of several lines does not end the game
    first = _BLANK_LINE.split(_REMARK.sub(" ! ", moves), maxsplit=1)[0]
    words = re.split(r"[\s()]+", first)
    return next((word for word in words if not _WORD.fullmatch(word)), None)


class _Builder(chess.pgn.GameBuilder[chess.pgn.Game]):
    """A reader that keeps what is wrong to itself instead of logging it."""

    def handle_error(self, error: Exception) -> None:
        self.game.errors.append(error)
