"""A raw UCI driver, and a pool of engine processes that outlives any one of them.

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
import queue
import select
import shutil
import signal
import subprocess
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple, TypeVar

import chess

from rookworld.runtime.errors import DataError, EngineError
from rookworld.tasks.notation import MATE

Answer = TypeVar("Answer")

SYSTEM_FOLDERS = "/usr/games"
"""Where Debian puts it, which is not on everybody's PATH."""

START_TIMEOUT_S = 10.0
OUTPUT_LIMIT = 16 * 2**20
"""Bytes of one answer; 245 depths of five long lines are a tenth of it."""

WIDENINGS = (1, 16, 256)
"""Factors on the node limit, tried in turn until a search finishes at least its first depth."""

# A re-written FEN has these put right; any other fault can crash an engine.
_HARMLESS = (
    chess.STATUS_BAD_CASTLING_RIGHTS
    | chess.STATUS_INVALID_EP_SQUARE
    | chess.STATUS_TOO_MANY_CHECKERS
    | chess.STATUS_IMPOSSIBLE_CHECK
)


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


def parse_position(fen: str) -> chess.Board:
    """The position of a FEN that is safe to send to an engine, or a `DataError`."""
    if not fen.isprintable():
        raise DataError(f"FEN with control characters refused: {fen!r}")
    try:
        board = chess.Board(fen)
    except ValueError as error:
        raise DataError(f"not a FEN: {fen!r} ({error})") from error
    if board.status() & ~_HARMLESS:
        raise DataError(f"not a legal position: {fen!r}")
    return board


def default_timeout_s(nodes: int) -> float:
    """Seconds after which a search must have hung: a hundred times slower than an old laptop."""
    return 10.0 + nodes / 5_000


def usable_cores() -> int:
    """Cores this process may use: in a container often fewer than the machine has."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


class Engine:
    """One engine process, started by the first call and again by the call after a failure.

    The hash is kept from search to search; `new_game` clears it. Not for several threads at once.
    """

    def __init__(self, path: Path | str, *, hash_mb: int = 16) -> None:
        self.path = Path(path)
        self.hash_mb = hash_mb
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
            options = f"setoption name Threads value 1\nsetoption name Hash value {self.hash_mb}\n"
            self._ask(options + "isready\n", "readyok", deadline)

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


class EnginePool:
    """`size` engine processes behind one thread-safe door; each is started when first needed.

    Every position is searched with a cleared hash: answers depend on nothing but the query.
    """

    def __init__(
        self,
        path: Path | str,
        size: int | None = None,
        *,
        hash_mb: int = 16,
        retries: int = 2,
        timeout_s: float | None = None,
    ) -> None:
        self.path = Path(path)
        self.size = size or usable_cores()
        self.retries = retries
        self.timeout_s = timeout_s
        self._engines = [Engine(path, hash_mb=hash_mb) for _ in range(self.size)]
        # Last in, first out: calls from one thread share one warm process.
        self._idle: queue.LifoQueue[Engine] = queue.LifoQueue()
        for engine in self._engines:
            self._idle.put(engine)

    def __enter__(self) -> EnginePool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def starts(self) -> int:
        """Processes started so far; more than `size` means that some were lost."""
        return sum(engine.starts for engine in self._engines)

    @property
    def pids(self) -> list[int]:
        """Process ids of the engines that run."""
        return [engine.pid for engine in self._engines if engine.pid is not None]

    def close(self) -> None:
        """End all processes. A later call would start them again."""
        for engine in self._engines:
            engine.close()

    def name(self) -> str:
        """What the engine calls itself; starts one if none has run yet."""
        with self._borrow() as engine:
            if not engine.name:
                engine.start()
            return engine.name

    def search(self, query: Query) -> list[Line]:
        """Answer one query, on a new process if the first is lost, a bounded number of times."""
        with self._borrow() as engine:
            for attempt in range(self.retries + 1):
                try:
                    engine.new_game(self.timeout_s or START_TIMEOUT_S)
                    return engine.search(*query, timeout_s=self.timeout_s)
                except EngineLost as lost:
                    if attempt == self.retries:
                        raise EngineError(
                            f"gave up on {query.fen} after {attempt + 1} attempts: {lost}"
                        ) from lost
        raise AssertionError("unreachable")

    def map(self, queries: Iterable[Query]) -> list[list[Line]]:
        """Answers in the order of the queries, searched in parallel."""
        return self.spread(self.search, queries)

    def spread(self, function: Callable[[Query], Answer], queries: Iterable[Query]) -> list[Answer]:
        """A function of each query, called in as many threads as there are engines."""
        with ThreadPoolExecutor(self.size, thread_name_prefix="engine") as threads:
            return list(threads.map(function, queries))

    @contextmanager
    def _borrow(self) -> Iterator[Engine]:
        engine = self._idle.get()
        try:
            yield engine
        finally:
            self._idle.put(engine)
