"""`rookworld analyze`, `report` and `sweep`: looking at runs, and making many of them."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rookworld.cli.display import bar, say, show
from rookworld.cli.flags import leading, parse
from rookworld.runtime.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class AnalyzeSettings:
    """What runs or a sweep amount to, as a table."""

    json: bool = False
    """One JSON object instead of tables."""


def analyze(args: list[str]) -> int:
    paths, rest = leading(args)
    settings = parse(AnalyzeSettings, rest, command="rookworld analyze")
    if not paths:
        raise ConfigError("analyze: name one or more run folders, or a sweep's folder")
    from rookworld.report.analysis import analyze as analyzed
    from rookworld.report.evolution import read_rounds, rounds_table
    from rookworld.report.run_reader import find_runs, is_evolution, is_sweep, read_run
    from rookworld.report.sweep_summary import read_sweep, summarize
    from rookworld.report.tables import render, render_sweep

    sweeps = [summarize(read_sweep(Path(p))) for p in paths if is_sweep(Path(p))]
    folders = find_runs(Path(p) for p in paths if not is_sweep(Path(p)))
    runs = [analyzed(read_run(folder)) for folder in folders]
    evolutions = [Path(p) for p in paths if is_evolution(Path(p))]
    if settings.json:
        found: dict[str, Any] = {"runs": [one.to_json() for one in runs]}
        if evolutions:
            found["rounds"] = [one for folder in evolutions for one in read_rounds(folder)]
        print(json.dumps(found | {"sweeps": [dataclasses.asdict(one) for one in sweeps]}))
        return 0
    for sweep in sweeps:
        show(render_sweep(sweep))
    for folder in evolutions:
        show(rounds_table(folder))
    if runs:
        show(render(runs))
    return 0


def report(args: list[str]) -> int:
    from rookworld.report.page import ReportSettings, serving, write_report

    paths, rest = leading(args)
    settings = parse(ReportSettings, rest, command="rookworld report")
    if paths:
        settings = dataclasses.replace(settings, runs=tuple(map(Path, paths)))
    if not settings.watch:
        for sentence in story(settings.runs):
            say(sentence)
        print(write_report(settings))
        return 0
    with serving(settings) as (address, serve):
        print(address, flush=True)
        say("following the run; Ctrl-C ends")
        serve()
    return 0


def story(folders: Sequence[Path]) -> list[str]:
    """What a single run began with, what it changed, and its games against the model before."""
    from rookworld.report.analysis import analyze as analyzed
    from rookworld.report.run_reader import find_runs, is_sweep, read_run

    runs = [] if any(map(is_sweep, folders)) else find_runs(folders)
    if len(runs) != 1:
        return []
    found = analyzed(read_run(runs[0]))
    return [one for one in (found.start, found.verdict, found.match) if one]


def sweep(args: list[str]) -> int:
    from rookworld.report.tables import render_sweep
    from rookworld.sweep.runner import SweepHooks, SweepSettings, plan, run_sweep

    paths, rest = leading(args)
    settings = parse(SweepSettings, rest, command="rookworld sweep")
    if len(paths) > 1:
        raise ConfigError(f"sweep: one file at a time, not {' '.join(paths)}")
    if paths:
        settings = dataclasses.replace(settings, file=Path(paths[0]))
    if settings.dry_run:
        for line in plan(settings):
            print(line)
        return 0
    with bar("trials") as progress:

        def ended(number: int, params: object, outcome: object) -> None:
            progress.say(f"trial {number}: {outcome_text(outcome)}")

        summary = run_sweep(settings, SweepHooks(ended, progress.update, progress.say))
    show(render_sweep(summary))
    say(f"`rookworld report {settings.folder}` draws it")
    return 0


def outcome_text(outcome: object) -> str:
    from rookworld.sweep.trial import Outcome

    assert isinstance(outcome, Outcome)
    if outcome.value is not None:
        return f"{outcome.state}, {outcome.value:.4f}"
    return outcome.state if outcome.cause is None else f"{outcome.cause}: {outcome.message}"
