"""What a person sees of a training: a bar, lines, tables, curves in TensorBoard or W&B."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from rich.table import Table

from rookworld.cli.display import Bar, show, speaks
from rookworld.rl.settings import TrainSettings
from rookworld.runtime.config import resolved, short_hash
from rookworld.runtime.errors import ConfigError
from rookworld.runtime.run_folder import FIRST_ROWS
from rookworld.tasks.registry import TASKS, headline_metrics, metric_info

if TYPE_CHECKING:
    from rookworld.evaluation.evaluate import Evaluation
    from rookworld.rollout.types import Group


def watch(
    settings: TrainSettings,
    progress: Bar,
    evaluations: dict[int, Evaluation],
    record: Any,
) -> Any:
    """Hooks that keep the terminal and the loggers up to date."""
    from rookworld.evaluation.evaluate import save_found
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
        evaluations[step] = evaluation
        if step == 0:
            save_found(settings.out / FIRST_ROWS, evaluation, evaluated(settings))
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
    """Writes metrics to TensorBoard and W&B where they are installed or asked for."""

    def __init__(self, settings: TrainSettings) -> None:
        self.settings = settings
        self.board: Any = None
        self.wandb: Any = None

    def __enter__(self) -> Any:
        if self.settings.log_dir is not None and find_spec("tensorboard") is None:
            raise ConfigError("--log-dir needs TensorBoard: pip install 'rookworld[tensorboard]'")
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
        if self.wandb is not None:
            self.wandb.log(dict(metrics), step=step)

    def __exit__(self, *_: object) -> None:
        if self.board is not None:
            self.board.close()
        if self.wandb is not None:
            self.wandb.finish()


EVALUATED = ("held_out", "eval_policy_rows", "eval_environment_rows", "eval_mates")


def evaluated(settings: TrainSettings) -> str:
    """Eight characters that are equal when the same rows are judged by the same rules."""
    rules = ("reward_", "p_", "a_")
    kept = [name for name in resolved(settings) if name in EVALUATED or name.startswith(rules)]
    return short_hash(settings, ignore=set(resolved(settings)) - set(kept))


def show_change(settings: TrainSettings, evaluations: Mapping[int, Evaluation]) -> None:
    """The run's last evaluation beside its first, which a resumed run has not seen itself."""
    from rookworld.evaluation.evaluate import load_found

    first, last = min(evaluations), max(evaluations)
    begun = load_found(settings.out / FIRST_ROWS, evaluated(settings)) if first > 0 else None
    if begun is not None:
        show(before_after(begun, evaluations[last]))
    elif last > first:
        show(before_after(evaluations[first], evaluations[last]))


def before_after(before: Evaluation, after: Evaluation) -> Table:
    """The same held-out rows before and after, with 95 % intervals of the paired difference."""
    from rookworld.evaluation.evaluate import paired

    differences = paired(before, after)
    table = Table("metric", "before", "after", "difference", "95 % interval", "rows")
    for name, change in differences.items():
        if not shown(name):
            continue
        info = metric_info(name)
        table.add_row(
            name,
            info.text(before.estimates[name].value),
            info.text(after.estimates[name].value),
            info.number(change.difference, "+"),
            f"{info.number(change.low, '+')} … {info.number(change.high, '+')}",
            f"{change.n}",
        )
    return table


def shown(metric: str) -> bool:
    """Whether a table of before and after has it; of a class alone it has everything."""
    return "/by_" in metric or metric in headline_metrics()


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
