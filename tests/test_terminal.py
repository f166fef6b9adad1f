"""A game in the terminal, through a pipe: every command, and whatever else is typed."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path

import chess
import chess.pgn
import pytest

from rookworld.cli.dispatch import main
from rookworld.cli.terminal import PlaySettings, TerminalGame, drawing, read_move, score_text
from rookworld.evaluation.generator import Answer
from rookworld.evaluation.opinion import Thinker
from rookworld.tasks.task import Style


class Replies:
    """Answers 1. e4 and 1. d4, and else says nothing that can be read."""

    style: Style = "compact"
    samples = 1

    def answer(self, prompts: Sequence[str], salts: Sequence[int] = ()) -> list[Answer]:
        black = " e7e5 d7d5 E: -0.3 -0.4 B: e7e5"
        return [
            Answer(black if " b " in prompt else " e2e4 E: 999.99 B: e2e4") for prompt in prompts
        ]


class Adviser:
    def ask(self, board: chess.Board) -> tuple[str, list[tuple[str, int]]]:
        return "Wise 1", [("d2d4", 45), ("g1f3", -99_997)] if board.turn else []


class NoAdviser:
    def ask(self, board: chess.Board) -> tuple[str, list[tuple[str, int]]]:
        return "", []


def told(game: TerminalGame, *lines: str) -> list[str]:
    return [answer for line in lines for answer in game.obey(line)]


def begun(adviser: bool = True, **settings: object) -> TerminalGame:
    known = PlaySettings(**settings)  # type: ignore[arg-type]
    game = TerminalGame(Thinker(Replies()), "nano", known, Adviser() if adviser else NoAdviser())
    list(game.begin())
    return game


def test_the_board_is_seen_from_ones_own_side() -> None:
    white = list(drawing(chess.Board(), white_below=True))
    assert white[0] == "8  ♜ ♞ ♝ ♛ ♚ ♝ ♞ ♜"
    assert white[4] == "4  · · · · · · · ·"
    assert white[-1] == "   a b c d e f g h"
    black = list(drawing(chess.Board(), white_below=False))
    assert black[0] == "1  ♖ ♘ ♗ ♔ ♕ ♗ ♘ ♖"
    assert black[-1] == "   h g f e d c b a"
    game = begun(color="black")
    assert told(game, "board")[-1] == black[-1]
    assert told(game, "flip")[-1] == white[-1]


def test_moves_in_san_and_uci_and_nothing_else() -> None:
    board = chess.Board()
    for text in ("e4", "e2e4", "E2E4", "Nf3", "nf3", "g1f3"):
        assert read_move(board, text), text
    for text in (
        "e5",
        "e2e5",
        "Nd4",
        "",
        "--",
        "0000",
        "Z0",
        "a1a1",
        "hello",
        "e4 e5",
        "\x00",
        "É",
    ):
        assert read_move(board, text) is None, text
    castles = chess.Board("4k3/P7/8/8/8/8/8/4K2R w K - 0 1")
    for text in ("O-O", "0-0", "e1g1", "a8=Q", "a8=q", "a7a8n", "a8N"):
        assert read_move(castles, text), text


def test_the_model_answers_and_says_what_it_thinks() -> None:
    game = begun()
    said = told(game, "e4")
    assert said[0] == "nano: 1... e5  thinks: e5 -0.30, d5 -0.40"
    assert said[1].startswith("8  ")
    assert game.board.ply() == 2 and game.asked() == "white 2> "
    assert told(game, "Ke3") == ["Ke3: no legal move here, and no command; see `help`"]
    assert told(game, "e7e6", "  ", "\x1b[A")[0].startswith("e7e6: no legal move")


def test_a_model_that_says_nothing_plays_on() -> None:
    said = told(begun(), "e4", "Nf3")
    assert "not legal" in said[10] and "the best legal move of the list" in said[10]


def test_take_back_is_to_ones_own_move() -> None:
    game = begun()
    told(game, "e4", "Nf3", "undo")
    assert [move.uci() for move in game.board.move_stack] == ["e2e4", "e7e5"]
    told(game, "undo")
    assert game.board == chess.Board()
    assert told(game, "undo") == ["nothing to take back"]
    black = begun(color="black")
    assert black.board.ply() == 1
    assert told(black, "undo") == ["nothing to take back"] and black.board.ply() == 1


def test_hints_stand_beside_the_engines() -> None:
    assert told(begun(), "hint") == [
        "nano                Wise 1",
        "e4      #1          d4      +0.45",
        "                    Nf3     #-3",
    ]
    assert told(begun(adviser=False), "hint") == ["nano", "e4      #1"]


def test_sides_are_changed() -> None:
    game = begun()
    said = told(game, "go")
    assert said[0].startswith("nano: 1. e4")
    assert told(game, "c5")[0].startswith("nano: 2. ")


def test_positions_and_games_are_loaded_and_saved(tmp_path: Path) -> None:
    game, kept = begun(save=tmp_path / "kept.pgn"), tmp_path / "other.pgn"
    told(game, "e4", f"save {kept}")
    for path in (kept, tmp_path / "kept.pgn"):
        read = chess.pgn.read_game(io.StringIO(path.read_text()))
        assert read is not None and (read.headers["White"], read.headers["Black"]) == (
            "you",
            "nano",
        )
        assert [move.uci() for move in read.mainline_moves()] == ["e2e4", "e7e5"]
    other = begun(pgn=kept)
    assert other.board.ply() == 2
    fen = "4k3/P7/8/8/8/8/8/4K2R w K - 0 1"
    assert told(other, f"fen {fen}", "fen")[-1] == fen
    told(other, "a8=Q", "undo")
    assert other.board.fen() == fen
    assert '[FEN "4k3/P7/8/8/8/8/8/4K2R w K - 0 1"]' in told(other, "pgn")
    assert told(other, f"pgn {kept}", "fen")[-1].startswith("rnbqkbnr/pppp1ppp")
    assert told(other, "new", "fen")[-1] == chess.STARTING_FEN
    assert begun(fen=fen).board.fen() == fen


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("fen 8/8/8/8/8/8/8/8 w - - 0 1", "not a legal position"),
        ("fen nonsense", "not a FEN"),
        ("pgn absent.pgn", "absent.pgn: cannot be read"),
        ("save", "needs the name"),
        ("save /dev/null/x.pgn", "cannot be written"),
    ],
)
def test_a_mistake_is_a_line_and_the_game_goes_on(line: str, why: str) -> None:
    game = begun()
    (said,) = told(game, line)
    assert why in said
    assert game.board == chess.Board() and not game.over


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("root:x:0:0:root:/root:/bin/bash\n", "no game in it"),
        ("", "no game in it"),
        ('[White "Ann"]\n\n*\n', "no game in it"),
        ("1. e4 and so on\n", "cannot read 'and'"),
        ('[FEN "8/8/8/8/8/8/8/8 w - - 0 1"]\n\n*\n', "not a legal position"),
    ],
)
def test_a_text_without_a_game_leaves_the_game_as_it_was(
    tmp_path: Path, text: str, why: str
) -> None:
    (tmp_path / "text").write_text(text)
    game = begun()
    told(game, "e4")
    before = game.board.copy()
    (said,) = told(game, f"pgn {tmp_path / 'text'}")
    assert why in said and game.board == before and game.board.move_stack


def test_a_game_ends(tmp_path: Path) -> None:
    broken = tmp_path / "broken.pgn"
    broken.write_text("1. e4 e5 2. Ke8 *\n")
    game = begun(fen="7k/8/6K1/8/8/8/8/1Q6 w - - 0 1")
    assert "not a game" in told(game, f"pgn {broken}")[0]
    assert told(game, "Qb8")[-1] == "1-0  checkmate"
    assert told(game, "a1a2", "hint") == [
        "the game is over: `undo`, `new` or `quit`",
        "1-0  checkmate",
    ]
    assert '[Result "1-0"]' in told(game, "pgn")
    told(game, "undo")
    assert told(game, "Qb7")[-1].startswith("   a b c")


def test_scores_are_pawns_or_mates() -> None:
    assert [score_text(cp) for cp in (0, -35, 99_998, -99_999, 100_000)] == [
        "+0.00",
        "-0.35",
        "#2",
        "#-1",
        "#1",
    ]


def test_the_command_plays_through_a_pipe(
    tiny_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("help\ne4\nundo\nd4\nfen\nquit\nnot read\n"))
    assert main(["play", str(tiny_folder), "--device", "cpu"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("You are white, tiny plays the other side")
    assert "3P4/8/PPP1PPPP/RNBQKBNR w" in lines[-1]
    monkeypatch.setattr("sys.stdin", io.StringIO("e5\n"))
    assert main(["play", str(tiny_folder), "--device", "cpu", "--color", "black"]) == 0
    assert main(["play", str(tiny_folder), "--fen", "nonsense"]) == 2
    assert "not a FEN" in capsys.readouterr().err
    assert main(["play", str(tiny_folder), "--engine", "/no/engine"]) == 2
