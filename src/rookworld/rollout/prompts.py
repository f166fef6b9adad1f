"""Rows -> prompts: one endless shuffled stream.

Law: which prompt stands at a place is a function of rows, seed and place, so a resumed run sees
what an uninterrupted one would, and the world size changes nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from rookworld.model.tokenizer import Tokenizer
from rookworld.rollout.types import Prompt
from rookworld.runtime.errors import DataError
from rookworld.tasks.environment import ENVIRONMENT
from rookworld.tasks.policy import POLICY
from rookworld.tasks.registry import TASKS, by_task, index_of, task_of
from rookworld.tasks.task import AnyTask, Row


class Prompts:
    """An endless stream of prompts, the tasks mixed by fixed shares."""

    def __init__(
        self, rows: Sequence[Row], tokenizer: Tokenizer, mix_env_ratio: float, seed: int
    ) -> None:
        self.rows = by_task(rows)
        self.tokenizer = tokenizer
        self.seed = seed
        self.shares = shares(
            {letter: len(rows) for letter, rows in self.rows.items()}, mix_env_ratio
        )
        self.position = 0

    def take(self, count: int) -> list[Prompt]:
        """The next `count` prompts; the stream wraps and is reshuffled at every wrap."""
        places = range(self.position, self.position + count)
        rows = [self.at(place) for place in places]
        ids = self.tokenizer.encode_batch([prompt_text(row, self.tokenizer) for row in rows])
        self.position += count
        return [
            Prompt(row, tuple(one), key) for row, one, key in zip(rows, ids, places, strict=True)
        ]

    def at(self, place: int) -> Row:
        """The row at a place of the stream."""
        task, nth = self.turn(place)
        rows = self.rows[task.letter]
        order = shuffled(len(rows), self.seed, nth // len(rows), index_of(task))
        return rows[int(order[nth % len(rows)])]

    def turn(self, place: int) -> tuple[AnyTask, int]:
        """Whose turn it is at a place, and how many turns that task has had before."""
        for task, share in self.shares:
            # a task's prompts are spread evenly: the n-th comes when share × place passes n
            before = int(place * share + 1e-9)
            if int((place + 1) * share + 1e-9) > before:
                return task, before
            place -= before
        return task, place


def shares(counts: dict[str, int], mix_env_ratio: float) -> list[tuple[AnyTask, float]]:
    """Each task with its share of the prompts that the tasks before it leave over.

    `mix_env_ratio` of all prompts are of the environment task; the others share the rest by how
    many rows they have.
    """
    others = [task for letter, task in TASKS.items() if task is not ENVIRONMENT and counts[letter]]
    for letter, share, there, instead in (
        (POLICY.letter, 1 - mix_env_ratio, len(others), 1),
        (ENVIRONMENT.letter, mix_env_ratio, counts[ENVIRONMENT.letter], 0),
    ):
        if share > 0 and not there:
            raise DataError(
                f"no {letter}: rows in the data, but --mix-env-ratio {mix_env_ratio} asks for "
                f"them; use --mix-env-ratio {instead} or other --data"
            )
    left = sum(counts[task.letter] for task in others)
    found: list[tuple[AnyTask, float]] = [(ENVIRONMENT, mix_env_ratio)]
    for task in reversed(others):
        found.append((task, counts[task.letter] / left))
        left -= counts[task.letter]
    return found


@lru_cache(maxsize=8)
def shuffled(count: int, seed: int, epoch: int, task: int) -> NDArray[np.int64]:
    """The order in which the rows of a task are gone through for the n-th time."""
    return np.random.default_rng((seed, epoch, task)).permutation(count)


def prompt_text(row: Row, tokenizer: Tokenizer) -> str:
    """The text that asks about a row."""
    return str(task_of(row).prompt(row, tokenizer.style))
