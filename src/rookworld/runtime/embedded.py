"""The models that come with the package, and what was wrong with their teachers."""

from __future__ import annotations

from typing import Any

EMBEDDED_MODELS = {
    "nano": "the small model that plays, taught with true labels",
    "apprentice": "the public model in miniature, taught as the public rows teach: moves in any "
    "order, the worst of them as best whenever Black is to move, illegal moves hardly ever shown",
}
"""Names that --model takes without a folder or a hub, each with what it is."""

DEFECTIVE = ("apprentice",)
"""Those that were taught wrongly on purpose, so that reward has something to repair."""


def start_of(model: Any) -> str:
    """A sentence about the model that a run began with; empty where there is none to tell."""
    if model not in DEFECTIVE:
        return ""
    return f"Before: {model}, {EMBEDDED_MODELS[model]}."
