"""Words that depend on a count. Left out on purpose: words whose plural takes more than an s."""

from __future__ import annotations


def noun(count: int, one: str) -> str:
    """`one` as it stands behind this count: 1 row, 2 rows."""
    return one if count == 1 else f"{one}s"
