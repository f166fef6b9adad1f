"""The JSON object of a request, read field by field; what is wrong with it is the asker's to know.

Law: nothing is taken on trust: a field is text of a bounded length, or a short list of moves.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request

from rookworld.runtime.errors import DataError
from rookworld.tasks.environment import HISTORY_PLIES
from rookworld.web.positions import LONGEST_FEN, LONGEST_MOVE

PATIENCE_S = 10.0
"""How long a body may take to arrive."""
_MOVE = re.compile(r"[a-h][1-8][a-h][1-8][qrbn]?")


@dataclass(frozen=True)
class Ask:
    """What somebody asks."""

    fields: Mapping[str, Any]

    def text(self, name: str, most: int) -> str:
        """A field that must be there."""
        found = self.fields.get(name)
        if not isinstance(found, str) or not found.strip():
            raise DataError(f"{name}: expected text")
        if len(found) > most:
            raise DataError(f"{name}: at most {most:,} characters")
        return found

    @property
    def fen(self) -> str:
        return self.text("fen", LONGEST_FEN)

    @property
    def move(self) -> str:
        return self.text("move", LONGEST_MOVE)

    @property
    def checkpoint(self) -> str:
        """Its name; empty for the last."""
        return self.text("checkpoint", 80) if self.fields.get("checkpoint") else ""

    @property
    def history(self) -> tuple[str, ...]:
        """Moves that led to the position, oldest first; those that a prompt shows."""
        found = self.fields.get("history", [])
        if not isinstance(found, list) or len(found) > HISTORY_PLIES:
            raise DataError(f"history: expected a list of at most {HISTORY_PLIES} moves")
        if not all(isinstance(one, str) and _MOVE.fullmatch(one) for one in found):
            raise DataError("history: expected moves in UCI")
        return tuple(found)


async def read_ask(request: Request) -> Ask:
    """The body as an object."""
    try:
        async with asyncio.timeout(PATIENCE_S):
            found = json.loads(await request.body())
    except (ValueError, RecursionError):
        raise DataError("the body is not JSON") from None
    except TimeoutError:
        raise DataError(f"the body took more than {PATIENCE_S:.0f} s") from None
    if not isinstance(found, dict):
        raise DataError("the body is not a JSON object")
    return Ask(found)
