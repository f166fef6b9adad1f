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
from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from rookworld.data.documents import read_documents
from rookworld.model.tokenizer import Tokenizer
from rookworld.runtime.errors import ConfigError, DataError
from rookworld.tasks.registry import task_of_text

CHUNK = 20_000
"""Documents encoded at a time, on every core."""


@dataclass(frozen=True)
class Documents:
    """Documents end to end, the end token before each."""

    tokens: NDArray[np.uint16]
    count: int
    answers: NDArray[np.bool_] | None = None
    """Which tokens are of an answer, end tokens among them; None: nobody asked."""

    @property
    def starts(self) -> NDArray[np.bool_]:
        """Which tokens are the end token before a document."""
        found: NDArray[np.bool_] = self.tokens == self.tokens[0]
        return found

    def summary(self) -> str:
        """One line for a log."""
        return f"{self.count:,} documents, {len(self.tokens):,} tokens"


def load_documents(
    sources: Sequence[str],
    tokenizer: Tokenizer,
    seed: int,
    progress: Callable[[int], None] = lambda count: None,
    *,
    with_answers: bool = False,
) -> Documents:
    """The documents of all sources, shuffled; `progress` is told how many are encoded."""
    if tokenizer.vocab_size > 2**16:
        raise ConfigError(
            f"a vocabulary of {tokenizer.vocab_size} tokens: {2**16} is the most that is read"
        )
    chunks: list[Chunk] = []
    count = 0
    texts = chain.from_iterable(read_documents(source, tokenizer.style) for source in sources)
    for some in encoded(texts, tokenizer, with_answers=with_answers):
        chunks.append(some)
        progress(count := count + len(some.lengths))
    if not count:
        raise DataError(f"{', '.join(sources)}: no documents in it")
    lengths = np.concatenate([some.lengths for some in chunks])
    tokens = np.concatenate([some.tokens for some in chunks])
    answers = np.concatenate([some.answers for some in chunks])
    chunks.clear()
    return Documents(
        shuffled(tokens, lengths, seed),
        count,
        shuffled(answers, lengths, seed) if with_answers else None,
    )


class Chunk(NamedTuple):
    """Some documents end to end."""

    tokens: NDArray[np.uint16]
    answers: NDArray[np.bool_]
    """Which tokens are of an answer; empty where nobody asked."""
    lengths: NDArray[np.int64]
    """Of each document, the end token before it included."""


def encoded(texts: Iterable[str], tokenizer: Tokenizer, *, with_answers: bool) -> Iterator[Chunk]:
    """Documents, a chunk at a time."""

    left = iter(texts)
    chunks = iter(lambda: list(islice(left, CHUNK)), [])
    with ThreadPoolExecutor(1) as pool:
        # the next chunk is encoded, outside of Python, while this one's numbers are taken over
        coming = [(some, pool.submit(tokenizer.encode_batch, some)) for some in islice(chunks, 1)]
        while coming:
            [(some, future)] = coming
            ready = future.result()
            coming = [(one, pool.submit(tokenizer.encode_batch, one)) for one in islice(chunks, 1)]
            lengths = np.array([len(ids) + 1 for ids in ready], dtype=np.int64)
            ends = ([tokenizer.eos, *ids] for ids in ready)
            tokens = np.fromiter(chain.from_iterable(ends), np.uint16, int(lengths.sum()))
            asked = in_answers(some, tokenizer, lengths) if with_answers else np.empty(0, np.bool_)
            yield Chunk(tokens, asked, lengths)


def in_answers(
    texts: Sequence[str], tokenizer: Tokenizer, lengths: NDArray[np.int64]
) -> NDArray[np.bool_]:
    """[tokens] whether each is of an answer; the end token before a document ends one."""
    prompts = [text[: task_of_text(text).answer_at(text)] for text in texts]
    # a prompt's tokens are the first of its document's
    asked = np.array([len(ids) for ids in tokenizer.encode_batch(prompts)], dtype=np.int64)
    place = np.arange(lengths.sum()) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    found: NDArray[np.bool_] = (place == 0) | (place > np.repeat(asked, lengths))
    return found


Number = TypeVar("Number", bound=np.generic)


def shuffled(tokens: NDArray[Number], lengths: NDArray[np.int64], seed: int) -> NDArray[Number]:
    """What is said of each token of the documents, these end to end in an order of the seed."""
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
