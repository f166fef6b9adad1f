"""A UCI driver: one engine process.

An engine is limited by nodes, never by seconds, so that its answers do not depend on the machine;
seconds only guard: every call has a deadline, and an engine that dies, hangs or talks nonsense is
killed and raises an `EngineLost`. The next call starts a new process. What is sent was always
parsed and written again by python-chess: text of a model can never become a UCI command.

The law: only lines of the last *finished* depth count. A node limit stops in mid-iteration, and
what is printed then mixes two depths: unsorted lines, the same move twice.

Left out on purpose: time controls, pondering, several threads per engine, Chess960, Windows.
"""

from __future__ import annotations

import os
import select
import shutil
import signal
import subprocess
import time
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import chess

from rookworld.runtime.errors import DataError, EngineError
from rookworld.tasks.notation import MATE
from rookworld.tasks.position import parse_position

SYSTEM_FOLDERS = "/usr/games"
"""Where Debian puts it, which is not on everybody's PATH."""

START_TIMEOUT_S = 10.0
OUTPUT_LIMIT = 16 * 2**20
"""Bytes of one answer; 245 depths of five long lines are a tenth of it."""

WIDENINGS = (1, 16, 256)
"""Factors on the node limit, tried in turn until a search finishes at least its first depth."""


class EngineLost(EngineError):
    """This engine process is of no more use; a new one may answer."""


class EngineDead(EngineLost):
    """The process ended by itself, was killed, or could not take a command."""


class EngineHung(EngineLost):
    """No answer before the deadline."""


class EngineGarbage(EngineLost):
    """The answer is not UCI, or not about the position that was sent."""


class Line(NamedTuple):
    """One candidate of a search; `cp` is for the side to move, mate in n is ±(100000 - n)."""

    move: str
    cp: int
    depth: int


class Query(NamedTuple):
    """What a search depends on besides the engine; `moves` restricts it to some legal moves."""

    fen: str
    nodes: int
    multipv: int = 5
    moves: tuple[str, ...] | None = None


class _Info(NamedTuple):
    line: Line
    rank: int
    nodes: int
    exact: bool


def find_engine(explicit: str | None = None) -> Path:
    """The engine asked for, else `STOCKFISH_PATH`, else `stockfish` on PATH or in /usr/games."""
    asked = {"--engine": explicit, "STOCKFISH_PATH": os.environ.get("STOCKFISH_PATH")}
    for source, value in asked.items():
        if value:
            if found := shutil.which(value):
                return Path(found)
            raise EngineError(f"{source}: {value!r} is not an executable file")
    for folders in (None, SYSTEM_FOLDERS):
        if found := shutil.which("stockfish", path=folders):
            return Path(found)
    raise EngineError(
        f"no chess engine found in STOCKFISH_PATH, PATH or {SYSTEM_FOLDERS}: install it with"
        " `apt install stockfish` or `brew install stockfish`, or give its path with --engine"
    )


def default_timeout_s(nodes: int) -> float:
    """Seconds after which a search must have hung: a hundred times slower than an old laptop."""
    return 10.0 + nodes / 5_000


class Engine:
    """One engine process, started by the first call and again by the call after a failure.

    The hash is kept from search to search; `new_game` clears it. Not for several threads at once.
    """

    def __init__(
        self, path: Path | str, *, hash_mb: int = 16, options: Mapping[str, int] | None = None
    ) -> None:
        """`options` are set besides the usual ones; an engine must know them."""
        self.path = Path(path)
        self.hash_mb = hash_mb
        self.options = dict(options or {})
        self.name = ""
        """What the engine calls itself (`Stockfish 15.1`), empty before the first start."""
        self.starts = 0
        self._process: subprocess.Popen[bytes] | None = None
        self._multipv = 0

    def __enter__(self) -> Engine:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def pid(self) -> int | None:
        """Process id while running."""
        return self._process.pid if self._process else None

    def start(self, timeout_s: float = START_TIMEOUT_S) -> None:
        """Start the process and shake hands; nothing if it runs already."""
        if self._process is not None:
            return
        try:
            # A group of its own: Ctrl-C reaches the trainer alone, and a wrapper script can be
            # killed together with the engine inside it.
            process = subprocess.Popen(
                [self.path],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                bufsize=0,
                process_group=0,
            )
        except OSError as error:
            raise EngineError(f"cannot start engine {self.path}: {error.strerror}") from error
        self._process = process
        self._finalizer = weakref.finalize(self, _reap, process, os.getpid())
        self._multipv = 0
        self.starts += 1
        with self._deadline(timeout_s) as deadline:
            hello = self._ask("uci\n", "uciok", deadline)
            names = [text[8:].strip() for text in hello if text.startswith("id name ")]
            self.name = names[0] if names else self.path.name
            for name in self.options:
                if not any(text.startswith(f"option name {name} ") for text in hello):
                    raise EngineError(f"engine {self.path}: it has no option {name!r}")
            chosen = {"Threads": 1, "Hash": self.hash_mb, **self.options}
            lines = (f"setoption name {name} value {value}\n" for name, value in chosen.items())
            self._ask("".join(lines) + "isready\n", "readyok", deadline)

    def close(self) -> None:
        """End the process, whatever state it is in."""
        if self._process is not None:
            self._process = None
            self._finalizer()

    def new_game(self, timeout_s: float = START_TIMEOUT_S) -> None:
        """Clear hash and history: the next answer depends on its position alone."""
        self.start()
        with self._deadline(timeout_s) as deadline:
            self._ask("ucinewgame\nisready\n", "readyok", deadline)

    def search(
        self,
        fen: str,
        nodes: int,
        multipv: int = 5,
        moves: Sequence[str] | None = None,
        timeout_s: float | None = None,
    ) -> list[Line]:
        """The best `multipv` lines (fewer if fewer moves are legal), best first."""
        board = parse_position(fen)
        allowed = _allowed_moves(board, moves)
        if not allowed:
            return []
        self.start()
        only = "" if moves is None else " searchmoves " + " ".join(allowed)
        with self._deadline(timeout_s or default_timeout_s(nodes)) as deadline:
            for limit in (nodes * factor for factor in WIDENINGS):
                command = f"position fen {board.fen()}\ngo nodes {limit}{only}\n"
                if multipv != self._multipv:
                    command = f"setoption name MultiPV value {multipv}\n{command}"
                    self._multipv = multipv
                output = self._ask(command, "bestmove", deadline)
                if lines := _finished_lines(output, allowed, multipv, limit):
                    return lines
                if not any(map(_parse_info, output)):
                    break
            raise EngineGarbage(f"engine {self.path}: no usable line for {board.fen()}")

    def best_move(self, board: chess.Board, nodes: int) -> str:
        """The move that the engine plays, by UCI; it knows the game that led to the board."""
        self.start()
        played = "".join(f" {move.uci()}" for move in board.move_stack)
        moves = f" moves{played}" if played else ""
        command = f"position fen {board.root().fen()}{moves}\ngo nodes {nodes}\n"
        with self._deadline(default_timeout_s(nodes)) as deadline:
            *_, last = self._ask(command, "bestmove", deadline)
            words = last.split()
            if len(words) < 2:
                raise EngineGarbage(f"engine {self.path}: no move for {board.fen()}")
            return words[1]

    @contextmanager
    def _deadline(self, timeout_s: float) -> Iterator[float]:
        """A moment in time; whatever interrupts the exchange, an unread answer dies with it."""
        done = False
        try:
            yield time.monotonic() + timeout_s
            done = True
        finally:
            if not done:
                self.close()

    def _ask(self, command: str, last: str, deadline: float) -> list[str]:
        """Send commands, read lines up to the one that begins with `last`."""
        process = self._process
        assert process is not None and process.stdin is not None and process.stdout is not None
        try:
            process.stdin.write(command.encode("ascii"))
        except BrokenPipeError as error:
            raise EngineDead(f"engine {self.path} died") from error
        output, end = bytearray(), last.encode("ascii")
        stdout = process.stdout.fileno()
        poll = select.poll()
        poll.register(stdout, select.POLLIN)
        while True:
            left_s = deadline - time.monotonic()
            if left_s <= 0 or not poll.poll(left_s * 1000):
                raise EngineHung(f"engine {self.path} hung: no {last} in time")
            chunk = os.read(stdout, 65536)
            if not chunk:
                raise EngineDead(f"engine {self.path} died: output ended before {last}")
            output += chunk
            if len(output) > OUTPUT_LIMIT:
                raise EngineGarbage(f"engine {self.path}: {OUTPUT_LIMIT} bytes without {last}")
            # Nothing follows the closing line before the next command, so it must be the tail.
            if output.endswith(b"\n") and output.startswith(end, output.rfind(b"\n", 0, -1) + 1):
                return output.decode("utf-8", "replace").splitlines()


def _reap(process: subprocess.Popen[bytes], owner: int) -> None:
    """Kill and bury the process; a forked child of its owner must leave it alone."""
    if os.getpid() != owner:
        return
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            pipe.close()


def _allowed_moves(board: chess.Board, moves: Sequence[str] | None) -> list[str]:
    legal = [move.uci() for move in board.legal_moves]
    if moves is None:
        return legal
    for move in moves:
        if move not in legal:
            raise DataError(f"{move!r} is not a legal move in {board.fen()}")
    return list(dict.fromkeys(moves))


def _parse_info(text: str) -> _Info | None:
    """One `info … score … pv …` line, or None if it is anything else."""
    head, _, variation = text.partition(" pv ")
    words = head.split()
    if not variation or words[:1] != ["info"] or "string" in words:
        return None
    following = dict(pairwise(words))
    try:
        if "mate" in following:
            mate = int(following["mate"])
            cp = MATE - mate if mate > 0 else -MATE - mate
        else:
            cp = int(following["cp"])
        line = Line(variation.split(maxsplit=1)[0], cp, int(following["depth"]))
        rank, nodes = int(following.get("multipv", 1)), int(following.get("nodes", 0))
    except (KeyError, ValueError, IndexError):
        return None
    return _Info(line, rank, nodes, "lowerbound" not in words and "upperbound" not in words)


def _finished_lines(
    output: Sequence[str], allowed: Sequence[str], multipv: int, limit: int
) -> list[Line]:
    """The lines of the last finished depth, best first; empty if no depth was finished."""
    count = min(multipv, len(allowed))
    block: list[_Info] = []
    for text in reversed(output):
        info = _parse_info(text)
        if info is None:
            continue
        block.append(info)
        if info.rank == 1:
            block.reverse()
            if _is_finished(block, count, limit) and {i.line.move for i in block} <= set(allowed):
                return sorted((i.line for i in block), key=lambda line: -line.cp)
            block = []
    return []


def _is_finished(block: Sequence[_Info], count: int, limit: int) -> bool:
    """Whether the block ranks `count` moves, all exact, of one depth, before the limit struck.

    What is printed at the limit itself can look whole while its last line was still being searched.
    """
    return (
        [info.rank for info in block] == list(range(1, count + 1))
        and len({info.line.move for info in block}) == count
        and len({info.line.depth for info in block}) == 1
        and all(info.exact and info.nodes < limit for info in block)
    )
