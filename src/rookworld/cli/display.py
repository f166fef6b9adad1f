"""What a person watches: progress on stderr, results on stdout, plain lines when nobody does."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TextIO

from rich.console import Console, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from rookworld.runtime.config import HERE_AND_NOW, resolved, short_hash
from rookworld.runtime.machine import chosen_wait

FILE_WIDTH = 120
PLAIN_EVERY_S = 10.0
"""Seconds between lines of progress where there is no terminal."""


def console(file: TextIO) -> Console:
    """A terminal has a width of its own; a file or a pipe gets room for whole tables."""
    terminal = file.isatty()
    return Console(
        file=file,
        highlight=False,
        emoji=False,  # `embedded:train:` is a name, not a picture of a train
        soft_wrap=not terminal,
        width=None if terminal else FILE_WIDTH,
    )


def stdout() -> Console:
    return console(sys.stdout)


def stderr() -> Console:
    return console(sys.stderr)


def show(thing: RenderableType) -> None:
    """Print a result."""
    stdout().print(thing)


def speaks() -> bool:
    """Whether this process is the one that speaks for all that torchrun has started."""
    return os.environ.get("RANK", "0") == "0"


def say(line: str) -> None:
    """Print a remark."""
    if speaks():
        stderr().print(line, markup=False)


def say_work_begins() -> None:
    """Say what is out of the way in how this work is done."""
    if told := chosen_wait():
        say(told)


class Bar:
    """A progress bar on a terminal; elsewhere a line now and then."""

    def __init__(self, progress: Progress | None, what: str) -> None:
        self.progress, self.what = progress, what
        self.task = progress.add_task(what, total=None, note="") if progress else None
        self.began = self.told = time.monotonic()
        self.first, self.last, self.ended = -1, 0, False

    def update(self, done: int, total: int, note: str = "") -> None:
        if self.progress is not None and self.task is not None:
            self.progress.update(self.task, completed=done, total=total, note=note)
            return
        now = time.monotonic()
        if self.first < 0 or done < self.last:  # what came before a count says nothing about it
            self.began, self.first = now, done
        self.last = done
        # one bar may count again and again: its end is news once
        if now - self.told >= PLAIN_EVERY_S or (done == total and not self.ended):
            self.ended = done == total
            rate = (done - self.first) / max(now - self.began, 1e-9)
            left = f" {(total - done) / rate:.0f} s left" if rate else ""
            say(f"{self.what} {done}/{total} {note}".rstrip() + left)
            self.told = now

    def note(self, text: str) -> None:
        """What goes on between two counts."""
        if self.progress is not None and self.task is not None:
            self.progress.update(self.task, note=text)
        elif time.monotonic() - self.told >= PLAIN_EVERY_S:
            say(f"{self.what}: {text}")
            self.told = time.monotonic()

    def say(self, line: str) -> None:
        if self.progress is not None:
            self.progress.console.print(line, markup=False)
        else:
            say(line)


@contextmanager
def bar(what: str) -> Iterator[Bar]:
    """A bar for one piece of long work."""
    console = stderr()
    if not (console.is_terminal and speaks()):
        yield Bar(None, what)
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[note]}"),
    )
    with Progress(*columns, console=console, transient=True) as progress:
        yield Bar(progress, what)


def banner(title: str, settings: Any, defaults: Any) -> str:
    """A mark that equal settings share, and what differs from the defaults."""
    plain, start = resolved(settings), resolved(defaults)
    changed = [f"{name}={value}" for name, value in plain.items() if start[name] != value]
    mark = short_hash(settings, ignore=HERE_AND_NOW)
    return f"{title} · settings {mark}" + (f" · {' '.join(changed)}" if changed else "")
