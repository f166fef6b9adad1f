"""Our rewards as reward functions of Hugging Face's TRL, and rows as records of its datasets.

    from rookworld.trl.rewards import environment_reward, policy_reward, records

Law: a completion is worth here what it is worth to `rookworld train` and `rookworld score`. Every
record has the same columns, empty where they belong to another task, so P and A may share a
dataset; a function answers None for other tasks' records, which TRL leaves out of its sums.
Neither torch nor TRL is imported: the functions can be called, tested and pickled without them.
Left out on purpose: chat prompts. The tasks are completions of plain text.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from rookworld.data.rows import Record, record_row, repair_row, row_record
from rookworld.runtime.errors import DataError
from rookworld.tasks.environment import ENVIRONMENT
from rookworld.tasks.policy import POLICY
from rookworld.tasks.registry import TASKS, task_of, task_of_record
from rookworld.tasks.reward import RewardRules
from rookworld.tasks.scorer import prefetch
from rookworld.tasks.task import AnyTask, Judge, Row, Style

Rewards = list[float | None]
RewardFunction = Callable[..., Rewards]

DEFAULT_RULES = RewardRules()


def records(rows: Iterable[Row], style: Style = "compact") -> list[Record]:
    """Rows as records of a dataset: `prompt` and the columns that the reward functions read.

    `style` is `compact` for the chess tokenizer and `padded` for GPT-2's.
    """
    empty = dict.fromkeys(name for task in TASKS.values() for name in task.columns)
    return [{"prompt": task_of(row).prompt(row, style), **empty, **row_record(row)} for row in rows]


def policy_reward(prompts: Sequence[str], completions: Sequence[str], **columns: Any) -> Rewards:
    """Reward of each analysis (P:), by the labels in its columns; None for other records."""
    return _rewards(POLICY, completions, columns)


def environment_reward(
    prompts: Sequence[str], completions: Sequence[str], **columns: Any
) -> Rewards:
    """Reward of each environment answer (A:); None for other records."""
    return _rewards(ENVIRONMENT, completions, columns)


def reward_function(
    letter: str,
    rules: RewardRules = DEFAULT_RULES,
    *,
    judge: Judge | None = None,
    end: int | None = None,
) -> RewardFunction:
    """A reward function with rules and a judge of its own.

    With the tokenizer's `end` id an answer that was cut off counts as malformed, as in our own
    training; without it only what can be read decides.
    """

    def reward(prompts: Sequence[str], completions: Sequence[str], **columns: Any) -> Rewards:
        return _rewards(task, completions, columns, rules, judge, end)

    task = TASKS[letter]
    named = {POLICY.letter: policy_reward, ENVIRONMENT.letter: environment_reward}.get(letter)
    reward.__name__ = named.__name__ if named else f"{letter}_reward"
    return reward


def _rewards(
    task: AnyTask,
    completions: Sequence[str],
    columns: Mapping[str, Any],
    rules: RewardRules = DEFAULT_RULES,
    judge: Judge | None = None,
    end: int | None = None,
) -> Rewards:
    rows = _rows(task, len(completions), columns)
    finished = [True] * len(completions)
    if end is not None:
        finished = [end in ids for ids in columns["completion_ids"]]
    prefetch(judge, [row for row in rows if row is not None])
    return [
        None if row is None else task.verify(row, text, rules, judge, finished=done).total
        for row, text, done in zip(rows, completions, finished, strict=True)
    ]


def _rows(task: AnyTask, count: int, columns: Mapping[str, Any]) -> list[Any]:
    """The row of each record, None where a record is of another task."""
    missing = [name for name in task.columns if name not in columns and name != "depth"]
    if missing:
        raise DataError(
            f"no column {', '.join(missing)} in the dataset; make its records with "
            "rookworld.trl.rewards.records(rows)"
        )
    known = {name for one in TASKS.values() for name in one.columns} & set(columns)
    records = [{name: columns[name][place] for name in known} for place in range(count)]
    return [
        repair_row(record_row(one))[0] if task_of_record(one) is task else None for one in records
    ]
