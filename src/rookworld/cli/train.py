"""`rookworld train`: GRPO as a person meets it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rookworld.cli.display import Bar, banner, bar, say, say_work_begins
from rookworld.cli.evaluate import open_judge
from rookworld.cli.flags import layered, parse, take_option
from rookworld.cli.training_display import Recorder, show_change, watch
from rookworld.data.sources import training_rows
from rookworld.rl.presets import TRAIN_PRESETS
from rookworld.rl.settings import TrainSettings
from rookworld.runtime.config import HERE_AND_NOW, of_run, resolved
from rookworld.runtime.processes import Interrupted
from rookworld.runtime.run_folder import Run, refuse_target
from rookworld.runtime.wording import noun
from rookworld.tasks.engine import find_engine
from rookworld.tasks.environment import ENVIRONMENT
from rookworld.tasks.policy import POLICY
from rookworld.tasks.registry import TASKS
from rookworld.tasks.task import Row

if TYPE_CHECKING:
    from rookworld.evaluation.evaluate import Evaluation, HeldOut
    from rookworld.rl.run_log import Evaluate

COMMAND = "rookworld train"
Rows = Sequence[Row]
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
    settings = read_settings(args, COMMAND, own)
    if changed := differences(own, settings):
        say(f"not as the run began: {changed}")
    return settings


def differences(before: TrainSettings, after: TrainSettings) -> str:
    """What is set otherwise, each setting with both values."""
    old, new = resolved(before), resolved(after)
    return ", ".join(
        f"{name} {old[name]} -> {value}"
        for name, value in new.items()
        if old[name] != value and name not in HERE_AND_NOW
    )


def usual(args: Sequence[str]) -> Sequence[str]:
    """The arguments of `train`, behind the preset for this device where none is asked for."""
    if any(take_option(args, name)[0] is not None for name in ("preset", "config")):
        return args
    settings = read_settings(args, COMMAND)
    why, preset = usual_preset(settings, asked=take_option(args, "model")[0] is not None)
    if preset == "plain":
        return args
    sets = " ".join(f"{name}={value}" for name, value in TRAIN_PRESETS[preset].items())
    say(f"{why}: taking --preset {preset} (the bare defaults: --preset plain), which sets {sets}")
    return ["--preset", preset, *args]


def usual_preset(settings: TrainSettings, *, asked: bool) -> tuple[str, str]:
    """Why which preset: the demo without a GPU, unless another model was `asked` for; on a GPU the
    one for the public model where the model is like it."""
    from rookworld.runtime.distributed import pick_device

    if settings.backend == "trl":
        return "", "plain"
    if pick_device(settings.compute.device) == "cpu":
        return "no GPU", "plain" if asked else "demo"
    if asked and is_like_public(settings.model):
        return f"{settings.model} is as large as RookWorld-LM and spelled as it", "rookworld-lm"
    return "", "plain"


def is_like_public(model: str) -> bool:
    """GPT-2's shape or a larger one, and a tokenizer that pads rows."""
    from rookworld.model.tokenizer import Tokenizer
    from rookworld.model.weights import read_config, resolve_folder

    folder = resolve_folder(model)
    shape = read_config(folder)
    large = shape.n_layer >= 12 and shape.n_embd >= 768
    return large and Tokenizer.load(folder).style == "padded"


def read_rows(sources: Sequence[str]) -> Rows:
    """Prompt rows of every source, with a bar: many take minutes."""
    with bar("rows read") as progress:
        return training_rows(sources, progress.update)


def train(args: list[str]) -> int:
    settings = train_settings(args)
    say(banner("train", settings, TrainSettings()))
    if warmup := settings.rewards.reward_warmup_steps:
        say(
            f"rewards warm up for {warmup} {noun(warmup, 'step')}: what answers say counts "
            "from nothing to its full weight; reward/at_full_weight is the reward without that"
        )
    refuse_target(settings.out)
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

    say_work_begins()
    begin: Train = loop.train
    if settings.backend == "trl":
        begin = trl_loop()
    try:
        with (
            open_judge(settings.judge, settings.engine, settings.nodes) as judge,
            bar("training") as progress,
            Recorder(settings) as record,
        ):
            hooks = watch(settings, progress, record)
            progress.note(f"loading {settings.model}")
            final = begin(settings, rows, measure(settings, held, progress), judge, hooks)
    except Interrupted as stopped:
        say(str(stopped))
        return 130
    if distributed.rank() == 0:
        show_change(settings.out)
        print(f"model: {final}")
    distributed.stop()
    return 0


def dry_run(settings: TrainSettings, rows: Rows) -> int:
    """Say what a run would do, having read its data and its model's tokenizer.

    What would end the run is refused here too: device, engine, room for answers, an occupied --out.
    """
    from rookworld.model.tokenizer import Tokenizer
    from rookworld.model.weights import read_config, resolve_folder
    from rookworld.rl.state import fits
    from rookworld.rollout.prompts import Prompts
    from rookworld.runtime.distributed import pick_device

    folder = resolve_folder(settings.model)
    shape, tokenizer = read_config(folder), Tokenizer.load(folder)
    pick_device(settings.compute.device)
    fits(shape, settings, tokenizer)
    if settings.judge != "labels":
        find_engine(settings.engine)
    if not settings.resume:
        Run(settings.out, make=False).refuse_occupied(overwrite=settings.overwrite)
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
    from rookworld.rl.leakage import trained_on

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


def measure(settings: TrainSettings, held: HeldOut, progress: Bar) -> Evaluate:
    """The run's held-out evaluation: the same rows every time."""
    from rookworld.evaluation.evaluate import evaluate
    from rookworld.evaluation.generator import ModelAnswerer
    from rookworld.evaluation.probes import answer_probes, choose_probes

    rules, probes = settings.rewards, choose_probes(held.rows)

    def tell(what: str, done: int, total: int) -> None:
        progress.note(f"evaluating: {what} {done}/{total}")

    def run(model: Any, tokenizer: Any) -> Evaluation:
        shared = gpu_sampling(settings, model)
        greedy = ModelAnswerer(model, tokenizer, progress=tell, **shared)
        sampled = greedy.sampling(1.0, samples=4)
        found = evaluate(greedy, held, rules, sampled=sampled)
        return replace(found, probes=answer_probes(greedy, probes, rules))

    return run


def gpu_sampling(settings: TrainSettings, model: Any) -> dict[str, Any]:
    """On a GPU evaluations share the sampler of training, for a second cache would not fit."""
    from rookworld.model.precision import matrix_dtype

    if model.device.type != "cuda":
        return {}
    return {"share_sampler": matrix_dtype(settings.compute.dtype, model.device), "batch_size": 512}
