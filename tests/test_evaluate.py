"""Every metric by hand, with answers from tables: perfect, illegal, copied, constant."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import pytest

from rookworld.data.puzzles import Mate, Puzzle
from rookworld.evaluation.evaluate import (
    HeldOut,
    evaluate,
    held_out_from,
    majority_baseline,
    paired,
    passk_columns,
    solve,
    spread,
)
from rookworld.evaluation.generator import Answer
from rookworld.tasks.environment import ENVIRONMENT, KINDS, text_similarity, transition
from rookworld.tasks.policy import POLICY, phase
from rookworld.tasks.task import PolicyRow, Style

START = "rnbqkbnr/pppppppp/8/8/8/8/PPPPPPPP/RNBQKBNR w KQkq - 0 1"
AFTER_E4 = "rnbqkbnr/pppppppp/8/8/4P3/8/PPPP1PPP/RNBQKBNR b KQkq - 0 1"
THREE_MOVES = "7k/8/8/8/8/8/8/K7 w - - 0 60"
POLICY_ROWS = (
    PolicyRow(START, ("e2e4", "d2d4", "g1f3", "c2c4", "b1c3"), (40, 30, 30, 20, 10)),
    PolicyRow(AFTER_E4, ("e7e5", "c7c5", "e7e6", "c7c6", "d7d5"), (-20, -20, -30, -40, -60)),
    PolicyRow(THREE_MOVES, ("a1a2", "a1b1", "a1b2"), (0, 0, 0)),
)
MATE_FEN = "7k/5ppp/8/8/8/8/8/R3R1K1 w - - 1 2"
MATES = (Mate(MATE_FEN, ("a1a8", "e1e8"), "e1e8"),)
ENVIRONMENT_ROWS = (
    transition(START, "e2e4"),
    transition(START, "e2e5"),
    transition(MATE_FEN, "a1a8"),
    transition("7k/8/5KQ1/8/8/8/8/8 w - - 0 1", "g6f7"),
    transition("8/P6k/8/8/8/8/8/K7 w - - 0 1", "a7a8q"),
    transition("4k3/8/8/3pP3/8/8/8/4K3 w - d6 0 2", "e5d6"),
    transition("4k3/8/8/8/8/8/8/4K2R w K - 0 1", "e1g1"),
    transition("4k3/8/8/3p4/4P3/8/8/4K3 w - - 0 1", "e4d5"),
)
ROWS = HeldOut((*POLICY_ROWS, *ENVIRONMENT_ROWS), MATES)


class Table:
    """Answers each prompt by a function of it."""

    samples = 1

    def __init__(self, answer: Callable[[str], str], style: Style = "compact") -> None:
        self.style: Style = style
        self._answer = answer

    def answer(self, prompts: Sequence[str], salts: Sequence[int] = ()) -> list[Answer]:
        return [Answer(self._answer(prompt)) for prompt in prompts]


def perfect(style: Style = "compact") -> Table:
    mates = PolicyRow(MATE_FEN, MATES[0].mates[::-1], (99_999, 99_999))
    policy = {POLICY.prompt(row, style): POLICY.answer(row, style) for row in (*POLICY_ROWS, mates)}
    environment = {
        ENVIRONMENT.prompt(row, style): ENVIRONMENT.answer(row, style) for row in ENVIRONMENT_ROWS
    }
    return Table((policy | environment).__getitem__, style)


def copy_the_fen(prompt: str) -> str:
    fen = prompt[3:].split("+")[0]
    return f"{fen}+0.001+0+0"


def values(answerer: Table, rows: HeldOut = ROWS) -> dict[str, float]:
    return {name: one.value for name, one in evaluate(answerer, rows).estimates.items()}


@pytest.mark.parametrize("style", ["compact", "padded"])
def test_a_perfect_model_scores_one_everywhere(style: Style) -> None:
    result = evaluate(perfect(style), ROWS, sampled=perfect(style))
    found = {name: one.value for name, one in result.estimates.items()}
    errors = ("P/eval_mae", "P/win_loss", "A/reward_error")
    assert {name: found.pop(name) for name in errors} == dict.fromkeys(errors, 0.0)
    assert found == dict.fromkeys(found, 1.0)
    assert result.estimates["reward/sampled"].n == len(POLICY_ROWS) + len(ENVIRONMENT_ROWS)


def test_every_name_of_the_contract_is_there() -> None:
    policy = "format legal best best_white best_black top5 eval_mae win_loss"
    environment = "format exact board reward terminated truncated"
    names = {"reward/sampled", "reward/greedy", "mate1/accuracy"}
    names |= {f"P/{name}" for name in policy.split()}
    names |= {f"A/{name}" for name in environment.split()}
    names |= {f"A/by_kind/{kind}" for kind in KINDS}
    result = evaluate(perfect(), ROWS, sampled=perfect())
    assert names <= set(result.estimates)
    assert set(result.to_json()["P/best"]) == {"value", "n", "low", "high"}


def test_always_illegal() -> None:
    found = values(Table(lambda prompt: " a1a1 E: 0.0 B: a1a1"))
    assert found["P/format"] == 1.0
    # START is worth 53.7 %, AFTER_E4 48.2 %, a drawn position 50 %
    assert found["P/win_loss"] == pytest.approx((0.53675 + 0.48160 + 0.5) / 3, abs=1e-4)
    for name in ("P/legal", "P/best", "P/best_or_equal", "P/top5", "mate1/accuracy", "A/format"):
        assert found[name] == 0.0
    assert "P/eval_mae" not in found
    assert found["reward/greedy"] < 0.0


def test_copy_the_fen_is_never_exact() -> None:
    found = values(Table(copy_the_fen))
    assert found["A/exact"] == 0.0
    assert found["A/by_kind/illegal"] == found["A/by_kind/quiet"] == 0.0
    assert found["A/board"] == 1 / 8  # the illegal move alone leaves the position as it was
    assert found["A/format"] == 1.0
    assert found["A/reward"] == 5 / 8
    assert found["A/terminated"] == 6 / 8
    assert found["A/truncated"] == 7 / 8
    assert found["A/reward_error"] == pytest.approx((2 * 0.999 + 1.001 - 0.5) / 8, abs=1e-9)
    assert 0.7 < found["A/similarity"] < 1.0


def test_a_constant_answer_by_hand() -> None:
    found = values(Table(lambda prompt: " d2d4 e2e4 E: 0.5 0.1 B: d2d4"))
    assert found["P/format"] == 1.0
    assert found["P/legal"] == found["P/best"] * 3 + 1 / 3 == 1 / 3
    assert found["P/top5"] == pytest.approx(2 / 5 / 3)
    assert found["P/eval_mae"] == pytest.approx((0.2 + 0.3) / 2)


def test_equal_evaluations_are_not_the_label() -> None:
    row = POLICY_ROWS[1]
    second = PolicyRow(row.fen, (row.moves[1], row.moves[0], *row.moves[2:]), row.cp)
    found = values(Table(lambda _: POLICY.answer(second, "compact")), HeldOut([row]))
    assert found["P/best"] == found["P/best_black"] == found["P/best_opening"] == 0.0
    assert found["P/best_or_equal"] == 1.0
    assert "P/best_white" not in found and "P/best_endgame" not in found


def test_an_answer_that_never_ends_counts_as_unreadable() -> None:
    class Endless(Table):
        def answer(self, prompts: Sequence[str], salts: Sequence[int] = ()) -> list[Answer]:
            return [Answer(one.text, finished=False) for one in super().answer(prompts)]

    found = values(Endless(perfect()._answer))
    assert found["P/format"] == found["P/best"] == found["A/exact"] == found["A/similarity"] == 0.0
    assert found["mate1/accuracy"] == 0.0


def test_any_mating_move_counts_but_not_as_the_target() -> None:
    answerer = Table(lambda _: " a1a8 e1e8 E: 999.99 999.99 B: a1a8")
    found = values(answerer, HeldOut(mates=MATES))
    assert found == {"mate1/accuracy": 1.0, "mate1/strict": 0.0}
    no_target = HeldOut(mates=[Mate(MATE_FEN, MATES[0].mates)])
    assert values(answerer, no_target) == {"mate1/accuracy": 1.0}


def test_rewards_of_several_samples_are_averaged_row_by_row() -> None:
    class Twice(Table):
        samples = 2

        def answer(self, prompts: Sequence[str], salts: Sequence[int] = ()) -> list[Answer]:
            good = perfect()._answer
            return [Answer(text) for p in prompts for text in (good(p), "nonsense")]

    result = evaluate(perfect(), HeldOut(POLICY_ROWS), sampled=Twice(str))
    assert result.estimates["reward/sampled"].value == pytest.approx((1.0 - 0.3) / 2)
    assert result.rows["reward/sampled"].shape == (3,)
    columns = passk_columns(Twice(str), POLICY_ROWS, ks=(1, 2, 4))
    assert {name: column.mean() for name, column in columns.items()} == {
        "passk/1": 0.5,
        "passk/2": 1.0,
    }


@pytest.mark.parametrize("part", ["validation", "test"])
def test_gold_scores_one_and_a_copy_nothing_on_the_embedded_rows(part: str) -> None:
    rows = held_out_from(f"embedded:{part}", {"P": 300, "A": 300}, n_mates=100)
    policy, environment = POLICY.select(rows.rows), ENVIRONMENT.select(rows.rows)
    assert [len(policy), len(environment), len(rows.mates)] == [300, 300, 100]
    assert {row.kind for row in environment} == set(KINDS)
    gold = {POLICY.prompt(row, "padded"): POLICY.answer(row, "padded") for row in policy}
    for row in environment:
        gold[ENVIRONMENT.prompt(row, "padded")] = ENVIRONMENT.answer(row, "padded")
    for mate in rows.mates:
        row_of_mate = PolicyRow(mate.fen, mate.mates[:1], (99_999,))
        gold[POLICY.prompt(row_of_mate, "padded")] = POLICY.answer(row_of_mate, "padded")
    found = values(Table(gold.__getitem__, "padded"), rows)
    errors = {found.pop(name) for name in ("P/eval_mae", "P/win_loss", "A/reward_error")}
    assert errors == {0.0} and set(found.values()) == {1.0}
    copied = values(Table(copy_the_fen), HeldOut(environment))
    assert copied["A/exact"] == 0.0


def test_models_are_compared_on_the_same_rows() -> None:
    before, after = evaluate(Table(copy_the_fen), ROWS), evaluate(perfect(), ROWS)
    found = paired(before, after)
    assert found["A/exact"].difference == 1.0
    assert found["A/exact"].n == 8
    assert found["A/exact"].p == pytest.approx(2 / 2**8)
    assert found["A/by_kind/quiet"].n == 1
    assert paired(after, after)["A/exact"].p == 1.0


def test_the_majority_baseline_is_the_most_common_label() -> None:
    found = {name: one.value for name, one in majority_baseline(ENVIRONMENT_ROWS).items()}
    assert found == {
        "A/baseline/reward": 5 / 8,
        "A/baseline/terminated": 6 / 8,
        "A/baseline/truncated": 7 / 8,
    }


TWO_MOVES = Puzzle("a", "7k/6pp/8/8/8/8/R5PP/1R5K b - - 0 1", ("h8g8", "a2a8", "g8f7", "b1b7"), 900)
MATE_AT_ONCE = Puzzle("b", "6k1/5ppp/8/8/8/8/8/R3R1K1 b - - 0 1", ("g8h8", "a1a8"), 700)


@pytest.mark.parametrize(
    ("replies", "expected"),
    [
        (("a2a8", "b1b7", "a1a8"), [1.0, 1.0]),
        (("a2a8", "b1b6", "e1e8"), [0.0, 1.0]),
        (("b1b8", "b1b7", "a1a7"), [0.0, 0.0]),
        (("a2a7", "b1b7", "a1a9"), [0.0, 0.0]),
        (("a2h8", "b1b7", ""), [0.0, 0.0]),
    ],
)
def test_puzzles_need_every_move_or_a_mate(replies: tuple[str, ...], expected: list[float]) -> None:
    boards = ("6k1/6pp", "R7/5kpp", "7k/5ppp")
    said = dict(zip(boards, replies, strict=True))
    answerer = Table(
        lambda prompt: next(
            f" {move} E: 0.0 B: {move}" for key, move in said.items() if prompt[3:].startswith(key)
        )
    )
    assert solve(answerer, [TWO_MOVES, MATE_AT_ONCE]).tolist() == expected


@pytest.mark.parametrize(
    ("fen", "expected"),
    [
        (START, "opening"),
        (START[:-1] + "13", "middlegame"),
        ("r2qk2r/8/8/8/8/8/8/R2QK1NR w - - 0 9", "middlegame"),
        ("r2qk2r/8/8/8/8/8/8/R2QK2R w - - 0 9", "endgame"),
    ],
)
def test_phases(fen: str, expected: str) -> None:
    assert phase(fen) == expected


def test_similarity_is_normalised_levenshtein() -> None:
    assert text_similarity("kitten", "sitting") == pytest.approx(1 - 3 / 7)
    assert text_similarity("", "abc") == 0.0
    assert text_similarity("abc", "abc") == 1.0


def test_a_choice_of_rows_ignores_their_order_and_nests() -> None:
    rows = [f"row {i}" for i in range(50)]
    shuffled = random.Random(0).sample(rows, 50)
    assert spread(rows, 10, str) == spread(shuffled, 10, str)
    assert spread(rows, 20, str)[:10] == spread(rows, 10, str)
    assert len(spread(rows, 99, str)) == 50
