"""Games by players from tables, python-chess as referee; a real engine where one is installed."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from pathlib import Path

import chess
import chess.pgn
import pytest

from fake_engine import install_fake
from rookworld.data.openings import BOOK, openings
from rookworld.evaluation.games import (
    EnginePlayer,
    ModelPlayer,
    match,
    new_game,
    pgn,
    play_out,
    selfplay,
    write_pgn,
)
from rookworld.evaluation.generator import Answer
from rookworld.evaluation.world_model import walk_worlds, world_estimates
from rookworld.runtime.errors import EngineError
from rookworld.tasks.engine import find_engine
from rookworld.tasks.environment import ENVIRONMENT, transition
from rookworld.tasks.task import Style

FOOLS_MATE = ["f2f3", "e7e5", "g2g4", "d8h4"]


class Scripted:
    """Plays a list of moves, the same in every game; after its end whatever is given last."""

    def __init__(self, name: str, moves: Sequence[str]) -> None:
        self.name = name
        self.moves = moves

    def choose(self, boards: Sequence[chess.Board], games: Sequence[int]) -> list[str]:
        return [self.moves[min(board.ply(), len(self.moves) - 1)] for board in boards]


class FirstLegal:
    """The first legal move by name."""

    name = "first"

    def choose(self, boards: Sequence[chess.Board], games: Sequence[int]) -> list[str]:
        return [min(move.uci() for move in board.legal_moves) for board in boards]


class Says:
    """An answerer that completes prompts by a function."""

    style: Style = "compact"
    samples = 1

    def __init__(self, answer: Callable[[str], str]) -> None:
        self._answer = answer

    def answer(self, prompts: Sequence[str], salts: Sequence[int] = ()) -> list[Answer]:
        return [Answer(self._answer(prompt)) for prompt in prompts]


def test_mate_ends_a_game_and_wins_it() -> None:
    player = Scripted("both", FOOLS_MATE)
    game = new_game(0, player, player)
    play_out([game], max_plies=100, claim_draw=False)
    assert (game.end, game.result, game.plies) == ("checkmate", "0-1", 4)


@pytest.mark.parametrize("text", ["e1e8", "", "e2e4 e7e5", "0000", "e7e8", "\n} 1-0 {"])
def test_any_other_text_than_a_legal_move_loses(text: str) -> None:
    white, black = Scripted("w", ["e2e4"]), Scripted("b", [text])
    game = new_game(0, white, black)
    play_out([game], max_plies=100, claim_draw=False)
    assert (game.end, game.result, game.plies) == ("illegal", "1-0", 1)
    assert game.points(white) == 1.0 and game.points(black) == 0.0
    read = chess.pgn.read_game(io.StringIO(pgn(game, "test")))
    assert read is not None and not read.errors
    assert read.headers["Result"] == "1-0"
    assert [move.uci() for move in read.mainline_moves()] == ["e2e4"]


def test_selfplay_counts_legal_plies_and_illegal_moves() -> None:
    # e2e4 is legal on the first ply, illegal on the second
    found = selfplay(Scripted("x", ["e2e4"]), 4).estimates
    assert found["selfplay/legal_plies"].value == 1.0
    assert found["selfplay/illegal"].value == 0.5
    assert (found["selfplay/illegal"].n, found["selfplay/legal_plies"].n) == (8, 4)
    assert found["selfplay/illegal_published"].value == 1.0
    assert found["selfplay/ends/illegal"].value == 1.0
    done = selfplay(Scripted("x", FOOLS_MATE), 3).estimates
    assert done["selfplay/legal_plies"].value == 4.0
    assert done["selfplay/illegal"].value == 0.0
    assert done["selfplay/illegal_published"].value == 0.25
    assert done["selfplay/ends/checkmate"].value == 1.0


def test_opening_plies_are_not_the_player_s() -> None:
    found = selfplay(Scripted("x", FOOLS_MATE), 1, starts=[FOOLS_MATE[:2]]).estimates
    assert found["selfplay/legal_plies"].value == 2.0


def test_a_match_exchanges_colours_from_each_opening() -> None:
    never, first = Scripted("never", [""]), FirstLegal()
    starts = openings(3)
    played = match(first, never, starts, max_plies=6)
    assert [game.white is first for game in played.games] == [True, False] * 3
    assert [game.board.move_stack[0].uci() for game in played.games] == [
        line[0] for line in starts for _ in range(2)
    ]
    assert played.estimates["match/score"].value == 1.0
    assert played.estimates["match/score"].n == 6
    assert played.estimates["match/forfeits"].value == 0.0
    lost = match(never, first, starts, max_plies=6)
    assert lost.estimates["match/score"].value == 0.0
    assert lost.estimates["match/forfeits"].value == 1.0
    assert lost.estimates["match/elo"].high < 0


def test_a_long_game_is_drawn() -> None:
    played = match(FirstLegal(), FirstLegal(), openings(2), max_plies=5)
    assert {game.end for game in played.games} == {"max_plies"}
    assert played.estimates["match/score"].value == 0.5
    assert played.estimates["match/elo"].value == 0.0


def test_a_model_plays_b_and_falls_back_only_if_asked() -> None:
    answerer = Says(lambda _: " a1a1 e2e4 E: 0.1 0.2 B: a1a1")
    board = chess.Board()
    assert ModelPlayer(answerer).choose([board], [0]) == ["a1a1"]
    assert ModelPlayer(answerer, fallback=True).choose([board], [0]) == ["e2e4"]
    assert ModelPlayer(Says(lambda _: "?"), fallback=True).choose([board], [0]) == [""]


def test_the_book_is_legal_and_more_starts_are_all_different() -> None:
    for line in BOOK.values():
        board = chess.Board()
        for move in line.split():
            board.push_uci(move)
        assert not board.is_game_over()
    many = openings(1_500, seed=3)
    assert len(set(many)) == 1_500
    assert openings(40, seed=3) == many[:40]
    assert openings(5, seed=4) != many[:5]


def test_pgn_files_hold_every_game(tmp_path: Path) -> None:
    played = match(FirstLegal(), FirstLegal(), openings(2), max_plies=5)
    path = tmp_path / "games.pgn"
    write_pgn(path, [("match", game) for game in played.games])
    with path.open() as file:
        read = [chess.pgn.read_game(file) for _ in range(4)]
        assert chess.pgn.read_game(file) is None
    assert [game.headers["Event"] for game in read if game] == ["match"] * 4
    assert all(game and game.headers["White"] == "first" for game in read)


def world_prompt(prompt: str, wrong_from: int = 99) -> str:
    """A faithful world that plays the first legal move, until it forgets to move the piece."""
    if prompt.startswith("P: "):
        board = chess.Board(prompt[3:].removesuffix(" M:"))
        move = min(one.uci() for one in board.legal_moves)
        return f" {move} E: 0.0 B: {move}"
    fen, move, history, _ = prompt[3:].split("+")
    row = transition(fen, move, history.split()[:-1])
    if len(history.split()) > wrong_from:
        return f"{fen}+0.001+0+0"
    return ENVIRONMENT.answer(row, "compact")


def test_a_faithful_world_lasts() -> None:
    walks = walk_worlds(Says(world_prompt), 2, max_plies=7)
    assert {(walk.plies, walk.end) for walk in walks} == {(7, "max_plies")}
    found = world_estimates(walks)
    assert found["world/plies"].value == 7.0
    assert found["world/faithful"].value == found["world/exact"].value == 1.0


def test_a_world_departs_at_its_first_error() -> None:
    walks = walk_worlds(Says(lambda prompt: world_prompt(prompt, wrong_from=3)), 2)
    assert {(walk.plies, walk.steps, walk.end) for walk in walks} == {(3, 4, "wrong_board")}
    found = world_estimates(walks)
    assert found["world/faithful"].value == 0.0
    assert found["world/exact"].value == 3 / 4
    assert found["world/ends/wrong_board"].value == 1.0


def test_a_world_may_call_its_player_s_move_illegal() -> None:
    def answer(prompt: str) -> str:
        return " e2e5 E: 0.0 B: e2e5" if prompt.startswith("P: ") else world_prompt(prompt)

    (walk,) = walk_worlds(Says(answer), 1)
    assert (walk.plies, walk.end) == (0, "illegal")
    assert world_estimates([walk])["world/faithful"].value == 1.0
    (silent,) = walk_worlds(Says(lambda _: "?"), 1)
    assert (silent.plies, silent.end) == (0, "no_move")


def test_a_world_goes_on_from_an_opening_with_its_history() -> None:
    seen: list[str] = []

    def answer(prompt: str) -> str:
        seen.append(prompt)
        return world_prompt(prompt)

    walk_worlds(Says(answer), 1, starts=[FOOLS_MATE[:2]], max_plies=1)
    assert seen[1].split("+")[2].split()[:2] == FOOLS_MATE[:2]


@pytest.mark.engine
def test_stockfish_beats_the_first_legal_move() -> None:
    with EnginePlayer(find_engine(), nodes=300) as engine:
        played = match(engine, FirstLegal(), openings(1))
        again = match(engine, FirstLegal(), openings(1))
    assert played.estimates["match/score"].value == 1.0
    assert {game.end for game in played.games} == {"checkmate"}
    assert [game.board.move_stack for game in again.games] == [
        game.board.move_stack for game in played.games
    ]
    assert "300 nodes" in played.games[0].white.name


@pytest.mark.engine
def test_a_skill_level_is_part_of_the_name() -> None:
    with EnginePlayer(find_engine(), nodes=50, skill=3) as engine:
        assert "skill 3" in engine.name
        assert (
            chess.Move.from_uci(engine.choose([chess.Board()], [0])[0]) in chess.Board().legal_moves
        )


def test_an_engine_that_is_none_or_cannot_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="none") as caught:
        EnginePlayer(tmp_path / "none", nodes=10)
    assert "\n" not in str(caught.value)
    fake = install_fake(tmp_path)
    with pytest.raises(EngineError, match="Skill Level"):
        EnginePlayer(fake, nodes=10, skill=3)


def test_an_engine_plays_on_from_the_moves_of_a_game(tmp_path: Path) -> None:
    said = tmp_path / "said"
    script = tmp_path / "engine.sh"
    script.write_text(
        f'#!/bin/sh\nwhile read line; do echo "$line" >> {said}; case $line in\n'
        'uci) echo "id name Sly"; echo "option name Skill Level type spin"; echo uciok;;\n'
        "isready) echo readyok;;\ngo*) echo bestmove g8f6;;\nesac; done\n"
    )
    script.chmod(0o755)
    board = chess.Board()
    board.push_uci("g1f3")
    with EnginePlayer(script, nodes=10, skill=3) as engine:
        assert engine.name == "Sly (10 nodes, skill 3)"
        assert engine.choose([board, board, board], [0, 0, 1]) == ["g8f6"] * 3
    lines = said.read_text().splitlines()
    assert "setoption name Skill Level value 3" in lines
    assert lines.count("ucinewgame") == 2
    assert lines.count(f"position fen {chess.STARTING_FEN} moves g1f3") == 3
    assert lines.count("go nodes 10") == 3


def test_an_engine_that_dies_is_one_line(tmp_path: Path) -> None:
    fake = install_fake(tmp_path, "die", faults=9)
    with EnginePlayer(fake, nodes=10) as engine, pytest.raises(EngineError, match="engine"):
        engine.choose([chess.Board()], [0])
