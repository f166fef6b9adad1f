"""Train, validation and test, disjoint by position.

The law: the first four fields of a FEN and the seed decide, nothing else. So the split of a row
does not depend on the file it is in, on other rows, or on their order, and a P row and an A row of
one position are always on the same side.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from hashlib import blake2b
from itertools import accumulate

from rookworld.runtime.errors import ConfigError
from rookworld.tasks.notation import position_key
from rookworld.tasks.task import Row

SHARES: Mapping[str, float] = {"train": 2 / 3, "validation": 1 / 6, "test": 1 / 6}
"""Shares of the embedded rows."""


def split_name(fen: str, seed: int = 0, shares: Mapping[str, float] = SHARES) -> str:
    """The side on which a position is."""
    digest = blake2b(f"{seed}/{position_key(fen)}".encode(), digest_size=8).digest()
    place = int.from_bytes(digest) / 2**64 * sum(shares.values())
    for name, end in zip(shares, accumulate(shares.values()), strict=True):
        if place < end:
            return name
    return [name for name, share in shares.items() if share][-1]


def seen_positions(trained: Iterable[str], tested: Iterable[str]) -> tuple[int, int]:
    """How many of the positions that are tested are also trained on, and how many are tested."""
    asked = {position_key(fen) for fen in tested}
    # one pass that keeps nothing: a million trained positions take a second
    return len(asked.intersection(map(position_key, trained))), len(asked)


def split_rows(
    rows: Iterable[Row], seed: int = 0, shares: Mapping[str, float] = SHARES
) -> dict[str, list[Row]]:
    """The rows of each side, in their order."""
    if not shares or min(shares.values()) < 0 or not sum(shares.values()):
        raise ConfigError(f"shares of a split must be 0 or more and not all 0: {dict(shares)}")
    found: dict[str, list[Row]] = {name: [] for name in shares}
    for row in rows:
        found[split_name(row.fen, seed, shares)].append(row)
    return found
