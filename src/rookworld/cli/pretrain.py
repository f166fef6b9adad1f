"""`rookworld pretrain`: supervised training from rows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from rookworld.cli.display import banner, bar, say
from rookworld.cli.flags import layered, parse
from rookworld.pretrain.presets import PRETRAIN_PRESETS
from rookworld.pretrain.settings import PretrainSettings
from rookworld.runtime.config import of_run
from rookworld.runtime.processes import Interrupted

if TYPE_CHECKING:
    from rookworld.model.gpt2 import GPT2
    from rookworld.model.tokenizer import Tokenizer

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
    from rookworld.evaluation.evaluate import evaluate, held_out_from
    from rookworld.evaluation.generator import ModelAnswerer
    from rookworld.model.tokenizer import Tokenizer as Loaded
    from rookworld.model.weights import resolve_folder
    from rookworld.pretrain import dataset
    from rookworld.pretrain import trainer as loop
    from rookworld.pretrain.sources import load_sources, pick_tokenizer
    from rookworld.runtime import distributed
    from rookworld.tasks.registry import TASKS

    say(banner("pretrain", settings, PretrainSettings()))
    if settings.model is not None:
        tokenizer = Loaded.load(resolve_folder(settings.model))
    else:
        tokenizer = pick_tokenizer(settings.tokenizer)
    sources = load_sources(
        settings.data, tokenizer, hard=settings.hard_share, softness=settings.softness
    )
    for packed, share in sources:
        say(f"{dataset.summary(packed)}, share {share:g}")
    rows = settings.eval_rows
    held = held_out_from("embedded:validation", dict.fromkeys(TASKS, rows), n_mates=rows)

    def measure(model: GPT2, tokenizer: Tokenizer) -> dict[str, Any]:
        return evaluate(ModelAnswerer(model, tokenizer), held).to_json()

    try:
        with bar("pretraining") as progress:
            final = loop.pretrain(
                settings,
                sources,
                tokenizer,
                evaluate=measure,
                on_step=lambda step, m: progress.update(step, settings.steps, told(m)),
                say=progress.say,
            )
    except Interrupted as stopped:
        say(str(stopped))
        return 130
    if distributed.rank() == 0:
        print(final)
    distributed.stop()
    return 0


def told(metrics: Mapping[str, float]) -> str:
    """A step in a few words."""
    loss, first = metrics["loss/total"], metrics["accuracy/first_move"]
    return f"loss {loss:.3f} first move {first:.1%}"
