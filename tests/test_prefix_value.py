"""Credit by field: what an answer promises while it is written, and who is paid for what."""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import torch

from rookworld.grpo.advantages import field_advantages, group_advantages, next_worths
from rookworld.grpo.settings import AdvantageSettings
from rookworld.model.tokenizer import Tokenizer
from rookworld.rollout.token_values import listed_move_values, stage_values
from rookworld.rollout.types import Completions, Prompt
from rookworld.tasks.environment import ENVIRONMENT, transition
from rookworld.tasks.policy import POLICY
from rookworld.tasks.prefix_value import (
    RunningUsual,
    Tally,
    Usual,
    move_values,
    prefix_values,
    tally,
)
from rookworld.tasks.reward import RewardRules, Shaping
from rookworld.tasks.task import Analysis, EnvironmentRow, PolicyRow, legal_moves

RULES = RewardRules()
START = "rnbqkbnr/pppppppp/8/8/8/8/PPPPPPPP/RNBQKBNR w KQkq - 0 1"
ROW = PolicyRow(START, ("e2e4", "d2d4", "g1f3", "c2c4", "e2e3"), (40, 40, 30, 30, 20))
GOLD = POLICY.answer(ROW, "compact")


def worths(text: str, row: PolicyRow | EnvironmentRow = ROW) -> list[float]:
    return [one.value for one in prefix_values(row, text, RULES)]


def test_an_outlook_sees_nothing_that_comes_later() -> None:
    promises = worths(GOLD)
    assert worths(GOLD.replace("0.4", "-7.0")) == promises
    assert worths(GOLD.split("E:")[0] + "E: junk") == promises
    fourth = worths(GOLD.replace("c2c4", "a2a3"))
    assert fourth[:3] == promises[:3] and fourth[3] < promises[3] and fourth[4] < promises[4]
    assert worths(GOLD.replace("d2d4", "e2e4"))[0] == promises[0]
    worse = worths(" a2a3" + GOLD[5:])
    assert all(less < more for less, more in zip(worse, promises, strict=True))


def test_prefix_values_by_hand() -> None:
    promises = worths(GOLD)
    for listed, found in enumerate(promises, start=1):
        share = (listed + Usual().hits * (5 - listed)) / 5
        chance = 5 * 5 / 20
        candidates = (5 * share - chance) / (5 - chance)
        expected = 0.40 + 0.05 * candidates + (0.07 + 0.48) * Usual().accuracy * share
        assert found == pytest.approx(expected)
    assert worths(" e2e5" + GOLD[5:])[0] == pytest.approx(0.10 + 0.06 * 0.8)
    assert worths(" e2e4 e2e4 E: 0.4 0.4 B: e2e4")[1] == RULES.p_malformed
    assert worths(" e2e4 d2d4 E: 0.4 0.4 B: e2e4")[1] == pytest.approx(0.16)
    assert worths(" nonsense")[0] == RULES.p_malformed
    assert worths("") == [] == worths(" E: 0.3")


def test_a_first_move_without_a_label_is_paid_what_a_judge_says() -> None:
    by_labels, judged = (move_values(ROW, [GOLD], RULES, judge)[0] for judge in (None, Other()))
    unlabelled = by_labels.words.index("a2a3")
    assert by_labels.values[unlabelled] < judged.values[unlabelled]


def test_the_usual_quality_comes_from_the_answers() -> None:
    """By hand: three of five moves are true, and of the evaluations two."""
    text = " e2e4 d2d4 g1f3 a2a3 b2b3 E: 0.4 0.4 -9.0 0.0 0.0 B: e2e4"
    verdict = POLICY.verify(ROW, text, RULES)
    found = tally(ROW, text, verdict, Analysis(ROW.moves, ROW.cp))
    assert found == pytest.approx(Tally(5, 3, 2))
    broken = POLICY.verify(ROW, " junk", RULES)
    assert tally(ROW, " junk", broken, Analysis(ROW.moves, ROW.cp)) == Tally()
    running = RunningUsual(momentum=0.5)
    running.update(Tally())
    assert running.now == Usual(0.5, 0.5)
    running.update(found)
    assert running.now == pytest.approx(Usual(0.55, (0.5 + 2 / 3) / 2))
    resumed = RunningUsual(momentum=0.5)
    resumed.load_state_dict(running.state_dict())
    assert resumed.now == running.now
    good, bad = (
        prefix_values(ROW, GOLD, RULES, usual=usual) for usual in (Usual(1, 1), Usual(0, 0))
    )
    assert good[0].value == 1.0 and bad[0].value < 0.5


def test_where_every_move_is_listed_nothing_is_learnt_of_the_usual() -> None:
    few = PolicyRow("7k/8/6KP/8/8/8/8/8 b - - 0 1", ("h8g8",), (-500,))
    gold = POLICY.answer(few, "compact")
    verdict = POLICY.verify(few, gold, RULES)
    assert tally(few, gold, verdict, Analysis(few.moves, few.cp)) == Tally()


def test_a_strict_scale_reaches_rewards_and_promises() -> None:
    second = " g1f3 e2e4 d2d4 c2c4 e2e3 E: 0.3 0.4 0.4 0.3 0.2 B: g1f3"
    strict = RewardRules(p_best_scale=0.001)
    promised = [prefix_values(ROW, second, rules)[0].value for rules in (RULES, strict)]
    paid = [POLICY.verify(ROW, second, rules).total for rules in (RULES, strict)]
    assert promised[1] < promised[0] - 0.2 and paid[1] < paid[0] - 0.3
    assert POLICY.verify(ROW, GOLD, strict).total == 1.0


def test_a_short_truth_promises_no_more_than_there_is() -> None:
    for known in (1, 2, 3):
        row = PolicyRow(START, ROW.moves[:known], ROW.cp[:known])
        assert max(worths(GOLD, row)) <= 1.0


def test_an_echo_or_a_doubled_space_moves_no_promise_forward(tiny_folder: Path) -> None:
    """Where a stage begins, its promise must not know the token that stands there."""
    tokenizer = Tokenizer.load(tiny_folder)
    echoed = " M:" + GOLD
    ids = np.array([[*tokenizer.encode(echoed), tokenizer.eos]])
    _, stages = stage_values(ids, [prefix_values(ROW, echoed, RULES)], tokenizer)
    assert stages[0, :7].tolist() == [0, 0, 1, 2, 3, 4, 4]
    assert worths(echoed) == worths(GOLD)
    doubled = [one.stage for one in prefix_values(ROW, GOLD.replace(" g1f3", "  g1f3"), RULES)]
    assert doubled == [1, 2, 5]


@pytest.mark.parametrize("move", ["e2e4", "e2e5"])
def test_a_right_board_promises_everything_and_a_wrong_one_what_it_is_worth(move: str) -> None:
    row = transition(START, move)
    gold = ENVIRONMENT.answer(row, "compact")
    assert worths(gold, row) == [1.0]
    assert worths(gold.split("+")[0] + "+9+1+1", row) == [1.0]
    copied = START if move == "e2e4" else transition(START, "d2d4").next_fen
    wrong = worths(f"{copied}+0.001+0+0", row)
    assert wrong[0] < 0.2
    assert worths("junk", row) == [RULES.a_malformed]


@pytest.mark.parametrize("baseline", ["group_mean", "rloo"])
def test_credit_by_field_has_the_same_mean_gradient_and_less_noise(baseline: Any) -> None:
    """Two tokens, two choices each, all four answers in one group: sums are exact means."""
    rewards = torch.tensor([[1.0, 0.7, 0.2, 0.3]], dtype=torch.float64)
    promised = torch.tensor([[[0.8], [0.8], [0.1], [0.1]]], dtype=torch.float64)
    stages = torch.tensor([[[0, 1]] * 4])
    centred = rewards - rewards.mean()
    if baseline == "rloo":
        centred = centred * 4 / 3
    settings = AdvantageSettings(baseline_type=baseline, advantage_scale="none")
    paid = field_advantages(rewards, centred, promised, stages, 1.0, settings)
    assert torch.equal(paid[..., 0], centred)
    # the gradient of log p(second | first) at even odds is ±1/2 on the two logits of that context
    slopes = torch.tensor([0.5, -0.5, 0.5, -0.5], dtype=torch.float64)
    for context in (slice(0, 2), slice(2, 4)):
        plain = (centred[0, context] * slopes[context]).sum()
        assert (paid[0, context, 1] * slopes[context]).sum() == pytest.approx(float(plain))
    assert paid[..., 1].var() < 0.2 * centred.var()


def test_paid_by_outlook_a_token_earns_what_it_changes() -> None:
    """By hand: three tokens of which the second lost and the third did better than promised."""
    rewards = torch.tensor([[0.9, 0.4]], dtype=torch.float64)
    promised = torch.tensor([[[0.8, 0.6], [0.5, 0.5]]], dtype=torch.float64)
    stages = torch.tensor([[[0, 1, 2], [0, 1, 2]]])
    settings = AdvantageSettings(advantage_scale="none")
    centred = rewards - rewards.mean()
    paid = field_advantages(rewards, centred, promised, stages, 1.0, settings, paid_by="outlook")
    assert paid[0, :, 0].tolist() == pytest.approx([0.15, -0.15])  # 0.8 and 0.5
    assert paid[0, :, 1].tolist() == pytest.approx([-0.1, 0.1])  # -0.2 and 0.0
    assert paid[0, :, 2].tolist() == pytest.approx([0.2, -0.2])  # +0.3 and -0.1
    # what all its tokens earn is what the answer earns
    assert paid.sum(-1).tolist()[0] == pytest.approx(centred[0].tolist())


@pytest.mark.parametrize("paid_by", ["fields", "outlook"])
def test_leaving_one_out_holds_at_every_stage(paid_by: str) -> None:
    """By hand: each answer less the mean of the *others* that came as far."""
    nan = float("nan")
    rewards = torch.tensor([[0.9, 0.4, 0.2]], dtype=torch.float64)
    promised = torch.tensor([[[0.8, 0.6], [0.5, 0.5], [0.1, nan]]], dtype=torch.float64)
    stages = torch.tensor([[[0, 1, 2], [0, 1, 2], [0, 1, 1]]])
    settings = AdvantageSettings(baseline_type="rloo", advantage_scale="none")
    centred = group_advantages(rewards, torch.zeros(1), settings)
    paid = field_advantages(rewards, centred, promised, stages, 1.0, settings, paid_by=paid_by)
    if paid_by == "fields":
        first, second = [0.9, 0.4, 0.2], [0.9 - 0.8, 0.4 - 0.5, 0.2 - 0.1]
    else:
        first, second = [0.8, 0.5, 0.1], [0.6 - 0.8, 0.5 - 0.5, 0.2 - 0.1]
    third = [0.9 - 0.6, 0.4 - 0.5]
    for place, earned in enumerate((first, second, third)):
        others = [(sum(earned) - one) / (len(earned) - 1) for one in earned]
        expected = [one - other for one, other in zip(earned, others, strict=True)]
        assert paid[0, : len(earned), place].tolist() == pytest.approx(expected)


def test_paid_by_outlook_the_last_that_came_is_paid_the_reward() -> None:
    nan = float("nan")
    rewards = torch.tensor([[1.0, -0.3]], dtype=torch.float64)
    promised = torch.tensor([[[0.6, nan, 0.7], [nan, nan, nan]]], dtype=torch.float64)
    begun, ends = next_worths(rewards, promised)
    assert begun.tolist() == [[0.6, -0.3]]
    assert ends[0, 0].tolist() == [0.7, 0.7, 1.0]


@pytest.mark.parametrize("baseline", ["group_mean", "rloo"])
def test_paid_by_outlook_the_scale_is_that_of_the_answers(baseline: Any) -> None:
    """All answers begin alike: the first token earns nothing, and nothing is blown up by that."""
    rewards = torch.tensor([[0.75, 0.55, 0.65, 0.45]], dtype=torch.float64)
    promised = torch.full((1, 4, 1), 0.6, dtype=torch.float64)
    stages = torch.tensor([[[0, 1]] * 4])
    centred = rewards - rewards.mean()
    if baseline == "rloo":
        centred = centred * 4 / 3
    settings = AdvantageSettings(baseline_type=baseline, advantage_scale="group")
    paid = field_advantages(rewards, centred, promised, stages, 1.0, settings, paid_by="outlook")
    assert paid[..., 0].abs().max() < 1e-9
    assert paid[..., 1].abs().max() < 1.5


def test_an_answer_that_never_came_so_far_neither_pays_nor_counts() -> None:
    rewards = torch.tensor([[1.0, 0.5, -0.3]], dtype=torch.float64)
    promised = torch.tensor([[[0.9], [0.6], [float("nan")]]], dtype=torch.float64)
    stages = torch.tensor([[[0, 1], [0, 1], [0, 0]]])
    centred = rewards - rewards.mean()
    settings = AdvantageSettings(
        advantage_scale="batch", advantage_std_floor=0.0, advantage_clip=0.4
    )
    paid = field_advantages(rewards, centred, promised, stages, 0.5, settings)
    assert paid[0, :, 0].tolist() == pytest.approx([0.4, 0.2, -0.4])
    assert paid[0, :2, 1].tolist() == pytest.approx([0.2, -0.2])
    assert paid.isfinite().all()


def test_tokens_know_their_stage(tiny_folder: Path) -> None:
    tokenizer = Tokenizer.load(tiny_folder)
    broken = " e2e4 d2d4"
    ids = [[*tokenizer.encode(text), tokenizer.eos] for text in (GOLD, broken)]
    padded = [row + [tokenizer.eos] * (len(ids[0]) - len(row)) for row in ids]
    begun = [prefix_values(ROW, text, RULES) for text in (GOLD, broken)]
    found, stages = stage_values(np.array(padded), begun, tokenizer)
    assert stages[0].tolist() == [0, 1, 2, 3, 4, 4] + [5] * 8
    assert stages[1, :2].tolist() == [0, 1]
    assert found[0].tolist() == worths(GOLD)
    assert np.isnan(found[1]).tolist() == [False, True, True, True, True]
    row = transition(START, "e2e4")
    gold = ENVIRONMENT.answer(row, "compact")
    only = np.array([[*tokenizer.encode(gold), tokenizer.eos]])
    _, played = stage_values(only, [prefix_values(row, gold, RULES)], tokenizer)
    line = played[0].tolist()
    assert line == sorted(line) and 3 <= sum(line) <= 8 and line[-1] == 1
    assert " 0.001" in {text for text, held in zip_vocabulary(tokenizer, ".") if held}


def test_ids_that_the_tokenizer_does_not_know_promise_nothing(tiny_folder: Path) -> None:
    tokenizer = Tokenizer.load(tiny_folder)
    unknown = np.full((1, 4), tokenizer.vocab_size + 7)
    found, stages = stage_values(unknown, [prefix_values(ROW, GOLD, RULES)], tokenizer)
    assert not stages.any() and np.isnan(found).all()


def zip_vocabulary(tokenizer: Tokenizer, sign: str) -> list[tuple[str, bool]]:
    held = tokenizer.tokens_with(sign)
    return [(text, held[number]) for text, number in tokenizer.vocabulary().items()]


# --- what else could have been listed -----------------------------------------------------------

LEGAL = sorted(legal_moves(START))


def offered(text: str, row: PolicyRow = ROW) -> list[dict[str, float]]:
    """For each place of a list, the worth of each word in it."""
    (found,) = move_values(row, [text], RULES)
    lines = np.array(found.values).reshape(found.places, len(found.words))
    return [dict(zip(found.words, line, strict=True)) for line in lines.tolist()]


def test_a_choice_is_worth_what_naming_it_would_have_promised() -> None:
    *places, end = offered(GOLD)
    named = GOLD.split(" ")[1:6]
    assert [list(place) for place in places] == [[*LEGAL, "E:"]] * 5
    illegal = worths(" e2e5 a2a3")[0]
    for n, place in enumerate(places):
        for move in LEGAL:
            begun = [*named[:n], move]
            rest = [other for other in LEGAL if other not in begun][: 4 - n]
            promised = worths(" ".join(["", *begun, *rest, "E:"]))[n]
            assert place[move] == pytest.approx(promised - illegal), (n, move)
        if n > 0:
            short = worths(" ".join(["", *named[:n], "E:"]))[-1]
            assert place["E:"] == pytest.approx(short - illegal)
    assert places[0]["E:"] == pytest.approx(RULES.p_malformed - illegal)
    # nobody reads a list of six
    assert {word for word in end if end[word] != 0.0} == {"E:"}
    assert end["E:"] == pytest.approx(worths(GOLD)[-1] - RULES.p_malformed)


def test_a_sixth_move_promises_what_it_earns() -> None:
    rest = [move for move in LEGAL if move not in ROW.moves]
    six = " ".join(["", *ROW.moves, rest[0], "E:", *["0.4"] * 6, "B:", ROW.moves[0]])
    assert worths(six)[-1] == POLICY.verify(ROW, six, RULES).total == RULES.p_malformed


class Other:
    """A judge with another view than the row's; it counts what it is asked beyond its five."""

    best = Analysis(("g1f3", "c2c4", "d2d4", "b1c3", "g2g3"), (30, 20, 10, 0, -10))

    def __init__(self) -> None:
        self.asked: set[str] = set()

    def analyse(self, row: PolicyRow) -> Analysis:
        return self.best

    def move_cp(self, row: PolicyRow, move: str) -> int | None:
        self.asked.add(move)
        return -30

    def prefetch(self, rows: object, *, every_move: bool = False) -> None:
        """Nothing to warm up."""


@pytest.mark.parametrize("shaping", get_args(Shaping))
@pytest.mark.parametrize("progress", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("judged", [False, True])
def test_choices_know_rules_progress_and_judge(
    shaping: Shaping, progress: float, judged: bool
) -> None:
    rules, judge = RewardRules(reward_shaping=shaping), Other() if judged else None
    named = ["h2h3", "g1f3", "d2d4", "e2e4", "a2a3"]  # hits and misses of both views
    (found,) = move_values(ROW, [" ".join(["", *named, "E:"])], rules, judge, progress)
    lines = np.array(found.values).reshape(6, len(found.words)).tolist()
    unknown = set(LEGAL) - set(Other.best.moves)
    assert judge is None or judge.asked == unknown, "any move that may come first may be B"

    def promised(*moves: str) -> list[float]:
        text = " ".join(["", *moves, "E:"])
        return [one.value for one in prefix_values(ROW, text, rules, judge, progress)]

    illegal = promised("e2e5", "a2a3")[0]
    first = dict(zip(found.words, lines[0], strict=True))
    for move in LEGAL:
        assert first[move] == pytest.approx(promised(move, "e2e5")[0] - illegal), move
    for n in range(1, 5):
        place = dict(zip(found.words, lines[n], strict=True))
        for move in ("c2c4", "b1c3", "e2e3", "h2h4"):
            begun = promised(*named[:n], move, *(["b2b3"] if n < 4 else []))[n]
            assert place[move] == pytest.approx(begun - illegal), (n, move)
        assert place["E:"] == pytest.approx(promised(*named[:n])[-1] - illegal)
        assert place["h2h3"] == pytest.approx(rules.p_malformed - illegal)
    ended = promised(*named)[-1] - rules.p_malformed
    assert lines[5][-1] == pytest.approx(ended) and not any(lines[5][:-1])


def test_the_end_of_a_list_pays_where_fewer_moves_exist() -> None:
    few = PolicyRow("7k/8/6KP/8/8/8/8/8 b - - 0 1", ("h8g8",), (-500,))
    first, second = offered(" h8g8 E: -5.0 B: h8g8", few)
    assert first["h8g8"] > first["E:"] and second["E:"] > second["h8g8"]
    assert second["E:"] > 0.0 > second["h8g8"]


def test_choices_end_where_a_list_is_spoilt() -> None:
    assert len(offered(" e2e4 e2e5 d2d4 E: 0.4")) == 2
    assert len(offered(" e2e4 e2e4 d2d4 E: 0.4")) == 2
    assert len(offered(" e2e4 junk d2d4 E: 0.4")) == 2
    assert len(offered(" e2e4  d2d4 g1f3")) == 2
    assert len(offered(" " + " ".join(LEGAL))) == 6
    assert len(offered("")) == 1 == len(offered(" E: 0.3"))
    assert offered(" M:" + GOLD) == offered(GOLD)


def test_choices_stand_where_moves_were_drawn(tiny_folder: Path) -> None:
    tokenizer = Tokenizer.load(tiny_folder)
    texts = (GOLD, " M:" + GOLD, " e2e4 e2e5", " e2e4 junk", " e2e4", "")
    lines = [tokenizer.encode(text) for text in texts]
    counts = [len(line) for line in lines]
    counts[0] += 1  # only this one has its end
    ids = np.array([line + [tokenizer.eos] * (max(counts) - len(line)) for line in lines])
    nothing, done = torch.zeros(6, max(counts)), (True,) * 6
    prompt = Prompt(ROW, (1,), 0)
    answers = Completions(prompt, nothing, nothing, nothing, nothing, ids, counts, done)
    found = listed_move_values(answers, move_values(ROW, texts, RULES), tokenizer)
    assert found is not None
    assert found.tokens == [tokenizer.token(f" {word}") for word in (*LEGAL, "E:")]
    assert found.completions == [0] * 6 + [1] * 6 + [2] * 2 + [3] * 2 + [4]
    assert found.positions == [0, 1, 2, 3, 4, 5, 1, 2, 3, 4, 5, 6, 0, 1, 0, 1, 0]
    assert len(found.values) == len(found.positions) * len(found.tokens)


def test_moves_spelled_in_characters_and_cut_answers_make_fewer_choices(tiny_folder: Path) -> None:
    tokenizer = Tokenizer.load(tiny_folder)
    spelled = [tokenizer.token(sign) for sign in " e2e4"]
    lines = [[*spelled, *tokenizer.encode(" d2d4")], tokenizer.encode(" M: e2e4 d2d4")[:2]]
    texts = [tokenizer.decode(line) for line in lines]
    assert texts == [" e2e4 d2d4", " M: e2e4"]
    ids = np.array([line + [tokenizer.eos] * (6 - len(line)) for line in lines])
    nothing, done = torch.zeros(2, 6), (False, False)
    prompt = Prompt(ROW, (1,), 0)
    answers = Completions(prompt, nothing, nothing, nothing, nothing, ids, [6, 2], done)
    found = listed_move_values(answers, move_values(ROW, texts, RULES), tokenizer)
    assert found is not None
    assert (found.completions, found.positions) == ([1], [1])
