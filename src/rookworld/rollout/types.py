"""A prompt, its answers as sampled, and what was found out about them.

Types alone, for whoever samples, packs, pays or counts answers.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from rookworld.tasks.prefix_value import NOTHING_LISTED, Tally
from rookworld.tasks.registry import index_of, task_of
from rookworld.tasks.task import Row, Verdict


@dataclass(frozen=True)
class Prompt:
    """One question: the row that knows the answer, its ids, and what keys its samples."""

    row: Row
    ids: tuple[int, ...]
    key: int

    @property
    def letter(self) -> str:
        """The letter of its task."""
        return task_of(self.row).letter

    @property
    def task(self) -> int:
        """The place of its task in the registry."""
        return index_of(task_of(self.row))


@dataclass(frozen=True)
class Promises:
    """What K answers were worth while they were written; on the CPU."""

    worths: Tensor
    """[K, stages - 1] float64; NaN where an answer never came so far."""
    stages: Tensor
    """[K, T] which stage each token belongs to; 0: it is paid for the whole answer."""


@dataclass(frozen=True)
class Alternatives:
    """What each choice was worth wherever one of K answers listed a move or ended its list.

    Plain numbers: a tensor for each of thousands of prompts would take longer than their answers.
    """

    ids: list[int]
    """[words] the token of each legal move, and of the list's end."""
    answers: list[int]
    """[places] which of the K answers."""
    places: list[int]
    """[places] which token of it."""
    worths: array[float]
    """[places x words] above that of any other token, which is taken for an illegal move."""


@dataclass(frozen=True)
class Group:
    """A prompt's K answers as sampled, with verdicts; tensors on the model's device."""

    prompt: Prompt
    tokens: Tensor
    """[K, T] sampled ids, end token included."""
    lengths: Tensor
    """[K] sampled tokens."""
    logp: Tensor
    """[K, T] log-probabilities under the distribution that was sampled from."""
    entropy: Tensor
    """[K, T] entropies of that distribution."""
    finished: tuple[bool, ...]
    texts: tuple[str, ...]
    verdicts: tuple[Verdict, ...]
    promises: Promises | None = None
    """With credit by field: what each answer was worth while it was written."""
    alternatives: Alternatives | None = None
    """With credit by choice: what else could have been listed."""
    tally: Tally = NOTHING_LISTED
    """With credit by field: what its analyses listed."""

    @property
    def rewards(self) -> list[float]:
        return [verdict.total for verdict in self.verdicts]


@dataclass(frozen=True)
class Answers:
    """A prompt's K answers before they are read; see `Group`."""

    prompt: Prompt
    tokens: Tensor
    lengths: Tensor
    logp: Tensor
    entropy: Tensor
    ids: NDArray[np.int64]
    """[K, T or more] `tokens` on the host."""
    counts: list[int]
    """K of `lengths`, on the host."""
    finished: tuple[bool, ...]
