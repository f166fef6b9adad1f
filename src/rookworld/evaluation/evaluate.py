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
from rookworld.data.rows import MateRow, row_key
from rookworld.data.sources import load_rows
from rookworld.evaluation.generator import Answer, Answerer, analyses, prompt_key
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
from rookworld.tasks.environment import ENVIRONMENT, KINDS
from rookworld.tasks.policy import POLICY
from rookworld.tasks.reward import RewardRules
from rookworld.tasks.task import EnvironmentRow, Judge, PolicyRow, Task, legal_moves

AnyRow = TypeVar("AnyRow")
Scores = dict[str, float | None]

PHASES = ("opening", "middlegame", "endgame")
DEFAULT_RULES = RewardRules()


@dataclass(frozen=True)
class HeldOut:
    """The rows of an evaluation; each part may be empty."""

    policy: Sequence[PolicyRow] = ()
    environment: Sequence[EnvironmentRow] = ()
    mates: Sequence[Mate] = ()


@dataclass(frozen=True)
class Evaluation:
    """Estimates by metric name, and the values behind them, row by row (NaN: does not apply)."""

    estimates: dict[str, Estimate] = field(default_factory=dict)
    rows: dict[str, Values] = field(default_factory=dict)

    @classmethod
    def of(cls, rows: Mapping[str, Values]) -> Evaluation:
        """The estimates that follow from row values."""
        return cls(estimates(rows), dict(rows))

    def __or__(self, other: Evaluation) -> Evaluation:
        return Evaluation(self.estimates | other.estimates, self.rows | other.rows)

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
    policy = policy_scores(answerer, held_out.policy, rules, judge)
    environment = environment_scores(answerer, held_out.environment, rules)
    rows = {"reward/greedy": _rewards(policy, environment)}
    if sampled is not None:
        rows["reward/sampled"] = _rewards(
            policy_scores(sampled, held_out.policy, rules, judge),
            environment_scores(sampled, held_out.environment, rules),
        )
    rows |= policy_columns(held_out.policy, policy)
    rows |= environment_columns(held_out.environment, environment)
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
    source: str = "embedded:validation",
    *,
    mates: str = "embedded:mate",
    n_policy: int,
    n_environment: int,
    n_mates: int,
) -> HeldOut:
    """At most so many rows of each task from `source`, and mates in one from a source of theirs.

    A count of 0 leaves its part out, and a source that nothing is wanted of unread.
    """
    rows = load_rows(source) if n_policy or n_environment else []
    policy = [row for row in rows if isinstance(row, PolicyRow)]
    environment = [row for row in rows if isinstance(row, EnvironmentRow)]
    for letter, found, wanted in (("P", policy, n_policy), ("A", environment, n_environment)):
        if wanted and not found:
            raise DataError(f"{source}: no {letter} row in it")
    return HeldOut(
        spread(policy, n_policy, row_key),
        spread(environment, n_environment, row_key),
        mates_from(mates, n_mates) if n_mates else (),
    )


def mates_from(source: str, n: int) -> list[Mate]:
    """At most `n` mates in one: a BIG-bench or Lichess file, or any source with mates of ours."""
    if Path(source).suffix in (".json", ".csv", ".zst"):
        return read_mates(Path(source), n)
    rows = [row for row in load_rows(source) if isinstance(row, MateRow)]
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


def policy_scores(
    answerer: Answerer, rows: Sequence[PolicyRow], rules: RewardRules, judge: Judge | None = None
) -> list[Scores]:
    """Reward (as `total`) and metrics of each row."""
    if judge is not None:
        judge.prefetch(rows)

    def score(row: PolicyRow, answer: Answer) -> Scores:
        scores = POLICY.metrics(row, answer.text, judge, finished=answer.finished)
        said = POLICY.parse(answer.text).best if answer.finished else ""
        # `best` of the task lets a move that is just as good pass; the published number does not.
        exact = float(said == POLICY.truth(row, judge).moves[0])
        white = scores["best_white"] is not None
        return scores | {
            "best": exact,
            "best_white": exact if white else None,
            "best_black": None if white else exact,
            "best_or_equal": scores["best"],
        }

    return _scores(POLICY, answerer, rows, rules, judge, score)


def environment_scores(
    answerer: Answerer, rows: Sequence[EnvironmentRow], rules: RewardRules
) -> list[Scores]:
    """Reward (as `total`) and metrics of each row."""

    def score(row: EnvironmentRow, answer: Answer) -> Scores:
        scores = ENVIRONMENT.metrics(row, answer.text, finished=answer.finished)
        said = ENVIRONMENT.parse(answer.text).fen if scores["format"] else ""
        return scores | {
            "squares": scores["similarity"],
            "similarity": text_similarity(said, row.next_fen),
        }

    return _scores(ENVIRONMENT, answerer, rows, rules, None, score)


def _scores(
    task: Task[AnyRow],
    answerer: Answerer,
    rows: Sequence[AnyRow],
    rules: RewardRules,
    judge: Judge | None,
    score: Callable[[AnyRow, Answer], Scores],
) -> list[Scores]:
    """For each row the mean over its samples of the reward and of every score."""
    answers = iter(answerer.answer([task.prompt(row, answerer.style) for row in rows]))
    scored = []
    for row in rows:
        samples = []
        for answer in (next(answers) for _ in range(answerer.samples)):
            verdict = task.verify(row, answer.text, rules, judge, finished=answer.finished)
            samples.append(score(row, answer) | {"total": verdict.total})
        scored.append({name: _mean(one[name] for one in samples) for name in samples[0]})
    return scored


def _mean(values: Iterable[float | None]) -> float | None:
    there = [value for value in values if value is not None]
    return sum(there) / len(there) if there else None


def _rewards(policy: Sequence[Scores], environment: Sequence[Scores]) -> Values:
    return known(scores["total"] for scores in (*policy, *environment))


def _columns(letter: str, scored: Sequence[Scores]) -> dict[str, Values]:
    names = [name for name in (scored[0] if scored else {}) if name != "total"]
    return {f"{letter}/{name}": known(scores[name] for scores in scored) for name in names}


def _where(values: Values, chosen: Iterable[bool]) -> Values:
    return np.where(np.fromiter(chosen, dtype=bool, count=values.size), values, np.nan)


def policy_columns(rows: Sequence[PolicyRow], scored: Sequence[Scores]) -> dict[str, Values]:
    """`P/…` row by row, best-move accuracy also by phase."""
    columns = _columns("P", scored)
    if columns:
        phases = [phase(row.fen) for row in rows]
        for name in PHASES:
            columns[f"P/best_{name}"] = _where(columns["P/best"], (one == name for one in phases))
    return columns


def environment_columns(
    rows: Sequence[EnvironmentRow], scored: Sequence[Scores]
) -> dict[str, Values]:
    """`A/…` row by row, exactness also by class of move."""
    columns = _columns("A", scored)
    if columns:
        for kind in KINDS:
            chosen = (row.kind == kind for row in rows)
            columns[f"A/by_kind/{kind}"] = _where(columns["A/exact"], chosen)
    return columns


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
        f"A/baseline/{name}": share(Counter(labels).most_common(1)[0][1], len(labels))
        for name, labels in fields.items()
        if labels
    }


def phase(fen: str) -> str:
    """opening, middlegame or endgame.

    Endgame: at most six pieces besides kings and pawns are left, both sides together. Opening:
    more than ten, and not after move 12. Middlegame: everything else.
    """
    placement, *_, move_number = fen.split()
    pieces = sum(letter in "nbrqNBRQ" for letter in placement)
    if pieces <= 6:
        return "endgame"
    return "opening" if pieces > 10 and int(move_number) <= 12 else "middlegame"


def text_similarity(a: str, b: str) -> float:
    """1 - Levenshtein distance / length of the longer text; 1 for equal texts."""
    if a == b:
        return 1.0
    previous = list(range(len(b) + 1))
    for i, x in enumerate(a, 1):
        current = [i]
        for j, y in enumerate(b, 1):
            current.append(min(previous[j] + 1, current[-1] + 1, previous[j - 1] + (x != y)))
        previous = current
    return 1 - previous[-1] / max(len(a), len(b))
