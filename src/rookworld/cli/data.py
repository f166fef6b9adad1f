"""`rookworld data`: make, convert, write out, look at, pack and pick rows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rich.table import Table

from rookworld.cli.display import bar, say, show
from rookworld.cli.flags import leading, parse
from rookworld.data.documents import ExportSettings, export_rows
from rookworld.data.generate.generator import generate
from rookworld.data.generate.settings import GenerateSettings
from rookworld.data.importing import ImportSettings, import_rows
from rookworld.data.rows import MATE
from rookworld.data.show import ShowSettings
from rookworld.data.show import show as show_rows
from rookworld.runtime.config import suggestion
from rookworld.runtime.errors import ConfigError, DataError
from rookworld.runtime.wording import noun
from rookworld.tasks.environment import ENVIRONMENT
from rookworld.tasks.policy import POLICY

if TYPE_CHECKING:
    from rookworld.pretrain.dataset import TokenizedRows


def data(args: list[str]) -> int:
    actions: dict[str, Callable[[list[str]], int]] = {
        "generate": _generate,
        "import": _import,
        "export": _export,
        "show": _show,
        "pack": _pack,
        "mine": _mine,
    }
    if not args or args[0] in ("-h", "--help"):
        print(f"usage: rookworld data {{{','.join(actions)}}} [flags]")
        return 0
    if args[0] not in actions:
        hint = suggestion(args[0], actions) or f"; there are {', '.join(actions)}"
        raise ConfigError(f"unknown action {args[0]!r} of `rookworld data`{hint}")
    return actions[args[0]](args[1:])


def _generate(args: list[str]) -> int:
    settings = parse(GenerateSettings, args, command="rookworld data generate")
    with bar(f"{settings.task} rows") as progress:
        made = generate(settings, progress.update)
    if made.rows < made.asked:
        say(
            f"only {made.rows} of {made.asked} rows: nothing is left of what was given"
            f" ({made.repeated} repeated, {made.excluded} excluded)"
        )
    print(f"{settings.out}: {made.rows} {noun(made.rows, 'row')}")
    return 0


def _import(args: list[str]) -> int:
    sources, rest = leading(args)
    flags = ["--sources", *sources, *rest] if sources else rest
    settings = parse(ImportSettings, flags, command="rookworld data import")
    with bar("rows read") as progress:
        done = import_rows(settings, lambda count: progress.update(count, count))
    for note in done.notes:
        say(note)
    for path, count in done.files.items():
        print(f"{path}: {count} {noun(count, 'row')}")
    return 0


def _export(args: list[str]) -> int:
    sources, rest = leading(args)
    flags = ["--sources", *sources, *rest] if sources else rest
    settings = parse(ExportSettings, flags, command="rookworld data export")
    with bar("rows read") as progress:
        done = export_rows(settings, lambda count: progress.update(count, count))
    for note in done.notes:
        say(note)
    for task, count in sorted(done.left_out.items()):
        say(f"{count:,} {task} {noun(count, 'row')} left out, which have no such text")
    shares = ", ".join(f"{count:,} {task}" for task, count in sorted(done.written.items()))
    total = sum(done.written.values())
    print(f"{settings.out}: {total:,} {noun(total, 'row')} ({shares})")
    return 0


def _show(args: list[str]) -> int:
    sources, rest = leading(args)
    if len(sources) > 1:
        raise ConfigError(f"data show: one source at a time, not {' '.join(sources)}")
    flags = ["--source", *sources, *rest] if sources else rest
    settings = parse(ShowSettings, flags, command="rookworld data show", default=ShowSettings())
    shown = show_rows(settings)
    for text in shown.texts:
        print(text)
    table = Table("class", "rows", title=settings.source)
    for name, count in shown.counts.items():
        table.add_row(name, f"{count:,}")
    show(table)
    if settings.svg is not None:
        say(f"drawn: {settings.svg}")
    return 0


@dataclass(frozen=True, kw_only=True)
class PackSettings:
    """Turn rows into arrays once, for training on a machine without Parquet."""

    source: tuple[str, ...] = ("embedded:train",)
    """Rows: files, embedded:PART, or hub ids, as one."""
    out: Path = Path("rows.npz")
    """File to write; rows of several tasks go to one each, with P, A or mate in its name."""
    tokenizer: str = "chess"
    """`chess`, `gpt2` for GPT-2's byte pairs, or a folder or hub id that has a tokenizer."""
    hard_share: float = 0.5
    """Share of the first move's target that goes to the best move."""
    softness: float = 0.03
    """Win probability by which a move's share of the spread falls to 1/e."""


def _pack(args: list[str]) -> int:
    from rookworld.pretrain import dataset
    from rookworld.pretrain.sources import pack_source, pick_tokenizer

    sources, rest = leading(args)
    flags = ["--source", *sources, *rest] if sources else rest
    settings = parse(PackSettings, flags, command="rookworld data pack", default=PackSettings())
    tokenizer = pick_tokenizer(settings.tokenizer)
    parts: dict[str, list[TokenizedRows]] = {}
    for source in settings.source:
        for packed, _ in pack_source(
            source, tokenizer, hard=settings.hard_share, softness=settings.softness
        ):
            parts.setdefault(packed_task(packed), []).append(packed)
    for name, same in parts.items():
        path = settings.out
        if len(parts) > 1:
            path = settings.out.with_name(f"{settings.out.stem}-{name}{settings.out.suffix}")
        joined = dataset.join(same)
        dataset.save_packed(joined, path)
        print(f"{path}: {dataset.summary(joined)}")
    return 0


def packed_task(packed: TokenizedRows) -> str:
    """The task of packed rows, by what they have to answer; a source may be packed already."""
    from rookworld.pretrain.dataset import FIRST_MOVE, STATE

    last = int(packed.fields.max())
    if last >= STATE:
        return ENVIRONMENT.letter
    return MATE if last == FIRST_MOVE else POLICY.letter


@dataclass(frozen=True, kw_only=True)
class MineSettings:
    """MODEL ROWS [ROWS …]: keep environment rows that a model finds hard, packed to train on."""

    model: str = "nano"
    """Model whose answers are looked at."""
    sources: tuple[str, ...] = ()
    """Files of A rows (Parquet, JSONL, packed .npz), embedded:PART, or hub ids; others are passed
    over."""
    out: Path = Path("hard.npz")
    """File to write."""
    least: float = 0.1
    """Keep rows whose least likely answer token has at least this loss, in nats."""
    most: int = 250_000
    """Keep at most this many, the hardest."""
    device: str = "auto"
    """`auto`, `cpu`, `cuda` or `cuda:N`."""

    def __post_init__(self) -> None:
        """Refuse what cannot work, naming the value and the remedy."""
        if not self.sources:
            raise ConfigError("give a model and rows: rookworld data mine MODEL ROWS [ROWS …]")
        if self.most < 1:
            raise ConfigError(f"--most {self.most}: give 1 or more")
        if not self.least >= 0:
            raise ConfigError(f"--least {self.least}: give 0 or more")
        if self.out.suffix != ".npz":
            raise ConfigError(f"--out: {self.out} does not end in .npz")


def _mine(args: list[str]) -> int:
    from rookworld.model.tokenizer import Tokenizer
    from rookworld.model.weights import load_model, resolve_folder
    from rookworld.pretrain import dataset
    from rookworld.pretrain.hard_rows import environment_rows, hardest, worst_losses
    from rookworld.pretrain.sources import pack_source
    from rookworld.runtime.distributed import start

    named, rest = leading(args)
    flags = ["--model", *named[:1]] if named else []
    flags += ["--sources", *named[1:]] if named[1:] else []
    settings = parse(MineSettings, [*flags, *rest], command="rookworld data mine")
    settings.out.parent.mkdir(parents=True, exist_ok=True)
    folder = resolve_folder(settings.model)
    model, tokenizer = load_model(folder, start(settings.device)), Tokenizer.load(folder)
    parts = [
        environment_rows(one)
        for source in settings.sources
        for one, _ in pack_source(source, tokenizer, hard=0.5, softness=0.03)
    ]
    parts = [one for one in parts if len(one)]
    if not parts:
        raise DataError(f"no A rows in {', '.join(settings.sources)}")
    packed = dataset.join(parts)
    with bar("rows looked at") as progress:
        losses = worst_losses(model, packed, progress=progress.update)
    kept = hardest(packed, losses, least=settings.least, most=settings.most)
    if not len(kept):
        raise DataError(f"no row is as hard as --least {settings.least}: lower it")
    dataset.save_packed(kept, settings.out)
    print(f"{settings.out}: {len(kept):,} of {len(packed):,} rows")
    return 0
