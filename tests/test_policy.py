"""P: the verdict table, what a judge changes, and the laws of scoring."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import chess
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rookworld.data.sources import load_rows
from rookworld.tasks.hacks import hacks
from rookworld.tasks.notation import EVALS, GRID_CP, cp_text, flip_fen, flip_move, grid_index
from rookworld.tasks.policy import POLICY
from rookworld.tasks.reward import (
    FORMAT_ONLY,
    MISTAKE,
    ONE_WRONG,
    RewardRules,
    Shaping,
    win_percent,
)
from rookworld.tasks.task import END, Analysis, PolicyRow, Style, legal_moves

RULES = RewardRules()
SHAPINGS: list[Shaping] = ["continuous", "linear", "graduated", "binary"]
ITALIAN = "r1bqk1nr/pppp1ppp/2n5/2b1p3/2B1P3/5N2/PPPP1PPP/RNBQK2R w KQkq - 4 4"
ROW = PolicyRow(ITALIAN, ("c2c3", "e1g1", "d2d3", "b1c3", "b2b4"), (46, 38, 31, 12, -20), 24)
BLACK = PolicyRow(flip_fen(ITALIAN), tuple(map(flip_move, ROW.moves)), ROW.cp)
MATES = PolicyRow(
    "6k1/5ppp/8/8/8/8/5PPP/R5K1 w - - 0 1",
    ("a1a8", "a1d1", "a1c1", "a1b1", "a1e1"),
    (99_999, 99_995, 910, 800, -120),
)
THREE = PolicyRow("7k/8/8/8/8/8/1p6/K7 w - - 0 1", ("a1b2", "a1b1", "a1a2"), (0, -640, -700))
ONE = PolicyRow("7k/8/8/8/8/8/r7/7K w - - 0 1", ("h1g1",), (-99_990,))
ROWS = [ROW, BLACK, MATES, THREE, ONE]


def gold(row: PolicyRow, style: Style = "compact") -> str:
    return POLICY.answer(row, style)


def score(row: PolicyRow, completion: str, rules: RewardRules = RULES) -> float:
    return POLICY.verify(row, completion, rules).total


def say(moves: Sequence[str], evals: Sequence[str], best: str) -> str:
    return f" {' '.join(moves)} E: {' '.join(evals)} B: {best}"


def test_an_answer_as_it_is_written() -> None:
    assert POLICY.prompt(ROW, "compact") + gold(ROW) == (
        f"P: {ITALIAN} M: c2c3 e1g1 d2d3 b1c3 b2b4 E: 0.5 0.4 0.3 0.1 -0.2 B: c2c3"
    )
    padded = POLICY.prompt(ROW, "padded") + gold(ROW, "padded")
    assert (padded[93:95], padded[126:128], padded[169:]) == ("M:", "E:", "B: c2c3")
    assert "0.46 0.38 0.31 0.12 -0.2 " in padded


@pytest.mark.parametrize("shaping", SHAPINGS)
@pytest.mark.parametrize("style", ["padded", "compact"])
@pytest.mark.parametrize("row", ROWS)
def test_gold_scores_one(row: PolicyRow, style: Style, shaping: Shaping) -> None:
    rules, text = RewardRules(reward_shaping=shaping), gold(row, style)
    assert POLICY.verify(row, text, rules).reason == "exact"
    for form in (text, f"M:{text}", f"{text}{END}{END}", text.replace(" ", "   ")):
        assert score(row, form, rules) == 1.0


@given(st.permutations(range(5)))
def test_order_does_not_matter(order: list[int]) -> None:
    moves, evals = [ROW.moves[i] for i in order], [cp_text(ROW.cp[i]) for i in order]
    assert score(ROW, say(moves, evals, ROW.moves[0])) == 1.0


JUNK = ("a2a3", "h2h3", "a2a4", "h2h4", "h1g1")  # legal in ITALIAN, outside the five
ZEROS = ["0.0"] * 5
TRUE = [cp_text(cp) for cp in ROW.cp]
HACKS = [
    ("legal junk", say(JUNK, ZEROS, "h1g1")),
    ("legal junk, true evals", say(JUNK, TRUE, "a2a3")),
    ("junk that lists the best without choosing it", say(("c2c3", *JUNK[1:]), TRUE, "h1g1")),
    ("a1a1", say(["a1a1"], ["0.0"], "a1a1")),
    ("illegal best among true moves", say((*ROW.moves[:4], "e1e3"), TRUE, "e1e3")),
    ("right best among illegal moves", say(("c2c3", "a1a2", "a1a3", "h1h8", "d1d8"), TRUE, "c2c3")),
    ("one illegal move", say((*ROW.moves[:4], "e1e3"), TRUE, "c2c3")),
    ("other side's moves", say(("e8g8", "d7d6", "a7a6", "h7h6", "g8f6"), TRUE, "e8g8")),
    ("one move where five exist", say(["c2c3"], ["0.46"], "c2c3")),
    ("four moves where five exist", say(ROW.moves[:4], TRUE[:4], "c2c3")),
    ("castling as rook move", say(("c2c3", "e1h1", "d2d3", "b1c3", "b2b4"), TRUE, "c2c3")),
    ("promotion of nothing", say(("c2c3", "e1g1", "d2d3", "b1c3", "b7b8q"), TRUE, "c2c3")),
    ("best not among the moves", say((*ROW.moves[1:], "a2a3"), TRUE, "c2c3")),
    ("duplicate moves", say(["c2c3"] * 5, TRUE, "c2c3")),
    ("one duplicate", say((*ROW.moves[:4], "c2c3"), TRUE, "c2c3")),
    ("six moves", say((*ROW.moves, "a2a3"), [*TRUE, "0.0"], "c2c3")),
    ("text after the answer", gold(ROW) + " c2c3"),
    ("a second answer", gold(ROW) + gold(ROW)),
    ("NaN", say(ROW.moves, [*TRUE[:4], "nan"], "c2c3")),
    ("infinity", say(ROW.moves, ["inf"] * 5, "c2c3")),
    ("copy of the prompt", POLICY.prompt(ROW, "compact")),
    ("the whole document", POLICY.prompt(ROW, "compact") + gold(ROW)),
]


@pytest.mark.parametrize("shaping", SHAPINGS)
@pytest.mark.parametrize("text", [h[1] for h in HACKS], ids=[h[0] for h in HACKS])
def test_hacks_score_at_most_format_only(text: str, shaping: Shaping) -> None:
    for progress in (0.0, 0.5, 1.0):
        rules = RewardRules(reward_shaping=shaping)
        assert POLICY.verify(ROW, text, rules, progress=progress).total <= FORMAT_ONLY


BESIDE = [
    ("junk moves, true evals", say(("c2c3", *JUNK[:4]), TRUE, "c2c3")),
    ("junk moves and evals", say(("c2c3", *JUNK[:4]), ["9.9"] * 5, "c2c3")),
    ("true moves, junk evals", say(ROW.moves, ["9.9"] * 5, "c2c3")),
    ("true moves, evals all zero", say(ROW.moves, ZEROS, "c2c3")),
    ("true moves, signs turned", say(ROW.moves, [cp_text(-3 * cp) for cp in ROW.cp], "c2c3")),
    ("true moves, mates announced", say(ROW.moves, ["999.99"] * 5, "c2c3")),
]


@pytest.mark.parametrize("shaping", SHAPINGS)
@pytest.mark.parametrize("text", [h[1] for h in BESIDE], ids=[h[0] for h in BESIDE])
def test_a_right_best_move_with_junk_beside_it_is_capped(text: str, shaping: Shaping) -> None:
    assert score(ROW, text, RewardRules(reward_shaping=shaping)) <= 0.6


def by_loss(loss: float) -> PolicyRow:
    """A row whose last move loses this much win probability, and whose others lose nothing."""
    cp = next(cp for cp in range(0, -5000, -1) if 50 - win_percent(cp) >= 100 * loss)
    return PolicyRow(ITALIAN, ROW.moves, (0, 0, 0, 0, cp))


@pytest.mark.parametrize("shaping", ["continuous", "linear", "binary"])
@pytest.mark.parametrize("loss", [MISTAKE, 0.08, 0.2, 0.45])
def test_a_mistake_as_best_move_is_capped_whatever_else_is_right(
    shaping: Shaping, loss: float
) -> None:
    row = by_loss(loss)
    text = say(row.moves, [cp_text(cp) for cp in row.cp], row.moves[-1])
    for progress in (0.0, 0.5, 1.0):
        rules = RewardRules(reward_shaping=shaping)
        assert POLICY.verify(row, text, rules, progress=progress).total <= ONE_WRONG


def test_a_better_best_move_always_earns_more() -> None:
    for evals in (TRUE, ZEROS, ["9.9"] * 5):
        for row in (ROW, BLACK, MATES):
            earned = [score(row, say(row.moves, evals, move)) for move in row.moves]
            lost = [win_percent(cp) for cp in row.cp]
            for place in range(4):
                assert (earned[place] > earned[place + 1]) == (lost[place] > lost[place + 1])


LOST = PolicyRow(THREE.fen, THREE.moves, (-600, -640, -700))


@pytest.mark.parametrize("shaping", ["continuous", "linear", "binary"])
@pytest.mark.parametrize("row", [THREE, LOST, PolicyRow(ONE.fen, ONE.moves, (-500,))])
@pytest.mark.parametrize("value", ["-999.97", "9.9"])
def test_listing_all_of_few_legal_moves_shows_nothing(
    row: PolicyRow, value: str, shaping: Shaping
) -> None:
    for best in row.moves:
        text = say(row.moves[::-1], [value] * len(row.moves), best)
        assert score(row, text, RewardRules(reward_shaping=shaping)) <= FORMAT_ONLY + 1e-9


@pytest.mark.parametrize("shaping", ["continuous", "linear", "graduated", "binary"])
def test_one_evaluation_for_all_of_few_legal_moves_is_paid_only_where_it_is_true(
    shaping: Shaping,
) -> None:
    """Moves in any order and any one evaluation: nothing that tells one position from another."""
    found, rng = load_rows("embedded:test"), random.Random(0)
    few = [row for row in POLICY.select(found) if len(legal_moves(row.fen)) <= len(row.moves)]
    assert len(few) > 50
    rules, over = RewardRules(reward_shaping=shaping), 0
    for row in few:
        moves = rng.sample(row.moves, len(row.moves))
        for value in (*EVALS[:12], *EVALS[12:-12:8]):
            earned = score(row, say(moves, [value] * len(moves), rng.choice(moves)), rules)
            true = all(EVALS[grid_index(cp)] == value for cp in row.cp)
            assert true or earned <= FORMAT_ONLY + 1e-9, (row, value)
            over += earned > 0.6
        assert score(row, gold(row), rules) == score(row, gold(row, "padded"), rules) == 1.0
    assert over / len(few) / 28 < 0.02


def test_among_few_moves_the_better_best_move_still_earns_more() -> None:
    earned = [score(THREE, say(THREE.moves, ["9.0"] * 3, move)) for move in THREE.moves]
    assert earned[0] > earned[1] > earned[2]


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
    "M: E: B:",
    " E: B: c2c3",
    "c2c3 E: 0.5",
    "c2c3 B: c2c3 E: 0.5",
    "c2c3 E: 0.5 B:",
    "c2c3 E: 0.5 B: c3",
    "c2c3 E: 0.5 B: c2c3\n",
    "c2c3 E: 0.5 B: c2c3 M:",
    "c2c3\tE: 0.5 B: c2c3",
    "c2c3E: 0.5 B: c2c3",
    "c2c3 E: 0.5 0.4 B: c2c3",
    "c2c3 e1g1 E: 0.5 B: c2c3",
    "c2c3 E: 5e-1 B: c2c3",
    "c2c3 E: 0.5 E: 0.5 B: c2c3",
    "Nf3 E: 0.5 B: Nf3",
    f"c2c3 E: 0.5 B: c2c3{END}c2c3",
]


@pytest.mark.parametrize("shaping", SHAPINGS)
@pytest.mark.parametrize("text", GARBAGE)
def test_garbage_scores_the_malformed_reward(text: str, shaping: Shaping) -> None:
    assert score(ROW, text, RewardRules(reward_shaping=shaping)) == -0.3
    assert score(ROW, text, RewardRules(reward_shaping=shaping, p_malformed=-1.0)) == -1.0
    verdict = POLICY.verify(ROW, text, RULES)
    assert verdict.reason.startswith("malformed") and not any(verdict.parts.values())


def test_an_answer_cut_short_is_malformed() -> None:
    assert POLICY.verify(ROW, gold(ROW), RULES, finished=False).total == -0.3
    assert POLICY.metrics(ROW, gold(ROW), finished=False)["format"] == 0.0


TOKENS = st.sampled_from(
    ["M:", "E:", "B:", "P:", END, "c2c3", "a1a1", "0.5", "nan", "-", "\n", "é", "999.99", "e1g1"]
)


@given(st.one_of(st.text(), st.lists(TOKENS, max_size=16).map(" ".join)))
def test_no_text_makes_the_parser_raise(text: str) -> None:
    assert score(ROW, text) <= 1.0
    POLICY.metrics(ROW, text)
    POLICY.row_from_text(text)
    POLICY.row_from_text(f"P: {ITALIAN} M: {text}")


def random_row(seed: int) -> PolicyRow:
    """A random position whose five moves carry random labels, mates among them."""
    rng, board = random.Random(seed), chess.Board()
    for _ in range(rng.randrange(80)):
        board.push(rng.choice(list(board.legal_moves)))
        if board.is_game_over():
            board.pop()
            break
    moves = rng.sample([move.uci() for move in board.legal_moves], k=board.legal_moves.count())[:5]
    cp = [rng.choice([rng.randint(-900, 900), rng.choice(GRID_CP)]) for _ in moves]
    return PolicyRow(board.fen(), tuple(moves), tuple(sorted(cp, reverse=True)))


def corruptions(row: PolicyRow, rng: random.Random) -> dict[str, str]:
    """Answers that are worse in one thing each."""
    moves, evals, found = list(row.moves), [cp_text(cp) for cp in row.cp], {}
    legal = sorted(move.uci() for move in chess.Board(row.fen).legal_moves)
    place = rng.randrange(len(moves))
    found["illegal"] = say([*moves[:place], "a1a1", *moves[place + 1 :]], evals, moves[0])
    others = [cp for cp in GRID_CP if abs(grid_index(cp) - grid_index(row.cp[place])) > 1]
    shifted = [*evals[:place], cp_text(rng.choice(others)), *evals[place + 1 :]]
    found["evaluation"] = say(moves, shifted, moves[0])
    outside = [move for move in legal if move not in moves]
    if outside:
        found["candidate"] = say([*moves[:-1], rng.choice(outside)], evals, moves[0])
    highest = win_percent(row.cp[0])
    worse = [m for m, cp in zip(moves, row.cp, strict=True) if highest - win_percent(cp) >= 1]
    if worse:
        found["best"] = say(moves, evals, rng.choice(worse))
    return found


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 10_000))
def test_every_corruption_lowers_the_score(seed: int) -> None:
    row = random_row(seed)
    linear = RewardRules(reward_shaping="linear")
    assert score(row, gold(row, "padded")) == score(row, gold(row, "compact")) == 1.0
    for name, text in corruptions(row, random.Random(seed)).items():
        assert POLICY.parse(text).fault is None, name
        assert max(score(row, text), score(row, text, linear)) < 0.9999, name
        if name == "illegal":
            assert score(row, text) <= FORMAT_ONLY


def flip_answer(text: str) -> str:
    said = POLICY.parse(text)
    return say([*map(flip_move, said.moves)], [*map(cp_text, said.cp)], flip_move(said.best))


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 10_000))
def test_colour_flipped_positions_score_the_same(seed: int) -> None:
    row = random_row(seed)
    flipped = PolicyRow(flip_fen(row.fen), tuple(map(flip_move, row.moves)), row.cp)
    for name, text in corruptions(row, random.Random(seed)).items():
        if name != "illegal":
            assert score(flipped, flip_answer(text)) == score(row, text)


@dataclass(frozen=True)
class FixedJudge:
    """Sees what it is told to see, outside the five as well."""

    seen: Analysis
    outside: dict[str, int]

    def analyse(self, row: PolicyRow) -> Analysis:
        return self.seen

    def move_cp(self, row: PolicyRow, move: str) -> int | None:
        return self.outside.get(move)

    def prefetch(self, rows: Sequence[PolicyRow], *, every_move: bool = False) -> None:
        return None


def test_labels_pay_legality_of_a_move_they_do_not_know_and_a_judge_its_quality() -> None:
    text = say((*ROW.moves[:4], "a2a3"), TRUE, "a2a3")
    by_labels = POLICY.verify(ROW, text, RULES)
    assert by_labels.parts["best"] == 0.0 and by_labels.parts["legal"] == 1.0
    judge = FixedJudge(Analysis(ROW.moves, ROW.cp), {"a2a3": -30})
    judged = POLICY.verify(ROW, text, RULES, judge)
    assert 0 < judged.parts["best"] < 1 and judged.total > by_labels.total


def test_a_judge_overrides_the_labels() -> None:
    judge = FixedJudge(Analysis(ROW.moves[::-1], (300, 40, 30, 20, 10)), {})
    verdict = POLICY.verify(ROW, gold(ROW), RULES, judge)
    assert verdict.parts["best"] < 0.2 and verdict.parts["candidates"] == 1.0


def test_listing_every_legal_move_shows_nothing_by_itself() -> None:
    text = say(THREE.moves, ["9.0", "9.0", "9.0"], "a1a2")
    assert score(THREE, text) <= FORMAT_ONLY
    assert POLICY.verify(THREE, text, RULES).parts["candidates"] < 0.05


def test_a_row_that_knows_too_few_moves_takes_its_own_gold_and_a_fuller_answer() -> None:
    row = PolicyRow(ITALIAN, ROW.moves[:4], ROW.cp[:4])
    assert score(row, gold(row)) == 1.0 == score(row, gold(ROW))
    assert score(row, say(["c2c3"], ["0.46"], "c2c3")) <= FORMAT_ONLY


def test_equal_best_moves_are_equally_good() -> None:
    row = PolicyRow(ITALIAN, ROW.moves, (46, 46, 31, 12, -20))
    evals = [cp_text(cp) for cp in row.cp]
    assert score(row, say(row.moves, evals, "e1g1")) == 1.0


def test_content_ramps_in_with_progress() -> None:
    totals = [POLICY.verify(ROW, gold(ROW), RULES, progress=p).total for p in (0, 0.5, 1)]
    assert totals == pytest.approx([0.16, 0.58, 1.0])


def test_the_documented_weights_stay_reachable() -> None:
    weights = {"best": 4, "format": 2, "candidates": 1.5, "evaluations": 1, "legal": 0, "whole": 0}
    rules = RewardRules(p_weights=tuple(weights.items()))
    assert score(ROW, gold(ROW), rules) == 1.0
    assert score(ROW, say(JUNK, ZEROS, "h1g1"), rules) == pytest.approx(2 / 8.5)
    assert score(ROW, say(ROW.moves, ["9.9"] * 5, "c2c3"), rules) == pytest.approx(7.5 / 8.5)


@pytest.mark.parametrize(
    ("text", "level"),
    [
        (say(["a1a1"], ["0.0"], "a1a1"), 0.0),
        (say(["c2c3"], ["0.46"], "c2c3"), 0.2),
        (say(JUNK, ZEROS, "h1g1"), 0.2),
        (say(("c2c3", *JUNK[:4]), ["9.9"] * 5, "c2c3"), 0.4),
        (say(ROW.moves, ["9.9"] * 5, "c2c3"), 0.6),
        (say(ROW.moves, [*TRUE[:4], "0.0"], "c2c3"), 0.8),
        (gold(ROW), 1.0),
    ],
)
def test_graduated_levels(text: str, level: float) -> None:
    assert score(ROW, text, RewardRules(reward_shaping="graduated")) == level


def test_parts_by_hand() -> None:
    parts = POLICY.verify(ROW, say((*ROW.moves[:4], "a2a3"), TRUE, "c2c3"), RULES).parts
    legal = chess.Board(ITALIAN).legal_moves.count()
    chance = 25 / legal
    assert parts["candidates"] == pytest.approx((4 - chance) / (5 - chance))
    assert parts["evaluations"] == pytest.approx(0.8) == parts["whole"]
    weights = RULES.part_weights
    total = sum(weights[name] * value for name, value in parts.items())
    assert score(ROW, say((*ROW.moves[:4], "a2a3"), TRUE, "c2c3")) == pytest.approx(total)


def test_metrics_of_gold_per_colour() -> None:
    assert POLICY.metrics(ROW, gold(ROW, "padded")) == {
        **dict.fromkeys(("format", "legal", "best", "best_white", "top5"), 1.0),
        **{"best_black": None, "eval_mae": 0.0, "win_loss": 0.0, "best_or_equal": 1.0},
        **{"best_opening": 1.0, "best_middlegame": None, "best_endgame": None},
    }
    black = POLICY.metrics(BLACK, gold(BLACK))
    assert black["best_black"] == 1.0 and black["best_white"] is None


def test_metrics_of_wrong_answers() -> None:
    worst = POLICY.metrics(ROW, say(ROW.moves, TRUE, "b2b4"))
    lost = (win_percent(46) - win_percent(-20)) / 100
    assert worst["best"] == 0.0 and worst["win_loss"] == pytest.approx(lost)
    unknown = POLICY.metrics(ROW, say((*ROW.moves[:4], "a2a3"), TRUE, "a2a3"))
    assert unknown["win_loss"] == pytest.approx(lost) and unknown["top5"] == 0.8
    for text in ("?", say((*ROW.moves[:4], "a1a1"), TRUE, "a1a1")):
        forfeited = POLICY.metrics(ROW, text)
        assert forfeited["legal"] == 0.0
        assert forfeited["win_loss"] == pytest.approx(win_percent(46) / 100)
    mates = POLICY.metrics(MATES, say(MATES.moves, ["9.0", *["0.0"] * 4], "a1a8"))
    assert mates["eval_mae"] == pytest.approx((1 + 10 + 9.1 + 8 + 1.2) / 5)


@pytest.mark.parametrize("row", ROWS)
def test_rows_come_back_from_text(row: PolicyRow) -> None:
    text = POLICY.prompt(row, "padded") + gold(row, "padded")
    back = PolicyRow(row.fen, row.moves, row.cp)
    for form in (text, f"{END}{text}{END}\n", " ".join(text.split())):
        assert POLICY.row_from_text(form) == back
    compact = POLICY.row_from_text(POLICY.prompt(row, "compact") + gold(row))
    assert compact is not None and score(compact, gold(row)) == 1.0 == score(row, gold(row))


def test_a_shuffled_row_with_a_wrong_best_move_is_read_best_first() -> None:
    text = f"P: {ITALIAN} M:{say(ROW.moves[::-1], TRUE[::-1], 'b2b4')}"
    assert POLICY.row_from_text(text) == PolicyRow(ITALIAN, ROW.moves, ROW.cp)


@pytest.mark.parametrize(
    "text",
    [
        "",
        f"P: {ITALIAN}",
        f"A: {ITALIAN} M:{gold(ROW)}",
        f"P: nonsense M:{gold(ROW)}",
        f"P: {ITALIAN} M:{say(['c2c3'], ['0.5'], 'c2c3')}",
        f"P: {ITALIAN} M:{say((*ROW.moves[:4], 'a1a1'), TRUE, 'c2c3')}",
        f"P: {ITALIAN.replace(' 4 4', '')} M:{gold(ROW)}",
    ],
)
def test_what_is_not_a_row_is_none(text: str) -> None:
    assert POLICY.row_from_text(text) is None
