"""`rookworld play`: a game against a model in the terminal, by hand or through a pipe.

The law: whatever is typed, the game lives on; a move is played if it is legal, in SAN or UCI, and
anything else is answered by a line. The model's move is what its opinion comes to. Evaluations are
in pawns for the side to move. Left out on purpose: clocks, colours of the terminal.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol

import chess
import chess.pgn

from rookworld.cli.flags import leading, parse
from rookworld.cli.play import one_model
from rookworld.runtime.atomic_files import write_text
from rookworld.runtime.errors import DataError, EngineError, RookworldError
from rookworld.tasks.engine import Engine, find_engine
from rookworld.tasks.notation import MATE, is_mate, is_move_text
from rookworld.tasks.pgn import read_pgn

if TYPE_CHECKING:
    from rookworld.evaluation.opinion import Opinion, Thinker

LONGEST_GAME = 1_000_000
"""Characters of a file that are read: the first game is among them."""

HELP = """\
a move            e4, Nf3, O-O, e8=Q or in UCI: e2e4, e7e8q
undo              take back your last move and the answer to it
hint              the model's candidates, and Stockfish's beside them if there is one
go                let the model play the side to move; you play the other from now on
flip · board      turn the board · show it again
fen [FEN]         show the position, or go on from another
pgn [FILE]        show the game, or go on from the end of another
save FILE         write the game
new · help · quit"""


@dataclass(frozen=True, kw_only=True)
class PlaySettings:
    """Play against a model in the terminal: moves in SAN or UCI, `help` for the rest."""

    color: Literal["white", "black"] = "white"
    """Your side."""
    fen: str | None = None
    """Begin here."""
    pgn: Path | None = None
    """Begin at the end of the first game of this file."""
    save: Path | None = None
    """Keep the game in this file, written anew after every move."""
    sides: bool = False
    """The model averages its first move over the position and its images: stronger, and slower."""
    temperature: float = 0.0
    """Temperature of what the model says; 0 is greedy."""
    engine: str | None = None
    """Stockfish for hints; default: STOCKFISH_PATH, PATH, /usr/games, or none."""
    nodes: int = 100_000
    """Stockfish's nodes for a hint."""
    device: str = "auto"
    """auto, cpu, cuda or cuda:N."""
    seed: int = 0
    """Seed of sampled moves."""


def play(args: list[str]) -> int:
    from rookworld.evaluation.opinion import Thinking
    from rookworld.evaluation.players import Loading, model_player

    models, rest = leading(args)
    settings = parse(PlaySettings, rest, command="rookworld play", default=PlaySettings())
    model = one_model(models, "play") if models else "nano"
    loading = Loading(device=settings.device, seed=settings.seed)
    thinking = Thinking(temperature=settings.temperature, sides=settings.sides)
    with Hints(settings.engine, settings.nodes) as hints:
        thinker = model_player(model, loading, thinking).thinker
        game = TerminalGame(thinker, Path(model).name, settings, hints)
        for line in game.begin():
            print(line)
        for command in typed(game.asked):
            for line in game.obey(command):
                print(line)
            if game.over:
                break
    return 0


def typed(asked: Callable[[], str]) -> Iterator[str]:
    """Lines from the keyboard, each asked for, or from a pipe."""
    while True:
        if sys.stdin.isatty():
            print(asked(), end="", flush=True)
        line = sys.stdin.readline()
        if not line:
            return
        yield line


class Adviser(Protocol):
    """Who knows more than the model."""

    def ask(self, board: chess.Board) -> tuple[str, list[tuple[str, int]]]:
        """A name, and moves with their evaluations; no name, nobody."""
        ...


class Hints:
    """Stockfish's opinion, if there is one; it is started when it is first asked."""

    def __init__(self, engine: str | None, nodes: int) -> None:
        self.nodes = nodes
        self.engine: Engine | None = None
        try:
            self.engine = Engine(find_engine(engine))
        except EngineError:
            if engine is not None:
                raise

    def __enter__(self) -> Hints:
        return self

    def __exit__(self, *_: object) -> None:
        if self.engine is not None:
            self.engine.close()

    def ask(self, board: chess.Board) -> tuple[str, list[tuple[str, int]]]:
        """Its name and its five best moves."""
        if self.engine is None:
            return "", []
        lines = self.engine.search(board.fen(), self.nodes)
        return self.engine.name, [(line.move, line.cp) for line in lines]


class TerminalGame:
    """A game between a person and a model: commands in, lines out."""

    def __init__(
        self, thinker: Thinker, model: str, settings: PlaySettings, adviser: Adviser
    ) -> None:
        self.thinker = thinker
        self.model = model
        self.settings = settings
        self.adviser = adviser
        self.person = settings.color == "white"
        self.from_below = self.person
        self.board = chess.Board()
        self.over = False
        self.commands: Mapping[str, Callable[[str], Iterable[str]]] = {
            "undo": self._undo,
            "hint": self._hint,
            "go": self._go,
            "flip": self._flip,
            "board": self._show,
            "fen": self._fen,
            "pgn": self._pgn,
            "save": self._save,
            "new": self._new,
            "help": lambda _: HELP.splitlines(),
            "quit": self._quit,
        }

    def asked(self) -> str:
        """What stands before the person's line."""
        return f"{'white' if self.board.turn else 'black'} {self.board.fullmove_number}> "

    def begin(self) -> Iterator[str]:
        """Set up the position that the settings name; a `RookworldError` if it is none."""
        yield f"You are {self.settings.color}, {self.model} plays the other side; see `help`."
        if self.settings.fen is not None:
            self.board = position(self.settings.fen)
        if self.settings.pgn is not None:
            self.board = read_game(self.settings.pgn)
        yield from self._turn()

    def obey(self, line: str) -> Iterator[str]:
        """The answer to what was typed."""
        word, _, rest = line.strip().partition(" ")
        if not word:
            return
        command = self.commands.get(word.lower())
        try:
            yield from command(rest.strip()) if command else self._move(line.strip())
        except RookworldError as error:
            yield str(error)

    # --- moves ---------------------------------------------------------------------------------

    def _move(self, text: str) -> Iterator[str]:
        if self._ended():
            yield "the game is over: `undo`, `new` or `quit`"
            return
        move = read_move(self.board, text)
        if move is None:
            yield f"{text[:20]}: no legal move here, and no command; see `help`"
            return
        self.board.push(move)
        self._keep()
        yield from self._turn()

    def _turn(self) -> Iterator[str]:
        """The model's move if it is its turn, and the board."""
        if self.board.turn != self.person and not self._ended():
            yield self._answer()
            self._keep()
        yield from self._show()
        if self._ended():
            yield self._ended()

    def _answer(self) -> str:
        (found,) = self.thinker.opinions([self.board], [self.board.ply()])
        move = chess.Move.from_uci(found.move)
        number = f"{self.board.fullmove_number}{'.' if self.board.turn else '...'}"
        said = f"{self.model}: {number} {self.board.san(move)}"
        listed = candidates(self.board, found)
        thinks = ", ".join(f"{name} {score}" for name, score in listed)
        self.board.push(move)
        note = f"  ({found.note})" if found.note else ""
        return f"{said}  thinks: {thinks}{note}" if thinks else said + note

    def _ended(self) -> str:
        """How the game has ended; empty while it goes on."""
        outcome = self.board.outcome(claim_draw=True)
        if outcome is None:
            return ""
        return f"{outcome.result()}  {outcome.termination.name.lower().replace('_', ' ')}"

    def _undo(self, _: str = "") -> Iterator[str]:
        if self.board.turn == self.person and len(self.board.move_stack) >= 2:
            self.board.pop()
        if self.board.turn == self.person or not self.board.move_stack:
            yield "nothing to take back"
            return
        self.board.pop()
        self._keep()
        yield from self._show()

    def _go(self, _: str = "") -> Iterator[str]:
        self.person = not self.board.turn
        yield from self._turn()

    # --- looks ---------------------------------------------------------------------------------

    def _hint(self, _: str = "") -> Iterator[str]:
        if self._ended():
            yield self._ended()
            return
        (found,) = self.thinker.opinions([self.board], [self.board.ply()])
        name, lines = self.adviser.ask(self.board)
        theirs = [(self.board.san(chess.Move.from_uci(move)), score_text(cp)) for move, cp in lines]
        yield f"{self.model:<20}{name}".rstrip()
        mine = candidates(self.board, found) or [
            (self.board.san(chess.Move.from_uci(found.move)), "")
        ]
        for ours, other in zip_longest(mine, theirs, fillvalue=("", "")):
            yield "{:<8}{:<12}{:<8}{}".format(*ours, *other).rstrip()

    def _show(self, _: str = "") -> Iterator[str]:
        return drawing(self.board, white_below=self.from_below)

    def _flip(self, _: str = "") -> Iterator[str]:
        self.from_below = not self.from_below
        return self._show()

    # --- positions and files -------------------------------------------------------------------

    def _fen(self, text: str) -> Iterator[str]:
        if not text:
            yield self.board.fen()
            return
        self.board = position(text)
        yield from self._turn()

    def _pgn(self, name: str) -> Iterator[str]:
        if not name:
            yield from self._game().splitlines()
            return
        self.board = read_game(Path(name))
        yield from self._turn()

    def _save(self, name: str) -> Iterator[str]:
        if not name:
            yield "save needs the name of a file"
            return
        write(Path(name), self._game())
        yield f"saved: {name}"

    def _new(self, _: str = "") -> Iterator[str]:
        self.board = chess.Board()
        yield from self._turn()

    def _quit(self, _: str = "") -> Iterable[str]:
        self.over = True
        return ()

    def _game(self) -> str:
        record = chess.pgn.Game.from_board(self.board)
        sides = {"White": "you", "Black": self.model}
        if not self.person:
            sides = {"White": self.model, "Black": "you"}
        record.headers.update({"Event": "rookworld play", **sides})
        outcome = self.board.outcome(claim_draw=True)
        record.headers["Result"] = outcome.result() if outcome else "*"
        return f"{record}\n"

    def _keep(self) -> None:
        if self.settings.save is not None:
            write(self.settings.save, self._game())


def write(path: Path, text: str) -> None:
    """Write a game, or a `RookworldError` that names the file."""
    try:
        write_text(path, text)
    except OSError as error:
        raise RookworldError(f"{path}: cannot be written ({error.strerror})") from None


def position(fen: str) -> chess.Board:
    """The position of a FEN, or a `RookworldError`."""
    try:
        board = chess.Board(fen)
    except ValueError as error:
        raise RookworldError(f"not a FEN: {fen[:80]} ({error})") from None
    if not board.is_valid():
        raise RookworldError(f"not a legal position: {fen[:80]}")
    return board


def read_game(path: Path) -> chess.Board:
    """The end of the first game of a PGN file, with its moves, or a `RookworldError`."""
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            game = read_pgn(file.read(LONGEST_GAME))
    except OSError as error:
        raise RookworldError(f"{path}: cannot be read ({error.strerror})") from None
    except DataError as error:
        raise RookworldError(f"{path}: not a game in PGN ({error})") from None
    return game.end().board()


def read_move(board: chess.Board, text: str) -> chess.Move | None:
    """A legal move as a person writes it; None if it is none."""
    legal = {move.uci(): move for move in board.legal_moves}
    if is_move_text(text.lower()):
        return legal.get(text.lower())
    for spelled in (text, text[:1].upper() + text[1:]):
        try:
            # python-chess takes `--` for a move that does nothing
            return legal.get(board.parse_san(spelled).uci())
        except ValueError:
            continue
    return None


def san(board: chess.Board, move: str) -> str:
    """A UCI move in SAN."""
    return board.san(chess.Move.from_uci(move))


def candidates(board: chess.Board, found: Opinion) -> list[tuple[str, str]]:
    """A model's legal candidates, what it plays first, in SAN with evaluations."""
    return [(san(board, one.move), score_text(one.cp)) for one in found.ranked]


def score_text(cp: int) -> str:
    """Pawns, or a mate in so many moves."""
    if is_mate(cp):
        return f"#{'' if cp > 0 else '-'}{max(1, MATE - abs(cp))}"
    return f"{cp / 100:+.2f}"


def drawing(board: chess.Board, *, white_below: bool) -> Iterator[str]:
    """The board in Unicode, seen from the side that sits below."""
    rows = board.unicode(empty_square="·", orientation=white_below).splitlines()
    ranks = "87654321" if white_below else "12345678"
    for rank, row in zip(ranks, rows, strict=True):
        yield f"{rank}  {row}"
    yield f"   {' '.join('abcdefgh' if white_below else 'hgfedcba')}"
