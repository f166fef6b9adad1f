"""The one evaluator: answers of a model to held-out rows, and the chess numbers they amount to.

The law: the same rows, the same model and the same settings give the same numbers, whatever the
batch size or the order; a row's own values are kept, so that two models are compared row by row.
Metric names are stable for ever, and `docs/evaluation.md` defines each of them.

torch is not imported here: whoever answers prompts may be evaluated, a table in a test included.
Left out on purpose: games, against itself, inside its own world or against others: see `games`
and `world_model`.
"""

from __future__ import annotations

import zipfile
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

import chess
import numpy as np

from rookworld.data.puzzles import Mate, Puzzle, mate_of, read_mates
from rookworld.data.rows import is_mate_row, row_key, task_rows
from rookworld.data.sources import load_rows
from rookworld.evaluation.generator import Answerer, analyses, prompt_key
from rookworld.evaluation.statistics import (
    Estimate,
    PairedDifference,
    Values,
    estimates,
    known,
    paired_difference,
    pass_at_k,
    share,
)
from rookworld.runtime.atomic_files import atomic_file
from rookworld.runtime.errors import DataError
from rookworld.tasks.environment import ENVIRONMENT
from rookworld.tasks.registry import TASKS, by_task
from rookworld.tasks.reward import RewardRules
from rookworld.tasks.scorer import prefetch
from rookworld.tasks.task import AnyTask, EnvironmentRow, Judge, PolicyRow, Row, legal_moves

AnyRow = TypeVar("AnyRow")
Scores = dict[str, float | None]

DEFAULT_RULES = RewardRules()


@dataclass(frozen=True)
class HeldOut:
    """What an evaluation asks: rows of any tasks, and mates in one; either may be empty."""

    rows: Sequence[Row] = ()
    mates: Sequence[Mate] = ()


@dataclass(frozen=True)
class Evaluation:
    """Estimates by metric name, and the values behind them, row by row (NaN: does not apply)."""

    estimates: dict[str, Estimate] = field(default_factory=dict)
    rows: dict[str, Values] = field(default_factory=dict)
    probes: Sequence[dict[str, Any]] = ()
    """Answers to a few fixed rows, as `evaluation.probes` writes them down."""

    @classmethod
    def of(cls, rows: Mapping[str, Values]) -> Evaluation:
        """The estimates that follow from row values."""
        return cls(estimates(rows), dict(rows))

    def __or__(self, other: Evaluation) -> Evaluation:
        both = (*self.probes, *other.probes)
        return Evaluation(self.estimates | other.estimates, self.rows | other.rows, both)

    def to_json(self) -> dict[str, Any]:
        """Metric name → `{"value", "n", "low", "high"}`."""
        return {name: one.to_json() for name, one in self.estimates.items()}


def evaluate(
    answerer: Answerer,
    held_out: HeldOut,
    rules: RewardRules = DEFAULT_RULES,
    *,
    sampled: Answerer | None = None,
    judge: Judge | None = None,
) -> Evaluation:
    """Every metric of the held-out rows; `sampled` answers once more, for `reward/sampled`.

    `judge` None means the rows' own labels.
    """
    greedy = task_scores(answerer, held_out.rows, rules, judge)
    rows = {"reward/greedy": _rewards(greedy)}
    if sampled is not None:
        rows["reward/sampled"] = _rewards(task_scores(sampled, held_out.rows, rules, judge))
    for letter, scored in greedy.items():
        rows |= _columns(letter, scored)
    rows |= mate_columns(answerer, held_out.mates)
    return Evaluation.of(rows)


ASKED = "asked"


def save_found(path: Path, evaluation: Evaluation, asked: str) -> None:
    """Keep what was found row by row; `asked` says of which rows and under which rules."""
    found: dict[str, Any] = {**evaluation.rows, ASKED: np.array(asked)}
    with atomic_file(path) as temporary, temporary.open("wb") as file:
        np.savez_compressed(file, **found)


def load_found(path: Path, asked: str) -> Evaluation | None:
    """What `save_found` kept; None if it did not, or something else was asked."""
    try:
        with np.load(path, allow_pickle=False) as kept:
            rows = {name: kept[name] for name in kept.files}
    except (OSError, EOFError, ValueError, zipfile.BadZipFile):
        return None
    return Evaluation.of(rows) if str(rows.pop(ASKED, "")) == asked else None


def paired(before: Evaluation, after: Evaluation) -> dict[str, PairedDifference]:
    """after - before for every metric that both have row by row, on the same rows."""
    found = {
        name: paired_difference(before.rows[name], values)
        for name, values in after.rows.items()
        if name in before.rows
    }
    return {name: difference for name, difference in found.items() if difference is not None}


def held_out_from(
    source: str,
    counts: Mapping[str, int],
    *,
    mates: str = "embedded:mate",
    n_mates: int,
) -> HeldOut:
    """At most so many rows of each task from `source`, and mates in one from a source of theirs.

    A count of 0 leaves its part out, and a source that nothing is wanted of unread; a task without
    a count takes as many as the task with the most.
    """
    most = max(counts.values())
    found = by_task(task_rows(load_rows(source) if most else []))
    for letter, wanted in counts.items():
        if wanted and not found[letter]:
            raise DataError(f"{source}: no {letter} row in it")
    rows = [
        row
        for letter, same in found.items()
        for row in spread(same, counts.get(letter, most), row_key)
    ]
    return HeldOut(rows, mates_from(mates, n_mates) if n_mates else ())


def mates_from(source: str, n: int) -> list[Mate]:
    """At most `n` mates in one: a BIG-bench or Lichess file, or any source with mates of ours."""
    if Path(source).suffix in (".json", ".csv", ".zst"):
        return read_mates(Path(source), n)
    rows = [row for row in load_rows(source) if is_mate_row(row)]
    # a forced mate that takes longer than a move has no mating move yet
    in_one = (mate for row in spread(rows, len(rows), row_key) if (mate := mate_of(row.fen)).mates)
    if not (found := list(islice(in_one, n))):
        raise DataError(f"{source}: no mate in one in it")
    return found


def spread(rows: Sequence[AnyRow], n: int, key: Callable[[AnyRow], str]) -> list[AnyRow]:
    """`n` of the rows (all if there are fewer): those with the smallest hash, in that order.

    The choice does not depend on the order of a file, and a smaller one is part of a larger.
    """
    return sorted(rows, key=lambda row: (prompt_key(key(row)), key(row)))[:n]


def task_scores(
    answerer: Answerer, rows: Sequence[Row], rules: RewardRules, judge: Judge | None = None
) -> dict[str, list[Scores]]:
    """Of each task that has rows, by its letter: reward (as `total`) and metrics of each row."""
    prefetch(judge, rows)
    return {
        letter: _scores(TASKS[letter], answerer, same, rules, judge)
        for letter, same in by_task(rows).items()
        if same
    }


def _scores(
    task: AnyTask,
    answerer: Answerer,
    rows: Sequence[Row],
    rules: RewardRules,
    judge: Judge | None,
) -> list[Scores]:
    """For each row the mean over its samples of the reward and of every score."""
    answers = iter(answerer.answer([task.prompt(row, answerer.style) for row in rows]))
    scored = []
    for row in rows:
        samples = []
        for one in (next(answers) for _ in range(answerer.samples)):
            verdict = task.verify(row, one.text, rules, judge, finished=one.finished)
            found = task.metrics(row, one.text, judge, finished=one.finished)
            samples.append(found | {"total": verdict.total})
        scored.append({name: _mean(found[name] for found in samples) for name in samples[0]})
    return scored


def _mean(values: Iterable[float | None]) -> float | None:
    there = [value for value in values if value is not None]
    return sum(there) / len(there) if there else None


def _rewards(scored: Mapping[str, Sequence[Scores]]) -> Values:
    return known(scores["total"] for same in scored.values() for scores in same)


def _columns(letter: str, scored: Sequence[Scores]) -> dict[str, Values]:
    names = [name for name in scored[0] if name != "total"]
    return {f"{letter}/{name}": known(scores[name] for scores in scored) for name in names}


def mate_columns(answerer: Answerer, mates: Sequence[Mate]) -> dict[str, Values]:
    """Mate in one, row by row: any mating move, and the one a benchmark expects."""
    if not mates:
        return {}
    answers = iter(analyses(answerer, (mate.fen for mate in mates)))
    any_mate: list[float | None] = []
    strict: list[float | None] = []
    for mate in mates:
        said = [next(answers).best for _ in range(answerer.samples)]
        any_mate.append(_mean(float(move in mate.mates) for move in said))
        strict.append(_mean(float(move == mate.target) for move in said) if mate.target else None)
    return {"mate1/accuracy": known(any_mate), "mate1/strict": known(strict)}


def passk_columns(
    answerer: Answerer, rows: Sequence[PolicyRow], ks: Sequence[int]
) -> dict[str, Values]:
    """Unbiased pass@k of the best move, row by row, from the answerer's samples."""
    n = answerer.samples
    answers = iter(analyses(answerer, (row.fen for row in rows)))
    right = [sum(next(answers).best == row.moves[0] for _ in range(n)) for row in rows]
    return {f"passk/{k}": known(pass_at_k(n, c, k) for c in right) for k in ks if k <= n}


def solve(answerer: Answerer, puzzles: Sequence[Puzzle]) -> Values:
    """1 for each puzzle whose every move was found; another move that mates also solves it."""
    boards = [chess.Board(puzzle.fen) for puzzle in puzzles]
    solved = np.full(len(puzzles), np.nan)
    for ply in range(0, max((len(puzzle.moves) for puzzle in puzzles), default=0), 2):
        open_ones = [i for i in range(len(puzzles)) if np.isnan(solved[i])]
        for i in open_ones:
            boards[i].push_uci(puzzles[i].moves[ply])
        found = analyses(answerer, (boards[i].fen() for i in open_ones))
        for i, answer in zip(open_ones, found, strict=True):
            said, line = answer.best, puzzles[i].moves
            if said not in legal_moves(boards[i].fen()):
                solved[i] = 0.0
                continue
            boards[i].push_uci(said)
            last = ply + 2 == len(line)
            if boards[i].is_checkmate() or said != line[ply + 1] or last:
                solved[i] = float(boards[i].is_checkmate() or said == line[ply + 1])
    return solved


def majority_baseline(rows: Sequence[EnvironmentRow]) -> dict[str, Estimate]:
    """What always answering the most common label would score on each field."""
    fields: dict[str, list[Any]] = {
        "reward": [round(row.reward, 3) for row in rows],
        "terminated": [row.terminated for row in rows],
        "truncated": [row.truncated for row in rows],
    }
    return {
        f"{ENVIRONMENT.letter}/baseline/{name}": share(
            Counter(labels).most_common(1)[0][1], len(labels)
        )
        for name, labels in fields.items()
        if labels
    }
