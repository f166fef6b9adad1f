"""Guides: what is never sampled is learnt from the truth, and what was sampled as ever."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from rookworld.grpo.advantages import RunningMeans, group_mean, guide_advantages
from rookworld.grpo.kl import ESTIMATORS
from rookworld.grpo.loss import LOSSES, Batch, StepTotals
from rookworld.grpo.settings import AdvantageSettings, LossSettings
from rookworld.model.tokenizer import Tokenizer
from rookworld.model.weights import load_model
from rookworld.rl import credit, forward, update
from rookworld.rl.forward import MicroBatch
from rookworld.rl.models import Learner
from rookworld.rl.scratch import StepScratch
from rookworld.rl.settings import TrainSettings
from rookworld.rl.trainer import train
from rookworld.rollout.collector import Collector, collect
from rookworld.rollout.guide import Asked, guided, to_guide
from rookworld.rollout.prompts import Prompts
from rookworld.rollout.types import Group, Prompt
from rookworld.runtime.errors import ConfigError
from rookworld.tasks.environment import ENVIRONMENT, transition
from rookworld.tasks.policy import POLICY
from rookworld.tasks.registry import task_of
from rookworld.tasks.reward import RewardRules
from rookworld.tasks.task import AnyTask, Row, Verdict
from test_rollout import collector_of
from test_update import K, made_group
from tiny_training import metrics_of, no_evaluation, relative, tiny_rows, tiny_settings

pytestmark = pytest.mark.usefixtures("single_thread")

# --- the mathematics, by enumeration of all sequences of two tokens ------------------------------

WORDS = 3
SEQUENCES = list(product(range(WORDS), repeat=2))
TRUTH = SEQUENCES.index((2, 1))


def random_policy() -> Tensor:
    """Scores of the first token, and of the second behind each first one."""
    scores = torch.randn(1 + WORDS, WORDS, generator=torch.Generator().manual_seed(4))
    return (2 * scores.double()).requires_grad_()


def token_logp(scores: Tensor) -> Tensor:
    """[sequences, 2]."""
    table = scores.log_softmax(-1)
    return torch.stack([torch.stack([table[0, a], table[1 + a, b]]) for a, b in SEQUENCES])


def guide_term(scores: Tensor, gain: float, loss: str = "token") -> Tensor:
    """What a guide adds to the objective, by the functions that training uses."""
    logp = token_logp(scores)[TRUTH][None]
    plain = AdvantageSettings(advantage_scale="none")
    paid = guide_advantages(torch.tensor([gain]), 0.3, plain)
    totals = StepTotals(tokens=1, sequences=1, max_tokens=1)
    answer = Batch(logp, logp.detach(), paid, torch.ones(1, 2, dtype=torch.bool))
    return -LOSSES[loss](answer, totals, LossSettings())[0].sum()


def gradient_of(value: Tensor, scores: Tensor) -> Tensor:
    return torch.autograd.grad(value, scores, retain_graph=True)[0]


def test_the_honest_weight_of_the_truth_is_its_probability() -> None:
    """π(o*) A ∇log π(o*) and the samples that are not the truth: the gradient of the mean reward.

    So a guide of weight 1 has the honest direction, 1 / π(o*) times as long.
    """
    scores, baseline = random_policy(), 0.3
    rewards = torch.rand(len(SEQUENCES), generator=torch.Generator().manual_seed(1)).double()
    rewards[TRUTH] = 1.0
    logp = token_logp(scores).sum(-1)
    exact = gradient_of((logp.exp() * rewards).sum(), scores)
    weights = (logp.exp() * (rewards - baseline)).detach()
    weights[TRUTH] = 0.0
    of_others = gradient_of((weights * logp).sum(), scores)
    of_truth = gradient_of(guide_term(scores, 1.0 - baseline), scores)
    honest = of_others + logp[TRUTH].detach().exp() * of_truth
    torch.testing.assert_close(honest, exact)


@pytest.mark.parametrize("k", [1, 2, 3])
def test_guiding_completes_the_log_of_the_success(k: int) -> None:
    """Over all groups of K samples, guided if all are wrong, the gradient is that of
    F(p) = (K - 1) p + log p + Σ_j≤K (1 - p)^j / j, which rises with p: the honest optimum."""
    scores, found = random_policy(), torch.zeros(1 + WORDS, WORDS, dtype=torch.float64)
    logp = token_logp(scores).sum(-1)
    for drawn in product(range(len(SEQUENCES)), repeat=k):
        chosen = list(drawn)
        rewards = torch.tensor([[float(one == TRUTH) for one in chosen]])
        paid = (rewards - group_mean(rewards, torch.zeros(1)))[0]
        value = (paid.double() * logp[chosen]).sum()
        if TRUTH not in chosen:
            value = value + guide_term(scores, 1.0 - float(rewards.mean()))
        found += logp[chosen].sum().exp().detach() * gradient_of(value, scores)
    p = logp[TRUTH].exp()
    tail = sum((1 - p) ** j / j for j in range(1, k + 1))
    torch.testing.assert_close(found, gradient_of((k - 1) * p + p.log() + tail, scores))


@pytest.mark.parametrize("loss", sorted(LOSSES))
def test_every_loss_has_the_gradient_of_the_log_probability(loss: str) -> None:
    scores = random_policy()
    found = gradient_of(guide_term(scores, 0.7, loss), scores)
    logp = token_logp(scores)[TRUTH].sum()
    length = 2 if loss in ("grpo", "gspo") else 1
    torch.testing.assert_close(found, gradient_of(0.7 * logp / length, scores))


def test_the_advantage_of_a_truth_by_hand() -> None:
    gains = torch.tensor([0.6, 2.0])
    of = AdvantageSettings
    assert guide_advantages(gains, 0.2, of()).tolist() == pytest.approx([3.0, 5.0])
    assert guide_advantages(gains, 0.0, of(advantage_clip=0)).tolist() == pytest.approx([30, 100])
    assert guide_advantages(gains, 0.2, of(advantage_scale="group"))[0] == pytest.approx(3.0)
    assert guide_advantages(gains, 0.2, of(advantage_scale="none")).tolist() == gains.tolist()


# --- the update ---------------------------------------------------------------------------------


@pytest.fixture
def learner(tiny_folder: Path) -> Learner:
    """A policy and a reference that differs from it, in double precision."""
    model = load_model(tiny_folder).double()
    reference = copy.deepcopy(model).requires_grad_(False)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in reference.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator))
    return Learner(model, reference)


@pytest.fixture
def tokenizer(tiny_folder: Path) -> Tokenizer:
    return Tokenizer.load(tiny_folder)


@pytest.fixture
def groups(tokenizer: Tokenizer) -> list[Group]:
    prompts = Prompts(tiny_rows(), tokenizer, 0.4, seed=3).take(5)
    return [made_group(prompt, tokenizer, number) for number, prompt in enumerate(prompts)]


def guides_of(groups: Sequence[Group], tokenizer: Tokenizer) -> list[Group]:
    """The truth of some prompts, and what it is worth."""
    found = []
    for group in groups:
        text = str(task_of(group.prompt.row).answer(group.prompt.row, tokenizer.style))
        found.append(guided(group, text, Verdict(1.0, {}, ""), tokenizer))
    return found


def plain_settings(folder: Path, **changes: Any) -> TrainSettings:
    changes = {"credit": "answer", "advantage_scale": "none", "guide": 0.5} | changes
    return tiny_settings(folder, folder, k_samples=K, a_temperature=0.8, **changes)


def micros_of(
    groups: Sequence[Group], guides: Sequence[Group], learner: Learner, settings: TrainSettings
) -> list[MicroBatch]:
    micros = forward.prepare(groups, learner, settings, eos=0)
    truths = forward.prepare_guides(guides, learner, settings, eos=0)
    credit.set_advantages(micros, learner, settings, RunningMeans(), None, 0.0, truths)
    return [*micros, *truths]


def update_gradient(
    micros: Sequence[MicroBatch], learner: Learner, settings: TrainSettings, kl_coef: float
) -> tuple[update.Gradient, list[Tensor]]:
    for parameter in learner.parameters():
        parameter.grad = None
    totals = update.step_totals(micros, longest=20)
    assert totals is not None
    coefs = update.Coefs(kl_coef, 0.0)
    found = update.gradient(micros, learner, totals, settings, coefs, StepScratch())
    return found, [p.grad.clone() for p in learner.parameters() if p.grad is not None]


def truth_logp(group: Group, learner: Learner) -> tuple[Tensor, Tensor]:
    """log π and the exact KL of each token of a true answer, behind a prompt of its own."""
    head = len(group.prompt.ids)
    ids = torch.tensor([[*group.prompt.ids, *group.tokens[0].tolist()]])
    policy = learner.model.logits(learner.model(ids)[0, head - 1 : -1]).log_softmax(-1)
    states = learner.reference(ids)[0, head - 1 : -1]
    apart = policy - learner.reference.logits(states).log_softmax(-1)
    return policy.gather(-1, group.tokens[0, :, None])[:, 0], (policy.exp() * apart).sum(-1)


@pytest.mark.parametrize("changes", [{}, {"kl_type": "k2"}, {"micro_tokens": 1}], ids=str)
def test_a_guide_adds_its_own_log_likelihood_and_kl(
    learner: Learner,
    groups: list[Group],
    tokenizer: Tokenizer,
    tmp_path: Path,
    changes: dict[str, Any],
) -> None:
    """By the formulas alone, one sequence at a time; what was sampled teaches what it taught."""
    settings, guides = plain_settings(tmp_path, **changes), guides_of(groups[:3], tokenizer)
    kl_coef = 0.0 if settings.kl.kl_type in ESTIMATORS else 0.3
    micros = micros_of(groups, guides, learner, settings)
    found, both = update_gradient(micros, learner, settings, kl_coef)
    sampled = [micro for micro in micros if not micro.guide]
    without, alone = update_gradient(sampled, learner, settings, 0.0)
    tokens = sum(int(group.lengths.sum()) for group in groups)
    held = tokens + sum(int(group.lengths.sum()) for group in guides)
    total = torch.zeros((), dtype=torch.float64)
    for guide in guides:
        logp, kl = truth_logp(guide, learner)
        assert guide.baseline is not None
        total = total - (1 - guide.baseline) * logp.sum() / tokens + kl_coef * kl.sum() / held
    own = torch.autograd.grad(total, list(learner.model.parameters()), allow_unused=True)
    if kl_coef:
        _, with_kl = update_gradient(sampled, learner, settings, kl_coef * tokens / held)
        alone = with_kl
    expected = [a if b is None else a + b for a, b in zip(alone, own, strict=True)]
    assert relative(both, expected) < 1e-5
    assert float(found.ratio.tokens) == float(without.ratio.tokens)
    assert found.entropy == pytest.approx(without.entropy)


def test_a_guide_is_held_by_the_trust_region_from_its_second_update_on(
    learner: Learner, groups: list[Group], tokenizer: Tokenizer, tmp_path: Path
) -> None:
    settings = plain_settings(tmp_path)
    (guide,) = micros_of([], guides_of(groups[:1], tokenizer), learner, settings)
    totals = StepTotals(tokens=1, sequences=1, max_tokens=1)
    coefs = update.Coefs(0.0, 0.0)

    def gradient() -> float:
        objective, _, _ = update.micro_objective(guide, learner, totals, settings, coefs)
        (found,) = torch.autograd.grad(objective, [learner.model.lm_head.weight])
        return float(found.abs().sum())

    assert gradient() > 0
    expected, _ = truth_logp(guide.groups[0], learner)
    torch.testing.assert_close(guide.old_logp.double(), expected.detach())
    guide.old_logp = guide.old_logp - 1.0
    assert gradient() == 0


# --- which prompts, and what stands beside them --------------------------------------------------


def asked(row: Row, *, solved: bool) -> Asked:
    return Asked(Prompt(row, (1,), 0), solved, None)


def test_classes_that_are_solved_least_come_first() -> None:
    board = "7k/8/8/8/8/8/8/RK6 w - - 0 1"
    quiet, illegal = transition(board, "a1a2"), transition(board, "a1b3")
    assert (quiet.kind, illegal.kind) == ("quiet", "illegal")
    met = [
        asked(quiet, solved=False),
        asked(quiet, solved=True),
        asked(illegal, solved=False),
        asked(illegal, solved=False),
        asked(quiet, solved=False),
    ]
    assert to_guide(met, 9) == [met[2], met[3], met[0], met[4]]
    assert to_guide(met, 1) == [met[2]]


class Judged(Collector):
    """Analyses are right, the rules are not known."""

    def groups(self, prompts: Sequence[Prompt], step: int, progress: float) -> list[Group]:
        def scored(group: Group) -> Group:
            right = float(group.prompt.letter == "P")
            parts = {"best": right, "whole": right}
            verdicts = (
                v._replace(total=0.1 * i, parts=parts) for i, v in enumerate(group.verdicts)
            )
            return replace(group, verdicts=tuple(verdicts))

        return [scored(group) for group in super().groups(prompts, step, progress)]


def test_unsolved_prompts_get_the_truth_and_solved_ones_do_not(
    tiny_folder: Path, tokenizer: Tokenizer
) -> None:
    collector = Judged(**vars(collector_of(load_model(tiny_folder), tokenizer, k=2)))
    longer = {letter: replace(one, max_new_tokens=96) for letter, one in collector.sampling.items()}
    collector = replace(collector, sampling=longer)

    def found(guide: float) -> Any:
        prompts = Prompts(tiny_rows(), tokenizer, 0.5, seed=0)
        return collect(collector, prompts, 8, 0, 1.0, flat_tries=1, guide=guide)

    assert found(0.0).guides == []
    assert found(0.0).solved == {}
    assert len(found(0.3).guides) == 3
    every = found(1.0)
    assert [group.prompt.letter for group in every.guides] == ["A"] * 4
    assert every.solved["P/5_moves"] == (4, 4)
    assert {n for kind, (n, _) in every.solved.items() if kind.startswith("A/")} == {0}
    for group in every.guides:
        row = group.prompt.row
        assert group.texts == (ENVIRONMENT.answer(row, "compact"),)
        assert tokenizer.decode(group.tokens[0].tolist()) == group.texts[0]
        assert int(group.tokens[0, -1]) == tokenizer.eos
        assert group.rewards == [1.0]
        assert group.baseline == pytest.approx(0.05)


def test_a_truth_that_does_not_fit_or_is_no_better_is_left_out(
    tiny_folder: Path, tokenizer: Tokenizer
) -> None:
    collector = collector_of(load_model(tiny_folder), tokenizer, k=2)
    (prompt,) = Prompts(tiny_rows(), tokenizer, 0.0, seed=0).take(1)
    group = replace(made_group(prompt, tokenizer, 0), verdicts=(Verdict(0.2, {}, ""),))
    assert collector.true_answer(group, 1.0) is None  # 5 tokens at most
    longer = replace(collector.sampling["P"], max_new_tokens=40)
    collector = replace(collector, sampling={"P": longer})
    assert collector.true_answer(group, 1.0) is not None
    best = replace(group, verdicts=(Verdict(1.0, {}, ""),))
    assert collector.true_answer(best, 1.0) is None


def test_what_is_right_is_said_by_the_task() -> None:
    analysis, played = (POLICY.select(tiny_rows(1, 0))[0], ENVIRONMENT.select(tiny_rows(0, 1))[0])

    def right(task: AnyTask, row: Row, text: str) -> bool:
        return task.is_right(task.verify(row, text, RewardRules()))

    text = POLICY.answer(analysis, "compact")
    assert right(POLICY, analysis, text)
    assert right(POLICY, analysis, text.replace("0.3 0.1", "0.1 0.3"))
    assert not right(POLICY, analysis, text.replace("B: e2e4", "B: a2a3"))
    text = ENVIRONMENT.answer(played, "compact")
    assert right(ENVIRONMENT, played, text)
    assert not right(ENVIRONMENT, played, text.replace("0.001", "1.0"))


def test_rare_classes_are_drawn_more_often_and_all_rows_all_the_same(tokenizer: Tokenizer) -> None:
    """Sixteen quiet moves and one illegal one: a fifth of the turns, not a seventeenth."""
    board = "7k/8/8/8/8/8/8/RK6 w - - 0 1"
    rows: list[Row] = [transition(board, "a1b3")]
    moves = ["a1a2", "a1a3", "a1a4", "a1a5", "a1a6", "a1a7", "b1b2", "b1c1"]
    rows += [transition(board, move, (past,)) for move in moves for past in ("h7h8", "g8h8")]
    assert Counter(row.kind for row in ENVIRONMENT.select(rows)) == {"illegal": 1, "quiet": 16}
    drawn = Prompts(rows, tokenizer, 1.0, seed=0, by_class=True).take(20)
    kinds = Counter(row.kind for row in ENVIRONMENT.select(prompt.row for prompt in drawn))
    assert kinds == {"illegal": 4, "quiet": 16}
    assert len({prompt.row for prompt in drawn}) == 17
    mixed = [*rows, *tiny_rows(8, 0)]
    plain, classed = (
        Prompts(mixed, tokenizer, 0.5, seed=0, by_class=one).take(30) for one in (False, True)
    )
    assert [one.letter for one in plain] == [one.letter for one in classed]
    of_p = [[one.row for one in found if one.letter == "P"] for found in (plain, classed)]
    assert of_p[0] == of_p[1]


# --- a run --------------------------------------------------------------------------------------

CHANGES: list[dict[str, Any]] = [
    {"gae": True},
    {"credit": "choices", "kl_type": "reverse"},
    {"loss": "gspo", "advantage_scale": "group", "reward_norm": True, "updates_per_rollout": 2},
    {"kl_type": "k2", "loss": "cispo", "credit": "outlook", "kl_collect_cap": 1.0},
]


@pytest.mark.parametrize("changes", CHANGES, ids=str)
def test_a_class_that_is_never_sampled_is_learnt(
    warm_folder: Path, tmp_path: Path, changes: dict[str, Any]
) -> None:
    """The model knows analyses, and of the rules nothing at all."""
    settings = tiny_settings(warm_folder, tmp_path / "run", steps=5, lr=3e-3, guide=0.5)
    settings = settings.but(mix_env_ratio=0.5, max_new_tokens=90, kl_divergence_threshold=0.0)
    settings = settings.but(eval_every=0, save_every=5, batch_size=4, flat_tries=0, **changes)
    train(settings, tiny_rows(), no_evaluation)
    lines = metrics_of(tmp_path / "run")
    assert all(0 < line["guide/share"] <= 0.5 for line in lines)
    assert lines[-1]["guide/prob"] > lines[0]["guide/prob"]
    assert {"guide/solved/P/5_moves", "guide/solved/A/quiet"} <= {n for one in lines for n in one}


def test_a_run_with_guides_resumes_to_the_same_bits(warm_folder: Path, tmp_path: Path) -> None:
    whole, cut = (
        tiny_settings(
            warm_folder, tmp_path / name, guide=0.5, mix_env_ratio=0.5, max_new_tokens=90
        ).but(lr_schedule="constant")
        for name in ("whole", "cut")
    )
    train(whole, tiny_rows(), no_evaluation)
    train(cut.but(steps=2), tiny_rows(), no_evaluation)
    train(cut.but(resume=True), tiny_rows(), no_evaluation)
    assert metrics_of(tmp_path / "whole") == metrics_of(tmp_path / "cut")
    paths = (tmp_path / name / "final" / "model.safetensors" for name in ("whole", "cut"))
    assert len({path.read_bytes() for path in paths}) == 1


def test_a_kl_in_the_reward_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--guide with --kl-type k1_reward"):
        TrainSettings.of(guide=0.2, kl_type="k1_reward", credit="answer")
