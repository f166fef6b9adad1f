"""The training of a round: the supervised trainer, or GRPO's, told what a round's settings say.

Law: nothing is trained here that `rookworld pretrain` or `rookworld train` would not train alike;
a round's folder is their run folder, and they go on in it where they were killed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from rookworld.data.rows import row_key
from rookworld.data.sources import training_rows
from rookworld.evaluation.evaluate import Evaluation, spread
from rookworld.evolve.settings import EvolveSettings
from rookworld.model.tokenizer import Tokenizer
from rookworld.model.weights import resolve_folder
from rookworld.pretrain.settings import PretrainSettings
from rookworld.pretrain.sources import load_sources
from rookworld.pretrain.trainer import pretrain
from rookworld.rl.run_log import Hooks as TrainHooks
from rookworld.rl.settings import TrainSettings
from rookworld.rl.trainer import train
from rookworld.runtime.run_folder import Run
from rookworld.tasks.task import Judge, Row

OWN_ROWS = "rows.jsonl"
WARMUP_STEPS = 10


@dataclass(frozen=True)
class Hooks:
    """What the surface wants to hear of a round's training."""

    say: Callable[[str], None]
    on_step: Callable[[int], None]


def train_round(
    settings: EvolveSettings,
    model: str,
    number: int,
    folder: Path,
    own: Sequence[Row],
    judge: Judge | None,
    hooks: Hooks,
) -> Path:
    """Train from `model` on a round's rows and the others; the folder of the final model."""
    if Run(folder).done:
        return folder / "final"
    if settings.method == "pretrain":
        return supervised(settings, model, number, folder, hooks)
    return by_reward(settings, model, number, folder, own, judge, hooks)


def supervised(
    settings: EvolveSettings, model: str, number: int, folder: Path, hooks: Hooks
) -> Path:
    """The trainer of `pretrain`, without evaluations of its own."""
    wanted = PretrainSettings.of(
        model=model,
        data=sources(settings, folder / OWN_ROWS),
        out=folder,
        steps=settings.steps,
        batch_size=settings.batch_size,
        optimizer="adamw",
        lr=settings.lr,
        lr_other=settings.lr,
        lr_warmup_steps=WARMUP_STEPS,
        eval_every=0,
        eval_rows=0,
        save_every=settings.save_every,
        seed=settings.seed + number,
        device=settings.device,
        resume=True,
        overwrite=True,
    )
    tokenizer = Tokenizer.load(resolve_folder(model))
    packed = load_sources(wanted.data, tokenizer, hard=wanted.hard_share, softness=wanted.softness)
    return pretrain(
        wanted,
        packed,
        tokenizer,
        on_step=lambda step, metrics: hooks.on_step(step),
        say=hooks.say,
    )


def sources(settings: EvolveSettings, own: Path) -> tuple[str, ...]:
    """The round's own rows and the others, each with its share of a batch."""
    if settings.share == 1:
        return (f"{own}=1",)
    rest = (1 - settings.share) / len(settings.data)
    return (f"{own}={settings.share}", *(f"{source}={rest}" for source in settings.data))


def by_reward(
    settings: EvolveSettings,
    model: str,
    number: int,
    folder: Path,
    own: Sequence[Row],
    judge: Judge | None,
    hooks: Hooks,
) -> Path:
    """GRPO, judged by labels, or by the engine if that verified the rows."""
    wanted = TrainSettings.of(
        model=model,
        data=(str(folder / OWN_ROWS), *settings.data),
        out=folder,
        steps=settings.steps,
        lr=settings.lr,
        lr_warmup_steps=WARMUP_STEPS,
        judge="labels" if judge is None else "stockfish",
        engine=settings.engine,
        nodes=settings.nodes,
        eval_every=0,
        save_every=settings.save_every,
        seed=settings.seed + number,
        device=settings.device,
        resume=True,
        overwrite=True,
    )
    if settings.batch_size is not None:
        wanted = wanted.but(batch_size=settings.batch_size)
    rows = mixed(own, list(training_rows(settings.data)) if settings.data else [], settings.share)
    told = TrainHooks(on_step=lambda step, metrics: hooks.on_step(step), say=hooks.say)
    return train(wanted, rows, lambda model, tokenizer: Evaluation(), judge, told)


def mixed(own: Sequence[Row], others: Sequence[Row], share: float) -> list[Row]:
    """A round's rows with so many others that theirs is the share; fewer if there are fewer."""
    wanted = round(len(own) * (1 - share) / share)
    return [*own, *spread(others, wanted, row_key)]
