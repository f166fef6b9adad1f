"""The tasks there are, and which one a row, a text or a record belongs to.

A new task is a file in this folder and a name in `TASKS`. A row knows its task by its type.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from rookworld.tasks.environment import ENVIRONMENT
from rookworld.tasks.policy import POLICY
from rookworld.tasks.task import AnyTask, Metric, Row

TASKS: dict[str, AnyTask] = {task.letter: task for task in (POLICY, ENVIRONMENT)}
"""Every task by its letter; a task's place here seeds the order of its prompts: add behind."""


def task_of(row: Row) -> AnyTask:
    """The task of a row."""
    return next(task for task in TASKS.values() if isinstance(row, task.row_type))


def task_of_text(text: str) -> AnyTask:
    """The task of a prompt or document; public rows of A may lack their letter."""
    return TASKS.get(text.lstrip().partition(":")[0], ENVIRONMENT)


def task_of_record(record: Mapping[str, Any]) -> AnyTask | None:
    """The task of columns: the first whose key column is filled."""
    return next((task for task in TASKS.values() if record.get(task.key_column) is not None), None)


def index_of(task: AnyTask) -> int:
    """A task's place in the registry."""
    return list(TASKS).index(task.letter)


def by_task(rows: Iterable[Row]) -> dict[str, list[Row]]:
    """The rows of each task, by its letter, in the order of the registry."""
    found: dict[str, list[Row]] = {letter: [] for letter in TASKS}
    for row in rows:
        found[task_of(row).letter].append(row)
    return found


def shown_metrics() -> dict[str, Metric]:
    """How each task's metrics are shown, by their full names, labels with the letter."""
    return {
        f"{letter}/{name}": replace(metric, label=f"{letter} {metric.label}")
        for letter, task in TASKS.items()
        for name, metric in task.shown_metrics.items()
    }


def headline_metrics() -> tuple[str, ...]:
    """The few metrics that a short table shows."""
    chosen = (name for name, metric in shown_metrics().items() if metric.headline)
    return ("reward/sampled", "reward/greedy", *chosen)


def lower_is_better() -> list[str]:
    """The metrics that improve by falling."""
    return sorted(name for name, metric in shown_metrics().items() if metric.lower_is_better)
