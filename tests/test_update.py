"""The gradient: that of every prompt computed K times, however a step is cut."""

from __future__ import annotations

import copy
import math
import sys
from array import array
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from rookworld.grpo.advantages import RunningMeans, gae
from rookworld.grpo.loss import LOSSES
from rookworld.model.kernels import cuda_graphs
from rookworld.model.kernels.cuda_graphs import PassGraphs
from rookworld.model.tokenizer import Tokenizer
from rookworld.model.weights import load_model
from rookworld.rl import credit, forward, models, update
from rookworld.rl.batch import causal_batch, padded_batch, shared_prefix_batch
from rookworld.rl.forward import MicroBatch
from rookworld.rl.memory import MemoryPlan
from rookworld.rl.models import Learner, ValueHead, make_optimizers
from rookworld.rl.scratch import StepScratch
from rookworld.rl.self_distill import Distiller
from rookworld.rl.settings import MICRO_TOKENS, TrainSettings
from rookworld.rl.update import Gradient
from rookworld.rollout.prompts import Prompts
from rookworld.rollout.types import Group, ListedMoveValues, Prompt, TokenValues
from rookworld.runtime.errors import ConfigError
from rookworld.tasks.reward import RunningNorm
from rookworld.tasks.task import Verdict
from tiny_training import relative, tiny_rows, tiny_settings, tiny_tokenizer

pytestmark = pytest.mark.usefixtures("single_thread")

K, KL_COEF = 3, 0.3


@pytest.fixture
def learner(tiny_folder: Path) -> Learner:
    """A policy and a reference that differs from it, in double precision, and a value head."""
    model = load_model(tiny_folder).double()
    reference = copy.deepcopy(model).requires_grad_(False)
    generator = torch.Generator().manual_seed(1)
    head = ValueHead(model.config.n_embd)
    with torch.no_grad():
        for parameter in (*reference.parameters(), *head.parameters()):
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator))
    return Learner(model, reference, head)


@pytest.fixture
def groups(tiny_folder: Path) -> list[Group]:
    """Groups of both tasks with answers of every length, as if sampled by a nearby policy."""
    tokenizer = Tokenizer.load(tiny_folder)
    prompts = Prompts(tiny_rows(), tokenizer, 0.4, seed=3).take(5)
    assert {prompt.letter for prompt in prompts} == {"P", "A"}
    return [made_group(prompt, tokenizer, number) for number, prompt in enumerate(prompts)]


def made_group(prompt: Prompt, tokenizer: Tokenizer, seed: int) -> Group:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, 12 - 2 * seed, (K,), generator=generator)
    width = int(lengths.max())
    place = torch.arange(width)
    tokens = torch.randint(0, tokenizer.vocab_size, (K, width), generator=generator)
    tokens = torch.where(place < lengths[:, None] - 1, tokens, tokenizer.eos)
    rewards = torch.rand(K, generator=generator, dtype=torch.float64).tolist()
    return Group(
        prompt,
        tokens,
        lengths,
        -7.8 + 0.3 * torch.randn(K, width, generator=generator),
        torch.zeros(K, width),
        (True,) * K,
        ("",) * K,
        tuple(Verdict(reward, {}, "") for reward in rewards),
        TokenValues(
            torch.rand(K, 2, generator=generator, dtype=torch.float64),
            torch.randint(0, 3, (K, width), generator=generator).sort(1).values,
        ),
        made_move_values(lengths.tolist(), generator) if prompt.letter == "P" else None,
    )


def made_move_values(lengths: Sequence[int], generator: torch.Generator) -> ListedMoveValues:
    """Up to two choices an answer, between a few tokens."""
    where = [(i, place) for i, length in enumerate(lengths) for place in range(min(2, length))]
    moves = int(torch.randint(3, 9, (), generator=generator))
    worths = torch.randn(len(where) * moves, generator=generator, dtype=torch.float64)
    return ListedMoveValues(
        torch.randperm(300, generator=generator)[:moves].tolist(),
        [i for i, _ in where],
        [place for _, place in where],
        array("d", worths.tolist()),
    )


def settings_of(tmp_path: Path, **changes: Any) -> TrainSettings:
    changes = {"credit": "answer"} | changes
    return tiny_settings(
        tmp_path,
        tmp_path,
        k_samples=K,
        entropy_coef=0.1,
        a_temperature=0.8,
        **changes,
    )


def coefs_of(settings: TrainSettings) -> update.Coefs:
    return update.Coefs(KL_COEF, settings.distill.distill_coef)


def computed(
    groups: Sequence[Group], learner: Learner, settings: TrainSettings, *, ahead: bool = False
) -> tuple[Gradient, list[Tensor], list[MicroBatch]]:
    """The update's gradient, parameter by parameter."""
    if not settings.advantages.gae:
        learner = replace(learner, value_head=None)
    learner = replace(learner, memory=MemoryPlan(settings.compute.micro_tokens or MICRO_TOKENS))
    for parameter in learner.parameters():
        parameter.grad = None
    micros = forward.prepare(groups, learner, settings, eos=0)
    credit.set_advantages(micros, learner, settings, RunningMeans(), None, KL_COEF)
    scratch = StepScratch()
    if settings.distill.distill_coef > 0:
        fens = [row.fen for row in tiny_rows(8, 0)]
        scratch.distill_batches = Distiller(fens, learner, tiny_tokenizer(), settings).batches(0)
    totals = update.step_totals(micros, longest=20)
    assert totals is not None
    coefs = coefs_of(settings)
    if ahead:
        update.distill(scratch, learner, settings, coefs.distill)
    found = update.gradient(micros, learner, totals, settings, coefs, scratch)
    assert scratch.distill_loss is None
    gradients = [p.grad.clone() for p in learner.parameters() if p.grad is not None]
    return found, gradients, micros


def plain_gradient(
    groups: Sequence[Group], learner: Learner, settings: TrainSettings
) -> list[Tensor]:
    """Every answer behind a prompt of its own, one sequence at a time, by the formulas alone."""
    for parameter in learner.parameters():
        parameter.grad = None
    tokens = sum(int(group.lengths.sum()) for group in groups)
    plain = [(group, i) for group in groups for i in range(K)]
    parts = [plain_pass(group, i, learner, settings) for group, i in plain]
    raw = [raw_advantage(p, group, i, settings) for p, (group, i) in zip(parts, plain, strict=True)]
    spread = torch.cat([advantage for advantage, _ in raw]).std(correction=0)
    if not settings.advantages.gae:  # one value per answer, however long it is
        spread = torch.stack([advantage[0] for advantage, _ in raw]).std(correction=0)
    total = torch.zeros((), dtype=torch.float64)
    for part, (advantage, returns), (group, i) in zip(parts, raw, plain, strict=True):
        logp, kl, entropy, value = part
        scaled = (advantage / spread.clamp_min(settings.advantages.advantage_std_floor)).float()
        ratio = (logp - group.logp[i, : len(logp)]).exp()
        clipped = ratio.clamp(1 - settings.loss.clip_range, 1 + settings.loss.clip_high)
        policy = -torch.minimum(ratio * scaled, clipped * scaled)
        total = (
            total + (policy + KL_COEF * kl - settings.loss.entropy_coef * entropy).sum() / tokens
        )
        if settings.advantages.gae:
            off = 0.5 * (value - returns).square().sum() / tokens
            total = total + update.VALUE_COEF * off
    total.backward()  # type: ignore[no-untyped-call]
    own = learner.model.parameters() if not settings.advantages.gae else learner.parameters()
    return [torch.zeros_like(p) if p.grad is None else p.grad for p in own]


def plain_pass(
    group: Group, i: int, learner: Learner, settings: TrainSettings
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """log π, exact KL, entropy and value of each token of answer `i`."""
    length, head = int(group.lengths[i]), len(group.prompt.ids)
    ids = torch.tensor([[*group.prompt.ids, *group.tokens[i, :length].tolist()]])
    states = learner.model(ids)[0, head - 1 : -1]
    reference = learner.reference(ids)[0, head - 1 : -1]
    temperature, _ = settings.sampling.of_task(group.prompt.letter)
    drawn = (learner.model.logits(states) / temperature).log_softmax(-1)
    logp = drawn.gather(-1, group.tokens[i, :length, None])[:, 0]
    policy = learner.model.logits(states).log_softmax(-1)
    kl = (policy.exp() * (policy - learner.reference.logits(reference).log_softmax(-1))).sum(-1)
    assert learner.value_head is not None
    still = states.detach().float()
    scaled = still / still.norm(dim=-1, keepdim=True)
    value = (scaled @ learner.value_head.weight.T)[:, 0] + learner.value_head.bias
    return logp, kl, -(drawn.exp() * drawn).sum(-1), value


def raw_advantage(
    part: tuple[Tensor, ...], group: Group, i: int, settings: TrainSettings
) -> tuple[Tensor, Tensor]:
    value = part[3].detach()
    if not settings.advantages.gae:
        mean = sum(group.rewards) / K
        return torch.full_like(value, group.rewards[i] - mean), value
    reward = torch.tensor([group.rewards[i] - sum(group.rewards) / K])
    mask = torch.ones(1, len(value))
    found = gae(
        value[None], reward, mask, settings.advantages.gamma, settings.advantages.gae_lambda
    )
    return found[0][0], found[1][0]


@pytest.mark.parametrize("with_value_head", [False, True])
def test_shared_prefix_gradient_is_the_plain_one(
    learner: Learner, groups: list[Group], tmp_path: Path, with_value_head: bool
) -> None:
    settings = settings_of(tmp_path, gae=with_value_head, gamma=0.9)
    _, shared, _ = computed(groups, learner, settings)
    assert relative(shared, plain_gradient(groups, learner, settings)) < 1e-6


@pytest.mark.parametrize("scale", ["none", "batch", "group"])
def test_a_choice_learns_from_everything_it_could_have_been(
    learner: Learner, groups: list[Group], tmp_path: Path, scale: str
) -> None:
    """The gradient of what choices are worth on average, by the formula alone."""
    changes = {"credit": "choices", "advantage_scale": scale, "advantage_clip": 0.0}
    settings = settings_of(tmp_path, p_temperature=0.6, **changes)
    measured, found, micros = computed(groups, learner, settings)
    silent = [worthless(group) for group in groups]
    silently, without, _ = computed(silent, learner, settings)
    assert measured.policy == pytest.approx(silently.policy)
    spread = torch.tensor([group.rewards for group in groups], dtype=torch.float64)
    spread = spread - spread.mean(1, keepdim=True)
    by_group = {"none": [1.0] * 5, "batch": [float(spread.std(correction=0))] * 5}
    by_group["group"] = spread.std(1, correction=0).tolist()
    total = torch.zeros((), dtype=torch.float64)
    for parameter in learner.parameters():
        parameter.grad = None
    for group, deviation in zip(groups, by_group[scale], strict=True):
        if (one := group.move_values) is None:
            continue
        table = torch.tensor(one.values, dtype=torch.float64).view(len(one.positions), -1)
        for i, place, worth in zip(one.completions, one.positions, table, strict=True):
            head = len(group.prompt.ids)
            ids = torch.tensor([[*group.prompt.ids, *group.tokens[i, :place].tolist()]])
            states = learner.model(ids)[0, head + place - 1]
            drawn = (learner.model.logits(states) / 0.6).softmax(-1)
            total = total - (drawn[one.tokens] * worth).sum() / deviation
    total = total / sum(int(group.lengths.sum()) for group in groups)
    total.backward()  # type: ignore[no-untyped-call]
    plain = [torch.zeros_like(p) if p.grad is None else p.grad for p in learner.model.parameters()]
    moved = [a - b for a, b in zip(found, without, strict=True)]
    assert relative(moved, plain) < 1e-6
    for micro in micros:
        assert micro.advantages is not None
        for at, group in enumerate(micro.groups):
            if (one := group.move_values) is not None:
                paid = micro.advantages[at * K : (at + 1) * K][one.completions, one.positions]
                assert not paid.any()


def test_choices_of_several_widths_share_a_pack_and_a_norm(
    learner: Learner, tiny_folder: Path, tmp_path: Path
) -> None:
    tokenizer = Tokenizer.load(tiny_folder)
    prompts = Prompts(tiny_rows(), tokenizer, 0.0, seed=3).take(4)
    groups, generator = (
        [made_group(prompt, tokenizer, 1) for prompt in prompts],
        torch.Generator().manual_seed(4),
    )
    groups = [
        replace(group, move_values=made_move_values(group.lengths.tolist(), generator))
        for group in groups
    ]
    settings = settings_of(tmp_path, credit="choices", advantage_scale="none")
    norm = RunningNorm()
    norm.update([0.0, 1.0])
    (micro,) = forward.prepare(groups, learner, settings, eos=0)
    credit.set_advantages([micro], learner, settings, RunningMeans(), norm, KL_COEF)
    assert micro.choices is not None
    tables = [group.move_values for group in micro.groups if group.move_values]
    assert len({len(one.tokens) for one in tables}) > 2
    lines = zip(micro.choices.ids.tolist(), micro.choices.values.tolist(), strict=True)
    for one in tables:
        width = len(one.tokens)
        for at in range(0, len(one.values), width):
            ids, worths = next(lines)
            assert ids[:width] == one.tokens and not any(worths[width:])
            expected = [worth / norm.deviation for worth in one.values[at : at + width]]
            assert worths[:width] == pytest.approx(expected)
    rows = micro.choices.rows
    answers = [at * K + i for at, one in enumerate(tables) for i in one.completions]
    assert micro.batch.sequences[rows].tolist() == answers
    assert micro.batch.places[rows].tolist() == [place for one in tables for place in one.positions]


def test_choices_of_answers_beyond_the_cap_teach_nothing(
    learner: Learner, groups: list[Group], tmp_path: Path
) -> None:
    settings = settings_of(tmp_path, credit="choices").but(entropy_coef=0.0)
    _, gradients, micros = computed(groups, learner, settings)
    assert any(gradient.any() for gradient in gradients)
    totals = update.step_totals(micros, longest=20)
    assert totals is not None
    for micro in micros:
        micro.kept = torch.zeros(micro.batch.count, dtype=torch.bool)
    for parameter in learner.parameters():
        parameter.grad = None
    update.gradient(micros, learner, totals, settings, update.Coefs(0.0, 0.0), StepScratch())
    assert not any(p.grad.any() for p in learner.model.parameters() if p.grad is not None)


def worthless(group: Group) -> Group:
    """The same choices between things worth nothing."""
    one = group.move_values
    if one is None:
        return group
    return replace(group, move_values=replace(one, values=array("d", [0.0] * len(one.values))))


@pytest.mark.parametrize(
    "changes",
    [
        *({"loss": name} for name in LOSSES),
        *({"credit": "choices", "advantage_scale": name} for name in ("batch", "group")),
        {"credit": "choices", "kl_collect_cap": 0.5},
        {"distill_coef": 2.0, "distill_prompts": 5},
        {"distill_coef": 2.0, "distill_prompts": 5, "distill_first": 0.0},
        *({"credit": "fields", "advantage_scale": name} for name in ("batch", "group")),
        *({"kl_type": name} for name in ("reverse", "symmetric", "k2", "k3", "k1_reward")),
        *({"baseline_type": name} for name in ("rloo", "ema", "adaptive")),
        *({"advantage_scale": name} for name in ("none", "group")),
        {"kl_collect_cap": 0.5},
        {"p_top_p": 0.7, "top_k": 50},
        {"gae": True},
        {"gae": True, "advantage_scale": "group"},
    ],
    ids=str,
)
def test_gradient_is_the_same_however_a_step_is_cut(
    learner: Learner, groups: list[Group], tmp_path: Path, changes: dict[str, Any]
) -> None:
    whole_settings = settings_of(tmp_path, micro_tokens=10**6, **changes)
    cut_settings = whole_settings.but(micro_tokens=1)
    whole, expected, few = computed(groups, learner, whole_settings)
    cut, found, many = computed(groups, learner, cut_settings)
    assert len(few) < len(many) == len(groups)
    assert relative(found, expected) < 1e-6
    assert cut.total(coefs_of(cut_settings), cut_settings) == pytest.approx(
        whole.total(coefs_of(whole_settings), whole_settings)
    )
    assert cut.kl == pytest.approx(whole.kl)
    assert cut.entropy == pytest.approx(whole.entropy)


def test_the_weight_of_distillation_is_that_of_the_step(
    learner: Learner, groups: list[Group], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not that of the settings: it falls over a run."""
    settings = settings_of(tmp_path, distill_coef=2.0, distill_prompts=5)
    found = []
    for weight in (0.0, 0.5, 1.0):
        coefs = update.Coefs(KL_COEF, weight)
        monkeypatch.setattr(sys.modules[__name__], "coefs_of", lambda settings, now=coefs: now)
        found.append(computed(groups, learner, settings)[1])
    mean = [(none + whole) / 2 for none, whole in zip(found[0], found[2], strict=True)]
    assert relative(found[1], mean) < 1e-5
    assert relative(found[0], mean) > 1e-2


def test_distillation_may_come_before_the_answers(
    learner: Learner, groups: list[Group], tmp_path: Path
) -> None:
    settings = settings_of(tmp_path, distill_coef=2.0, distill_prompts=5)
    after, expected, _ = computed(groups, learner, settings)
    before, found, _ = computed(groups, learner, settings, ahead=True)
    assert relative(found, expected) < 1e-6
    assert before.distill_loss == after.distill_loss > 0


def test_value_head_never_touches_the_policys_gradient(
    learner: Learner, groups: list[Group], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = settings_of(tmp_path, gae=True)
    monkeypatch.setattr(update, "VALUE_COEF", 1000.0)
    whole, heavy, _ = computed(groups, learner, settings)
    monkeypatch.setattr(update, "VALUE_COEF", 0.0)
    part, light, _ = computed(groups, learner, settings)
    assert whole.norm == part.norm  # and never has it clipped
    own = len(list(learner.model.parameters()))
    assert all(torch.equal(a, b) for a, b in zip(heavy[:own], light[:own], strict=True))
    assert any(gradient.abs().max() > 0 for gradient in heavy[own:])


def paid(groups: Sequence[Group], learner: Learner, settings: TrainSettings) -> dict[str, float]:
    micros = forward.prepare(groups, learner, settings, eos=0)
    return credit.set_advantages(micros, learner, settings, RunningMeans(), None, KL_COEF)


@pytest.mark.parametrize("baseline", ["group_mean", "rloo"])
def test_a_value_head_that_knows_nothing_leaves_the_baseline(
    learner: Learner, groups: list[Group], tmp_path: Path, baseline: str
) -> None:
    """All rewards are positive; without a baseline nearly all tokens would be pushed up."""
    settings = settings_of(tmp_path, gae=True, baseline_type=baseline, gae_lambda=1.0)
    fresh = replace(learner, value_head=ValueHead(learner.model.config.n_embd))
    micros = forward.prepare(groups, fresh, settings, eos=0)
    numbers = credit.set_advantages(micros, fresh, settings, RunningMeans(), None, KL_COEF)
    for micro in micros:
        assert micro.advantages is not None
        first = micro.advantages[:, 0].view(-1, K)
        torch.testing.assert_close(first.sum(1), torch.zeros(len(first)), atol=1e-5, rtol=0)
        assert (first > 0).any(1).all() and (first < 0).any(1).all()
    assert numbers["value/explained_variance"] == 0
    tokens = torch.cat([m.advantages[m.mask()] for m in micros if m.advantages is not None])
    assert numbers["advantage/mean"] == pytest.approx(tokens.mean().item(), abs=1e-6)


def test_explained_variance_by_hand(learner: Learner, groups: list[Group], tmp_path: Path) -> None:
    settings = settings_of(tmp_path, gae=True, gamma=0.9)
    found, wanted = list[Tensor](), list[Tensor]()
    for group in groups:
        for i in range(K):
            values = plain_pass(group, i, learner, settings)[3].detach()
            last = group.rewards[i] - sum(group.rewards) / K
            found.append(values)
            wanted.append(last * 0.9 ** torch.arange(len(values)).flip(0))
    left, whole = (torch.cat(wanted) - torch.cat(found)).var(), torch.cat(wanted).var()
    explained = paid(groups, learner, settings)["value/explained_variance"]
    assert explained == pytest.approx(1 - float(left / whole), abs=1e-5)


def test_the_value_head_has_a_rate_of_its_own(learner: Learner, tmp_path: Path) -> None:
    (adam,) = make_optimizers(learner, settings_of(tmp_path, gae=True, lr=1e-6))
    policy, head = adam.param_groups
    assert learner.value_head is not None
    assert {*map(id, head["params"])} == {*map(id, learner.value_head.parameters())}
    assert (policy.get("own_lr"), head["own_lr"]) == (None, 1e-3)


def test_kl_is_measured_task_by_task(learner: Learner, groups: list[Group], tmp_path: Path) -> None:
    """By hand over each task's own tokens; the largest is what is controlled."""
    settings = settings_of(tmp_path)
    found, _, _ = computed(groups, learner, settings)
    apart: dict[str, list[Tensor]] = {"P": [], "A": []}
    for group in groups:
        for i in range(K):
            apart[group.prompt.letter].append(plain_pass(group, i, learner, settings)[1])
    means = {letter: torch.cat(parts).mean().item() for letter, parts in apart.items()}
    assert found.kl_of_tasks == pytest.approx(means, rel=1e-5)
    assert found.kl_worst == max(found.kl_of_tasks.values()) > found.kl
    one = [group for group in groups if group.prompt.letter == "P"]
    assert set(computed(one, learner, settings)[0].kl_of_tasks) == {"P"}
    assert math.isnan(update.NOTHING.kl_worst)


def test_anchors_are_held_to_the_reference_and_learn_nothing_else(
    learner: Learner, groups: list[Group], tmp_path: Path
) -> None:
    """All A groups are flat: no advantage on their tokens, the KL of all tokens."""
    settings = settings_of(tmp_path)
    alone = replace(learner, value_head=None)

    def gradients(micros: list[MicroBatch], kl_coef: float) -> tuple[Gradient, list[Tensor]]:
        for parameter in alone.parameters():
            parameter.grad = None
        totals = update.step_totals(micros, longest=20)
        assert totals is not None
        coefs = update.Coefs(kl_coef, 0.0)
        found = update.gradient(micros, alone, totals, settings, coefs, StepScratch())
        return found, [p.grad.clone() for p in alone.parameters() if p.grad is not None]

    def prepared(chosen: Sequence[Group]) -> list[MicroBatch]:
        return forward.prepare(chosen, alone, settings, eos=0)

    learning = prepared([group for group in groups if group.prompt.letter == "P"])
    credit.set_advantages(learning, alone, settings, RunningMeans(), None, KL_COEF)
    solved = prepared([group for group in groups if group.prompt.letter == "A"])
    anchors = [replace(micro, anchor=True) for micro in solved]
    everything = prepared(groups)
    credit.set_advantages(everything, alone, settings, RunningMeans(), None, KL_COEF)
    found, held = gradients([*learning, *anchors], KL_COEF)
    _, free = gradients([*learning, *anchors], 0.0)
    without, only = gradients(learning, 0.0)
    assert relative(free, only) < 1e-6
    whole, all_held = gradients(everything, KL_COEF)
    _, all_free = gradients(everything, 0.0)
    by_kl = [a - b for a, b in zip(held, free, strict=True)]
    assert relative(by_kl, [a - b for a, b in zip(all_held, all_free, strict=True)]) < 1e-5
    assert found.kl == pytest.approx(whole.kl)
    assert found.kl_of_tasks == pytest.approx(whole.kl_of_tasks)
    assert (found.policy, found.entropy) == pytest.approx((without.policy, without.entropy))
    assert float(found.ratio.tokens) == float(without.ratio.tokens)


def test_mask_covers_exactly_the_sampled_ids_end_token_included(
    learner: Learner, groups: list[Group], tmp_path: Path
) -> None:
    _, _, micros = computed(groups, learner, settings_of(tmp_path, micro_tokens=500))
    for micro in micros:
        rows = iter(micro.batch.targets.tolist())
        mask = micro.mask()
        for number, group in enumerate(micro.groups):
            for i, length in enumerate(group.lengths.tolist()):
                assert mask[number * K + i].tolist() == [
                    place < length for place in range(micro.batch.width)
                ]
                trained = [next(rows) for _ in range(length)]
                assert trained == group.tokens[i, :length].tolist()
        assert next(rows, None) is None


def test_groups_keep_their_rewards_after_sorting_by_length(
    learner: Learner, groups: list[Group], tmp_path: Path
) -> None:
    settings = settings_of(tmp_path, advantage_scale="none", advantage_clip=0.0)
    _, _, micros = computed(groups, learner, settings)
    order = [group.prompt.key for micro in micros for group in micro.groups]
    assert order != sorted(order), "the groups were meant to be reordered"
    for micro in micros:
        assert micro.advantages is not None
        for group, found in zip(micro.groups, micro.advantages.view(-1, K), strict=True):
            mean = sum(group.rewards) / K
            assert found.tolist() == pytest.approx([r - mean for r in group.rewards], abs=1e-6)
            assert float(found.sum()) == pytest.approx(0, abs=1e-6)


def test_answers_beyond_the_cap_are_left_out_of_loss_and_count(
    learner: Learner, groups: list[Group], tmp_path: Path
) -> None:
    _, _, all_of_them = computed(groups, learner, settings_of(tmp_path))
    distances = sorted(
        distance
        for micro in all_of_them
        for distance in cap_distances(micro, learner, settings_of(tmp_path))
    )
    cap = (distances[4] + distances[5]) / 2
    _, _, micros = computed(groups, learner, settings_of(tmp_path, kl_collect_cap=cap))
    assert sum(int(micro.kept.sum()) for micro in micros if micro.kept is not None) == 5
    totals = update.step_totals(micros, longest=20)
    assert totals is not None
    assert totals.sequences == 5
    assert totals.tokens == sum(int(micro.mask().sum()) for micro in micros)
    none = forward.prepare(groups, learner, settings_of(tmp_path, kl_collect_cap=1e-9), eos=0)
    assert update.step_totals(none, longest=20) is None


def cap_distances(micro: MicroBatch, learner: Learner, settings: TrainSettings) -> list[float]:
    x = micro.old_logp - forward.reference_logp(micro, learner, settings)
    grid = micro.batch.grid((-x).exp() - 1 + x)
    lengths = torch.cat([group.lengths for group in micro.groups])
    return [float(value) for value in grid.sum(-1) / lengths]


def test_k1_takes_the_summed_log_ratio_off_the_reward(
    learner: Learner, groups: list[Group], tmp_path: Path
) -> None:
    settings = settings_of(tmp_path, kl_type="k1_reward")
    micros = forward.prepare(groups, learner, settings, eos=0)
    for micro in micros:
        plain = credit.answer_rewards(micro, learner, settings, None, 0.0)
        less = credit.answer_rewards(micro, learner, settings, None, 0.5)
        x = micro.batch.grid(micro.old_logp - forward.reference_logp(micro, learner, settings))
        assert torch.allclose(plain - less, 0.5 * x.sum(-1).view_as(plain).double())


def test_normalised_rewards_are_on_the_running_scale(
    learner: Learner, groups: list[Group], tmp_path: Path
) -> None:
    settings = settings_of(tmp_path, reward_norm=True)
    norm = RunningNorm()
    norm.update([0.0, 2.0])
    (micro, *_) = forward.prepare(groups, learner, settings, eos=0)
    found = credit.answer_rewards(micro, learner, settings, norm, 0.0)
    assert found[0].tolist() == pytest.approx([r - 1.0 for r in micro.groups[0].rewards])


def test_large_vocabularies_are_scored_in_chunks_with_the_same_gradient(
    learner: Learner, groups: list[Group], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = settings_of(tmp_path)
    _, expected, _ = computed(groups, learner, settings)
    monkeypatch.setattr(models, "CHUNK_VOCABULARY", 1)
    monkeypatch.setattr(models, "CHUNK_ROWS", 7)
    _, found, _ = computed(groups, learner, settings)
    assert relative(found, expected) < 1e-6


@pytest.mark.parametrize("micro_tokens", [40, 10_000])
def test_passes_that_may_be_recorded_have_the_same_gradient(
    learner: Learner,
    groups: list[Group],
    tmp_path: Path,
    micro_tokens: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cuda_graphs, "memory_of", lambda device: 1 << 40)
    settings = settings_of(tmp_path, micro_tokens=micro_tokens, gae=True)
    _, expected, _ = computed(groups, learner, settings)
    passed = [PassGraphs(model, None) for model in (learner.model, learner.reference)]
    _, found, micros = computed(
        groups, replace(learner, graphs=passed[0], ref_graphs=passed[1]), settings
    )
    assert relative(found, expected) < 1e-6
    assert sum(passed[0].seen.values()) == 2 * len(micros) == 2 * sum(passed[1].seen.values())


@pytest.mark.parametrize("multiple", [3, 16])
def test_packs_padded_to_a_multiple_say_the_same(
    learner: Learner, groups: list[Group], multiple: int
) -> None:
    plain, padded = shared_prefix_batch(groups, 0), shared_prefix_batch(groups, 0, multiple)
    assert padded.head % multiple == 0 == (padded.width - 1) % multiple
    assert padded.ids.shape[1] > plain.ids.shape[1]
    for name in ("targets", "sequences", "places"):
        assert torch.equal(getattr(padded, name), getattr(plain, name))
    found, expected = (forward.states(one, learner.model) for one in (padded, plain))
    torch.testing.assert_close(found, expected, atol=1e-7, rtol=1e-6)


def test_one_answer_behind_its_own_prompt_says_the_same(learner: Learner) -> None:
    heads, generator = torch.tensor([5, 9, 7]), torch.manual_seed(1)
    prompts, answers = (
        torch.randint(1, 60, size, generator=generator) for size in ((3, 9), (3, 4))
    )
    behind = padded_batch(prompts, heads, answers[:, None], torch.full((3, 1), 4))
    for tokens in (12, 16):
        own = causal_batch(prompts, heads, answers, tokens)
        assert own.ids.shape == own.positions.shape == (1, 3 * tokens)
        assert int(own.positions.max()) == 9 + 4 - 2
        for name in ("targets", "sequences", "places", "count", "width", "answers"):
            assert np.array_equal(getattr(own, name), getattr(behind, name)), name
        found, expected = (forward.states(one, learner.model) for one in (own, behind))
        torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-5)


def test_padding_stands_no_further_than_the_longest_answer(groups: list[Group]) -> None:
    found = shared_prefix_batch(groups, 0)
    longest = max(len(group.prompt.ids) + int(group.lengths.max()) for group in groups)
    padded = max(len(group.prompt.ids) for group in groups) + found.width
    assert int(found.positions.max()) < longest < padded


def test_key_biases_have_no_gradient_for_adam_to_blow_up(
    learner: Learner, groups: list[Group], tmp_path: Path
) -> None:
    computed(groups, learner, settings_of(tmp_path))
    for block in learner.model.h:
        gradient = block.get_parameter("attn.c_attn.bias").grad
        assert gradient is not None
        query, key, value = gradient.chunk(3)
        assert not key.any()
        assert query.any()
        assert value.any()


def test_the_reference_may_live_elsewhere(
    groups: list[Group], learner: Learner, tmp_path: Path
) -> None:
    settings = settings_of(tmp_path)
    (batch, *_) = [micro.batch for micro in forward.prepare(groups, learner, settings, eos=0)]
    elsewhere = replace(learner, reference=copy.deepcopy(learner.reference).to("meta"))
    there = forward.reference_pass(batch, elsewhere, settings)
    assert there.device.type == "meta" and len(there) == len(batch.targets)
    assert batch.to(batch.ids.device) is batch


# --- every loss with every credit -----------------------------------------------------------------

REFUSED = {(loss, "choices") for loss in ("grpo", "dr_grpo", "gspo")}
"""Choices are averaged over all tokens of a step."""


@pytest.mark.parametrize("credit_by", ["answer", "fields", "outlook", "choices", "gae"])
@pytest.mark.parametrize("loss", LOSSES)
def test_every_loss_with_every_credit_has_the_slope_of_its_definition(
    learner: Learner, groups: list[Group], tmp_path: Path, loss: str, credit_by: str
) -> None:
    """Finite differences of the formulas, each answer behind a prompt of its own."""
    changes: dict[str, Any] = {"credit": credit_by}
    if credit_by == "gae":
        changes = {"gae": True, "gamma": 0.9}
    if (loss, credit_by) in REFUSED:
        with pytest.raises(ConfigError, match=f"--credit choices with --loss {loss}: .*; take"):
            settings_of(tmp_path, loss=loss, **changes)
        return
    settings = settings_of(tmp_path, loss=loss, clip_range=0.4, advantage_clip=0.0, **changes)
    settings = settings.but(entropy_coef=0.0)
    _, _, micros = computed(groups, learner, settings)
    for parameter in learner.parameters():
        parameter.grad = None
    totals = update.step_totals(micros, longest=20)
    assert totals is not None
    alone = replace(learner, value_head=None)
    update.gradient(micros, alone, totals, settings, update.Coefs(0.0, 0.0), StepScratch())
    generator = torch.Generator().manual_seed(5)
    weights = list(learner.model.parameters())
    away = [torch.randn(one.shape, generator=generator).double() for one in weights]
    slope = sum(
        float((one.grad * d).sum())
        for one, d in zip(weights, away, strict=True)
        if one.grad is not None
    )
    paid = paid_by_definition(groups, learner, settings)
    assert any(len(set(p.tolist())) > 1 for p in paid.values()) == (credit_by != "answer")
    now = answer_logp(groups, learner, settings)
    found = []
    for sign in (1, -1):
        with torch.no_grad():
            for one, d in zip(weights, away, strict=True):
                one.add_(sign * 1e-6 * d)
            found.append(by_definition(groups, learner, settings, paid, now))
            for one, d in zip(weights, away, strict=True):
                one.sub_(sign * 1e-6 * d)
    assert slope == pytest.approx((found[0] - found[1]) / 2e-6, rel=1e-4, abs=1e-6)


Answer = tuple[int, int]
"""A group's number, and an answer's in it."""


def answer_logp(
    groups: Sequence[Group], learner: Learner, settings: TrainSettings
) -> dict[Answer, Tensor]:
    """log π of each answer's tokens."""
    with torch.no_grad():
        return {
            (g, i): plain_pass(group, i, learner, settings)[0]
            for g, group in enumerate(groups)
            for i in range(K)
        }


def paid_by_definition(
    groups: Sequence[Group], learner: Learner, settings: TrainSettings
) -> dict[Answer, Tensor]:
    """The advantage of each token, one loop inside the other, divided by the step's deviation."""
    rewards = torch.tensor([group.rewards for group in groups], dtype=torch.float64)
    centred = rewards - rewards.mean(1, keepdim=True)
    rules, floor = settings.advantages, settings.advantages.advantage_std_floor
    paid: dict[Answer, Tensor] = {}
    for g, group in enumerate(groups):
        for i, length in enumerate(group.lengths.tolist()):
            if rules.gae:
                part = plain_pass(group, i, learner, settings)
                paid[g, i] = raw_advantage(part, group, i, settings)[0].double()
            elif rules.credit == "answer":
                paid[g, i] = centred[g, i].expand(length).clone()
            else:
                paid[g, i] = torch.stack(
                    [token_paid(group, i, t, rules.credit) for t in range(length)]
                )
    spread = torch.cat(list(paid.values())) if rules.gae else centred.flatten()
    divisor = max(float(spread.std(correction=0)), floor)
    paid = {answer: values / divisor for answer, values in paid.items()}
    if rules.credit == "choices" and not rules.gae:
        for g, group in enumerate(groups):
            if (one := group.move_values) is not None:
                for i, place in zip(one.completions, one.positions, strict=True):
                    paid[g, i][place] = 0.0
    return paid


def token_paid(group: Group, i: int, token: int, credit_by: str) -> Tensor:
    """What the token's stage pays this answer above the mean of all that came so far."""
    values = group.token_values
    assert values is not None
    stage = int(values.stages[i, token])
    begun = torch.cat(
        [torch.zeros(K, 1, dtype=torch.float64), values.values], dim=1
    )  # before stage 0 nothing was promised
    rewards = torch.tensor(group.rewards, dtype=torch.float64)
    last = begun.shape[1] - 1
    following = rewards if credit_by == "fields" or stage == last else begun[:, stage + 1]
    gained = following - begun[:, stage]
    return gained[i] - gained.mean()


def by_definition(
    groups: Sequence[Group],
    learner: Learner,
    settings: TrainSettings,
    paid: dict[Answer, Tensor],
    now: dict[Answer, Tensor],
) -> float:
    """What a loss minimises: weights that it takes for constants are those of `now`."""
    tokens, name = sum(len(one) for one in paid.values()), settings.loss.loss
    total, answers = 0.0, len(groups) * K
    low, high = 1 - settings.loss.clip_range, 1 + settings.loss.clip_high
    for (g, i), logp in answer_logp(groups, learner, settings).items():
        old, before = groups[g].logp[i, : len(logp)], now[g, i]
        by_answer = {"grpo": answers * len(logp), "gspo": answers * len(logp)}
        divisor = {"dr_grpo": answers * 20, **by_answer}.get(name, tokens)
        ratio = (logp - old).exp()
        if name == "gspo":
            ratio = (before - old).mean().exp() * (logp - before).exp()
        each = -torch.minimum(ratio * paid[g, i], ratio.clamp(low, high) * paid[g, i])
        if name == "cispo":
            each = -(before - old).exp().clamp(max=high) * paid[g, i] * logp
        total += float(each.sum()) / divisor
    if settings.advantages.credit == "choices" and not settings.advantages.gae:
        total -= sum(chosen(group, learner, settings, groups) for group in groups) / tokens
    return total


def chosen(
    group: Group, learner: Learner, settings: TrainSettings, groups: Sequence[Group]
) -> float:
    """What listed moves are worth on average over the policy, in the step's deviations."""
    if (one := group.move_values) is None:
        return 0.0
    rewards = torch.tensor([group.rewards for group in groups], dtype=torch.float64)
    spread = float((rewards - rewards.mean(1, keepdim=True)).std(correction=0))
    table = torch.tensor(one.values, dtype=torch.float64).view(len(one.positions), -1)
    temperature, _ = settings.sampling.of_task(group.prompt.letter)
    total = 0.0
    for i, place, worth in zip(one.completions, one.positions, table, strict=True):
        ids = torch.tensor([[*group.prompt.ids, *group.tokens[i, :place].tolist()]])
        states = learner.model(ids)[0, -1]
        drawn = (learner.model.logits(states) / temperature).softmax(-1)
        total += float((drawn[one.tokens] * worth).sum()) / spread
    return total
