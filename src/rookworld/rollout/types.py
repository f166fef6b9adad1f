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
class TokenValues:
    """What K completions were worth, as expected at each of their tokens; on the CPU."""

    values: Tensor
    """[K, stages - 1] float64: expected reward at each stage; NaN where one never came so far."""
    stages: Tensor
    """[K, T] which stage each token belongs to; 0: it is paid for the whole answer."""


@dataclass(frozen=True)
class ListedMoveValues:
    """Expected reward of every move that could have been listed where one of K completions listed
    one, or ended its list: the gradient is taken over all of them.

    Plain numbers: a tensor for each of thousands of prompts would take longer than their answers.
    """

    tokens: list[int]
    """[words] the token of each legal move, and of the list's end."""
    completions: list[int]
    """[positions] which of the K completions."""
    positions: list[int]
    """[positions] which token of it."""
    values: array[float]
    """[positions x words] above that of any other token, which is taken for an illegal move."""


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
    token_values: TokenValues | None = None
    """With credit by field: what each answer was worth while it was written."""
    move_values: ListedMoveValues | None = None
    """With credit by choice: what else could have been listed."""
    tally: Tally = NOTHING_LISTED
    """With credit by field: what its analyses listed."""
    baseline: float | None = None
    """Of a true answer: the mean reward of those that were sampled in its stead."""

    @property
    def rewards(self) -> list[float]:
        return [verdict.total for verdict in self.verdicts]


@dataclass(frozen=True)
class Completions:
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
