"""The tasks there are, and which one a row, a text or a record belongs to.

A new task is a file in this folder and a name in `TASKS`. A row knows its task by its type.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from rookworld.runtime.metric_info import STEP_METRICS, SUITE_METRICS, Metric, look_up
from rookworld.tasks.environment import ENVIRONMENT
from rookworld.tasks.policy import POLICY
from rookworld.tasks.task import AnyTask, Row

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


@runtime_checkable
class RowsByTask(Protocol):
    """Rows that know of which task they are without being read."""

    def of_task(self, letter: str) -> Sequence[Row]:
        """The rows of one task, in their order."""
        ...


def by_task(rows: Iterable[Row]) -> Mapping[str, Sequence[Row]]:
    """The rows of each task, by its letter, in the order of the registry."""
    if isinstance(rows, RowsByTask):
        return {letter: rows.of_task(letter) for letter in TASKS}
    found: dict[str, list[Row]] = {letter: [] for letter in TASKS}
    for row in rows:
        found[task_of(row).letter].append(row)
    return found


def all_metrics() -> dict[str, Metric]:
    """Every metric by its full name: of steps, of each task, of suites."""
    found = dict(STEP_METRICS)
    for letter, task in TASKS.items():
        found[f"reward/{letter}"] = Metric(f"Reward, {letter}", unit="reward")
        found[f"kl/{letter}"] = Metric(f"KL, {letter}", unit="nats", better="none")
        found |= {f"reward/{letter}/{part}": Metric(f"{letter} {part}") for part in task.parts}
        found |= {f"{letter}/{name}": metric for name, metric in task.shown_metrics.items()}
    return found | SUITE_METRICS


def metric_info(name: str) -> Metric:
    """What is known of a metric."""
    return look_up(name, all_metrics())


def headline_metrics() -> list[str]:
    """The few metrics that a short table shows."""
    return [name for name, metric in all_metrics().items() if metric.headline]
