"""SURFACE: one way in (`dispatch.py`), one file a command family; the only room that prints."""

from rookworld.cli.dispatch import main

__all__ = ["main"]
