"""A few fixed held-out rows, answered at every evaluation: what changes in words and on boards.

Law: the same held-out rows give the same probes, whatever their order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rookworld.data.rows import row_record
from rookworld.evaluation.generator import Answerer
from rookworld.tasks.registry import by_task, task_of
from rookworld.tasks.reward import RewardRules
from rookworld.tasks.task import AnyTask, Judge, Row

PROBES = 8
"""Rows of each task."""


def choose_probes(rows: Sequence[Row], most: int = PROBES) -> list[Row]:
    """Of each task the first rows, of every kind in turn; held-out rows come in order of a hash."""
    found: list[Row] = []
    for same in by_task(rows).values():
        kinds: dict[str, int] = {}
        turns = []
        for place, row in enumerate(same):
            kind = _kind(task_of(row), row)
            kinds[kind] = kinds.get(kind, 0) + 1
            turns.append((kinds[kind], place))
        found += [same[place] for _, place in sorted(turns)[:most]]
    return found


def _kind(task: AnyTask, row: Row) -> str:
    """Positions by the side to move, transitions by their class."""
    return row.fen.split()[1] if task.open_ended else task.row_class(row)


def answer_probes(
    answerer: Answerer, rows: Sequence[Row], rules: RewardRules, judge: Judge | None = None
) -> list[dict[str, Any]]:
    """Each row with its answer and verdict, in the form of a line of `rollouts.jsonl`."""
    tasks = [task_of(row) for row in rows]
    prompts = [task.prompt(row, answerer.style) for task, row in zip(tasks, rows, strict=True)]
    records = []
    for task, row, said in zip(tasks, rows, answerer.answer(prompts), strict=True):
        verdict = task.verify(row, said.text, rules, judge, finished=said.finished)
        answer = {"text": said.text, "reward": verdict.total, "parts": verdict.parts}
        answers = [answer | {"reason": verdict.reason}]
        records.append({"task": task.letter, "truth": row_record(row), "answers": answers})
    return records
