"""Rows of every kind -> packed arrays for supervised training, with their share of a batch.

Sits between `data` (rows) and `pretrain` (loop). A source is `PATH` or `PATH=SHARE`; a packed
`.npz` is taken as it is, anything else is packed with the run's tokenizer.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from rookworld.data.rows import MATE, is_mate_row
from rookworld.data.sources import load_rows
from rookworld.model.tokenizer import Tokenizer, chess_tokenizer, gpt2_tokenizer
from rookworld.model.weights import resolve_folder
from rookworld.pretrain import dataset
from rookworld.pretrain.dataset import TokenizedRows
from rookworld.runtime.errors import ConfigError
from rookworld.tasks.environment import ENVIRONMENT
from rookworld.tasks.notation import CASTLING, EN_PASSANT, EVALS, MOVES
from rookworld.tasks.policy import POLICY


def pick_tokenizer(name: str) -> Tokenizer:
    """`chess`, `gpt2` (unless a folder is called so), or that of a model folder or hub id."""
    if name == "chess":
        return chess_tokenizer(MOVES, EVALS, CASTLING, EN_PASSANT)
    if name == "gpt2" and not Path(name).is_dir():
        return gpt2_tokenizer()
    return Tokenizer.load(resolve_folder(name))


def load_sources(
    sources: Sequence[str], tokenizer: Tokenizer, *, hard: float, softness: float
) -> list[tuple[TokenizedRows, float]]:
    """Every source packed, with its share; sources without one count by their rows."""
    loaded: list[tuple[TokenizedRows, float | None]] = []
    for source in sources:
        path, share = split_share(source)
        parts = [packed for packed, _ in pack_source(path, tokenizer, hard=hard, softness=softness)]
        total = sum(map(len, parts))
        loaded += [(one, None if share is None else share * len(one) / total) for one in parts]
    given = [share for _, share in loaded if share is not None]
    if given and len(given) < len(loaded):
        raise ConfigError("--data: give every source a =SHARE, or none")
    return [(one, float(len(one)) if share is None else share) for one, share in loaded]


def split_share(source: str) -> tuple[str, float | None]:
    """`PATH=SHARE` as its two halves."""
    path, equals, share = source.rpartition("=")
    if not equals:
        return source, None
    try:
        value = float(share)
    except ValueError:
        value = 0.0
    if value <= 0:
        raise ConfigError(f"--data {source}: the share after = must be a positive number")
    return path, value


def pack_source(
    source: str, tokenizer: Tokenizer, *, hard: float, softness: float
) -> Iterator[tuple[TokenizedRows, str]]:
    """A source's rows by task, packed, each with the task's name (empty if there is only one)."""
    if source.endswith(".npz"):
        yield dataset.load_packed(Path(source)), ""
        return
    rows = load_rows(source)
    policy = [row for row in POLICY.select(rows) if row.moves]
    environment = ENVIRONMENT.select(rows)
    mates = [(row.fen, row.mates) for row in rows if is_mate_row(row)]
    several = sum(map(bool, (policy, environment, mates))) > 1
    if policy:
        packed = dataset.pack_policy(policy, tokenizer, softness, hard)
        yield packed, POLICY.letter if several else ""
    if environment:
        yield (
            dataset.pack_environment(environment, tokenizer),
            ENVIRONMENT.letter if several else "",
        )
    if mates:
        yield dataset.pack_mates(mates, tokenizer), MATE if several else ""
