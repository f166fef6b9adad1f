"""`rookworld uci` and `rookworld export`: a trained model in other people's programs."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from rookworld.cli.display import say
from rookworld.cli.flags import leading, parse
from rookworld.runtime.config import require
from rookworld.runtime.errors import ConfigError

if TYPE_CHECKING:
    from rookworld.evaluation.opinion import Thinker


LONGEST_LINE = 4 * 2**20
"""Bytes of a line; a `position` with the moves of the longest game is a thousandth of it."""


@dataclass(frozen=True, kw_only=True)
class UciSettings:
    """Speak UCI on standard input and output; see docs/play.md."""

    checkpoint: str = ""
    """Of a run's folder: `final`, `best` or a step; the last one if empty."""
    sides: bool = False
    """Average the first move over the position and its images: stronger, and slower."""
    legal_only: bool = False
    """Let the model write no illegal move."""
    temperature: float = 0.0
    """Temperature of what the model says; 0 is greedy."""
    top_p: float = 1.0
    """Draw from the most probable tokens that reach this mass; 1 is all of them."""
    device: str = "auto"
    """`auto`, `cpu`, `cuda` or `cuda:N`."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Precision of the weights."""
    seed: int = 0
    """Seed of sampled moves."""

    def __post_init__(self) -> None:
        # that it is there is seen when the model loads, which a chess program need not wait for
        known = re.fullmatch(r"auto|cpu|cuda(:\d+)?", self.device)
        require(bool(known), f"--device {self.device}: expected auto, cpu, cuda or cuda:N")


def uci(args: list[str]) -> int:
    from rookworld.uci import serve

    models, rest = leading(args)
    settings = parse(UciSettings, rest, command="rookworld uci", default=UciSettings())
    given = {
        "Model": one_model(models, "uci") if models else "nano",
        "Checkpoint": settings.checkpoint,
        "Sides": str(settings.sides).lower(),
        "LegalOnly": str(settings.legal_only).lower(),
        "Temperature": str(settings.temperature),
        "TopP": str(settings.top_p),
    }

    def load(model: str, checkpoint: str) -> Thinker:
        from rookworld.evaluation.generator import load_answerer
        from rookworld.evaluation.opinion import Thinker
        from rookworld.runtime.checkpoint_names import model_of_run

        folder = model_of_run(model, checkpoint)
        return Thinker(
            load_answerer(folder, device=settings.device, dtype=settings.dtype, seed=settings.seed)
        )

    for line in serve(load, lines_of(sys.stdin.fileno()), given):
        print(line, flush=True)
    return 0


def lines_of(descriptor: int) -> Iterator[str]:
    """Lines as they arrive; one beyond any sense is left out, so that memory stays bounded.

    Read by hand: a thread that waits inside `sys.stdin` cannot be left behind at the end.
    """
    rest, dropping = b"", False
    while chunk := os.read(descriptor, 65_536):
        *whole, rest = (rest + chunk).split(b"\n")
        for line in whole:
            if not dropping:
                yield line.decode("utf-8", "replace")
            dropping = False
        if len(rest) > LONGEST_LINE:
            rest, dropping = b"", True
    if rest and not dropping:
        yield rest.decode("utf-8", "replace")


@dataclass(frozen=True, kw_only=True)
class ExportSettings:
    """A model as a Hugging Face folder, ready for `hf upload`."""

    out: Path = Path("export")
    """Folder to write."""
    name: str | None = None
    """What the model is called; default: as --out, or else as the run it was trained in."""
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """Precision of the written weights."""


def export(args: list[str]) -> int:
    import torch

    from rookworld.model.tokenizer import Tokenizer
    from rookworld.model.weights import load_model, resolve_folder, write_model
    from rookworld.report.model_card import card_name, model_card
    from rookworld.runtime.atomic_files import atomic_folder

    models, rest = leading(args)
    settings = parse(ExportSettings, rest, command="rookworld export", default=ExportSettings())
    folder = resolve_folder(one_model(models, "export"))
    model, tokenizer = load_model(folder), Tokenizer.load(folder)
    name = settings.name or card_name(folder, settings.out, ExportSettings().out)
    dtype = torch.bfloat16 if settings.dtype == "bfloat16" else torch.float32
    with atomic_folder(settings.out) as unfinished:
        write_model(model, unfinished, dtype=dtype, tokenizer=tokenizer)
        count = sum(parameter.numel() for parameter in model.parameters())
        card = model_card(folder, name, count, tokenizer.style)
        (unfinished / "README.md").write_text(card, encoding="utf-8")
    print(settings.out)
    say(f"upload it with: hf upload OWNER/{name} {settings.out}")
    return 0


def one_model(models: Sequence[str], command: str) -> str:
    if len(models) != 1:
        raise ConfigError(f"{command}: name one model folder or hub id")
    return models[0]
