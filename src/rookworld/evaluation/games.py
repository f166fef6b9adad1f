"""Players and games: a model or Stockfish at the board, matches, self-play, PGN.

The law: a game is decided by python-chess alone. A move is legal if its text is that of a legal
move; any other text ends the game, and whoever wrote it has lost. Games run side by side, so that a
model answers for all of them at once; what it plays in one does not depend on the others.

The engine is limited by nodes, never by seconds (a deadline only guards against one that hangs), so
its strength does not depend on the machine. Below skill 20 Stockfish draws its mistakes from the
clock, so those games do not repeat.
Left out on purpose: clocks, draw offers; resignation is a `referee`'s affair.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, Protocol

import chess
import chess.pgn

from rookworld.evaluation.generator import Answerer, analyses
from rookworld.evaluation.pairs import normalised_elo
from rookworld.evaluation.statistics import (
    Estimate,
    Values,
    elo_difference,
    known,
    match_score,
    mean_estimate,
    share,
)
from rookworld.runtime.atomic_files import write_text
from rookworld.tasks.engine import Engine
from rookworld.tasks.policy import PolicyAnswer
from rookworld.tasks.task import legal_moves

STRONGEST = 20
"""Skill level at which Stockfish makes no mistakes on purpose."""


class Player(Protocol):
    """Whoever plays: a network and an engine alike."""

    @property
    def name(self) -> str:
        """Name in the PGN."""
        ...

    def choose(self, boards: Sequence[chess.Board], games: Sequence[int]) -> list[str]:
        """A move in UCI for each position; `games` are their numbers. Anything illegal loses."""
        ...


class ModelPlayer:
    """A model that plays the B of its analysis.

    With `fallback` an unplayable B gives way to the first legal move that the analysis lists.
    """

    def __init__(self, answerer: Answerer, name: str = "model", *, fallback: bool = False) -> None:
        self.answerer = answerer
        self.name = name
        self.fallback = fallback

    def choose(self, boards: Sequence[chess.Board], games: Sequence[int]) -> list[str]:
        """B for each position, or what stands for it."""
        fens = [board.fen() for board in boards]
        return list(map(self._move, fens, analyses(self.answerer, fens, games)))

    def _move(self, fen: str, said: PolicyAnswer) -> str:
        legal = legal_moves(fen)
        if said.best in legal or not self.fallback:
            return said.best
        return next((move for move in said.moves if move in legal), said.best)


class EnginePlayer:
    """A UCI engine at a fixed number of nodes and, below 20, a skill level of Stockfish's."""

    def __init__(self, path: Path, *, nodes: int, skill: int = STRONGEST) -> None:
        self.nodes = nodes
        self._engine = Engine(path, options={"Skill Level": skill} if skill < STRONGEST else None)
        self._engine.start()
        self._game = -1
        level = f", skill {skill}" if skill < STRONGEST else ""
        self.name = f"{self._engine.name} ({nodes} nodes{level})"

    def __enter__(self) -> EnginePlayer:
        return self

    def __exit__(self, *_: object) -> None:
        self._engine.close()

    def choose(self, boards: Sequence[chess.Board], games: Sequence[int]) -> list[str]:
        """The engine's move for each position; its hash is cleared from game to game."""
        return [self._move(board, game) for board, game in zip(boards, games, strict=True)]

    def _move(self, board: chess.Board, game: int) -> str:
        if game != self._game:
            self._engine.new_game()
            self._game = game
        return self._engine.best_move(board, self.nodes)


@dataclass(eq=False)
class Game:
    """A game in progress or over: `end` says how, `refused` is the text that was no legal move."""

    number: int
    white: Player
    black: Player
    board: chess.Board = field(default_factory=chess.Board)
    book_plies: int = 0
    end: str = ""
    refused: str | None = None
    result: str = "*"

    @property
    def plies(self) -> int:
        """Legal plies that were played, those of the opening left out."""
        return len(self.board.move_stack) - self.book_plies

    @property
    def mover(self) -> Player:
        """Whose turn it is."""
        return self.white if self.board.turn else self.black

    def points(self, player: Player) -> float:
        """1, ½ or 0 for a player of a game that is over."""
        draw = self.result == "1/2-1/2"
        return 0.5 if draw else float((self.result == "1-0") == (player is self.white))

    def play(self, move: str) -> None:
        """Play a move, or lose the game by it."""
        if move in legal_moves(self.board.fen()):
            self.board.push_uci(move)
            return
        self.refused = move
        self.end, self.result = "illegal", "0-1" if self.board.turn else "1-0"

    def adjudicate(self, max_plies: int, claim_draw: bool) -> None:
        """End the game if the rules, or its length, say so."""
        outcome = self.board.outcome(claim_draw=claim_draw)
        if outcome is not None:
            self.end, self.result = outcome.termination.name.lower(), outcome.result()
        elif self.plies >= max_plies:
            self.end, self.result = "max_plies", "1/2-1/2"


def new_game(number: int, white: Player, black: Player, opening: Sequence[str] = ()) -> Game:
    """A game after the moves of an opening."""
    game = Game(number, white, black, book_plies=len(opening))
    for move in opening:
        game.board.push_uci(move)
    return game


Look = Callable[[Game], None]
"""Called with a game: after each ply of one that goes on, or at the end of one."""


def play_out(
    games: Sequence[Game],
    *,
    max_plies: int,
    claim_draw: bool,
    referee: Look | None = None,
    ended: Look | None = None,
) -> None:
    """Play all games to their end, one ply of each at a time; a referee may end one too."""
    while active := [game for game in games if not game.end]:
        turns: dict[int, list[Game]] = {}
        for game in active:
            turns.setdefault(id(game.mover), []).append(game)
        for turn in turns.values():
            boards, numbers = [game.board for game in turn], [game.number for game in turn]
            moves = turn[0].mover.choose(boards, numbers)
            for game, move in zip(turn, moves, strict=True):
                game.play(move)
        for game in active:
            if not game.end:
                game.adjudicate(max_plies, claim_draw)
            if referee is not None and not game.end:
                referee(game)
            if ended is not None and game.end:
                ended(game)


class Played(NamedTuple):
    """Games that were played and what they amount to."""

    games: list[Game]
    estimates: dict[str, Estimate]


def match(
    player: Player, opponent: Player, starts: Sequence[Sequence[str]], *, max_plies: int = 300
) -> Played:
    """Two games from each opening, colours exchanged; the score is the first player's."""
    games = []
    for pair, opening in enumerate(starts):
        games.append(new_game(2 * pair, player, opponent, opening))
        games.append(new_game(2 * pair + 1, opponent, player, opening))
    play_out(games, max_plies=max_plies, claim_draw=True)
    return Played(games, match_estimates(player, games))


def match_estimates(player: Player, games: Sequence[Game]) -> dict[str, Estimate]:
    """What a match amounts to for one of its players; games come in pairs."""
    pairs = pair_scores(player, games)
    score, normalised = match_score(pairs), normalised_elo(pairs)
    forfeits = sum(game.end == "illegal" and game.points(player) == 0 for game in games)
    return {
        "match/score": score,
        "match/elo": elo_difference(score),
        **({"match/normalised_elo": normalised} if normalised is not None else {}),
        "match/forfeits": share(forfeits, len(games)),
        **_ends("match", games),
    }


def pair_scores(player: Player, games: Sequence[Game]) -> Values:
    """A player's mean score in each pair of games."""
    scores: Values = known(game.points(player) for game in games).reshape(-1, 2).mean(axis=1)
    return scores


def selfplay(
    player: Player,
    n: int,
    *,
    starts: Sequence[Sequence[str]] = (),
    max_plies: int = 600,
    ended: Look | None = None,
) -> Played:
    """`n` games of a player against itself, from the initial position or from given openings."""
    games = [new_game(i, player, player, starts[i] if starts else ()) for i in range(n)]
    play_out(games, max_plies=max_plies, claim_draw=False, ended=ended)
    plies = known(game.plies for game in games)
    illegal = sum(game.end == "illegal" for game in games)
    moves = int(plies.sum()) + illegal
    mean = mean_estimate(plies)
    estimates = {
        "selfplay/legal_plies": mean,
        "selfplay/illegal": share(illegal, moves) if moves else share(0, 1),
        "selfplay/illegal_published": _inverse(mean),
        **_ends("selfplay", games),
    }
    return Played(games, estimates)


def _inverse(mean: Estimate) -> Estimate:
    """1 / mean, at most 1: RookWorld's share of illegal moves."""
    value, low, high = (1 / max(x, 1.0) for x in (mean.value, mean.high, mean.low))
    return Estimate(value, mean.n, low, high)


def _ends(suite: str, games: Sequence[Game]) -> dict[str, Estimate]:
    ends = Counter(game.end for game in games)
    return {f"{suite}/ends/{end}": share(ends[end], len(games)) for end in sorted(ends)}


def pgn(game: Game, event: str) -> str:
    """A game in PGN; a refused move stands in a comment behind the last legal one."""
    record = chess.pgn.Game.from_board(game.board)
    record.headers["Event"] = event
    record.headers["Round"] = str(game.number + 1)
    record.headers["White"], record.headers["Black"] = game.white.name, game.black.name
    record.headers["Result"] = game.result
    record.headers["Termination"] = game.end.replace("_", " ")
    if game.refused is not None:
        record.end().comment = f"illegal: {game.refused[:12] or 'no readable move'}"
    return str(record)


def write_pgn(path: Path, games: Sequence[tuple[str, Game]]) -> None:
    """Games with the names of their events in one file, whole or not at all."""
    write_text(path, "".join(f"{pgn(game, event)}\n\n" for event, game in games))
