"""`rookworld check`, `overfit`, `inspect`: what to look at before a training."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from rich.table import Table

from rookworld.cli.display import banner, bar, say, say_work_begins, show
from rookworld.cli.evaluate import open_judge
from rookworld.cli.flags import leading
from rookworld.cli.train import dry_run, read_rows, read_settings
from rookworld.rl.presets import TRAIN_PRESETS
from rookworld.rl.settings import TrainSettings
from rookworld.runtime.config import override
from rookworld.runtime.errors import ConfigError
from rookworld.tasks.registry import task_of

if TYPE_CHECKING:
    from rookworld.rl.checks import Law
    from rookworld.rollout.types import Group


def check(args: list[str]) -> int:
    """`rookworld check [MODEL]`: one line a law, exit code 1 if one does not hold."""
    from rookworld.model.weights import resolve_folder
    from rookworld.rl.checks import check as run_laws

    models, rest = leading(args)
    if len(models) > 1:
        raise ConfigError(f"check: one model at a time, not {' '.join(models)}")
    flags = ["--model", *models, *rest] if models else rest
    settings = read_settings(flags, "rookworld check", about=check.__doc__)
    resolve_folder(settings.model)  # that there is none is a mistake, not a law that fails
    rows = read_rows(settings.data)
    rows = [*rows[:400], *rows[-200:]]
    with tempfile.TemporaryDirectory() as folder:
        laws = run_laws(settings.but(out=Path(folder)), rows, show_law)
    return 0 if all(law.holds for law in laws) else 1


def show_law(law: Law) -> None:
    print(f"{'holds' if law.holds else 'FAILS'}  {law.name}: {law.detail}")


def overfit(args: list[str]) -> int:
    """`rookworld overfit`: three criteria on one fixed batch, exit code 1 if one fails."""
    from rookworld.rl.checks import fixed_batch
    from rookworld.rl.checks import overfit as run_overfit
    from rookworld.rl.run_log import Hooks

    start = override(TrainSettings(), TRAIN_PRESETS["overfit"], "preset overfit")
    start = start.but(out=Path("runs/overfit"))
    settings = read_settings(args, "rookworld overfit", start, about=overfit.__doc__)
    settings = settings.but(eval_every=1, flat_tries=0)
    if settings.out == start.out:  # a folder that holds nothing but such tries
        settings = settings.but(overwrite=True)
    say(banner("overfit", settings, TrainSettings()))
    rows = read_rows(settings.data)
    if settings.dry_run:
        return dry_run(settings, fixed_batch(rows, settings))
    say_work_begins()
    with bar("overfitting") as progress:
        hooks = Hooks(
            on_step=lambda step, m: progress.update(
                step, settings.steps, f"reward {m['reward/mean']:.3f} KL {m['kl/exact']:.4f}"
            ),
            on_event=lambda event: progress.say(f"guard: {event['message']}"),
        )
        laws = run_overfit(settings, rows, hooks)
    for law in laws:
        show_law(law)
    return 0 if all(law.holds for law in laws) else 1


def inspect(args: list[str]) -> int:
    """`rookworld inspect`: one batch, answers side by side with the truth and every part."""
    from rookworld.model.precision import matrix_dtype
    from rookworld.rl.state import new_state, sampling
    from rookworld.rollout.collector import Collector
    from rookworld.runtime.distributed import start

    settings = read_settings(args, "rookworld inspect", about=inspect.__doc__)
    state = new_state(settings, read_rows(settings.data), start(settings.compute.device))
    with open_judge(settings.judge, settings.engine, settings.nodes) as judge:
        collector = Collector(
            state.learner.model,
            state.tokenizer,
            sampling(settings.sampling, state.tokenizer),
            settings.sampling.k_samples,
            settings.seed,
            settings.rewards,
            judge,
            dtype=matrix_dtype(settings.compute.dtype, state.learner.model.device),
        )
        groups = collector.groups(state.prompts.take(settings.batch_size), 0, 1.0)
    for group in groups:
        show(inspected(group))
    return 0


def inspected(group: Group) -> Table:
    row = group.prompt.row
    truth = task_of(row).answer(row, "compact")
    parts = sorted({name for verdict in group.verdicts for name in verdict.parts})
    table = Table("reward", *parts, "answer", "why", title=f"{group.prompt.letter}: {row.fen}")
    table.add_row("truth", *["" for _ in parts], truth, "")
    for text, verdict in zip(group.texts, group.verdicts, strict=True):
        values = [f"{verdict.parts.get(name, 0):.2f}" for name in parts]
        table.add_row(f"{verdict.total:.3f}", *values, text, verdict.reason)
    return table
