"""Answers scored by the group: here, or by processes beside this one while others are sampled.

Law: where an answer is scored changes nothing but the time. Scoring 128 × 16 answers takes one core
about as long as a GPU needs for all the rest of the step.
"""

from __future__ import annotations

import multiprocessing
import warnings
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import TypeVar

from rookworld.runtime.processes import interrupts_held, outlive_interrupts
from rookworld.tasks.policy import POLICY
from rookworld.tasks.prefix_value import (
    NEUTRAL,
    NOTHING_LISTED,
    MoveValues,
    PrefixValue,
    Tally,
    Usual,
    move_values,
    prefix_values,
    tally,
)
from rookworld.tasks.registry import task_of
from rookworld.tasks.reward import RewardRules
from rookworld.tasks.task import Judge, PolicyRow, Row, Verdict

Given = TypeVar("Given")
Found = TypeVar("Found")

PIECES_EACH = 4
"""Pieces of a batch for each worker, if it has so many questions: one with slow answers in it
should not keep the others waiting."""


@dataclass(frozen=True, slots=True)
class Question:
    """One row's answers."""

    row: Row
    texts: tuple[str, ...]
    finished: tuple[bool, ...]


@dataclass(frozen=True, slots=True)
class Scores:
    """What they are worth, and (if asked for) what each prefixes on the way."""

    verdicts: tuple[Verdict, ...]
    prefix_values: tuple[tuple[PrefixValue, ...], ...]
    move_values: tuple[MoveValues, ...] = ()
    """Of an analysis alone."""
    tally: Tally = NOTHING_LISTED
    """Of analyses alone, with their prefix values."""


@dataclass(frozen=True)
class Scorer:
    """How answers are scored; whole when pickled unless the judge is a running engine."""

    rules: RewardRules
    progress: float = 1.0
    by_field: bool = False
    judge: Judge | None = None
    by_choice: bool = False
    usual: Usual = NEUTRAL
    """What the rest of an answer is taken to be like."""

    def scores(self, question: Question) -> Scores:
        row = question.row
        verdicts = [
            judge_answer(row, text, done, self.rules, self.judge, self.progress)
            for text, done in zip(question.texts, question.finished, strict=True)
        ]
        prefixes = [
            prefix_values(row, text, self.rules, self.judge, self.progress, self.usual)
            if self.by_field
            else ()
            for text in question.texts
        ]
        if not (self.by_field and isinstance(row, PolicyRow)):
            return Scores(tuple(verdicts), tuple(prefixes))
        truth, found = POLICY.truth(row, self.judge), NOTHING_LISTED
        for text, verdict in zip(question.texts, verdicts, strict=True):
            found = found.plus(tally(row, text, verdict, truth))
        chosen: tuple[MoveValues, ...] = ()
        if self.by_choice:
            known = (self.rules, self.judge, self.progress, self.usual)
            chosen = move_values(row, question.texts, *known)
        return Scores(tuple(verdicts), tuple(prefixes), chosen, found)

    def all(self, questions: Sequence[Question]) -> list[Scores]:
        return [self.scores(question) for question in questions]


def judge_answer(
    row: Row,
    text: str,
    finished: bool,
    rules: RewardRules,
    judge: Judge | None,
    progress: float,
) -> Verdict:
    """The verdict on one answer, whichever the task."""
    return task_of(row).verify(row, text, rules, judge, progress, finished=finished)


def prefetch(judge: Judge | None, rows: Iterable[Row], *, every_move: bool = False) -> None:
    """Warm a judge up for the rows that it is asked about."""
    if judge is not None:
        judge.prefetch(POLICY.select(rows), every_move=every_move)


class Workers:
    """Processes that score. When one dies its part is done here, and others are started."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.start()

    def start(self) -> None:
        context = multiprocessing.get_context("spawn")
        self.pool = ProcessPoolExecutor(
            self.count, mp_context=context, initializer=outlive_interrupts
        )

    def replaced(self, pool: ProcessPoolExecutor) -> None:
        """Start anew, unless that has been done since `pool` broke."""
        if pool is self.pool:
            warnings.warn(
                "a process that scores answers has died (out of memory?); others are started",
                RuntimeWarning,
                stacklevel=2,
            )
            self.start()

    def begin(
        self, work: Callable[[Sequence[Given]], list[Found]], given: Sequence[Given]
    ) -> Callable[[], list[Found]]:
        """Start `work`, which can be done piece by piece; the function returned waits for it."""
        size = max(1, -(-len(given) // (PIECES_EACH * self.count)))
        pieces = [given[at : at + size] for at in range(0, len(given), size)]
        pool = self.pool
        try:
            with interrupts_held():  # a submit may start a worker, which inherits the mask
                begun = [pool.submit(work, piece) for piece in pieces]
        except BrokenProcessPool:
            self.replaced(pool)
            return partial(work, given)

        def found() -> list[Found]:
            try:
                return [one for piece in begun for one in piece.result()]
            except BrokenProcessPool:
                self.replaced(pool)
                return work(given)

        return found


@lru_cache(maxsize=1)
def workers(count: int) -> Workers:
    """The one set of workers, started when first asked for; it ends with the process."""
    return Workers(count)
