"""A: truth for every class of move, the verdict table, and the laws of scoring."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Iterator

import chess
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rookworld.runtime.errors import DataError
from rookworld.tasks.environment import ENVIRONMENT, KINDS, transition
from rookworld.tasks.hacks import hacks
from rookworld.tasks.notation import MOVES, flip_fen, flip_move
from rookworld.tasks.reward import FORMAT_ONLY, ONE_WRONG, RewardRules, Shaping
from rookworld.tasks.task import END, EnvironmentRow

RULES = RewardRules()
SHAPINGS: list[Shaping] = ["continuous", "linear", "graduated", "binary"]
START = chess.STARTING_FEN
AFTER_E4 = "rnbqkbnr/pppppppp/8/8/4P3/8/PPPP1PPP/RNBQKBNR b KQkq - 0 1"
CASTLING = "r3k2r/pppppppp/8/8/8/8/PPPPPPPP/R3K2R w KQkq - 0 1"
QUIET = transition(START, "e2e4")
ILLEGAL = transition(START, "e2e5")

TRUTHS = [  # name, position, move, kind, reward, terminated
    ("quiet", START, "g1f3", "quiet", 0.001, False),
    ("capture", "4k3/8/8/3p4/4P3/8/8/4K3 w - - 0 1", "e4d5", "capture", 0.001, False),
    ("castle short", CASTLING, "e1g1", "castle", 0.001, False),
    ("castle long", CASTLING, "e1c1", "castle", 0.001, False),
    ("castle black", CASTLING.replace(" w ", " b "), "e8c8", "castle", 0.001, False),
    ("en passant", "4k3/8/8/3pP3/8/8/8/4K3 w - d6 0 2", "e5d6", "en_passant", 0.001, False),
    ("promotion", "8/P6k/8/8/8/8/8/K7 w - - 0 1", "a7a8q", "promotion", 0.001, False),
    ("underpromotion", "8/P6k/8/8/8/8/8/K7 w - - 0 1", "a7a8r", "promotion", 0.001, False),
    ("check", "4k3/8/8/8/8/8/8/R3K3 w Q - 0 1", "a1a8", "quiet", 0.001, False),
    ("checkmate", "6k1/5ppp/8/8/8/8/8/R3K3 w - - 0 1", "a1a8", "mate", 1.0, True),
    ("black mates", flip_fen("6k1/5ppp/8/8/8/8/8/R3K3 w - - 0 1"), "a8a1", "mate", 1.0, True),
    ("promotion mates", "7k/P4ppp/8/8/8/8/8/K7 w - - 0 1", "a7a8q", "mate", 1.0, True),
    ("stalemate", "7k/8/5K2/6Q1/8/8/8/8 w - - 0 1", "g5g6", "draw", 0.5, True),
    ("bare kings", "4k3/8/8/8/8/8/3p4/4K3 w - - 0 1", "e1d2", "draw", 0.5, True),
    ("75 moves", "4k3/8/8/8/8/8/8/R3K3 w - - 149 90", "a1a2", "draw", 0.5, True),
    ("mate on move 75", "6k1/5ppp/8/8/8/8/8/R3K3 w - - 149 90", "a1a8", "mate", 1.0, True),
    ("50 moves go on", "4k3/8/8/8/8/8/8/R3K3 w - - 99 90", "a1a2", "quiet", 0.001, False),
    ("illegal", START, "e2e5", "illegal", -1.0, False),
    ("pinned", "4k3/4r3/8/8/8/8/4N3/4K3 w - - 0 1", "e2c3", "illegal", -1.0, False),
    ("null move", START, "0000", "illegal", -1.0, False),
    ("castling as rook move", CASTLING, "e1h1", "illegal", -1.0, False),
    ("other side's move", START, "e7e5", "illegal", -1.0, False),
    ("no promotion piece", "8/P6k/8/8/8/8/8/K7 w - - 0 1", "a7a8", "illegal", -1.0, False),
    ("not a move", START, "Nf3", "illegal", -1.0, False),
    ("nothing", START, "", "illegal", -1.0, False),
    ("after mate", "R5k1/5ppp/8/8/8/8/8/4K3 b - - 1 1", "g8h8", "illegal", -1.0, False),
]


@pytest.mark.parametrize(
    ("fen", "move", "kind", "reward", "over"), [t[1:] for t in TRUTHS], ids=[t[0] for t in TRUTHS]
)
def test_truth_of_every_class(fen: str, move: str, kind: str, reward: float, over: bool) -> None:
    row = transition(fen, move)
    assert (row.kind, row.reward, row.terminated) == (kind, reward, over)
    assert row.truncated == (kind == "illegal")
    assert (row.next_fen == fen) == (kind == "illegal")


def test_the_new_fen_is_written_as_python_chess_does() -> None:
    assert QUIET.next_fen == AFTER_E4  # no en passant square: no capture is legal
    taken = "4k3/8/8/8/3p4/8/4P3/4K3 w - - 0 1"
    assert transition(taken, "e2e4").next_fen.split()[3] == "e3"


def test_an_illegal_move_leaves_the_fen_to_the_letter() -> None:
    other_tools = "rnbqkbnr/pppppppp/8/8/4P3/8/PPPP1PPP/RNBQKBNR b KQkq e3 0 1"
    assert transition(other_tools, "e2e4").next_fen == other_tools


def test_history_keeps_ten_plies_and_ends_with_the_move() -> None:
    row = transition(START, "e2e4", [f"a{n}" for n in range(12)])
    assert row.history == (*(f"a{n}" for n in range(3, 12)), "e2e4")


def test_a_bad_position_is_the_users_mistake() -> None:
    with pytest.raises(DataError, match="not a position: 'nonsense'"):
        transition("nonsense", "e2e4")


def is_rare(board: chess.Board, move: chess.Move) -> bool:
    """Castling, en passant, promotion or mate, which random play hardly ever finds."""
    if board.is_castling(move) or board.is_en_passant(move) or move.promotion:
        return True
    board.push(move)
    mate = board.is_checkmate()
    board.pop()
    return mate


def plies(count: int, seed: int) -> Iterator[tuple[str, str]]:
    """Random plies of random games and endgames, rare moves often, one in six a stray."""
    rng, done = random.Random(seed), 0
    starts = [START, CASTLING, *(fen for name, fen, *_ in TRUTHS if name in ENDINGS)]
    while done < count:
        board = chess.Board(rng.choice(starts))
        for _ in range(rng.randint(1, 120)):
            legal = [move.uci() for move in board.legal_moves]
            if not legal or board.is_insufficient_material() or board.is_seventyfive_moves():
                break
            stray = rng.choice([rng.choice(MOVES), "0000", "a1a1", "e9e4", "O-O", "e2 e4"])
            rare = [move.uci() for move in board.legal_moves if is_rare(board, move)]
            move = rng.choice(rare or legal) if rng.random() < 1 / 2 else rng.choice(legal)
            yield board.fen(), stray if rng.random() < 1 / 6 else move
            done += 1
            board.push_uci(rng.choice(legal))


ENDINGS = ("en passant", "promotion", "checkmate", "stalemate", "75 moves", "bare kings")


def agree(count: int, seed: int) -> Counter[str]:
    """Compare `transition` with an independent reading of python-chess; count the classes."""
    kinds: Counter[str] = Counter()
    for fen, text in plies(count, seed):
        row = transition(fen, text)
        after, board = chess.Board(fen), chess.Board(fen)
        try:
            after.push_uci(text)
            legal = chess.Move.from_uci(text) in board.legal_moves and text != "0000"
        except ValueError:
            legal = False
        mate = legal and after.is_checkmate()
        draw = legal and not mate and after.is_game_over()
        reward = -1.0 if not legal else 1.0 if mate else 0.5 if draw else 0.001
        assert row.next_fen == (after.fen() if legal else fen)
        assert (row.reward, row.terminated, row.truncated) == (reward, mate or draw, not legal)
        kinds[row.kind] += 1
    return kinds


def test_truth_agrees_with_python_chess_on_random_plies() -> None:
    assert set(agree(1_500, seed=1)) == set(KINDS)


@pytest.mark.slow
def test_truth_agrees_with_python_chess_on_ten_thousand_plies(
    capsys: pytest.CaptureFixture[str],
) -> None:
    kinds = agree(10_000, seed=2)
    with capsys.disabled():
        print("\nplies per class:", dict(kinds.most_common()))  # noqa: T201
    assert kinds.total() >= 10_000 and min(kinds[kind] for kind in KINDS) >= 20


def score(row: EnvironmentRow, completion: str, rules: RewardRules = RULES) -> float:
    return ENVIRONMENT.verify(row, completion, rules).total


def gold(row: EnvironmentRow) -> str:
    return ENVIRONMENT.answer(row, "compact")


@pytest.mark.parametrize("shaping", SHAPINGS)
@pytest.mark.parametrize(("fen", "move"), [t[1:3] for t in TRUTHS], ids=[t[0] for t in TRUTHS])
def test_gold_scores_one(fen: str, move: str, shaping: Shaping) -> None:
    row = transition(fen, move)
    rules = RewardRules(reward_shaping=shaping)
    assert score(row, gold(row), rules) == 1.0
    assert score(row, f" {gold(row).replace('+', ' + ').replace(' ', '  ')} {END}{END}", rules) == 1
    assert ENVIRONMENT.verify(row, gold(row), rules).reason == "exact"


HACKS = [
    ("copy of the input, right flags", QUIET, f"{START}+0.001+0+0"),
    ("copy, side and counters updated", QUIET, f"{START.replace(' w ', ' b ')}+0.001+0+0"),
    ("copy called illegal", QUIET, f"{START}+-1.0+0+1"),
    ("copy of an illegal row, not called illegal", ILLEGAL, f"{START}+0.001+0+0"),
    ("illegal move played all the same", ILLEGAL, f"{AFTER_E4}+0.001+0+0"),
    ("right flags, illegal move played", ILLEGAL, f"{AFTER_E4}+-1.0+0+1"),
    ("empty board", QUIET, "8/8/8/8/8/8/8/8 b KQkq - 0 1+0.001+0+0"),
    ("another move's board", QUIET, f"{transition(START, 'a2a4').next_fen}+0.001+0+0"),
    ("start position for any row", transition(AFTER_E4, "e7e5"), f"{START}+0.001+0+0"),
    ("copy claimed won", QUIET, f"{START}+1.0+1+0"),
    ("board mirrored", QUIET, f"{flip_fen(AFTER_E4)}+0.001+0+0"),
    ("a board of queens", QUIET, f"{'/'.join(['QQQQQQQQ'] * 8)} b - - 0 1+0.001+0+0"),
    ("all flags up, board copied", ILLEGAL, f"{START}+-1.0+1+0"),
    ("another piece moved as well", QUIET, f"{AFTER_E4.replace('RNBQK', 'RBNQK')}+0.001+0+0"),
]


@pytest.mark.parametrize("shaping", SHAPINGS)
@pytest.mark.parametrize(("row", "text"), [h[1:] for h in HACKS], ids=[h[0] for h in HACKS])
def test_hacks_score_at_most_format_only(row: EnvironmentRow, text: str, shaping: Shaping) -> None:
    assert ENVIRONMENT.parse(text).fault is None
    for progress in (0.0, 0.5, 1.0):
        rules = RewardRules(reward_shaping=shaping)
        assert ENVIRONMENT.verify(row, text, rules, progress=progress).total <= FORMAT_ONLY


@pytest.mark.parametrize("shaping", ["continuous", "graduated", "binary"])
@pytest.mark.parametrize("change", [("4P3", "8"), ("1PPP", "PPPP")], ids=["erased", "doubled"])
def test_half_a_move_is_no_move(change: tuple[str, str], shaping: Shaping) -> None:
    text = f"{AFTER_E4.replace(*change)}+0.001+0+0"
    assert ENVIRONMENT.parse(text).fault is None
    assert score(QUIET, text, RewardRules(reward_shaping=shaping)) <= FORMAT_ONLY


@pytest.mark.parametrize(
    ("text", "level"),
    [
        (f"{START}+0.001+0+0", 0.2),
        (f"{AFTER_E4}+1.0+1+0", 0.4),
        (f"{AFTER_E4}+1.0+0+0", 0.6),
        (f"{AFTER_E4.replace(' 0 1', ' 0 2')}+0.001+0+0", 0.8),
        (f"{AFTER_E4}+0.001+0+0", 1.0),
    ],
)
def test_graduated_levels(text: str, level: float) -> None:
    assert score(QUIET, text, RewardRules(reward_shaping="graduated")) == level


@pytest.mark.parametrize("shaping", SHAPINGS)
@pytest.mark.parametrize("tail", ["1.0+0+0", "0.5+1+0", "0.001+1+0", "0.001+0+1", "-1.0+0+1"])
def test_a_right_board_with_wrong_flags_or_reward_is_capped(tail: str, shaping: Shaping) -> None:
    limit = 0.6 if shaping == "graduated" else ONE_WRONG
    assert score(QUIET, f"{AFTER_E4}+{tail}", RewardRules(reward_shaping=shaping)) <= limit


FIELDS_OF_GOLD = ("side", "castling", "en passant", "halfmoves", "moves")


@pytest.mark.parametrize("shaping", ["continuous", "linear", "binary"])
@pytest.mark.parametrize("place", range(5), ids=FIELDS_OF_GOLD)
def test_a_wrong_field_is_capped_whatever_else_is_right(place: int, shaping: Shaping) -> None:
    for row in (QUIET, ILLEGAL, transition(CASTLING, "e1g1")):
        board, *fields = row.next_fen.split(" ")
        others = ("w" if fields[0] == "b" else "b", "Q", "e3", "7", "9")
        fields[place] = others[place]
        text = "+".join([" ".join([board, *fields]), *gold(row).split("+")[1:]])
        assert ENVIRONMENT.parse(text).fault is None
        assert score(row, text, RewardRules(reward_shaping=shaping)) <= ONE_WRONG


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 10_000))
def test_no_known_hack_passes_its_limit_on_any_row(seed: int) -> None:
    row = random_row(seed)
    for shaping in ("continuous", "linear", "binary"):
        for name, text, limit in hacks(row):
            assert score(row, text, RewardRules(reward_shaping=shaping)) <= limit, (name, shaping)


GARBAGE = [
    "",
    " ",
    "hello",
    "+++",
    AFTER_E4,
    f"{AFTER_E4}+0.001+0",
    f"{AFTER_E4}+0.001+0+0+0",
    f"{AFTER_E4}+0.001+0+0 e7e5",
    f"{AFTER_E4}+0.001+0+0\nA: {START}",
    f"{AFTER_E4}+0.001+0+0{END}{AFTER_E4}",
    f"{AFTER_E4}+nan+0+0",
    f"{AFTER_E4}+inf+0+0",
    f"{AFTER_E4}+1e-3+0+0",
    f"{AFTER_E4}+0.001+2+0",
    f"{AFTER_E4}+0.001+False+False",
    f"{AFTER_E4.replace('4P3', '4P4')}+0.001+0+0",
    f"{AFTER_E4.replace('4P3', '22P3')}+0.001+0+0",
    f"{AFTER_E4.replace(' b ', ' ')}+0.001+0+0",
    f"{AFTER_E4.replace(' 0 1', ' 0 -1')}+0.001+0+0",
    f"A: {START}+e2e4+e2e4+{gold(QUIET)}",
]


@pytest.mark.parametrize("shaping", SHAPINGS)
@pytest.mark.parametrize("text", GARBAGE)
def test_garbage_scores_the_malformed_reward(text: str, shaping: Shaping) -> None:
    assert score(QUIET, text, RewardRules(reward_shaping=shaping)) == -0.3
    assert score(QUIET, text, RewardRules(reward_shaping=shaping, a_malformed=-1.0)) == -1.0
    verdict = ENVIRONMENT.verify(QUIET, text, RULES)
    assert verdict.reason.startswith("malformed") and not any(verdict.parts.values())


def test_an_answer_cut_short_is_malformed() -> None:
    assert ENVIRONMENT.verify(QUIET, gold(QUIET), RULES, finished=False).total == -0.3
    assert ENVIRONMENT.metrics(QUIET, gold(QUIET), finished=False)["format"] == 0.0


PIECES = st.text("pnbrqkPNBRQK12345678/ +-.01wKQ<|>", max_size=90)


@given(st.one_of(st.text(), PIECES))
def test_no_text_makes_the_parser_raise(text: str) -> None:
    assert ENVIRONMENT.verify(QUIET, text, RULES).total <= 1.0
    ENVIRONMENT.parse(f"{AFTER_E4}+{text}+0+0")
    ENVIRONMENT.row_from_text(text)
    ENVIRONMENT.row_from_text(f"A: {START}+{text}+e2e4+{gold(QUIET)}")
    ENVIRONMENT.metrics(QUIET, text)


def random_row(seed: int) -> EnvironmentRow:
    rng = random.Random(seed)
    fen, move = next(itertools.islice(plies(50, seed), rng.randrange(50), None))
    return transition(fen, move)


def corruptions(row: EnvironmentRow, rng: random.Random) -> dict[str, str]:
    """Answers that are wrong in one thing each."""
    placement, *behind = row.next_fen.split(" ")
    board = chess.Board(row.next_fen)
    square = rng.randrange(64)
    others = [p for p in "pnbrqkPNBRQK" if p != getattr(board.piece_at(square), "symbol", str)()]
    board.set_piece_at(square, chess.Piece.from_symbol(rng.choice(others)))
    side = "b" if behind[0] == "w" else "w"
    values = [v for v in ("0.001", "1.0", "0.5", "-1.0") if float(v) != row.reward]
    flags = (f"{row.terminated:d}", f"{row.truncated:d}")
    _, value, *_ = gold(row).split("+")
    return {
        "square": "+".join([" ".join([board.board_fen(), *behind]), value, *flags]),
        "side": "+".join([" ".join([placement, side, *behind[1:]]), value, *flags]),
        "counter": "+".join([" ".join([placement, *behind[:-1], "4321"]), value, *flags]),
        "reward": "+".join([row.next_fen, rng.choice(values), *flags]),
        "terminated": "+".join([row.next_fen, value, f"{not row.terminated:d}", flags[1]]),
        "truncated": "+".join([row.next_fen, value, flags[0], f"{not row.truncated:d}"]),
    }


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10_000))
def test_every_corruption_lowers_the_score(seed: int) -> None:
    row = random_row(seed)
    for name, text in corruptions(row, random.Random(seed)).items():
        assert score(row, text) < 0.999, name
        assert score(row, text, RewardRules(reward_shaping="linear")) < 0.999, name
        assert ENVIRONMENT.parse(text).fault is None, name
        if name in ("reward", "terminated", "truncated"):
            assert score(row, text) <= 0.6, name


def flip_answer(text: str, before: EnvironmentRow, after: EnvironmentRow) -> str:
    """A colour-flipped answer; move numbers count from White, so they come from the truth."""
    fen, *tail = text.split("+")
    *fields, number = flip_fen(fen).split(" ")
    shift = int(after.next_fen.split()[-1]) - int(before.next_fen.split()[-1])
    return "+".join([" ".join([*fields, str(int(number) + shift)]), *tail])


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10_000))
def test_colour_flipped_positions_score_the_same(seed: int) -> None:
    row = random_row(seed)
    flipped = transition(flip_fen(row.fen), flip_move(row.move))
    assert (flipped.kind, flipped.reward) == (row.kind, row.reward)
    for text in (gold(row), *corruptions(row, random.Random(seed)).values()):
        assert score(flipped, flip_answer(text, row, flipped)) == score(row, text)


def test_content_ramps_in_with_progress() -> None:
    totals = [ENVIRONMENT.verify(QUIET, gold(QUIET), RULES, progress=p).total for p in (0, 0.5, 1)]
    assert totals == pytest.approx([0.08, 0.54, 1.0])


def test_metrics() -> None:
    assert ENVIRONMENT.metrics(QUIET, gold(QUIET)) == {
        **dict.fromkeys(("format", "exact", "board", "similarity", "reward"), 1.0),
        **dict.fromkeys(("terminated", "truncated"), 1.0),
        **{"reward_error": 0.0, "squares": 1.0},
        **{f"by_kind/{kind}": 1.0 if kind == "quiet" else None for kind in KINDS},
    }
    copied = ENVIRONMENT.metrics(QUIET, f"{START}+1.0+0+1")
    assert copied["squares"] == 62 / 64 and copied["exact"] == copied["board"] == 0.0
    assert copied["reward_error"] == pytest.approx(0.999) and copied["truncated"] == 0.0
    assert ENVIRONMENT.metrics(QUIET, "?")["reward_error"] is None


@pytest.mark.parametrize(("fen", "move"), [t[1:3] for t in TRUTHS if t[2] and " " not in t[2]])
def test_rows_come_back_from_text(fen: str, move: str) -> None:
    row = transition(fen, move, ["d2d4"])
    text = ENVIRONMENT.prompt(row, "padded") + ENVIRONMENT.answer(row, "padded")
    for form in (text, text.removeprefix("A: "), f"{END}{text}{END}\n", text.replace(" ", "  ")):
        assert ENVIRONMENT.row_from_text(form) == row
    assert ENVIRONMENT.truth(row) == row


@pytest.mark.parametrize(
    "text", ["", "P: x M: e2e4", "A: +++++++", f"A: {START}+e2e4+e2e4+{AFTER_E4}+0.001+0+x"]
)
def test_what_is_not_a_row_is_none(text: str) -> None:
    assert ENVIRONMENT.row_from_text(text) is None


def test_a_reward_kept_in_single_precision_is_still_written_right() -> None:
    stored = EnvironmentRow(START, "e2e4", ("e2e4",), AFTER_E4, 0.0010000000475, False, False, "q")
    assert gold(stored) == gold(QUIET) and score(stored, gold(QUIET)) == 1.0
