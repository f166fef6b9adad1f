"""`rookworld score` and `rookworld eval`: what answers and models are worth."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from rookworld.cli.display import bar, show
from rookworld.cli.flags import leading, parse
from rookworld.data.rows import text_row
from rookworld.runtime.config import Composed
from rookworld.runtime.errors import ConfigError, DataError
from rookworld.tasks.registry import task_of
from rookworld.tasks.reward import RewardRules
from rookworld.tasks.task import Judge, Verdict


@contextmanager
def open_judge(kind: str, engine: str | None, nodes: int) -> Iterator[Judge | None]:
    """The judge by name; None is the rows' own labels."""
    if kind == "labels":
        yield None
        return
    from rookworld.tasks.engine import find_engine
    from rookworld.tasks.engine_cache import default_cache_path
    from rookworld.tasks.judge import StockfishJudge

    with StockfishJudge(find_engine(engine), nodes=nodes, cache=default_cache_path()) as judge:
        yield judge


@dataclass(frozen=True, kw_only=True)
class ScoreSettings(Composed):
    """Score answers: one JSON line each with `reward`, `parts` and `reason`.

    FILE holds a line for each: {"row": "P: … or A: …, the gold row", "completion": "the answer"}.
    """

    judge: Literal["labels", "stockfish"] = "labels"
    """Who says how good moves are: the gold rows, or Stockfish."""
    engine: str | None = None
    """Stockfish binary; default: STOCKFISH_PATH, PATH, /usr/games."""
    nodes: int = 20_000
    """Stockfish's nodes a position."""
    rules: RewardRules = field(default_factory=RewardRules)


def score(args: list[str]) -> int:
    files, rest = leading(args)
    settings = parse(ScoreSettings, rest, command="rookworld score", default=ScoreSettings())
    if len(files) != 1:
        raise ConfigError("score: name one JSONL file, or - for standard input")
    with open_judge(settings.judge, settings.engine, settings.nodes) as judge:
        number = 0
        for number, line in _lines(files[0]):
            verdict = score_line(line, f"{files[0]}:{number}", settings.rules, judge)
            result = {"reward": verdict.total, "parts": verdict.parts, "reason": verdict.reason}
            print(json.dumps(result))
    if number == 0:
        raise DataError(f"{files[0]}: no answers in it")
    return 0


def _lines(name: str) -> Iterator[tuple[int, str]]:
    """The lines that are not blank, each with its number in the file."""
    try:
        with (
            nullcontext(sys.stdin) if name == "-" else Path(name).open(encoding="utf-8-sig") as file
        ):
            yield from ((number, line) for number, line in enumerate(file, 1) if line.strip())
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{name}: cannot be read ({error})") from None


def score_line(line: str, where: str, rules: RewardRules, judge: Judge | None) -> Verdict:
    """The verdict on one `{"row": gold row, "completion": text}`."""
    try:
        record: Any = json.loads(line)
        row_text, completion = record["row"], record["completion"]
    except (ValueError, KeyError, TypeError, RecursionError):
        raise DataError(f'{where}: expected {{"row": "…", "completion": "…"}}') from None
    if not isinstance(row_text, str) or not isinstance(completion, str):
        raise DataError(f"{where}: row and completion must be texts")
    row = text_row(row_text)
    if row is None:
        raise DataError(f"{where}: not a gold row: {row_text[:60]!r}")
    return task_of(row).verify(row, completion, rules, judge)


def evaluate(args: list[str]) -> int:
    from rookworld.evaluation.suites import EvalSettings, run_eval
    from rookworld.evaluation.tables import render_tables

    models, rest = leading(args)
    settings = parse(EvalSettings, rest, command="rookworld eval", default=EvalSettings())
    if not models:
        raise ConfigError("eval: name a model, such as `rookworld eval nano`")
    with bar("evaluating") as progress:
        result = run_eval(
            models, settings, lambda what, done, total: progress.update(done, total, what)
        )
    if settings.json:
        print(json.dumps(result.to_json()))
    else:
        for table in render_tables(result):
            show(table)
    return 0
