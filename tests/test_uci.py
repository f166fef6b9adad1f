"""The model speaks UCI, and survives whatever is said to it."""

from __future__ import annotations

import os
import random
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from queue import SimpleQueue

import chess
import chess.engine
import pytest
import torch

from rookworld.cli.dispatch import main
from rookworld.cli.play import LONGEST_LINE, lines_of
from rookworld.evaluation.generator import Answer, load_answerer
from rookworld.evaluation.opinion import Thinker
from rookworld.runtime.errors import ModelError
from rookworld.tasks.engine import find_engine
from rookworld.tasks.task import Style
from rookworld.uci import OPTIONS, serve

START = " e2e4 d2d4 g1f3 E: 0.3 0.2 0.1 B: e2e4"
COMMAND = [sys.executable, "-m", "rookworld", "uci"]


class Says:
    style: Style = "compact"
    samples = 1

    def __init__(self, text: str, gate: threading.Event | None = None) -> None:
        self.text, self.gate = text, gate

    def answer(self, prompts: Sequence[str], salts: Sequence[int] = ()) -> list[Answer]:
        if self.gate:
            assert self.gate.wait(10)
        return [Answer(self.text) for _ in prompts]


def spoken(text: str, *commands: str) -> list[str]:
    def load(model: str, checkpoint: str) -> Thinker:
        if model == "broken":
            raise ModelError("no model broken")
        return Thinker(Says(text))

    said = list(serve(load, commands))
    return [re.sub(r" nodes (\d+) nps \d+ time \d+", r" nodes \1", line) for line in said]


class Talk:
    """A conversation in which the program waits for answers."""

    def __init__(self, answerer: Says) -> None:
        self.sent: SimpleQueue[str] = SimpleQueue()
        self.heard: SimpleQueue[str] = SimpleQueue()
        self.thread = threading.Thread(target=self._run, args=(answerer,))
        self.thread.start()

    def _run(self, answerer: Says) -> None:
        for line in serve(lambda *_: Thinker(answerer), iter(self.sent.get, "")):
            self.heard.put(line)

    def send(self, *lines: str) -> None:
        for line in lines:
            self.sent.put(line)

    def until(self, start: str) -> list[str]:
        lines = [self.heard.get(timeout=10)]
        while not lines[-1].startswith(start):
            lines.append(self.heard.get(timeout=10))
        return lines

    def quiet(self) -> bool:
        return self.heard.empty()

    def close(self) -> None:
        self.send("quit")
        self.thread.join(10)
        assert not self.thread.is_alive()


# --- words ---------------------------------------------------------------------------------------


def test_an_introduction_declares_every_option() -> None:
    said = spoken("", "uci", "isready", "", "quit", "uci")
    assert said[:2] == ["id name RookWorld nano", "id author RookWorld"]
    assert said[-2:] == ["uciok", "readyok"]
    names = [re.match(r"option name (.+) type (check|spin|string) default ", line) for line in said]
    assert [found[1] for found in names if found] == list(OPTIONS)


def test_evaluations_and_mates_are_shown() -> None:
    text = " e7e5 c7c5 d8h4 g7g5 E: 0.3 -999.99 999.98 -0.1 B: e7e5"
    many = "setoption name MultiPV value 5"
    assert spoken(text, many, "position startpos moves e2e4", "go movetime 100") == [
        "info depth 1 multipv 1 score cp 30 nodes 1 pv e7e5",
        "info depth 1 multipv 2 score cp -10 nodes 1 pv g7g5",
        "info depth 1 multipv 3 score mate -1 nodes 1 pv c7c5",
        "bestmove e7e5",
    ]


@pytest.mark.parametrize(
    ("text", "move"),
    [
        (" e2e4 d2d4 E: 0.1 0.2 B: d2d4", "d2d4"),
        (" e2e5 g1f3 d2d4 E: 0.1 0.1 0.2 B: e2e5", "d2d4"),
        (" e2e5 E: 0.1 B: e2e5", "a2a3"),
        ("nonsense", "a2a3"),
    ],
)
def test_a_legal_move_is_always_played(text: str, move: str) -> None:
    said = spoken(text, "go")
    assert said[-1] == f"bestmove {move}"
    assert any(line.startswith("info string ") for line in said) == (move != text[-4:])


def test_no_move_in_a_finished_game() -> None:
    mated = "position startpos moves f2f3 e7e5 g2g4 d8h4"
    stale = "position fen 7k/5Q2/6K1/8/8/8/8/8 b - - 0 1"
    ends = ["info depth 0 score mate 0", "bestmove (none)"]
    assert spoken("", mated, "go", stale, "go") == [*ends, "info depth 0 score cp 0", ends[1]]


@pytest.mark.parametrize(
    "bad",
    [
        "position",
        "position fen",
        "position fen 8/8/8/8/8/8/8/8 w - - 0 1",
        "position fen bqnrkbrn/pppppppp/8/8/8/8/PPPPPPPP/BQNRKBRN w GDgd - 0 1",
        "position startpos moves e2e5",
        "position startpos moves \x00",
        "position somewhere",
    ],
)
def test_a_bad_position_is_refused_and_the_old_one_stays(bad: str) -> None:
    good = "position startpos moves e2e4"
    said = spoken(" e7e5 E: 0.0 B: e7e5", good, bad, "go")
    assert said[0].startswith("info string position refused, the one before stays: ")
    assert said[-1] == "bestmove e7e5"


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("setoption name UCI_Chess960 value true", "standard chess only"),
        ("setoption name Threads value many", "expected 1 to 1024"),
        ("setoption name MultiPV value 6", "expected 1 to 5"),
        ("setoption name Sides value maybe", "expected true or false"),
        ("setoption name Temperature value hot", "not a number"),
        ("setoption name Temperature value -1", "give 0 (greedy) or more"),
        ("setoption name TopP value 0", "at most 1"),
        ("setoption name Contempt value 3", "no such option: Contempt"),
    ],
)
def test_a_bad_option_is_refused(line: str, why: str) -> None:
    (said,) = spoken("", line)
    assert said.startswith("info string ") and why in said


@pytest.fixture
def threads_kept() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("threads_kept")
def test_what_lichess_bot_sets_is_accepted() -> None:
    options = {"Move Overhead": 100, "Threads": 2, "Hash": 256, "SyzygyPath": "./syzygy/"}
    lines = [f"setoption name {name} value {value}" for name, value in options.items()]
    lines += ["setoption name UCI_ShowWDL value true", "setoption name ponder value true"]
    assert spoken("", *lines, "isready") == ["readyok"]


def test_a_model_that_is_none_leaves_the_one_before() -> None:
    said = spoken(START, "isready", "setoption name Model value broken", "isready", "go")
    assert "info string model refused, the one before stays: no model broken" in said
    assert said[-1] == "bestmove e2e4"


def test_the_first_model_has_to_be_there() -> None:
    def load(*_: str) -> Thinker:
        raise ModelError("no model")

    with pytest.raises(ModelError):
        list(serve(load, ["uci", "isready"]))


def test_search_moves_are_the_only_ones() -> None:
    said = spoken(START, "go searchmoves d2d4 g1f3 wtime 3")
    assert said[0] == "info depth 1 multipv 1 score cp 20 nodes 1 pv d2d4"
    assert said[-1] == "bestmove d2d4"
    assert spoken(START, "go searchmoves h2h4")[-1] == "bestmove h2h4"
    assert spoken(START, "go searchmoves e2e5")[-1] == "bestmove e2e4"


def test_win_draw_loss_where_it_is_asked_for() -> None:
    text = " e2e4 d2d4 g1f3 E: 0.3 999.99 -999.98 B: e2e4"
    wanted = ["setoption name UCI_ShowWDL value true", "setoption name MultiPV value 3"]
    said = spoken(text, *wanted, "go")
    chances = [line.split(" wdl ")[1].split()[:3] for line in said[:3]]
    assert all(sum(map(int, one)) == 1000 for one in chances)
    assert chances[1:] == [["1000", "0", "0"], ["0", "0", "1000"]]


def test_the_reply_it_expects_where_it_ponders() -> None:
    said = spoken(START, "setoption name Ponder value true", "go")
    assert said[0].endswith("nodes 2 pv e2e4 a7a5")
    assert said[-1] == "bestmove e2e4 ponder a7a5"


# --- time ----------------------------------------------------------------------------------------


@pytest.fixture
def talk() -> Iterator[Talk]:
    conversation = Talk(Says(START))
    yield conversation
    conversation.close()


@pytest.mark.parametrize(("go", "end"), [("go infinite", "stop"), ("go ponder", "ponderhit")])
def test_an_endless_search_waits_for_its_end(talk: Talk, go: str, end: str) -> None:
    talk.send(go)
    assert talk.until("info")[-1].startswith("info depth 1 multipv 1 score cp 30")
    talk.send("isready")
    assert talk.until("readyok") == ["readyok"]
    assert talk.quiet()
    talk.send(end)
    assert talk.until("bestmove") == ["bestmove e2e4"]


def test_it_listens_while_it_thinks() -> None:
    gate = threading.Event()
    talk = Talk(Says(START, gate))
    talk.send("isready")
    talk.until("readyok")
    talk.send("go nodes 5", "isready", "position startpos moves e2e4", "uci")
    assert talk.until("uciok")[0] == "readyok"
    assert talk.quiet()
    gate.set()
    assert talk.until("bestmove")[-1] == "bestmove e2e4"
    talk.close()


def test_garbage_and_long_lines_are_survived() -> None:
    rng = random.Random(0)
    words = ["position", "fen", "moves", "setoption", "name", "value", "\x00", "é", "🙂", "-1"]
    words += ["startpos", "e2e4", "w", "8/8", "stop", "ponderhit", "uci", "debug"]
    noise = [" ".join(rng.choices(words, k=rng.randrange(6))) for _ in range(10_000)]
    said = spoken(START, *noise, "x" * 2**20, "position " + "y " * 2**19, "isready", "go")
    assert "readyok" in said
    assert said[-1].startswith("bestmove ")


def test_a_line_without_end_is_left_out() -> None:
    read, write = os.pipe()
    with os.fdopen(write, "wb") as file:

        def fill() -> None:
            file.write(b"uci\nbad \xff\n" + b"z" * (LONGEST_LINE + 200_000) + b"\nisready\nlast")
            file.close()

        filling = threading.Thread(target=fill)
        filling.start()
        found = list(lines_of(read))
        filling.join()
    os.close(read)
    assert found == ["uci", "bad �", "isready", "last"]


# --- programs ------------------------------------------------------------------------------------


def test_python_chess_plays_analyses_and_configures() -> None:
    with chess.engine.SimpleEngine.popen_uci(COMMAND, timeout=60) as engine:
        board = chess.Board()
        engine.configure({"Threads": 1, "Hash": 256, "Move Overhead": 100, "Temperature": "0.0"})
        lines = engine.analyse(board, chess.engine.Limit(depth=1), multipv=3)
        assert [line["multipv"] for line in lines] == [1, 2, 3]
        assert all(line["pv"][0] in board.legal_moves and line["score"] for line in lines)
        limit = chess.engine.Limit(white_clock=1, black_clock=1, white_inc=0.1, black_inc=0.1)
        played = engine.play(board, limit, info=chess.engine.INFO_ALL)
        assert played.move == lines[0]["pv"][0]
        engine.configure({"Sides": True, "UCI_ShowWDL": True, "LegalOnly": True})
        seen = engine.analyse(board, chess.engine.Limit(nodes=1))
        assert seen["pv"][0] in board.legal_moves and seen["wdl"].white().total() == 1000
        only = [chess.Move.from_uci("a2a4")]
        assert engine.play(board, limit, root_moves=only).move == only[0]
        with engine.analysis(board) as endless:
            assert endless.get()["depth"] == 1
        play_with(engine, engine, games=1, plies=20)
        ponder_with(engine, limit)


def ponder_with(engine: chess.engine.SimpleEngine, limit: chess.engine.Limit) -> None:
    """It guesses a reply, which comes at first (`ponderhit`), and then does not (`stop`)."""
    board = chess.Board()
    for hit in (True, False, False):
        played = engine.play(board, limit, ponder=True)
        assert played.move is not None and played.ponder is not None
        assert played.move in board.legal_moves
        board.push(played.move)
        others = [move for move in board.legal_moves if move != played.ponder]
        board.push(played.ponder if hit else others[0])


COMPLIANCE = [
    "position startpos",
    "position fen 3r2k1/p5n1/1pq1p2p/2p3p1/2P1P1n1/1P1P2pP/PN1Q2K1/5R2 w - - 0 27",
    "go wtime 100",
    "position fen rnbqkbnr/pppppppp/8/8/4P3/8/PPPP1PPP/RNBQKBNR b KQkq - 0 1",
    "go btime 100",
    "go wtime 100 winc 100 btime 100 binc 100",
    "go btime 100 binc 100 wtime 100 winc 100",
    "ucinewgame",
    "position startpos",
    "go wtime 100 btime 100",
    "position startpos moves e2e4 e7e5",
    "go wtime 100 btime 100",
]
"""What `fastchess --compliance` sends, and expects to be ready after each."""


def test_the_compliance_list_of_fastchess() -> None:
    def load(model: str, checkpoint: str) -> Thinker:
        return Thinker(load_answerer(model))

    lines = ["uci", "isready", *(part for line in COMPLIANCE for part in (line, "isready"))]
    said = list(serve(load, [*lines, "quit"]))
    assert said.count("readyok") == 1 + len(COMPLIANCE)
    goes = sum(line.startswith("go ") for line in COMPLIANCE)
    assert sum(line.startswith("bestmove ") for line in said) == goes
    info = r"info depth \d+ multipv 1 score cp -?\d+ nodes \d+ nps \d+ time \d+ pv [a-h1-8]{4}"
    for line, after in pairwise(said):
        assert not after.startswith("bestmove") or re.fullmatch(info, line)


def play_with(
    white: chess.engine.SimpleEngine, black: chess.engine.SimpleEngine, games: int, plies: int
) -> None:
    for game in range(games):
        board = chess.Board()
        while not board.is_game_over(claim_draw=True) and board.ply() < plies:
            mover = (white, black)[(board.ply() + game) % 2]
            move = mover.play(board, chess.engine.Limit(nodes=20), game=object()).move
            assert move is not None and move in board.legal_moves
            board.push(move)


@pytest.mark.engine
@pytest.mark.slow
def test_seventy_games_without_a_protocol_error() -> None:
    open_engine = chess.engine.SimpleEngine.popen_uci
    with open_engine(COMMAND, timeout=60) as ours, open_engine(str(find_engine())) as theirs:
        play_with(ours, theirs, games=50, plies=160)
        ours.configure({"Temperature": "0.6"})
        play_with(ours, ours, games=20, plies=160)


@pytest.mark.slow
def test_the_first_move_comes_within_two_seconds_and_the_next_in_a_tenth() -> None:
    """On a machine that has nothing else to do; the best of three starts."""
    starts, limit = [], chess.engine.Limit(time=0.1)
    for _ in range(3):
        began, took_s = time.monotonic(), []
        with chess.engine.SimpleEngine.popen_uci(COMMAND, timeout=60) as engine:
            board = chess.Board()
            board.push(engine.play(board, limit).move or chess.Move.null())
            starts.append(time.monotonic() - began)
            while not board.is_game_over() and board.ply() < 40:
                began = time.monotonic()
                board.push(engine.play(board, limit).move or chess.Move.null())
                took_s.append(time.monotonic() - began)
    assert min(starts) <= 2.0
    assert sorted(took_s)[len(took_s) // 2] <= 0.1


def test_what_takes_seconds_to_load_is_not_loaded() -> None:
    """torch's compiler and its symbolic algebra, which nobody asks for a move."""
    code = (
        "import sys\nfrom rookworld.cli.dispatch import main\nmain(['uci', 'nano'])\n"
        "print([name for name in ('torch._dynamo', 'sympy') if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        input="go\nquit\n",
        capture_output=True,
        text=True,
        check=False,
    )
    bestmove, loaded = done.stdout.splitlines()[-2:]
    assert bestmove.startswith("bestmove ")
    assert loaded == "[]"


def test_uci_answers_on_standard_output(
    tiny_folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:

    script = tmp_path / "lines"
    script.write_text("uci\nposition startpos\ngo\nquit\n")
    with script.open() as file:
        monkeypatch.setattr("sys.stdin", file)
        assert main(["uci", str(tiny_folder), "--device", "cpu"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "id name RookWorld tiny"
    assert lines[-1].startswith("bestmove ")
