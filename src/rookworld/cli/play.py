"""`rookworld uci` and `rookworld export`: a trained model in other people's programs."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from rookworld.cli.display import say
from rookworld.cli.flags import leading, parse
from rookworld.runtime.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class UciSettings:
    """Speak UCI on standard input and output."""

    device: str = "auto"
    """`auto`, `cpu`, `cuda` or `cuda:N`."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Precision of the weights."""
    seed: int = 0
    """Seed of sampled moves."""


def uci(args: list[str]) -> int:
    from rookworld.evaluation.generator import load_answerer
    from rookworld.uci import serve

    models, rest = leading(args)
    settings = parse(UciSettings, rest, command="rookworld uci", default=UciSettings())
    model = one_model(models, "uci") if models else "nano"
    answerer = load_answerer(
        model, device=settings.device, dtype=settings.dtype, batch_size=64, seed=settings.seed
    )
    for line in serve(answerer, Path(model).name, sys.stdin):
        print(line, flush=True)
    return 0


@dataclass(frozen=True, kw_only=True)
class ExportSettings:
    """A model as a Hugging Face folder, ready for `hf upload`."""

    out: Path = Path("export")
    """Folder to write."""
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """Precision of the written weights."""


def export(args: list[str]) -> int:
    import torch

    from rookworld.model.tokenizer import Tokenizer
    from rookworld.model.weights import load_model, resolve_folder, write_model
    from rookworld.report.model_card import model_card
    from rookworld.runtime.atomic_files import atomic_folder

    models, rest = leading(args)
    settings = parse(ExportSettings, rest, command="rookworld export", default=ExportSettings())
    folder = resolve_folder(one_model(models, "export"))
    model, tokenizer = load_model(folder), Tokenizer.load(folder)
    dtype = torch.bfloat16 if settings.dtype == "bfloat16" else torch.float32
    with atomic_folder(settings.out) as unfinished:
        write_model(model, unfinished, dtype=dtype, tokenizer=tokenizer)
        count = sum(parameter.numel() for parameter in model.parameters())
        card = model_card(folder, settings.out.name, count, tokenizer.style)
        (unfinished / "README.md").write_text(card, encoding="utf-8")
    print(settings.out)
    say(f"upload it with: hf upload OWNER/{settings.out.name} {settings.out}")
    return 0


def one_model(models: Sequence[str], command: str) -> str:
    if len(models) != 1:
        raise ConfigError(f"{command}: name one model folder or hub id")
    return models[0]
