"""JOINT: texts x tokenizer -> one line of tokens, which pre-training cuts into windows.

Laws: the end token precedes every document; each document comes once, in an order that is a
function of seed and documents. Beside the texts of a chunk or two only two bytes a token are held.
Left out: parsing, repairs, and a cache (encoding takes seconds a million documents).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import chain, islice

import numpy as np
from numpy.typing import NDArray

from rookworld.data.documents import read_documents
from rookworld.model.tokenizer import Tokenizer
from rookworld.runtime.errors import ConfigError, DataError

CHUNK = 20_000
"""Documents encoded at a time, on every core."""


@dataclass(frozen=True)
class Documents:
    """Documents end to end, the end token before each."""

    tokens: NDArray[np.uint16]
    count: int

    def summary(self) -> str:
        """One line for a log."""
        return f"{self.count:,} documents, {len(self.tokens):,} tokens"


def load_documents(
    sources: Sequence[str],
    tokenizer: Tokenizer,
    seed: int,
    progress: Callable[[int], None] = lambda count: None,
) -> Documents:
    """The documents of all sources, shuffled; `progress` is told how many are encoded."""
    if tokenizer.vocab_size > 2**16:
        raise ConfigError(
            f"a vocabulary of {tokenizer.vocab_size} tokens: {2**16} is the most that is read"
        )
    tokens: list[NDArray[np.uint16]] = []
    lengths: list[NDArray[np.int64]] = []
    count = 0
    texts = chain.from_iterable(read_documents(source, tokenizer.style) for source in sources)
    for some, long in encoded(texts, tokenizer):
        tokens.append(some)
        lengths.append(long)
        progress(count := count + len(long))
    if not count:
        raise DataError(f"{', '.join(sources)}: no documents in it")
    line = np.concatenate(tokens)
    tokens.clear()
    return Documents(shuffled(line, np.concatenate(lengths), seed), count)


def encoded(
    texts: Iterable[str], tokenizer: Tokenizer
) -> Iterator[tuple[NDArray[np.uint16], NDArray[np.int64]]]:
    """Tokens of a chunk of documents, end to end, and the length of each."""
    left = iter(texts)
    chunks = iter(lambda: list(islice(left, CHUNK)), [])
    with ThreadPoolExecutor(1) as pool:
        # the next chunk is encoded, outside of Python, while this one's numbers are taken over
        coming = [pool.submit(tokenizer.encode_batch, chunk) for chunk in islice(chunks, 1)]
        while coming:
            ready = coming.pop().result()
            coming += [pool.submit(tokenizer.encode_batch, chunk) for chunk in islice(chunks, 1)]
            lengths = np.array([len(ids) + 1 for ids in ready], dtype=np.int64)
            ends = ([tokenizer.eos, *ids] for ids in ready)
            tokens = np.fromiter(chain.from_iterable(ends), np.uint16, int(lengths.sum()))
            yield tokens, lengths


def shuffled(
    tokens: NDArray[np.uint16], lengths: NDArray[np.int64], seed: int
) -> NDArray[np.uint16]:
    """The documents of `tokens`, end to end in an order of the seed."""
    order = np.random.default_rng((seed, len(lengths))).permutation(len(lengths))
    starts = np.cumsum(lengths) - lengths
    mixed = np.empty_like(tokens)
    filled = 0
    for some in np.array_split(order, -(-len(order) // CHUNK)):
        long = lengths[some]
        inside = np.arange(long.sum()) - np.repeat(np.cumsum(long) - long, long)
        mixed[filled : filled + len(inside)] = tokens[np.repeat(starts[some], long) + inside]
        filled += len(inside)
    return mixed
