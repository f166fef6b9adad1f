"""Train, validation and test, disjoint by position.

The law: the first four fields of a FEN and the seed decide, nothing else. So the split of a row
does not depend on the file it is in, on other rows, or on their order, and a P row and an A row of
one position are always on the same side.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from hashlib import blake2b
from itertools import accumulate
from typing import Protocol, runtime_checkable

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


def position_hash(fen: str) -> int:
    """64 bits that two FENs share if they are the same position to a split."""
    return int.from_bytes(blake2b(position_key(fen).encode(), digest_size=8).digest())


@runtime_checkable
class KnownPositions(Protocol):
    """Rows that know their positions without being read."""

    def positions_among(self, hashes: Collection[int]) -> Iterable[int]:
        """Those of the position hashes that rows have."""
        ...


def seen_positions(trained: Iterable[str], tested: Iterable[str]) -> tuple[int, int]:
    """How many of the positions that are tested are also trained on, and how many are tested."""
    asked = {position_key(fen) for fen in tested}
    # one pass that keeps nothing: a million trained positions take a second
    return len(asked.intersection(map(position_key, trained))), len(asked)


def positions_of(rows: Iterable[Row], tested: Iterable[str]) -> Iterator[str]:
    """The positions of rows; where they know them by hash, those of them that are tested."""
    if not isinstance(rows, KnownPositions):
        yield from (row.fen for row in rows)
        return
    asked = {position_hash(fen): fen for fen in tested}
    yield from (asked[number] for number in rows.positions_among(asked))


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
