"""Prompts, groups and packs: what is asked, what is trained on, and what is replaced."""

from __future__ import annotations

import copy
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from rookworld.grpo.kl import Draw, stats_from_logits
from rookworld.model.gpt2 import GPT2
from rookworld.model.sampling.sampler import Sampling
from rookworld.model.tokenizer import Tokenizer
from rookworld.model.weights import load_model
from rookworld.rl import forward
from rookworld.rl.batch import pad_stack, shared_prefix_batch, split_to_budget
from rookworld.rl.forward import prepare, reference_ahead
from rookworld.rl.memory import MemoryPlan
from rookworld.rl.models import Learner
from rookworld.rl.scratch import StepScratch
from rookworld.rollout.collector import Collector, collect
from rookworld.rollout.prompts import Prompts, prompt_text
from rookworld.rollout.token_values import stage_values
from rookworld.rollout.types import Group, Prompt
from rookworld.runtime.errors import DataError
from rookworld.tasks.prefix_value import prefix_values
from rookworld.tasks.reward import RewardRules
from tiny_training import judge_by, share_of_low_moves, tiny_rows, tiny_settings

pytestmark = pytest.mark.usefixtures("single_thread")


@pytest.fixture
def model(tiny_folder: Path) -> GPT2:
    return load_model(tiny_folder)


@pytest.fixture
def tokenizer(tiny_folder: Path) -> Tokenizer:
    return Tokenizer.load(tiny_folder)


def collector_of(model: GPT2, tokenizer: Tokenizer, k: int = 3) -> Collector:
    sampling = {
        "P": Sampling(temperature=0.7, max_new_tokens=5),
        "A": Sampling(temperature=1.3, top_p=0.9, max_new_tokens=9),
    }
    return Collector(model, tokenizer, sampling, k, 0, RewardRules())


# --- the stream of prompts ----------------------------------------------------------------------


@pytest.mark.parametrize("ratio", [0.0, 0.1, 0.25, 0.5, 0.75, 1.0])
def test_prompts_are_mixed_by_the_ratio_in_every_stretch(
    tokenizer: Tokenizer, ratio: float
) -> None:
    letters = [p.letter for p in Prompts(tiny_rows(), tokenizer, ratio, seed=0).take(60)]
    assert letters.count("A") == round(60 * ratio)
    for start in range(0, 60, 20):
        assert abs(letters[start : start + 20].count("A") - 20 * ratio) <= 1


def test_stream_wraps_and_is_reshuffled_at_every_wrap(tokenizer: Tokenizer) -> None:
    rows = tiny_rows(8, 0)
    prompts = Prompts(rows, tokenizer, 0.0, seed=0)
    passes = [[p.row.fen for p in prompts.take(8)] for _ in range(3)]
    for seen in passes:
        assert Counter(seen) == Counter(row.fen for row in rows)
    assert len({tuple(seen) for seen in passes}) == 3


def test_stream_is_a_function_of_seed_and_position(tokenizer: Tokenizer) -> None:
    once = Prompts(tiny_rows(), tokenizer, 0.4, seed=5)
    expected = once.take(30)
    again = Prompts(tiny_rows(), tokenizer, 0.4, seed=5)
    found = again.take(7)
    resumed = Prompts(tiny_rows(), tokenizer, 0.4, seed=5)
    resumed.position = again.position
    found += resumed.take(23)
    assert found == expected
    assert [prompt.key for prompt in found] == list(range(30))
    assert Prompts(tiny_rows(), tokenizer, 0.4, seed=6).take(30) != expected


def test_a_task_that_is_asked_for_needs_rows(tokenizer: Tokenizer) -> None:
    with pytest.raises(DataError, match=r"no A: rows .* --mix-env-ratio 0 "):
        Prompts(tiny_rows(8, 0), tokenizer, 0.5, seed=0)
    with pytest.raises(DataError, match=r"no P: rows .* --mix-env-ratio 1 "):
        Prompts(tiny_rows(0, 4), tokenizer, 0.5, seed=0)
    Prompts(tiny_rows(0, 4), tokenizer, 1.0, seed=0).take(9)


# --- groups -------------------------------------------------------------------------------------


def test_ids_trained_on_are_the_ids_sampled(model: GPT2, tokenizer: Tokenizer) -> None:
    prompts = Prompts(tiny_rows(), tokenizer, 0.5, seed=0).take(4)
    groups = collector_of(model, tokenizer).groups(prompts, step=0, progress=1.0)
    assert [group.prompt for group in groups] == prompts
    for group in groups:
        limit = 5 if group.prompt.letter == "P" else 9
        assert group.prompt.ids == tuple(tokenizer.encode(prompt_text(group.prompt.row, tokenizer)))
        for i, length in enumerate(group.lengths.tolist()):
            ids = group.tokens[i, :length].tolist()
            assert tokenizer.decode(ids) == group.texts[i]
            assert group.finished[i] == (ids[-1] == tokenizer.eos)
            assert group.finished[i] or length == limit
            assert tokenizer.eos not in ids[:-1]
    batch = shared_prefix_batch(groups, tokenizer.eos)
    sampled = [
        token
        for group in groups
        for i, length in enumerate(group.lengths.tolist())
        for token in group.tokens[i, :length].tolist()
    ]
    assert batch.targets.tolist() == sampled


def test_what_is_found_out_meanwhile_is_of_the_same_answers(
    model: GPT2, tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reference = copy.deepcopy(model).requires_grad_(False)
    learner = Learner(model, reference, memory=MemoryPlan(micro_tokens=60))
    settings = tiny_settings(tmp_path, tmp_path)
    collector = collector_of(model, tokenizer)
    prompts = Prompts(tiny_rows(), tokenizer, 0.5, seed=0).take(6)
    plain = collector.groups(prompts, step=0, progress=1.0)
    for count in (4, 6):  # some groups may be left out after they were judged
        scratch = StepScratch()
        look = partial(reference_ahead, learner, settings, tokenizer.eos, scratch)
        looked = replace(collector, meanwhile=look).groups(prompts, step=0, progress=1.0)
        assert set(scratch.ref_hidden) == {prompt.key for prompt in prompts}
        expected = prepare(plain[:count], learner, settings, tokenizer.eos)
        with monkeypatch.context() as patched:
            patched.delattr(forward, "reference_pass")  # nothing is left for it to find out
            if count == 6:
                patched.delattr(forward, "shared_prefix_batch")
            found = prepare(looked[:count], learner, settings, tokenizer.eos, scratch)
        assert len(found) > 1 and not scratch.ref_hidden and not scratch.batches
        for mine, theirs in zip(found, expected, strict=True):
            torch.testing.assert_close(mine.ref_hidden, theirs.ref_hidden, atol=1e-5, rtol=1e-4)
            assert torch.equal(mine.batch.targets, theirs.batch.targets)
            assert torch.equal(mine.old_logp, theirs.old_logp)


@pytest.mark.parametrize("count", [0, 3])
def test_a_rank_is_idle_once_with_or_without_prompts(
    model: GPT2, tokenizer: Tokenizer, count: int
) -> None:
    """What ranks do then they may have to agree on: one without a prompt must not be missing."""
    asked = Prompts(tiny_rows(), tokenizer, 0.5, seed=0).take(count)
    times: list[int] = []
    collector = replace(collector_of(model, tokenizer), idle=lambda: times.append(1))
    assert len(collector.groups(asked, step=0, progress=1.0)) == count == len(asked)
    assert times == [1]


def test_recorded_log_probabilities_are_the_models_own(model: GPT2, tokenizer: Tokenizer) -> None:
    prompts = Prompts(tiny_rows(), tokenizer, 0.5, seed=0).take(4)
    collector = collector_of(model, tokenizer)
    for group in collector.groups(prompts, step=3, progress=1.0):
        how = collector.sampling[group.prompt.letter]
        draw = Draw(temperature=how.temperature, top_k=how.top_k, top_p=how.top_p)
        for i, length in enumerate(group.lengths.tolist()):
            ids = torch.tensor([[*group.prompt.ids, *group.tokens[i, :length].tolist()]])
            with torch.no_grad():
                logits = model.logits(model(ids))[0, len(group.prompt.ids) - 1 : -1]
            stats = stats_from_logits(logits, group.tokens[i, :length], draw)
            assert torch.allclose(group.logp[i, :length], stats.logp, atol=1e-5)
            assert torch.allclose(group.entropy[i, :length], stats.entropy, atol=1e-4)


def test_answers_do_not_depend_on_who_else_is_asked(model: GPT2, tokenizer: Tokenizer) -> None:
    prompts = Prompts(tiny_rows(), tokenizer, 0.5, seed=0).take(6)
    collector = collector_of(model, tokenizer)
    together = collector.groups(prompts, step=1, progress=1.0)
    apart = [g for half in (prompts[:2], prompts[2:]) for g in collector.groups(half, 1, 1.0)]
    assert [group.texts for group in together] == [group.texts for group in apart]
    assert [g.texts for g in collector.groups(prompts, 2, 1.0)] != [g.texts for g in together]
    assert collector.groups([], 1, 1.0) == []


# --- flat groups --------------------------------------------------------------------------------


def numbered(rewards: list[float]) -> Iterator[float]:
    yield from rewards
    raise AssertionError("more answers were judged than expected")


def test_flat_groups_are_replaced_and_counted(
    model: GPT2, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    # groups of 2: flat, a lone winner, flat; then the two replacements: flat again, and not
    given = numbered([0.5, 0.5, 0.0, 1.0, 0.2, 0.2 + 1e-9, 0.7, 0.7, 0.1, 0.4])
    judge_by(monkeypatch, lambda text: next(given))
    prompts = Prompts(tiny_rows(), tokenizer, 0.0, seed=0)
    found = collect(collector_of(model, tokenizer, k=2), prompts, 3, 0, 1.0, flat_tries=1)
    assert [group.rewards for group in found.groups] == [[0.0, 1.0], [0.7, 0.7], [0.1, 0.4]]
    assert (found.flat, found.invalid, found.seen) == (3, 0, 5)
    assert prompts.position == 5
    assert len({group.prompt.key for group in found.groups}) == 3


class Solved(Collector):
    """Scores every environment answer alike, and each analysis a little higher than the last."""

    def groups(self, prompts: Sequence[Prompt], step: int, progress: float) -> list[Group]:
        def scored(group: Group) -> Group:
            grows = 0.0 if group.prompt.letter == "A" else 0.1
            verdicts = (v._replace(total=grows * i) for i, v in enumerate(group.verdicts))
            return replace(group, verdicts=tuple(verdicts))

        return [scored(group) for group in super().groups(prompts, step, progress)]


@pytest.mark.parametrize("tries", [0, 1, 3])
def test_a_solved_task_keeps_its_share_of_the_kl(
    model: GPT2, tokenizer: Tokenizer, tries: int
) -> None:
    """Half of eight prompts are A, all of them flat, and half of what replaces them is P."""
    collector = Solved(**vars(collector_of(model, tokenizer, k=2)))
    prompts = Prompts(tiny_rows(), tokenizer, 0.5, seed=0)
    found = collect(collector, prompts, 8, 0, 1.0, flat_tries=tries)
    of_a = [group for group in found.groups if group.prompt.letter == "A"]
    assert len(found.groups) == 8
    assert len(of_a) == {0: 4, 1: 2, 3: 0}[tries]
    assert [group.prompt.letter for group in found.anchors] == ["A"] * (4 - len(of_a))
    keys = [group.prompt.key for group in (*found.groups, *found.anchors)]
    assert len({*keys}) == len(keys)


@pytest.mark.parametrize("tries", [0, 1, 3])
def test_replacing_is_bounded(
    model: GPT2, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, tries: int
) -> None:
    judge_by(monkeypatch, lambda text: 0.5)
    prompts = Prompts(tiny_rows(), tokenizer, 0.0, seed=0)
    found = collect(collector_of(model, tokenizer, k=2), prompts, 2, 0, 1.0, flat_tries=tries)
    assert len(found.groups) == 2
    assert found.flat == found.seen == prompts.position == 2 * (tries + 1)


def test_a_reward_that_is_no_number_costs_its_group_and_no_other(
    model: GPT2, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = numbered([0.0, math.nan, 0.0, 1.0, math.inf, 0.1])
    judge_by(monkeypatch, lambda text: next(given))
    prompts = Prompts(tiny_rows(), tokenizer, 0.0, seed=0)
    found = collect(collector_of(model, tokenizer, k=2), prompts, 2, 0, 1.0, flat_tries=1)
    assert [group.rewards for group in found.groups] == [[0.0, 1.0]]
    assert (found.flat, found.invalid, found.seen) == (0, 2, 3)


# --- packs --------------------------------------------------------------------------------------


def test_packs_hold_every_group_once_within_the_budget(
    model: GPT2, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    judge_by(monkeypatch, share_of_low_moves)
    prompts = Prompts(tiny_rows(), tokenizer, 0.5, seed=0).take(8)
    groups = collector_of(model, tokenizer).groups(prompts, 0, 1.0)
    for budget in (1, 300, 10**6):
        packs = split_to_budget(groups, budget)
        keys = sorted(group.prompt.key for one in packs for group in one)
        assert keys == list(range(8))
        for one in packs:
            size = len(one) * (
                max(len(group.prompt.ids) for group in one)
                + 3 * max(group.tokens.shape[1] for group in one)
            )
            assert size <= budget or len(one) == 1
    assert len(split_to_budget(groups, 1)) == 8


def test_a_clock_bills_sampling_and_scoring_by_their_names(
    model: GPT2, tokenizer: Tokenizer
) -> None:
    marks: list[str] = []
    made = collector_of(model, tokenizer)
    timed = Collector(
        made.model, made.tokenizer, made.sampling, 2, 0, made.rules, clock=marks.append
    )
    timed.groups(Prompts(tiny_rows(), tokenizer, 0.0, seed=0).take(1), 0, 1.0)
    assert marks == ["sample", "score", "score"]


@pytest.mark.parametrize("widths", [(3, 3), (4, 1, 2), (5,)])
def test_tables_of_various_widths_lie_in_one(widths: tuple[int, ...]) -> None:
    tables = [torch.arange(2 * n).view(2, n) + 10 * at for at, n in enumerate(widths)]
    found = pad_stack(tables, 5, -1)
    assert found.shape == (len(widths), 2, 5)
    for one, table in zip(found, tables, strict=True):
        assert one.tolist() == [[*row, *[-1] * (5 - len(row))] for row in table.tolist()]


def test_promises_of_many_are_those_of_each_group_alone(model: GPT2, tokenizer: Tokenizer) -> None:
    collector = replace(collector_of(model, tokenizer), by_field=True)
    prompts = Prompts(tiny_rows(), tokenizer, 0.5, seed=0).take(8)
    groups = collector.groups(prompts, step=0, progress=1.0)
    assert len({group.tokens.shape[1] for group in groups}) > 1
    for group in groups:
        found = [prefix_values(group.prompt.row, text, collector.rules) for text in group.texts]
        worths, stages = stage_values(group.tokens.numpy(), found, tokenizer)
        assert group.token_values is not None
        np.testing.assert_array_equal(group.token_values.values.numpy(), worths)
        np.testing.assert_array_equal(group.token_values.stages.numpy(), stages)
    assert any(bool(group.token_values.stages.any()) for group in groups if group.token_values)
