"""SURFACE: the one way in. Find the command, hand over its arguments, turn errors into exit codes.

Laws: `--help` loads no torch; the user's or the machine's mistake is one line and exit code 2,
divergence 3, an interruption 130; a bug keeps its traceback and exits 1.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from io import TextIOWrapper
from types import FrameType

from rookworld import __version__
from rookworld.runtime.errors import ConfigError, RookworldError
from rookworld.runtime.machine import wait_politely

COMMANDS: dict[str, tuple[str, str]] = {
    "train": ("train:train", "GRPO: make a model better at chess"),
    "check": ("checks:check", "the laws that must hold before training"),
    "overfit": ("checks:overfit", "learn one batch by heart, or say why it does not"),
    "inspect": ("checks:inspect", "one batch of sampled answers beside the truth"),
    "pretrain": ("pretrain:pretrain", "supervised training from rows"),
    "evolve": ("evolve:evolve", "rounds of self-play and training, kept only if better"),
    "eval": ("evaluate:evaluate", "chess metrics with confidence intervals"),
    "score": ("evaluate:score", "score answers from a JSONL file"),
    "analyze": ("runs:analyze", "what runs amount to, as a table in the terminal"),
    "report": ("runs:report", "runs as one HTML page: curves, boards, comparisons"),
    "sweep": ("runs:sweep", "many trainings over a space of settings"),
    "data": ("data:data", "generate, import, export, show, pack or mine rows"),
    "play": ("terminal:play", "a game against a model in the terminal"),
    "uci": ("play:uci", "the model as a UCI engine for any chess program"),
    "match": ("matches:match", "two players, paired games, Elo with intervals, SPRT"),
    "selfplay": ("matches:selfplay", "a model against itself: how long its games stay legal"),
    "web": ("web:web", "a board in the browser: play, the model's world, checkpoints, live runs"),
    "export": ("play:export", "a Hugging Face folder with a model card"),
}
"""Command -> (function in rookworld.cli that takes the arguments, one line of help)."""

QUICK = ("analyze", "report", "score")
"""Commands that need no threads, and no look at what else the machine does."""

INTERRUPTED = 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; the exit code."""
    args = list(sys.argv[1:] if argv is None else argv)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            # what a file holds may be more than a terminal can show, half a surrogate pair at worst
            stream.reconfigure(errors="backslashreplace")
    logging.basicConfig(format="%(message)s", level=logging.WARNING, stream=sys.stderr)
    try:
        with terminable():
            return _dispatch(args)
    except RookworldError as error:
        print(f"rookworld: {' '.join(str(error).split())}", file=sys.stderr)
        return error.exit_code
    except MemoryError as error:
        print(f"rookworld: out of memory ({error}); ask for less at a time", file=sys.stderr)
        return RookworldError.exit_code
    except KeyboardInterrupt:
        print("rookworld: interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        # the reader of our output (head, less) has gone: nobody is left to tell
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:
        if error.filename is None:
            raise
        # a file that is not as it should be is the machine's or the user's, wherever it was met
        print(f"rookworld: {error.filename}: {error.strerror}", file=sys.stderr)
        return RookworldError.exit_code


class Terminated(KeyboardInterrupt):
    """SIGTERM; a class of its own, as the interpreter may end itself by SIGINT after the other."""


def _terminate(number: int, frame: FrameType | None) -> None:
    if _importing(frame):
        # C code that loads a module may swallow an exception, and half a module stays
        os.write(sys.stderr.fileno(), b"rookworld: interrupted\n")
        os._exit(INTERRUPTED)
    raise Terminated


def _importing(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code.co_filename == "<frozen importlib._bootstrap>":
            return True
        frame = frame.f_back
    return False


@contextmanager
def terminable() -> Iterator[None]:
    """SIGTERM is Ctrl-C, from the first moment: torch alone takes seconds to load."""
    ours = (
        threading.current_thread() is threading.main_thread()
        and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    )
    if ours:
        signal.signal(signal.SIGTERM, _terminate)
    try:
        yield
    finally:
        if ours and signal.getsignal(signal.SIGTERM) is _terminate:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _dispatch(args: list[str]) -> int:
    if not args or args[0] in ("-h", "--help", "help"):
        print(overview())
        return 0
    if args[0] in ("-V", "--version"):
        print(f"rookworld {__version__}")
        return 0
    name, rest = args[0], args[1:]
    if name not in COMMANDS:
        from rookworld.runtime.config import suggestion

        raise ConfigError(
            f"unknown command {name!r}{suggestion(name, COMMANDS)}; see `rookworld --help`"
        )
    asks = {"-h", "--help", "--help-all"} & set(rest)
    if not asks and name not in QUICK:
        wait_politely()
    module, function = COMMANDS[name][0].split(":")
    command = getattr(import_module(f"rookworld.cli.{module}"), function)
    code: int = command(rest)
    return code


def overview() -> str:
    """What `rookworld --help` prints."""
    width = max(map(len, COMMANDS))
    lines = [f"  {name:<{width}}  {help_line}" for name, (_, help_line) in COMMANDS.items()]
    return "\n".join(
        [
            "usage: rookworld COMMAND [flags]",
            "",
            "Train a chess language model with verifiable rewards.",
            "",
            *lines,
            "",
            "`rookworld COMMAND --help` lists a command's flags.",
        ]
    )
