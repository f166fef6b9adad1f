"""What Stockfish says beside the model: the same position, as many candidates, limited by nodes.

The law: an answer depends on its position alone (the hash is cleared before each), so it is kept
and given again. Not for several threads at once.
"""

from __future__ import annotations

from collections import OrderedDict
from pathlib import Path
from typing import Any

from rookworld.report.gallery import score_text
from rookworld.runtime.errors import EngineError
from rookworld.tasks.engine import Engine, find_engine
from rookworld.tasks.position import parse_position

MOST_KEPT = 5_000
CANDIDATES = 5


class SecondOpinion:
    """An engine that looks at what the model looks at."""

    def __init__(self, path: Path, nodes: int) -> None:
        self.nodes = nodes
        self._engine = Engine(path)
        self._engine.start()
        self._kept: OrderedDict[str, list[dict[str, Any]]] = OrderedDict()

    @property
    def name(self) -> str:
        return self._engine.name

    def close(self) -> None:
        self._engine.close()

    def think(self, fen: str) -> list[dict[str, Any]]:
        """Candidates, best first; evaluations are for the side to move."""
        board = parse_position(fen)
        if board.fen() not in self._kept:
            self._engine.new_game()
            lines = self._engine.search(board.fen(), self.nodes, CANDIDATES)
            self._kept[board.fen()] = [
                {
                    "move": line.move,
                    "san": board.san(board.parse_uci(line.move)),
                    "cp": line.cp,
                    "score": score_text(line.cp),
                    "legal": True,
                }
                for line in lines
            ]
            if len(self._kept) > MOST_KEPT:
                self._kept.popitem(last=False)
        return self._kept[board.fen()]


def second_opinion(asked: str | None, nodes: int) -> SecondOpinion | None:
    """The engine asked for, else one that is installed, else none."""
    try:
        path = find_engine(asked)
    except EngineError:
        if asked is not None:
            raise
        return None
    return SecondOpinion(path, nodes)
