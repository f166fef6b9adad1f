"""What a person sees of a training: a bar, lines, tables, curves in TensorBoard or W&B."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.table import Table
from rich.text import Text

from rookworld.cli.display import Bar, say, show, speaks
from rookworld.rl.settings import TrainSettings
from rookworld.runtime.config import resolved
from rookworld.runtime.errors import ConfigError
from rookworld.runtime.run_folder import append_record
from rookworld.tasks.registry import TASKS, headline_metrics

CURVES = "curves.jsonl"
"""What --log-dir gets without TensorBoard."""

if TYPE_CHECKING:
    from rookworld.evaluation.evaluate import Evaluation
    from rookworld.rollout.types import Group


def watch(
    settings: TrainSettings,
    progress: Bar,
    record: Any,
) -> Any:
    """Hooks that keep the terminal and the loggers up to date."""
    from rookworld.rl.metrics import log_line
    from rookworld.rl.run_log import Hooks

    def on_step(step: int, metrics: Mapping[str, float]) -> None:
        record(step, metrics)
        formats = [metrics.get(f"reward/{letter}/format") for letter in TASKS]
        valid = next((one for one in formats if one is not None), 0.0)
        tasks = " ".join(
            f"{letter} {metrics[f'reward/{letter}']:.3f}"
            for letter in TASKS
            if f"reward/{letter}" in metrics
        )
        progress.update(
            step,
            settings.steps,
            f"{tasks} KL {metrics['kl/exact']:.4f} entropy {metrics['policy/entropy']:.2f} "
            f"format {valid:.0%}",
        )
        if step == 1:
            progress.say(log_line(step, dict(metrics)))

    def on_eval(step: int, evaluation: Evaluation) -> None:
        found = evaluation.estimates
        numbers = " ".join(
            f"{name} {found[name].value:.3f}" for name in headline_metrics() if name in found
        )
        progress.say(f"held-out after step {step}: {numbers}")

    def on_samples(step: int, groups: Sequence[Group]) -> None:
        if progress.progress is not None:
            progress.progress.console.print(samples_table(step, groups[:2]))

    return Hooks(
        on_step=on_step,
        on_eval=on_eval,
        on_event=lambda event: progress.say(f"guard: {event['message']}"),
        on_samples=on_samples,
        say=progress.say,
    )


class Recorder:
    """Writes metrics to TensorBoard and W&B where they are installed or asked for.

    A folder that was asked for is filled without TensorBoard too: nothing asked for is ignored.
    """

    def __init__(self, settings: TrainSettings) -> None:
        self.settings = settings
        self.board: Any = None
        self.wandb: Any = None
        self.lines: Path | None = None
        """Where --log-dir is kept without TensorBoard."""

    def __enter__(self) -> Any:
        if self.settings.log_dir is not None and find_spec("tensorboard") is None:
            self.lines = self.settings.log_dir / CURVES
            say(
                f"TensorBoard is not installed: {self.lines} gets an object a step "
                "(to have them drawn: pip install 'rookworld[tensorboard]')"
            )
        if self.settings.wandb and speaks():
            if find_spec("wandb") is None:
                raise ConfigError("--wandb needs the extra: pip install 'rookworld[wandb]'")
            import wandb

            self.wandb = wandb.init(project="rookworld", config=resolved(self.settings))
        return self.record

    def record(self, step: int, metrics: Mapping[str, float]) -> None:
        # opened at the first step: a new run clears its folder before it begins
        if self.board is None and find_spec("tensorboard") is not None:
            from torch.utils.tensorboard import SummaryWriter

            folder = self.settings.log_dir or self.settings.out / "tensorboard"
            self.board = SummaryWriter(str(folder))
        if self.board is not None:
            for name, value in metrics.items():
                self.board.add_scalar(name, value, step)
        if self.lines is not None:
            self.lines.parent.mkdir(parents=True, exist_ok=True)
            append_record(self.lines, {"step": step, **metrics})
        if self.wandb is not None:
            self.wandb.log(dict(metrics), step=step)

    def __exit__(self, *_: object) -> None:
        if self.board is not None:
            self.board.close()
        if self.wandb is not None:
            self.wandb.finish()


def show_change(folder: Path) -> None:
    """What a run changed on its held-out rows, in a sentence and a table; nothing is said of what
    was not measured on the same rows before and after."""
    from rookworld.report.analysis import analyze
    from rookworld.report.run_reader import read_run
    from rookworld.report.tables import changes_table

    found = analyze(read_run(folder))
    if found.paired:
        show(changes_table(found, headlines=True))
        for line in (found.start, found.verdict):
            show(Text(line))


def samples_table(step: int, groups: Sequence[Group]) -> Table:
    """A few answers with their reward parts."""
    table = Table("prompt", "answer", "reward", "parts", title=f"answers at step {step}")
    for group in groups:
        for text, verdict in list(zip(group.texts, group.verdicts, strict=True))[:3]:
            parts = " ".join(f"{name} {value:.2f}" for name, value in verdict.parts.items())
            table.add_row(
                f"{group.prompt.letter}: {group.prompt.row.fen}",
                text,
                f"{verdict.total:.3f}",
                parts,
            )
    return table
