"""`rookworld train`, `check`, `overfit`, `inspect`: GRPO as a person meets it."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.table import Table

from rookworld.cli.display import Bar, banner, bar, say, show, speaks
from rookworld.cli.evaluate import open_judge
from rookworld.cli.flags import layered, leading, parse, take_option
from rookworld.data.rows import task_rows
from rookworld.data.sources import load_rows
from rookworld.rl.presets import TRAIN_PRESETS
from rookworld.rl.settings import TrainSettings
from rookworld.runtime.config import of_run, override, resolved, short_hash
from rookworld.runtime.errors import ConfigError
from rookworld.runtime.processes import Interrupted
from rookworld.runtime.run_folder import FIRST_ROWS
from rookworld.tasks.environment import ENVIRONMENT
from rookworld.tasks.policy import POLICY
from rookworld.tasks.registry import TASKS, headline_metrics, metric_info, task_of
from rookworld.tasks.task import Row

if TYPE_CHECKING:
    from rookworld.evaluation.evaluate import Evaluation, HeldOut
    from rookworld.rl.checks import Law
    from rookworld.rl.trainer import Evaluate
    from rookworld.rollout.types import Group

COMMAND = "rookworld train"
Rows = list[Row]
Train = Callable[..., Path]
"""A loop: settings, rows, evaluation, judge and hooks in, the final model's folder out."""


def read_settings(
    args: Sequence[str],
    command: str,
    start: TrainSettings | None = None,
    about: str | None = None,
) -> TrainSettings:
    """Defaults, or where the command starts < preset < TOML file < flags."""
    default, rest = layered(start or TrainSettings(), TRAIN_PRESETS, args)
    return parse(TrainSettings, rest, command=command, default=default, about=about)


def train_settings(args: Sequence[str]) -> TrainSettings:
    """The settings of `train`; what is not given, --resume takes from the run itself."""
    settings = read_settings(args, COMMAND)
    own = of_run(TrainSettings(), settings.out) if settings.resume else None
    if own is None:
        return read_settings(usual(args), COMMAND)
    say(f"what is not given is taken from {settings.out / 'config.json'}")
    return read_settings(args, COMMAND, own)


def usual(args: Sequence[str]) -> Sequence[str]:
    """The arguments of `train`; those of the demo, where no GPU and nothing else is asked for."""
    settings = read_settings(args, COMMAND)
    from rookworld.runtime.distributed import pick_device

    asked = any(take_option(args, name)[0] is not None for name in ("preset", "config"))
    other = settings.model != TrainSettings().model or settings.backend == "trl"
    if asked or other or pick_device(settings.compute.device) != "cpu":
        return args
    say("no GPU: taking --preset demo (the bare defaults: --preset plain)")
    return ["--preset", "demo", *args]


def read_rows(sources: Sequence[str]) -> Rows:
    """Prompt rows of every source; mates without an analysis have no reward and are left out."""
    return task_rows(row for source in sources for row in load_rows(source))


def train(args: list[str]) -> int:
    settings = train_settings(args)
    say(banner("train", settings, TrainSettings()))
    rows, held = read_rows(settings.data), held_out(settings)
    if settings.backend == "trl":
        planned = trl_plan(settings, rows, held)
        if settings.dry_run:
            print("\n".join(planned))
            return 0
    else:
        warn_of_trained_on(settings, rows, held)
    if settings.dry_run:
        return dry_run(settings, rows)
    from rookworld.rl import trainer as loop
    from rookworld.runtime import distributed

    begin: Train = loop.train
    if settings.backend == "trl":
        begin = trl_loop()
    evaluations: dict[int, Evaluation] = {}
    try:
        with (
            open_judge(settings.judge, settings.engine, settings.nodes) as judge,
            bar("training") as progress,
            Recorder(settings) as record,
        ):
            hooks = watch(settings, progress, evaluations, record)
            final = begin(settings, rows, measure(settings, held), judge, hooks)
    except Interrupted as stopped:
        say(str(stopped))
        return 130
    if distributed.rank() == 0:
        if evaluations:
            show_change(settings, evaluations)
        print(f"model: {final}")
    distributed.stop()
    return 0


def dry_run(settings: TrainSettings, rows: Rows) -> int:
    """Say what a run would do, having read its data and its model's tokenizer."""
    from rookworld.model.tokenizer import Tokenizer
    from rookworld.model.weights import read_config, resolve_folder
    from rookworld.rollout.prompts import Prompts

    folder = resolve_folder(settings.model)
    shape, tokenizer = read_config(folder), Tokenizer.load(folder)
    prompts = Prompts(rows, tokenizer, settings.mix_env_ratio, settings.seed)
    letters = "".join(prompt.letter for prompt in prompts.take(settings.batch_size))
    if len(letters) > 64:
        letters = " and ".join(f"{letters.count(one)} {one}" for one in TASKS if one in letters)
    counts = ", ".join(f"{len(rows):,} {letter}" for letter, rows in prompts.rows.items())
    print(f"model: {shape.n_layer} layers, width {shape.n_embd}, {tokenizer.style} tokenizer")
    print(f"rows: {counts}; first batch {letters}")
    print(settings.outline())
    return 0


def warn_of_trained_on(settings: TrainSettings, rows: Rows, held: HeldOut) -> None:
    """Say that held-out numbers mean nothing; learning rows by heart on purpose stays possible."""
    from rookworld.trl.plan import trained_on

    if seen := trained_on(settings, rows, held):
        say(f"warning: {seen}")


def trl_plan(settings: TrainSettings, rows: Rows, held: HeldOut) -> list[str]:
    """What a run with TRL would do; what would stop it is raised before anything is loaded."""
    from rookworld.trl.plan import plan

    return plan(settings, rows, held)


def trl_loop() -> Train:
    from rookworld.trl.plan import require_trl

    require_trl()
    from rookworld.trl.trainer import train

    return train


def held_out(settings: TrainSettings) -> HeldOut:
    """The run's held-out rows."""
    from rookworld.evaluation.evaluate import held_out_from

    return held_out_from(
        settings.evaluation.held_out,
        {
            POLICY.letter: settings.evaluation.eval_policy_rows,
            ENVIRONMENT.letter: settings.evaluation.eval_environment_rows,
        },
        n_mates=settings.evaluation.eval_mates,
    )


def measure(settings: TrainSettings, held: HeldOut) -> Evaluate:
    """The run's held-out evaluation: the same rows every time."""
    from rookworld.evaluation.evaluate import evaluate
    from rookworld.evaluation.generator import ModelAnswerer

    rules = settings.rewards

    def run(model: Any, tokenizer: Any) -> Evaluation:
        greedy = ModelAnswerer(model, tokenizer)
        sampled = ModelAnswerer(model, tokenizer, temperature=1.0, samples=4)
        return evaluate(greedy, held, rules, sampled=sampled)

    return run


def watch(
    settings: TrainSettings,
    progress: Bar,
    evaluations: dict[int, Evaluation],
    record: Any,
) -> Any:
    """Hooks that keep the terminal and the loggers up to date."""
    from rookworld.evaluation.evaluate import save_found
    from rookworld.rl.metrics import log_line
    from rookworld.rl.trainer import Hooks

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
    rows = rows[:400] + rows[-200:]
    with tempfile.TemporaryDirectory() as folder:
        laws = run_laws(settings.but(out=Path(folder)), rows, show_law)
    return 0 if all(law.holds for law in laws) else 1


def show_law(law: Law) -> None:
    print(f"{'holds' if law.holds else 'FAILS'}  {law.name}: {law.detail}")


def overfit(args: list[str]) -> int:
    """`rookworld overfit`: three criteria on one fixed batch, exit code 1 if one fails."""
    from rookworld.rl.checks import fixed_batch
    from rookworld.rl.checks import overfit as run_overfit
    from rookworld.rl.trainer import Hooks

    start = override(TrainSettings(), TRAIN_PRESETS["overfit"], "preset overfit")
    start = start.but(out=Path("runs/overfit"))
    settings = read_settings(args, "rookworld overfit", start, about=overfit.__doc__)
    settings = settings.but(eval_every=1, flat_tries=0)
    rows = read_rows(settings.data)
    if settings.dry_run:
        return dry_run(settings, fixed_batch(rows, settings))
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
    from rookworld.model.precision import matrices_in
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
            dtype=matrices_in(settings.compute.dtype, state.learner.model.device),
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
