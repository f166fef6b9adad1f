"""What `rookworld web` can be told. Loads neither torch nor the web server: `--help` needs it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from rookworld.runtime.bounds import Count
from rookworld.runtime.config import require


@dataclass(frozen=True, kw_only=True)
class WebSettings:
    """Play with a model in the browser, see its world, scrub through a run's checkpoints.

    The page is served to this machine alone; see docs/web.md.
    """

    port: int = 8000
    """Port on 127.0.0.1; 0: any free one."""
    engine: str | None = None
    """Engine to compare with; default: `STOCKFISH_PATH`, else `stockfish` if there is one."""
    nodes: Count = 20_000
    """Nodes the engine may search for an answer."""
    device: str = "auto"
    """`auto`, `cpu`, `cuda` or `cuda:N`."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Precision of the weights."""

    def __post_init__(self) -> None:
        require(0 <= self.port <= 65535, f"--port {self.port}: not in 0…65535")
