"""What the report page shows, as one JSON object made from run folders; the page only draws it.

Laws: every logged metric is in some panel, known or not; a number that is not finite is null; long
series are thinned to the mean of neighbouring steps, and the panel says so. No torch.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from rookworld import __version__
from rookworld.grpo.decisions import ENTROPY_FLOOR
from rookworld.report.analysis import Analysis, analyze
from rookworld.report.evolution import evolution_data
from rookworld.report.gallery import MOST_CARDS, films, gallery, parts_over_training
from rookworld.report.run_reader import (
    Record,
    RunRecord,
    Values,
    is_evolution,
    is_sweep,
    number,
    read_run,
)
from rookworld.report.sweep_summary import SweepSummary, read_sweep, summarize
from rookworld.report.tables import change_of, facts
from rookworld.rl.settings import TrainSettings
from rookworld.runtime.config import resolved
from rookworld.tasks.registry import TASKS, metric_info

MOST_POINTS = 1000
MOST_RUNS = 8
"""Runs drawn as curves; of a sweep, its best."""
MOST_GALLERIES = 4


@dataclass(frozen=True, kw_only=True)
class Panel:
    """A chart: some metrics on one axis."""

    title: str
    metrics: tuple[str, ...]
    help: str = ""
    log: bool = False
    smooth: bool = True
    """Whether a moving average helps; not for what is set rather than measured."""
    limits: tuple[tuple[str, str, float], ...] = ()
    """Level lines: label, the setting that holds them, and the share of it to draw."""


def all_panels() -> list[Panel]:
    """The reward, as a whole and by task, the parts of each task's, and all others."""
    return [WHOLE, *(panel for letter in TASKS for panel in task_panels(letter)), *PANELS]


WHOLE = Panel(
    title="Reward",
    metrics=("reward/mean",),
    help="Mean reward of the sampled answers of all tasks.",
)


def task_panels(letter: str) -> list[Panel]:
    """A task's reward and the parts of it: tasks differ in level, so each has its own axis."""
    task = TASKS[letter]
    return [
        Panel(
            title=f"Reward: {task.title.lower()}",
            metrics=(f"reward/{letter}",),
            help=f"Mean reward of the sampled {letter}: answers.",
        ),
        Panel(
            title=f"Parts: {task.title.lower()}",
            metrics=tuple(f"reward/{letter}/{part}" for part in task.parts),
            help="What that reward is made of, each part from 0 to 1.",
        ),
    ]


PANELS = (
    Panel(
        title="KL to the reference",
        metrics=("kl/exact", *(f"kl/{letter}" for letter in TASKS)),
        help="Nats per token. The guard restores at 90 % of the threshold.",
        limits=(
            ("guard acts", "kl_divergence_threshold", 0.9),
            ("guard warns", "kl_divergence_threshold", 0.8),
        ),
    ),
    Panel(
        title="KL weight",
        metrics=("kl/coef", "distill/coef", "agreement/coef"),
        smooth=False,
        help="Weight of the KL in the loss, and of self-distillation where it is asked for.",
    ),
    Panel(
        title="Entropy",
        metrics=("policy/entropy",),
        help="Nats per token. Falls as the policy commits; near 0 all answers are alike.",
        limits=(("floor", "entropy_floor", 1.0),),
    ),
    Panel(
        title="Learning rate",
        metrics=("lr",),
        smooth=False,
        help="Schedule times the guard's cuts.",
    ),
    Panel(
        title="Gradient norm",
        metrics=("grad/norm",),
        help="Before clipping, on a log scale.",
        log=True,
        limits=(("clipped above", "clip_norm", 1.0),),
    ),
    Panel(
        title="Loss",
        metrics=(
            "loss/total",
            "loss/policy",
            "loss/kl",
            "distill/loss",
            "loss/agreement",
            "loss/value",
        ),
        help="A policy loss near 0 is normal: advantages of a group sum to zero.",
    ),
    Panel(
        title="Answer length",
        metrics=("tokens/mean_length",),
        help="Tokens sampled per answer, the end token included.",
    ),
    Panel(
        title="Spread and cut-offs",
        metrics=(
            "reward/flat_groups",
            "reward/invalid_groups",
            "tokens/truncated",
            "policy/clipped",
            "kl/left_out",
        ),
        help="Shares of groups, answers or tokens that teach nothing or less.",
    ),
    Panel(
        title="Reward spread",
        metrics=("reward/std", "reward/max"),
        help="Deviation over the step's answers, and the best of them.",
    ),
    Panel(
        title="Ratio",
        metrics=("policy/ratio_max",),
        help="Largest policy ratio of a token: 1 with one update per rollout, but for rounding, "
        "which in bfloat16 can be a tenth.",
    ),
    Panel(
        title="Sampler against trainer",
        metrics=("sampler/logp_gap",),
        help="Mean |log π − log μ|; rounding only.",
    ),
    Panel(
        title="Seconds a step",
        metrics=("time/step_s", "time/sample_s", "time/score_s", "time/update_s"),
        help="Wall-clock time by phase.",
    ),
    Panel(title="Memory", metrics=("mem/peak_mb",), smooth=False, help="Peak, in MB."),
    Panel(
        title="Guard",
        metrics=("guard/skipped", "guard/recoveries"),
        smooth=False,
        help="Updates skipped and states restored so far.",
    ),
)


def page_data(paths: Sequence[Path], *, live: bool = False) -> Record:
    """Everything the page needs, from run folders, evolutions and at most one sweep folder."""
    sweeps = [path for path in paths if is_sweep(path)]
    folders = [path for path in paths if not is_sweep(path) and not is_evolution(path)]
    notes: list[str] = []
    evolutions = [evolution_data(path, notes) for path in paths if is_evolution(path)]
    shown: Record | None = None
    for path in sweeps[:1]:
        record = read_sweep(path)
        summary = summarize(record, best=MOST_RUNS)
        shown = sweep_data(record, summary)
        folders += [f for one in summary.best[:5] if (f := path / str(one.get("folder"))).is_dir()]
    if len(sweeps) > 1:
        notes.append(f"one sweep at a time: {', '.join(p.name for p in sweeps[1:])} left out")
    if len(folders) > MOST_RUNS:
        left_out = len(folders) - MOST_RUNS
        notes.append(f"the first {MOST_RUNS} runs are shown, {left_out} are left out")
    runs = [read_run(folder) for folder in folders[:MOST_RUNS]]
    cards = MOST_CARDS if len(runs) <= 1 else MOST_CARDS // 2
    return {
        "version": __version__,
        "live": live,
        "notes": notes,
        "metrics": metric_texts(runs, [r["metric"] for one in evolutions for r in one["rounds"]]),
        "panels": panels_for(runs),
        "runs": [
            run_data(run, cards if place < MOST_GALLERIES else 0) for place, run in enumerate(runs)
        ],
        "diff": config_diff(runs),
        "sweep": shown,
        "evolutions": evolutions,
    }


def metric_texts(runs: Sequence[RunRecord], others: Sequence[str] = ()) -> Record:
    """How the page names and writes each metric of the runs, and whether less of it is better."""
    records = [record for run in runs for record in (*run.metrics, *run.evals)]
    names = dict.fromkeys([*others, *(name for one in records for name in one)])
    known = {name: metric_info(name) for name in names}
    return {
        name: {"label": one.label, "percent": one.in_percent, "lower": one.better == "down"}
        for name, one in known.items()
    }


def run_data(run: RunRecord, cards: int) -> Record:
    found = analyze(run)
    steps, thinned = thin(run.steps, {name: run.series(name) for name in run.metric_names})
    return {
        "name": run.name,
        "state": found.state,
        "steps": found.steps,
        "planned": found.planned,
        "hours": round(found.hours, 4),
        "notes": found.notes,
        "warnings": found.warnings,
        "facts": facts(found) | slopes(found),
        "every": max(1, math.ceil(len(run.metrics) / max(1, len(steps)))),
        "x": steps,
        "series": thinned,
        "limits": limits(run.config),
        "events": [event_data(event) for event in run.events],
        "evals": eval_data(run.evals),
        "held_out": held_out_rows(found),
        "headline": found.held_out,
        "start": found.start,
        "verdict": found.verdict,
        "match": found.match,
        "paired": bool(found.paired),
        "config": run.config,
        "changed": changed_settings(run.config),
        "origin": {k: v for k, v in run.origin.items() if v is not None},
        "gallery": gallery(run.rollouts, cards) if cards else [],
        "films": films(run.probes) if cards else [],
        "parts": parts_over_training(run.rollouts),
    }


def slopes(found: Analysis) -> dict[str, str]:
    """How fast reward and KL go, by label."""
    texts = {}
    for name, label in (("reward/mean", "reward"), ("kl/exact", "KL")):
        if (trend := found.trends.get(name)) is not None:
            interval = f"{trend.low:+.2g} to {trend.high:+.2g}"
            texts[f"{label} per 100 steps"] = f"{trend.slope:+.2g} ({interval})".replace("-", "−")
    return texts


def thin(steps: Values, series: Mapping[str, Values]) -> tuple[list[int], dict[str, Any]]:
    """Series of at most `MOST_POINTS`, each the mean of the steps it stands for."""
    size = math.ceil(len(steps) / MOST_POINTS) if len(steps) else 1
    starts = np.arange(0, len(steps), size)
    kept = [int(step) for step in steps[starts]]
    made = {}
    for name, values in series.items():
        known = np.isfinite(values)
        if not known.any():
            continue
        sums = np.add.reduceat(np.where(known, values, 0.0), starts)
        counts = np.add.reduceat(known.astype(np.float64), starts)
        made[name] = [short(s / c) if c else None for s, c in zip(sums, counts, strict=True)]
    return kept, made


def short(value: float) -> float | None:
    """Five digits are more than a screen can show."""
    return float(f"{value:.5g}") if math.isfinite(value) else None


def limits(config: Mapping[str, Any]) -> dict[str, list[Any]]:
    """Level lines by panel title: label and value, where the run's settings know them."""
    known = {"entropy_floor": ENTROPY_FLOOR, **config}
    found: dict[str, list[Any]] = {}
    for panel in all_panels():
        for label, setting, share in panel.limits:
            value = number(known.get(setting))
            if value > 0:
                found.setdefault(panel.title, []).append([label, share * value])
    return found


def event_data(event: Mapping[str, Any]) -> Record:
    return {
        "step": int(number(event.get("step"))),
        "kind": str(event.get("kind", "event")),
        "cause": str(event.get("cause", "")),
        "message": str(event.get("message", "")),
    }


def panels_for(runs: Sequence[RunRecord]) -> list[Record]:
    """The panels that have something to show; metrics nobody knows get panels by their group."""
    logged = list(dict.fromkeys(name for run in runs for name in run.metric_names))
    panels = [dataclasses.asdict(panel) for panel in all_panels()]
    known = {name for panel in all_panels() for name in panel.metrics}
    groups: dict[str, list[str]] = {}
    for name in logged:
        if name not in known:
            groups.setdefault(name.split("/")[0], []).append(name)
    panels += [dataclasses.asdict(Panel(title=g, metrics=tuple(n))) for g, n in groups.items()]
    for panel in panels:
        panel["metrics"] = [name for name in panel["metrics"] if name in logged]
    return [panel for panel in panels if panel["metrics"]]


def eval_data(evals: Sequence[Record]) -> Record:
    """Held-out curves: metric → value, low, high at each evaluated step."""
    names = dict.fromkeys(n for one in evals for n, v in one.items() if isinstance(v, Mapping))
    curves = {}
    for name in names:
        found = [one.get(name) for one in evals]
        records = [one if isinstance(one, Mapping) else {} for one in found]
        curves[name] = {
            key: [short(number(one.get(key))) for one in records]
            for key in ("value", "low", "high")
        }
    return {"steps": [int(one["step"]) for one in evals], "curves": curves}


def held_out_rows(found: Analysis) -> list[Record]:
    """Before and after by metric, and what changed."""
    rows = []
    for name, before in found.before.items():
        if name == "step":
            continue
        after = found.after.get(name)
        change = None if after is None else change_of(before, after, found.paired.get(name))
        rows.append({"name": name, "before": before, "after": after, "change": change})
    return rows


def changed_settings(config: Mapping[str, Any]) -> list[Record]:
    """Settings that differ from the defaults of this version."""
    defaults = resolved(TrainSettings())
    left_out = {"out", "resume", "dry_run"}
    return [
        {"key": key, "value": value, "default": defaults.get(key)}
        for key, value in config.items()
        if key not in left_out and (key not in defaults or defaults[key] != value)
    ]


def config_diff(runs: Sequence[RunRecord]) -> list[Record]:
    """Settings in which the runs differ, a value for each run (null: it has no such setting)."""
    keys = dict.fromkeys(key for run in runs for key in run.config if key != "out")
    rows = [{"key": key, "values": [run.config.get(key) for run in runs]} for key in keys]
    return [row for row in rows if any(one != row["values"][0] for one in row["values"])]


def sweep_data(record: Record, summary: SweepSummary) -> Record:
    trials = [
        {
            "number": one.get("number"),
            "params": one["params"],
            "state": one.get("state"),
            "value": short(number(one.get("value"))),
            "cause": one.get("cause"),
            "message": one.get("message"),
        }
        for one in record["trials"]
        if isinstance(one.get("params"), dict)
    ]
    return dataclasses.asdict(summary) | {
        "survival": summary.survival,
        "trials": trials,
        "space": record.get("space", {}),
    }
