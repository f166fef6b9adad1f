"""`rookworld pretrain`: supervised training from rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from rookworld.cli.display import banner, bar, say, say_work_begins
from rookworld.cli.flags import layered, parse
from rookworld.pretrain.presets import PRETRAIN_PRESETS
from rookworld.pretrain.settings import PretrainSettings
from rookworld.runtime.config import of_run
from rookworld.runtime.processes import Interrupted
from rookworld.runtime.run_folder import refuse_target

if TYPE_CHECKING:
    from rookworld.model.gpt2 import GPT2
    from rookworld.model.tokenizer import Tokenizer
    from rookworld.pretrain.dataset import TokenizedRows
    from rookworld.pretrain.documents import Documents

COMMAND = "rookworld pretrain"


def read_settings(args: list[str], start: PretrainSettings) -> PretrainSettings:
    """Where it starts < preset < TOML file < flags."""
    default, rest = layered(start, PRETRAIN_PRESETS, args)
    return parse(PretrainSettings, rest, command=COMMAND, default=default)


def pretrain(args: list[str]) -> int:
    settings = read_settings(args, PretrainSettings())
    own = of_run(PretrainSettings(), settings.out) if settings.resume else None
    if own is not None:
        say(f"what is not given is taken from {settings.out / 'config.json'}")
        settings = read_settings(args, own)
    from rookworld.model.tokenizer import Tokenizer as Loaded
    from rookworld.model.weights import resolve_folder
    from rookworld.pretrain import trainer as loop
    from rookworld.pretrain.sources import pick_tokenizer
    from rookworld.runtime import distributed

    say(banner("pretrain", settings, PretrainSettings()))
    refuse_target(settings.out)
    if settings.model is not None:
        tokenizer = Loaded.load(resolve_folder(settings.model))
    else:
        tokenizer = pick_tokenizer(settings.tokenizer)
    data = read_data(settings, tokenizer)
    say_work_begins()
    try:
        with bar("pretraining") as progress:
            final = loop.pretrain(
                settings,
                data,
                tokenizer,
                evaluate=evaluation(settings.eval_rows),
                on_step=lambda step, m: progress.update(*gone(step, m, settings), told(m)),
                say=progress.say,
            )
    except Interrupted as stopped:
        say(str(stopped))
        return 130
    if distributed.rank() == 0:
        print(final)
    distributed.stop()
    return 0


def read_data(
    settings: PretrainSettings, tokenizer: Tokenizer
) -> list[tuple[TokenizedRows, float]] | Documents:
    """What is trained on, with a line about it."""
    from rookworld.pretrain import dataset
    from rookworld.pretrain.documents import load_documents
    from rookworld.pretrain.sources import load_sources

    if settings.documents:
        with bar("documents encoded") as progress:
            documents = load_documents(
                settings.data,
                tokenizer,
                settings.seed,
                lambda count: progress.update(count, count),
                with_answers=settings.prompt_weight != 1,
            )
        say(documents.summary())
        return documents
    sources = load_sources(
        settings.data, tokenizer, hard=settings.hard_share, softness=settings.softness
    )
    for packed, share in sources:
        say(f"{dataset.summary(packed)}, share {share:g}")
    return sources


def evaluation(rows: int) -> Callable[[GPT2, Tokenizer], dict[str, Any]] | None:
    """The evaluation on as many held-out rows of each task; None for none."""
    if not rows:
        return None
    from rookworld.evaluation.evaluate import evaluate, held_out_from
    from rookworld.evaluation.generator import ModelAnswerer
    from rookworld.tasks.registry import TASKS

    held = held_out_from("embedded:validation", dict.fromkeys(TASKS, rows), n_mates=rows)

    def measure(model: GPT2, tokenizer: Tokenizer) -> dict[str, Any]:
        return evaluate(ModelAnswerer(model, tokenizer), held).to_json()

    return measure


def gone(step: int, metrics: Mapping[str, float], settings: PretrainSettings) -> tuple[int, int]:
    """How far the training is and how far it goes: steps, or seconds."""
    if settings.minutes is None:
        return step, settings.steps
    return int(metrics["time/trained_s"]), int(60 * settings.minutes)


def told(metrics: Mapping[str, float]) -> str:
    """A step in a few words."""
    line = f"loss {metrics['loss/total']:.3f}"
    if "accuracy/first_move" in metrics:
        line += f" first move {metrics['accuracy/first_move']:.1%}"
    return line
