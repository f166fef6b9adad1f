"""The model as a UCI engine, so that any chess program can play against it or analyse with it.

The law: whatever is sent, the loop lives on and every `go` is answered with one `bestmove`, legal
if there is a legal move; an `info string` says where it is not the model's own (`opinion`). After
`go infinite` and `go ponder` it waits for `stop` or `ponderhit`.

Lines are read by a thread, the model thinks in another, and this one alone answers, so it listens
while it thinks. Lines come in and lines go out; whoever calls prints them. Left out on purpose:
search, and so clocks: the model thinks for as long as one answer takes, whatever the limit.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import chess

from rookworld.evaluation.opinion import Candidate, Opinion, Thinker, Thinking
from rookworld.runtime.errors import ConfigError, RookworldError
from rookworld.tasks.notation import MATE, is_mate, is_move_text
from rookworld.tasks.policy import MOST_MOVES

Load = Callable[[str, str], Thinker]
"""A model and the checkpoint of its run (empty: the last) -> who thinks."""

EMPTY = "<empty>"
PLIES_OF_A_GAME = 10_000
"""More than any game has: what keeps the chance of two games apart."""


@dataclass(frozen=True, slots=True)
class Option:
    """What a program may set, as UCI declares it."""

    kind: str
    default: str
    low: int = 0
    high: int = 0

    def declaration(self, name: str, value: str) -> str:
        """The line that answers `uci`; `value` is what it begins with."""
        bounds = f" min {self.low} max {self.high}" if self.kind == "spin" else ""
        return f"option name {name} type {self.kind} default {value or EMPTY}{bounds}"

    def fault(self, value: str) -> str:
        """Why a value is refused; empty if it is not."""
        if self.kind == "check":
            return "" if value in ("true", "false") else "expected true or false"
        if self.kind == "spin":
            whole = value.isascii() and value.removeprefix("-").isdigit() and len(value) < 12
            inside = whole and self.low <= int(value) <= self.high
            return "" if inside else f"expected {self.low} to {self.high}"
        return ""


OPTIONS: Mapping[str, Option] = {
    "Threads": Option("spin", str(os.cpu_count() or 1), 1, 1024),
    "Hash": Option("spin", "16", 1, 33_554_432),
    "Move Overhead": Option("spin", "10", 0, 60_000),
    "SyzygyPath": Option("string", ""),
    "Ponder": Option("check", "false"),
    "MultiPV": Option("spin", "1", 1, MOST_MOVES),
    "UCI_ShowWDL": Option("check", "false"),
    "UCI_Chess960": Option("check", "false"),
    "Model": Option("string", "nano"),
    "Checkpoint": Option("string", ""),
    "Temperature": Option("string", "0.0"),
    "TopP": Option("string", "1.0"),
    "Sides": Option("check", "false"),
    "LegalOnly": Option("check", "false"),
}
"""What can be set. Hash, Move Overhead and SyzygyPath change nothing: there is no search."""


def serve(
    load: Load, lines: Iterable[str], given: Mapping[str, str] | None = None
) -> Iterator[str]:
    """Answers to UCI commands, line by line, until `quit` or the end of the input.

    `given` are the values that options begin with. The first model is loaded at once, while the
    program still introduces itself.
    """
    events: SimpleQueue[Event] = SimpleQueue()
    with ThreadPoolExecutor(1) as worker:
        session = Session(worker, events, load, dict(given or {}))
        threading.Thread(target=_read, args=(lines, events), daemon=True).start()
        while not session.over:
            yield from session.answer(events.get())


Event = str | None | Future[Any]
"""A line, the end of the input, or something that the worker has finished."""


def _read(lines: Iterable[str], events: SimpleQueue[Event]) -> None:
    for line in lines:
        events.put(line)
        if line.split()[:1] == ["quit"]:
            return
    events.put(None)


@dataclass(eq=False)
class Search:
    """A `go` that has not been answered."""

    thought: Future[Thought]
    may_answer: bool
    """False until `stop` or `ponderhit` where the program asked for an endless search."""
    multipv: int
    wdl: bool
    ply: int
    shown: bool = False


@dataclass(frozen=True, slots=True)
class Thought:
    """What the model says of a position, the reply it expects, and how long it took."""

    opinion: Opinion
    reply: str
    took_s: float
    fault: str = ""
    """Why the model was not asked as the options say."""


@dataclass(eq=False)
class Session:
    """A program's view of the engine: the position, the options, the searches under way."""

    worker: ThreadPoolExecutor
    events: SimpleQueue[Event]
    load: Load
    values: dict[str, str]
    board: chess.Board = field(default_factory=chess.Board)
    game: int = 0
    over: bool = False
    ending: bool = False
    loading: list[Future[str]] = field(default_factory=list)
    loaded: tuple[str, str] = ("", "")
    thinker: Thinker | None = None
    asked_ready: int = 0
    searches: deque[Search] = field(default_factory=deque)

    def __post_init__(self) -> None:
        self.values = {name: one.default for name, one in OPTIONS.items()} | self.values
        self._keep_model()

    def answer(self, event: Event) -> Iterator[str]:
        """What there is to say after something happened."""
        if isinstance(event, Future):
            if event in self.loading:
                yield from self._take_model(event)
        elif event is None:
            self._end()
        else:
            command, *words = event.split() or [""]
            yield from self._obey(command, words)
        yield from self._finished()
        self.over = self.ending and not self.searches and not self.loading

    def _obey(self, command: str, words: Sequence[str]) -> Iterator[str]:
        if command == "uci":
            yield from self._introduction()
        elif command == "isready":
            self._keep_model()
            self.asked_ready += 1
        elif command == "setoption":
            yield from self._set(words)
        elif command == "ucinewgame":
            self.board, self.game = chess.Board(), self.game + 1
        elif command == "position":
            try:
                self.board = position(words)
            except ValueError as error:
                why = " ".join(str(error).split())[:200]
                yield f"info string position refused, the one before stays: {why}"
        elif command == "go":
            self._release()
            self._go(words)
        elif command in ("stop", "ponderhit"):
            self._release()
        elif command == "quit":
            self._end()

    def _introduction(self) -> Iterator[str]:
        yield f"id name RookWorld {Path(self.values['Model']).name}"
        yield "id author RookWorld"
        for name, option in OPTIONS.items():
            yield option.declaration(name, self.values[name])
        yield "uciok"

    # --- options -------------------------------------------------------------------------------

    def _set(self, words: Sequence[str]) -> Iterator[str]:
        """Set an option, or say why not."""
        if words[:1] != ["name"]:
            return
        cut = words.index("value") if "value" in words else len(words)
        said, value = " ".join(words[1:cut]), " ".join(words[cut + 1 :])
        names = {name.lower(): name for name in OPTIONS}
        name = names.get(said.lower())
        if name is None:
            yield f"info string no such option: {said[:40]}"
            return
        option = OPTIONS[name]
        value = "" if value == EMPTY else value
        value = value.lower() if option.kind == "check" else value
        fault = option.fault(value)
        if name == "UCI_Chess960" and value == "true":
            fault = "the model knows standard chess only"
        try:
            self._thinking({name: value})
        except ConfigError as error:
            fault = str(error)
        if fault:
            yield f"info string {name} {value[:40]} refused, {self.values[name]} stays: {fault}"
            return
        self.values[name] = value
        if name == "Threads":
            self.worker.submit(_use_threads, int(value))

    def _thinking(self, changes: Mapping[str, str] | None = None) -> Thinking:
        values = self.values | dict(changes or {})
        return Thinking(
            temperature=_number("Temperature", values["Temperature"]),
            top_p=_number("TopP", values["TopP"]),
            sides=values["Sides"] == "true",
            legal_only=values["LegalOnly"] == "true",
        )

    def _keep_model(self) -> None:
        """Begin to load the model that the options name, unless that is the one there is."""
        wanted = self.values["Model"], self.values["Checkpoint"]
        if wanted != self.loaded:
            self.loaded = wanted
            self.loading.append(self.worker.submit(self._load, *wanted))
            self.loading[-1].add_done_callback(self.events.put)

    def _load(self, model: str, checkpoint: str) -> str:
        """Why a model cannot be used; the first one has to be there."""
        try:
            self.thinker = self.load(model, checkpoint)
        except RookworldError as error:
            if self.thinker is None:
                raise
            return str(error)
        return ""

    def _take_model(self, loading: Future[str]) -> Iterator[str]:
        self.loading.remove(loading)
        fault = loading.result()
        if fault:
            yield f"info string model refused, the one before stays: {fault}"

    # --- thinking ------------------------------------------------------------------------------

    def _go(self, words: Sequence[str]) -> None:
        self._keep_model()
        endless = "infinite" in words or "ponder" in words
        only: list[str] = []
        if "searchmoves" in words:
            after = words[words.index("searchmoves") + 1 :]
            count = next((i for i, word in enumerate(after) if not is_move_text(word)), len(after))
            only = list(after[:count])
        salt = self.game * PLIES_OF_A_GAME + self.board.ply()
        ponder = self.values["Ponder"] == "true"
        asked = (self.board.copy(), only, self._thinking(), salt, ponder)
        search = Search(
            self.worker.submit(self._think, *asked),
            may_answer=not endless,
            multipv=int(self.values["MultiPV"]),
            wdl=self.values["UCI_ShowWDL"] == "true",
            ply=self.board.ply(),
        )
        self.searches.append(search)
        search.thought.add_done_callback(self.events.put)

    def _think(
        self, board: chess.Board, only: Sequence[str], thinking: Thinking, salt: int, ponder: bool
    ) -> Thought:
        """The model's opinion and, if the program ponders, the reply it expects; by the worker."""
        assert self.thinker is not None
        began = time.monotonic()
        fault = ""
        try:
            thinker = self.thinker = self.thinker.but(thinking)
        except ConfigError as error:
            fault = str(error)
            plain = replace(thinking, sides=False, legal_only=False)
            thinker = self.thinker = self.thinker.but(plain)
        (found,) = thinker.opinions([board], [salt], only)
        reply = ""
        if found.move and ponder:
            board.push_uci(found.move)
            (after,) = thinker.opinions([board], [salt])
            found, reply = replace(found, asked=found.asked + after.asked), after.move
        return Thought(found, reply, time.monotonic() - began, fault)

    def _finished(self) -> Iterator[str]:
        """What has been thought, and the moves that may be told; ready is who waits for nothing."""
        if not self.loading:
            yield from ["readyok"] * self.asked_ready
            self.asked_ready = 0
        while self.searches and self.searches[0].thought.done():
            search = self.searches[0]
            thought = search.thought.result()
            if not search.shown:
                yield from information(thought, search.multipv, wdl=search.wdl, ply=search.ply)
                search.shown = True
            if not search.may_answer:
                return
            self.searches.popleft()
            ponder = f" ponder {thought.reply}" if thought.reply else ""
            yield f"bestmove {thought.opinion.move or '(none)'}{ponder}"

    def _release(self) -> None:
        for search in self.searches:
            search.may_answer = True

    def _end(self) -> None:
        self.ending = True
        self._release()


def position(words: Sequence[str]) -> chess.Board:
    """The board of a `position` command; a `ValueError` if it is none, or a move is illegal."""
    cut = words.index("moves") if "moves" in words else len(words)
    kind, *fen = words[:cut] or [""]
    if kind not in ("startpos", "fen"):
        raise ValueError("expected startpos or fen")
    board = chess.Board(" ".join(fen)) if kind == "fen" else chess.Board()
    if not board.is_valid():
        raise ValueError("not a legal position")
    for move in words[cut + 1 :]:
        board.push_uci(move)
    return board


def information(thought: Thought, multipv: int, *, wdl: bool, ply: int) -> Iterator[str]:
    """The `info` lines of a thought: the move played first, then the list by evaluation."""
    found = thought.opinion
    if not found.move:
        yield f"info depth 0 score {'mate' if chess.Board(found.fen).is_checkmate() else 'cp'} 0"
        return
    took_ms = round(1000 * thought.took_s)
    rate = round(found.asked / max(thought.took_s, 1e-3))
    count = f"nodes {found.asked} nps {rate} time {took_ms}"
    ranked = found.ranked
    if not ranked or ranked[0].move != found.move:
        yield f"info depth 1 multipv 1 {count} pv {found.move}"
        ranked = ()
    for rank, one in enumerate(ranked[:multipv], 1):
        chances = f" wdl {_win_draw_loss(one, ply)}" if wdl else ""
        line = f"{one.move} {thought.reply}".rstrip() if rank == 1 else one.move
        yield f"info depth 1 multipv {rank} score {_score(one.cp)}{chances} {count} pv {line}"
    for remark in filter(None, (found.note, thought.fault)):
        yield f"info string {remark}"


def _score(cp: int) -> str:
    if not is_mate(cp):
        return f"cp {cp}"
    moves = max(1, MATE - abs(cp))
    return f"mate {moves if cp > 0 else -moves}"


def _win_draw_loss(one: Candidate, ply: int) -> str:
    """Chances in thousandths that Stockfish's own model gives such an evaluation at that ply."""
    import chess.engine

    score: chess.engine.Score = chess.engine.Cp(one.cp)
    if is_mate(one.cp):
        score = chess.engine.Mate(1 if one.cp > 0 else -1)
    chances = score.wdl(model="sf15.1", ply=ply)
    return f"{chances.wins} {chances.draws} {chances.losses}"


def _number(name: str, text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ConfigError(f"{name} {text[:20]!r}: not a number") from None


def _use_threads(count: int) -> None:
    import torch

    torch.set_num_threads(min(count, os.cpu_count() or 1))
