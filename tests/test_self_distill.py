"""What a step distils: whose turn it is, which image of it, along which list."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from rookworld.data.sources import load_positions, load_rows
from rookworld.grpo.list_targets import sample_without_replacement
from rookworld.model.gpt2 import GPT2, GPT2Config
from rookworld.rl import self_distill as module
from rookworld.rl.batch import DistillBatch
from rookworld.rl.models import Learner, new_learner
from rookworld.rl.self_distill import POWER, Distiller, teacher_frequencies
from rookworld.rl.settings import TrainSettings
from rookworld.rl.state import new_state
from rookworld.rollout.symmetry import SIDES, token_permutations
from rookworld.rollout.types import Prompt
from rookworld.runtime import distributed
from rookworld.runtime.errors import DataError
from rookworld.tasks.notation import flip_fen, mirror_fen
from rookworld.tasks.policy import POLICY
from rookworld.tasks.prefix_value import END_OF_LIST
from rookworld.tasks.scorer import Workers
from rookworld.tasks.task import PolicyRow, legal_moves
from tiny_training import tiny_rows, tiny_settings, tiny_tokenizer

TOKENIZER = tiny_tokenizer()
CASTLES = "r3k2r/pppq1ppp/2np1n2/4p3/4P3/2NP1N2/PPPQ1PPP/R3K2R w KQkq - 4 9"
CASTLED = "r4rk1/pppq1ppp/2np1n2/4p3/4P3/2NP1N2/PPPQ1PPP/R4RK1 b - - 7 10"
FEW = "k7/8/8/8/8/8/8/K6R b - - 0 1"
END = TOKENIZER.token(f" {END_OF_LIST}")


def images(fen: str) -> list[str]:
    """By the numbers of the sides."""
    both = [fen, flip_fen(fen)]
    return both if fen == CASTLES else [*both, *(mirror_fen(one) for one in both)]


def ids_of(fen: str) -> tuple[int, ...]:
    return tuple(TOKENIZER.encode(POLICY.prompt(PolicyRow(fen, (), ()), "compact")))


@pytest.fixture
def settings(warm_folder: Path, tmp_path: Path) -> TrainSettings:
    return tiny_settings(warm_folder, tmp_path, distill_coef=1.0, distill_prompts=40)


def distiller_of(settings: TrainSettings, *fens: str) -> Distiller:
    learner = new_learner(Path(settings.model), settings, torch.device("cpu"))
    own = [row.fen for row in tiny_rows() if isinstance(row, PolicyRow)]
    return Distiller(fens or own, learner, TOKENIZER, settings)


def contents(batches: list[DistillBatch]) -> list[tuple[tuple[int, ...], list[int], Tensor]]:
    """Prompt, list and targets [places, vocabulary] of everything that is trained on."""
    found = []
    for one in batches:
        batch = one.batch
        heads = batch.ids[0, : len(batch.heads) * batch.head].view(len(batch.heads), -1)
        lists = batch.grid(batch.targets)[:, :5]
        target = one.targets.logp().exp()
        mine = batch.sequences[one.targets.rows]
        for number, (ids, head) in enumerate(zip(heads.tolist(), batch.heads, strict=True)):
            found.append((tuple(ids[:head]), lists[number].tolist(), target[mine == number]))
    return found


def test_a_race_is_won_by_the_exponentials_of_scores() -> None:
    scores = torch.tensor([[-torch.inf, 0.0, 1.0, 2.0]]).expand(40_000, -1)
    waits = torch.empty(scores.shape).exponential_(generator=torch.manual_seed(1))
    drawn = sample_without_replacement(scores, waits, 4)
    assert bool((drawn[:, 3] == 0).all())
    assert bool((drawn.sort(1).values == torch.arange(4)).all())
    odds = scores[0].exp()
    for first in (1, 2, 3):
        for second in {1, 2, 3} - {first}:
            expected = odds[first] / odds.sum() * odds[second] / (odds.sum() - odds[first])
            share = ((drawn[:, 0] == first) & (drawn[:, 1] == second)).float().mean()
            assert float(share) == pytest.approx(float(expected), abs=0.01)


@pytest.mark.parametrize("fen", [CASTLES, CASTLED])
def test_an_image_has_the_image_of_the_targets(fen: str, settings: TrainSettings) -> None:
    """From every side from which it is the same question; lists are moves that are there."""
    settings = settings.but(distill_first=2.0)
    distiller = distiller_of(settings, fen)
    shares = teacher_frequencies(
        [Prompt(PolicyRow(fen, (), ()), ids_of(fen), 0)],
        distiller.learner,
        TOKENIZER,
        settings,
    )[0]
    sides = {ids_of(image): number for number, image in enumerate(images(fen))}
    names = torch.from_numpy(token_permutations(TOKENIZER))
    met = set()
    for ids, listed, targets in contents(distiller.batches(0)):
        side = sides[ids]
        met.add(side)
        legal = {TOKENIZER.token(f" {move}") for move in legal_moves(images(fen)[side])}
        assert set(listed) <= legal and len(set(listed)) == 5
        top = shares[0].topk(32).indices
        expected = torch.zeros_like(shares[0])
        expected[names[side][top]] = shares[0, top]
        assert torch.allclose(targets[0], expected / expected.sum(), atol=1e-5)
        third = torch.zeros_like(expected)
        top = shares[1].topk(32).indices
        third[names[side][top]] = shares[1, top] ** POWER
        third[listed[:2]] = 0
        assert torch.allclose(targets[2], third / third.sum(), atol=1e-5)
        assert len(targets) == 5
    assert met == set(range(2 if fen == CASTLES else SIDES))


def test_a_list_ends_where_there_are_no_more_moves(settings: TrainSettings) -> None:
    for _, listed, targets in contents(distiller_of(settings, FEW).batches(0)):
        assert len(set(listed[:3])) == 3 and END not in listed[:3] and listed[3:] == [END] * 2
        assert len(targets) == 4
        assert float(targets[3, END]) == 1 and float(targets[2, END]) == 0


def test_a_model_may_have_more_ids_than_its_tokenizer(
    settings: TrainSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a position with few moves, ids without a share are kept too: any but those."""
    more = 64

    def worst(prompts: list[Prompt], *rest: Any) -> Tensor:
        shares = teacher_frequencies(prompts, *rest)
        shares[..., :-more][shares[..., :-more] == 0] = -1.0  # the others would be kept first
        return shares

    monkeypatch.setattr(module, "teacher_frequencies", worst)
    model = GPT2(
        GPT2Config(
            vocab_size=TOKENIZER.vocab_size + more, n_positions=128, n_embd=8, n_layer=1, n_head=1
        )
    ).init_weights(1)
    distiller = Distiller([FEW], Learner(model, model, None), TOKENIZER, settings)
    for _, listed, _ in contents(distiller.batches(0)):
        assert listed[3:] == [END] * 2
    assert int(distiller.moves.max()) < TOKENIZER.vocab_size


def test_what_is_distilled_depends_on_seed_and_step_alone(settings: TrainSettings) -> None:
    def lists(settings: TrainSettings, step: int) -> list[Any]:
        return [(ids, listed) for ids, listed, _ in contents(distiller_of(settings).batches(step))]

    whole = lists(settings, 3)
    assert len(whole) == settings.distill.distill_prompts
    assert lists(settings.but(micro_tokens=1), 3) == whole
    assert lists(settings, 4) != whole
    assert lists(settings.but(seed=8), 3) != whole
    assert len({tuple(listed) for _, listed in whole}) > 20


def test_every_rank_distils_its_share(
    settings: TrainSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = contents(distiller_of(settings).batches(1))
    shared = []
    for part in (slice(0, 15), slice(15, 40), slice(40, 40)):
        monkeypatch.setattr(distributed, "share", lambda count, part=part: part)
        shared += contents(distiller_of(settings).batches(1))
    assert [one[:2] for one in shared] == [one[:2] for one in whole]


def test_a_position_is_asked_about_once_and_distilled_at_every_turn(
    settings: TrainSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def counted(prompts: list[Prompt], *rest: Any) -> Tensor:
        asked.extend(prompt.row.fen for prompt in prompts)
        return teacher_frequencies(prompts, *rest)

    monkeypatch.setattr(module, "teacher_frequencies", counted)
    distiller = distiller_of(settings.but(distill_prompts=5))
    for step in range(8):
        distiller.batches(step)
    assert sorted(asked) == sorted(distiller.fens) and len(distiller.fens) == 8
    epochs = distiller.positions_at(np.arange(16)).reshape(2, 8)
    assert [sorted(epoch) for epoch in epochs.tolist()] == [list(range(8))] * 2
    assert epochs[0].tolist() != epochs[1].tolist()


def test_a_checkpoint_knows_what_was_asked(
    settings: TrainSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the bit: asked again beside other positions, a reference rounds otherwise."""
    first = distiller_of(settings.but(distill_prompts=3))
    first.batches(0)
    first.frequencies[first.answered] *= 1.0 + 1e-6
    kept = first.tensors()
    again = distiller_of(first.settings)
    again.restore(kept)
    asked: list[int] = []

    def counted(prompts: list[Prompt], *rest: Any) -> Tensor:
        asked.extend(prompt.key for prompt in prompts)
        return teacher_frequencies(prompts, *rest)

    monkeypatch.setattr(module, "teacher_frequencies", counted)
    for one, other in zip(first.batches(0), again.batches(0), strict=True):
        assert torch.equal(one.batch.ids, other.batch.ids)
        assert torch.equal(one.targets.logits, other.targets.logits)
    assert not asked
    again.batches(1)
    assert not set(asked) & set(kept["numbers"].tolist()) and asked
    others: list[dict[str, Any]] = [{"seed": 5}]
    for changes in others:
        stranger = distiller_of(first.settings.but(**changes))
        stranger.restore(kept)
        assert not stranger.answered.any()


def test_workers_know_the_rules_too(settings: TrainSettings) -> None:
    settings = settings.but(distill_prompts=4)
    alone = distiller_of(settings).batches(0)
    helped = distiller_of(settings).batches(0, Workers(1))
    for one, other in zip(alone, helped, strict=True):
        assert torch.equal(one.targets.logits, other.targets.logits)


def test_positions_without_labels_are_enough(settings: TrainSettings, tmp_path: Path) -> None:
    """Each once, from any rows with a position; what is not one is said when its turn comes."""
    path = tmp_path / "positions.jsonl"
    path.write_text("".join(json.dumps({"fen": fen}) + "\n" for fen in (FEW, CASTLED, FEW)))
    settings = settings.but(distill_data=(str(path), "embedded:mate"))
    distiller = new_state(settings, tiny_rows(), torch.device("cpu")).distiller
    assert distiller is not None and distiller.fens[:2] == (FEW, CASTLED)
    assert len(distiller.fens) == 2 + len(load_rows("embedded:mate"))
    path.write_text(json.dumps({"fen": "8/8/8 w - - 0 1"}) + "\n")
    settings = settings.but(distill_data=(str(path),))
    distiller = new_state(settings, tiny_rows(), torch.device("cpu")).distiller
    assert distiller is not None
    with pytest.raises(DataError, match="8/8/8 w"):
        distiller.batches(0)
    for written, said in (("", "no positions in it"), ('{"fen": null}\n', "'fen' is no text")):
        path.write_text(written)
        load_positions.cache_clear()
        with pytest.raises(DataError, match=said):
            new_state(settings, tiny_rows(), torch.device("cpu"))


def test_passes_are_of_one_size_or_one_less(settings: TrainSettings) -> None:
    """A pass whose size comes back at every step can be recorded."""
    for count in (7, 40):
        cut = settings.but(distill_prompts=count, micro_tokens=900)
        sizes = [len(one.batch.heads) for one in distiller_of(cut).batches(0)]
        assert sum(sizes) == count and len(sizes) > 1 - (count < 10) and max(sizes) - min(sizes) < 2
