"""Errors by kind: who is at fault decides what happens.

A `RookworldError` is the user's or the machine's mistake: one line on stderr that names the value,
the place and the remedy, exit code 2. `Diverged` is training beyond recovery, exit code 3.
What a model says is never an error (it is a `Verdict`), and our own bugs are never caught.
"""

from __future__ import annotations


class RookworldError(Exception):
    """The user's or the machine's mistake; the message is one line and names the remedy."""

    exit_code = 2


class ConfigError(RookworldError):
    """A setting, flag or config file is wrong."""


class DataError(RookworldError):
    """A file of rows, games or puzzles cannot be used."""


class EngineError(RookworldError):
    """The chess engine is missing, dead, hung, or does not speak UCI."""


class ModelError(RookworldError):
    """A model folder, its weights or its tokenizer cannot be used."""


class Diverged(RookworldError):
    """Training diverged beyond recovery; the message is the diagnosis."""

    exit_code = 3
