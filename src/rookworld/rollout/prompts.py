"""Rows -> prompts: one endless shuffled stream.

Law: which prompt stands at a place is a function of rows, seed and place, so a resumed run sees
what an uninterrupted one would, and the world size changes nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from rookworld.model.tokenizer import Tokenizer
from rookworld.rollout.types import Prompt
from rookworld.runtime.errors import DataError
from rookworld.tasks.environment import ENVIRONMENT
from rookworld.tasks.policy import POLICY
from rookworld.tasks.registry import TASKS, by_task, index_of, task_of
from rookworld.tasks.task import AnyTask, Row

Name = TypeVar("Name")


class Prompts:
    """An endless stream of prompts, the tasks mixed by fixed shares.

    With `by_class` the classes of tasks that ask for it have shares as well, by the square root of
    how many rows they have: rare ones come more often, and a handful of rows not all the time.
    """

    def __init__(
        self,
        rows: Sequence[Row],
        tokenizer: Tokenizer,
        mix_env_ratio: float,
        seed: int,
        *,
        by_class: bool = False,
    ) -> None:
        self.rows = by_task(rows)
        self.tokenizer = tokenizer
        self.seed = seed
        self.shares = shares(
            {letter: len(rows) for letter, rows in self.rows.items()}, mix_env_ratio
        )
        self.classes = {
            letter: rows_by_class(TASKS[letter], mine) if by_class else {"": mine}
            for letter, mine in self.rows.items()
        }
        self.class_shares = {
            letter: shares_of({name: len(mine) ** 0.5 for name, mine in classes.items()})
            for letter, classes in self.classes.items()
        }
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
        task, nth = turn(place, self.shares)
        name, nth = turn(nth, self.class_shares[task.letter])
        rows = self.classes[task.letter][name]
        order = shuffled(len(rows), self.seed, nth // len(rows), index_of(task))
        return rows[int(order[nth % len(rows)])]


def turn(place: int, shares: Sequence[tuple[Name, float]]) -> tuple[Name, int]:
    """Whose turn it is at a place, and how many turns the same has had before."""
    for name, share in shares:
        # turns are spread evenly: the n-th comes when share × place passes n
        before = int(place * share + 1e-9)
        if int((place + 1) * share + 1e-9) > before:
            return name, before
        place -= before
    return name, place


def rows_by_class(task: AnyTask, rows: Sequence[Row]) -> dict[str, Sequence[Row]]:
    """The rows of each class of a task, if its classes have shares."""
    if not task.by_class:
        return {"": rows}
    found: dict[str, list[Row]] = {}
    for row in rows:
        found.setdefault(task.row_class(row), []).append(row)
    return dict(sorted(found.items()))


def shares_of(weights: Mapping[Name, float]) -> list[tuple[Name, float]]:
    """Each with its share of the turns that those before it leave over."""
    left, found = sum(weights.values()), []
    for name, weight in weights.items():
        found.append((name, weight / left if left > 0 else 1.0))
        left -= weight
    return found[:-1] + [(name, 1.0) for name, _ in found[-1:]]


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
    weights = {task.letter: float(counts[task.letter]) for task in reversed(others)}
    of_others = [(TASKS[letter], share) for letter, share in shares_of(weights)]
    return [(ENVIRONMENT, mix_env_ratio), *of_others]


@lru_cache(maxsize=8)
def shuffled(count: int, seed: int, epoch: int, task: int) -> NDArray[np.int64]:
    """The order in which the rows of a task are gone through for the n-th time."""
    return np.random.default_rng((seed, epoch, task)).permutation(count)


def prompt_text(row: Row, tokenizer: Tokenizer) -> str:
    """The text that asks about a row."""
    return str(task_of(row).prompt(row, tokenizer.style))
