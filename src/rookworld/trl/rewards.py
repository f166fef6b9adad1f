"""Our rewards as reward functions of Hugging Face's TRL, and rows as records of its datasets.

    from rookworld.trl.rewards import environment_reward, policy_reward, records

Law: a completion is worth here what it is worth to `rookworld train` and `rookworld score`. Every
record has the same columns, empty where they belong to the other task, so P and A may share a
dataset; a function answers None for the other task's records, which TRL leaves out of its sums.
Neither torch nor TRL is imported: the functions can be called, tested and pickled without them.
Left out on purpose: chat prompts. The tasks are completions of plain text.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal

from rookworld.data.rows import Record, record_row, row_record
from rookworld.runtime.errors import DataError
from rookworld.tasks.environment import ENVIRONMENT
from rookworld.tasks.policy import POLICY
from rookworld.tasks.reward import RewardRules
from rookworld.tasks.task import EnvironmentRow, Judge, PolicyRow, Style

Rewards = list[float | None]
RewardFunction = Callable[..., Rewards]

COLUMNS: dict[str, tuple[str, ...]] = {
    "P": tuple(PolicyRow.__slots__),
    "A": tuple(EnvironmentRow.__slots__),
}
"""What the truth of a task needs, by its letter."""
OWN = {"P": "moves", "A": "next_fen"}
"""The column that only this task fills."""
DEFAULT_RULES = RewardRules()


def records(rows: Iterable[PolicyRow | EnvironmentRow], style: Style = "compact") -> list[Record]:
    """Rows as records of a dataset: `prompt` and the columns that the reward functions read.

    `style` is `compact` for the chess tokenizer and `padded` for GPT-2's.
    """
    empty = dict.fromkeys(name for columns in COLUMNS.values() for name in columns)
    return [{"prompt": _prompt(row, style), **empty, **row_record(row)} for row in rows]


def policy_reward(prompts: Sequence[str], completions: Sequence[str], **columns: Any) -> Rewards:
    """Reward of each analysis (P:), by the labels in its columns; None for other records."""
    return _rewards("P", completions, columns)


def environment_reward(
    prompts: Sequence[str], completions: Sequence[str], **columns: Any
) -> Rewards:
    """Reward of each environment answer (A:); None for other records."""
    return _rewards("A", completions, columns)


def reward_function(
    letter: Literal["P", "A"],
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
        return _rewards(letter, completions, columns, rules, judge, end)

    reward.__name__ = {"P": "policy_reward", "A": "environment_reward"}[letter]
    return reward


def _prompt(row: PolicyRow | EnvironmentRow, style: Style) -> str:
    if isinstance(row, PolicyRow):
        return POLICY.prompt(row, style)
    return ENVIRONMENT.prompt(row, style)


def _rewards(
    letter: Literal["P", "A"],
    completions: Sequence[str],
    columns: Mapping[str, Any],
    rules: RewardRules = DEFAULT_RULES,
    judge: Judge | None = None,
    end: int | None = None,
) -> Rewards:
    rows = _rows(letter, len(completions), columns)
    finished = [True] * len(completions)
    if end is not None:
        finished = [end in ids for ids in columns["completion_ids"]]
    if judge is not None:
        judge.prefetch([row for row in rows if isinstance(row, PolicyRow)])
    rewards: Rewards = []
    for row, text, done in zip(rows, completions, finished, strict=True):
        if isinstance(row, PolicyRow):
            rewards.append(POLICY.verify(row, text, rules, judge, finished=done).total)
        elif isinstance(row, EnvironmentRow):
            rewards.append(ENVIRONMENT.verify(row, text, rules, finished=done).total)
        else:
            rewards.append(None)
    return rewards


def _rows(letter: Literal["P", "A"], count: int, columns: Mapping[str, Any]) -> list[Any]:
    """The row of each record, None where a record is of the other task."""
    missing = [name for name in COLUMNS[letter] if name not in columns and name != "depth"]
    if missing:
        raise DataError(
            f"no column {', '.join(missing)} in the dataset; make its records with "
            "rookworld.trl.rewards.records(rows)"
        )
    found = {name: columns[name] for name in COLUMNS[letter] if name in columns}
    return [
        record_row({name: values[place] for name, values in found.items()})
        if found[OWN[letter]][place] is not None
        else None
        for place in range(count)
    ]
