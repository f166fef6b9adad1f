"""Learning what the reference's lists agree on: targets by enumeration, views of one question."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from rookworld.grpo.list_targets import (
    ListTargets,
    continuation_rows,
    distillation_kl,
    power_logits,
)
from rookworld.model.tokenizer import Tokenizer
from rookworld.rl import self_distill
from rookworld.rl.batch import padded_batch
from rookworld.rl.models import new_learner
from rookworld.rl.self_distill import LISTS, POWER, list_targets, teacher_frequencies, teacher_lists
from rookworld.rl.settings import TrainSettings
from rookworld.rl.state import fits, new_state
from rookworld.rl.trainer import train
from rookworld.rollout.prompts import Prompts
from rookworld.rollout.symmetry import SIDES, Images, prompt_images, token_permutations
from rookworld.rollout.types import Prompt
from rookworld.runtime.errors import ConfigError
from rookworld.tasks.notation import flip_fen, mirror_fen
from rookworld.tasks.policy import POLICY
from rookworld.tasks.task import PolicyRow, legal_moves
from test_choices import PIECES
from tiny_training import metrics_of, no_evaluation, tiny_rows, tiny_settings, tiny_tokenizer

TOKENIZER = tiny_tokenizer()
CASTLES = "r3k2r/pppq1ppp/2np1n2/4p3/4P3/2NP1N2/PPPQ1PPP/R3K2R w KQkq - 4 9"
CASTLED = "r4rk1/pppq1ppp/2np1n2/4p3/4P3/2NP1N2/PPPQ1PPP/R4RK1 b - - 7 10"
SHARES = torch.tensor([[0.0, 0.9, 0.6, 0.3, 0.2, 0.0]])


def agreed(named: list[list[int]], power: float = 2.0, ends: int = 99) -> ListTargets:
    """Rows of one list, the one with the number `ends` where it should have ended."""
    rows = torch.arange(len(named))
    return ListTargets(
        rows=rows,
        lines=torch.zeros_like(rows),
        named=torch.tensor(named),
        logits=power_logits(SHARES, power),
        weights=torch.ones(len(rows)),
        ends=rows == ends,
        end=5,
    )


def test_a_target_is_what_lists_share_less_what_is_named() -> None:
    found = agreed([[1, 1], [1, 3]]).logp().exp()
    squares = SHARES[0].square()
    for line, left in zip(found, ([2, 3, 4], [2, 4]), strict=True):
        expected = torch.zeros(6)
        expected[left] = squares[left] / squares[left].sum()
        assert torch.allclose(line, expected, atol=1e-6)


def test_where_a_list_should_end_its_end_is_the_target() -> None:
    found = agreed([[1, 1], [1, 3]], ends=1).logp().exp()
    assert found[1].tolist() == [0, 0, 0, 0, 0, 1]
    assert torch.equal(found[0], agreed([[1, 1]]).logp().exp()[0])


def test_the_distance_is_that_by_enumeration_and_has_its_gradient() -> None:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(2, 4, generator=generator, requires_grad=True)
    head = torch.randn(6, 4, generator=generator)
    told = agreed([[1, 1], [1, 3]], power=3.0)
    found = distillation_kl(hidden, head, told)
    target, policy = told.logp().exp(), (hidden @ head.T).softmax(-1)
    by_hand = torch.special.xlogy(target, target).sum(-1) - (target * policy.log()).sum(-1)
    assert torch.allclose(found, by_hand, atol=1e-6)
    found.sum().backward()  # type: ignore[no-untyped-call]
    assert hidden.grad is not None
    assert torch.allclose(hidden.grad, (policy - target).detach() @ head, atol=1e-6)
    heavier = replace(told, weights=torch.tensor([1.0, 2.5]))
    weighted = distillation_kl(hidden, head, heavier)
    assert torch.allclose(weighted, found * heavier.weights)


def test_lists_go_on_as_long_as_there_are_moves() -> None:
    """Answers: a list; one that ends after two; a position with three moves; two without a list."""
    moves = torch.tensor([False, True, True, True, True, True, True])
    tokens = torch.tensor(
        [[1, 2, 3, 4, 5], [1, 2, 0, 3, 4], [4, 5, 6, 1, 2], [0, 1, 2, 3, 4], [1, 2, 3, 4, 5]]
    )
    counts = torch.tensor([5, 5, 3, 5, 0])
    sequences = torch.arange(5).repeat_interleave(7)
    places = torch.arange(7).repeat(5)
    rows, named, ends = continuation_rows(tokens, sequences, places, moves, counts, end=0, since=1)
    assert [(row // 7, row % 7) for row in rows.tolist()] == [
        *((0, place) for place in (1, 2, 3, 4)),
        *((1, place) for place in (1, 2)),  # the token that ended it should have been a move
        *((2, place) for place in (1, 2, 3, 4)),
    ]
    held = [set(line) - {0} for line in named.tolist()]
    assert held[:6] == [{1}, {1, 2}, {1, 2, 3}, {1, 2, 3, 4}, {1}, {1, 2}]
    assert held[6:] == [{4}, {4, 5}, {4, 5, 6}, {4, 5, 6, 1}]
    assert ends.tolist() == [False] * 8 + [True] * 2
    rows, named, ends = continuation_rows(tokens, sequences, places, moves, counts, end=0, since=0)
    first = [at for at, row in enumerate(rows.tolist()) if row % 7 == 0]
    # the fourth answer begins with no move, but it should have
    assert [int(rows[at]) // 7 for at in first] == [0, 1, 2, 3]
    assert not named[first].any() and not ends[first].any()
    assert len(rows) == 10 + 4


def asked(fen: str, key: int = 3) -> Prompt:
    row = PolicyRow(fen, (), ())
    return Prompt(row, tuple(TOKENIZER.encode(POLICY.prompt(row, "compact"))), key)


def test_views_are_the_same_question_from_all_sides() -> None:
    seen = prompt_images([asked(CASTLES, 3), asked(CASTLED, 4)], TOKENIZER, multiple=16)
    fens = [CASTLES, flip_fen(CASTLES)]
    fens += [CASTLED, flip_fen(CASTLED), mirror_fen(CASTLED), mirror_fen(flip_fen(CASTLED))]
    for ids, head, fen in zip(seen.ids, seen.lengths, fens, strict=True):
        assert tuple(ids[:head].tolist()) == asked(fen).ids
        assert set(ids[head:].tolist()) == {TOKENIZER.eos}
    assert seen.ids.shape[1] == 80
    assert seen.prompts.tolist() == [0] * 2 + [1] * SIDES
    assert seen.sides.tolist() == [*range(2), *range(SIDES)]


@pytest.fixture
def settings(warm_folder: Path, tmp_path: Path) -> TrainSettings:
    """What lists go on with alone."""
    run = tmp_path / "run"
    return tiny_settings(warm_folder, run, distill_coef=1.0, distill_first=0.0)


def test_what_is_found_from_another_side_is_told_in_the_words_of_this_one(
    settings: TrainSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A position and its image have the same prompt_images, so they agree on the same moves."""
    learner = new_learner(Path(settings.model), settings, torch.device("cpu"))
    listed = torch.tensor(TOKENIZER.encode(" e2e4 g1f3 d2d4 b1c3 f1c4"))
    names = torch.from_numpy(token_permutations(TOKENIZER))

    def as_seen(base: Tensor) -> Any:
        def teacher_lists(seen: Images, *rest: Any) -> tuple[Tensor, Tensor]:
            lists = torch.stack([names[side][base] for side in seen.sides])
            return lists[:, None], torch.full((len(seen.ids), 1), 5)

        return teacher_lists

    found = []
    for fen, base in ((CASTLED, listed), (flip_fen(CASTLED), names[1][listed])):
        monkeypatch.setattr(self_distill, "teacher_lists", as_seen(base))
        found.append(teacher_frequencies([asked(fen)], learner, TOKENIZER, settings)[0])
    assert torch.allclose(found[1][:, names[1]], found[0], atol=1e-6)
    assert not torch.allclose(found[1], found[0], atol=1e-6)
    first, anywhere = found[0]
    assert 0 < float(first.sum()) <= 1
    assert float(first.sum()) < float(anywhere.sum()) <= 5
    assert bool((first <= anywhere).all())
    evaluation = TOKENIZER.token(" 0.3")
    assert float(anywhere[evaluation]) == 0


@torch.no_grad()
def test_shares_are_the_mean_over_sides_and_lists(settings: TrainSettings) -> None:
    """By hand, list by list: what the reference might have put first, and anywhere."""
    learner = new_learner(Path(settings.model), settings, torch.device("cpu"))
    found = teacher_frequencies([asked(CASTLED)], learner, TOKENIZER, settings)[0]
    seen, names = (
        prompt_images([asked(CASTLED)], TOKENIZER),
        torch.from_numpy(token_permutations(TOKENIZER)),
    )
    lists, lengths = teacher_lists(seen, [3] * SIDES, learner, TOKENIZER, settings)
    by_hand = torch.zeros(2, TOKENIZER.vocab_size)
    for view in range(SIDES):
        head = int(seen.lengths[view])
        for tokens, length in zip(lists[view], lengths[view].tolist(), strict=True):
            ids = torch.cat((torch.from_numpy(seen.ids[view, :head]), tokens[: length - 1]))
            shares = learner.reference.logits(learner.reference(ids[None]))[0, head - 1 :]
            mine = shares.softmax(-1)[:, names[seen.sides[view]]]
            by_hand += torch.stack((mine[0], mine.sum(0))) / (SIDES * lists.shape[1])
    legal = [TOKENIZER.token(f" {move}") for move in legal_moves(CASTLED)]
    assert torch.allclose(found[:, legal], by_hand[:, legal], atol=1e-5)
    assert not torch.allclose(found[0], found[1], atol=1e-3)
    assert (found > 0).sum(1).tolist() == [len(legal)] * 2


@pytest.mark.parametrize(
    ("fen", "moves"),
    [
        ("k7/8/1R6/8/8/8/8/K6R b - - 0 1", 1),
        ("k7/7R/8/8/8/8/8/K7 b - - 0 1", 1),
        ("k7/8/8/8/8/8/8/K6R b - - 0 1", 3),
        (CASTLES, 5),
    ],
)
def test_a_list_is_told_to_end_when_every_move_is_named(
    fen: str, moves: int, settings: TrainSettings
) -> None:
    """The rules know how many moves there are; the reference of this test does not."""
    legal = sorted(legal_moves(fen))
    learner = new_learner(Path(settings.model), settings, torch.device("cpu"))
    prompt = asked(fen)
    shares = teacher_frequencies([prompt], learner, TOKENIZER, settings)[0]
    assert {int(token) for token in shares[1].nonzero()} == {
        TOKENIZER.token(f" {move}") for move in legal
    }
    assert min(5, len(legal)) == moves
    tokens = torch.tensor([TOKENIZER.encode("".join(f" {move}" for move in (legal * 5)[:5]))])
    batch = padded_batch(
        torch.tensor([prompt.ids]),
        torch.tensor([len(prompt.ids)]),
        tokens[None],
        torch.tensor([[5]]),
    )
    found = list_targets(batch, shares[None], TOKENIZER, settings)
    assert found.ends.tolist() == [place >= moves for place in range(1, 5)]
    first = settings.but(distill_first=2.0, distill_first_power=0.5)
    found = list_targets(batch, shares[None], TOKENIZER, first)
    assert found.ends.tolist() == [place >= moves for place in range(5)]
    assert found.weights.tolist() == [2, 1, 1, 1, 1]
    roots = shares[0].sqrt()
    assert torch.allclose(found.logp()[0].exp(), roots / roots.sum(), atol=1e-5)
    if moves > 1:
        cubes = shares[1] ** 3
        cubes[tokens[0, 0]] = 0
        assert torch.allclose(found.logp()[1].exp(), cubes / cubes.sum(), atol=1e-5)


def drawn(settings: TrainSettings) -> list[Prompt]:
    return Prompts(tiny_rows(), Tokenizer.load(settings.model), 0, settings.seed).take(6)


def test_shares_do_not_depend_on_how_a_step_is_cut(settings: TrainSettings) -> None:
    learner = new_learner(Path(settings.model), settings, torch.device("cpu"))
    prompts = drawn(settings)
    whole = teacher_frequencies(prompts, learner, TOKENIZER, settings)
    small = settings.but(micro_tokens=1)
    for prompt, shares in zip(prompts, whole, strict=True):
        one = teacher_frequencies([prompt], learner, TOKENIZER, small)[0]
        assert torch.allclose(one, shares, atol=1e-5)
    other = teacher_frequencies(prompts, learner, TOKENIZER, settings.but(seed=9))
    assert not any(torch.equal(one, shares) for one, shares in zip(other, whole, strict=True))


def test_each_side_writes_its_lists_and_targets_are_sharp(settings: TrainSettings) -> None:
    learner = new_learner(Path(settings.model), settings, torch.device("cpu"))
    seen = prompt_images([asked(CASTLES)], TOKENIZER)
    heads = torch.from_numpy(seen.lengths)
    lists, lengths = teacher_lists(seen, [3, 3], learner, TOKENIZER, settings)
    assert lists.shape[:2] == lengths.shape == (2, LISTS)
    batch = padded_batch(torch.from_numpy(seen.ids), heads, lists, lengths)
    shares = torch.full((2, 2, TOKENIZER.vocab_size), 0.5)
    found = list_targets(batch, shares, TOKENIZER, settings)
    assert torch.allclose(found.logits[1] / math.log(0.5), torch.tensor(POWER))


def test_a_run_comes_nearer_to_what_its_reference_agrees_on(
    warm_folder: Path, tmp_path: Path
) -> None:
    settings = tiny_settings(
        warm_folder,
        tmp_path / "run",
        distill_coef=3.0,
        distill_prompts=16,
        distill_schedule="constant",
        steps=40,
        batch_size=4,
        kl_divergence_threshold=0.0,
    )
    train(settings, tiny_rows(), no_evaluation)
    apart = [line["distill/loss"] for line in metrics_of(settings.out)]
    assert sum(apart[-3:]) < 0.8 * sum(apart[:3])
    assert {line["distill/coef"] for line in metrics_of(settings.out)} == {3.0}
    falls = settings.but(out=tmp_path / "falls", steps=6, distill_schedule="late")
    train(falls, tiny_rows(), no_evaluation)
    lines = metrics_of(falls.out)
    assert [line["distill/coef"] for line in lines] == pytest.approx([3.0] * 5 + [1.5])
    for line in lines:
        parts = line["loss/policy"] + line["kl/coef"] * line["loss/kl"]
        parts += line["distill/coef"] * line["distill/loss"]
        assert line["loss/total"] == pytest.approx(parts, abs=1e-6)
    plain = tiny_settings(warm_folder, tmp_path / "plain", steps=1)
    train(plain, tiny_rows(), no_evaluation)
    assert "distill/loss" not in metrics_of(plain.out)[0]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"ref_sync_every": 5}, "a reference that stays as it is"),
        ({"ref_reset_kl": 0.5}, "a reference that stays as it is"),
        ({"shard": True}, "cannot with --shard"),
        ({"mix_env_ratio": 1.0}, "there are no lists"),
    ],
)
def test_what_cannot_agree_is_refused(
    changes: dict[str, Any], said: str, tiny_folder: Path, tmp_path: Path
) -> None:
    tiny_settings(tiny_folder, tmp_path, **changes)
    with pytest.raises(ConfigError, match=said):
        tiny_settings(tiny_folder, tmp_path, distill_coef=0.1, **changes)


def test_positions_of_their_own_are_enough_to_agree_on(tiny_folder: Path, tmp_path: Path) -> None:
    data: dict[str, Any] = {"distill_data": ("embedded:mate",)}
    tiny_settings(tiny_folder, tmp_path, distill_coef=0.1, mix_env_ratio=1.0, **data)
    with pytest.raises(ConfigError, match="nothing would be learnt from them"):
        tiny_settings(tiny_folder, tmp_path, **data)


@pytest.mark.parametrize(
    ("kind", "gib", "count"),
    [("cpu", 0, 1024), ("cuda", 139, 8192), ("cuda", 24, 1536), ("cuda", 8, 1024)],
)
def test_small_gpus_write_fewer_lists_at_once(
    kind: str, gib: int, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(self_distill, "memory_of", lambda device: gib << 30)
    assert self_distill.lists_at_once(torch.device(kind)) == count


def test_moves_in_pieces_are_refused(settings: TrainSettings) -> None:
    state = new_state(settings, tiny_rows(), torch.device("cpu"))
    with pytest.raises(ConfigError, match=r"--distill-coef 1\.0: the tokenizer of"):
        fits(state.learner.model.config, settings, PIECES)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_a_gpu_agrees_with_a_cpu(settings: TrainSettings) -> None:
    found = []
    for name in ("cpu", "cuda"):
        learner = new_learner(Path(settings.model), settings, torch.device(name))
        exact = settings.but(dtype="float32", device=name)
        found.append(teacher_frequencies(drawn(settings), learner, TOKENIZER, exact).cpu())
    assert torch.allclose(found[0], found[1], atol=1e-2)
