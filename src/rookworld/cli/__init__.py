"""SURFACE: one door (`door.py`), one file a command family; the only room that prints."""

from rookworld.cli.door import main

__all__ = ["main"]
