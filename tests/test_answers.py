"""A model's answers: the same whatever stands beside a prompt, of the weights it has now."""

from __future__ import annotations

import random
from pathlib import Path

import chess
import pytest
import torch

from rookworld.evaluation.generator import Answer, ModelAnswerer, load_answerer, prompt_key
from rookworld.model.sampling.sampler import Sampling
from rookworld.model.weights import save_model
from rookworld.runtime.errors import ModelError
from rookworld.tasks.environment import ENVIRONMENT, transition
from tiny import sample, tiny_model


def mixed_prompts(n: int = 12) -> list[str]:
    rng, prompts = random.Random(0), []
    board = chess.Board()
    for _ in range(n):
        move = rng.choice(list(board.legal_moves)).uci()
        prompts.append(f"P: {board.fen()} M:")
        prompts.append(ENVIRONMENT.prompt(transition(board.fen(), move), "compact"))
        board.push_uci(move)
    return prompts


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_batch_size_and_order_change_nothing(temperature: float) -> None:
    model, tokenizer = tiny_model()
    prompts = mixed_prompts()
    expected = ModelAnswerer(model, tokenizer, batch_size=64, temperature=temperature)
    by_prompt = dict(zip(prompts, expected.answer(prompts), strict=True))
    assert len({answer.text for answer in by_prompt.values()}) > len(prompts) / 2
    shuffled = random.Random(1).sample(prompts, len(prompts))
    for batch_size in (1, 5):
        answerer = ModelAnswerer(model, tokenizer, batch_size=batch_size, temperature=temperature)
        found = answerer.answer([*shuffled, shuffled[0]])
        assert found == [by_prompt[prompt] for prompt in [*shuffled, shuffled[0]]]


@pytest.mark.parametrize(("number", "budget"), [(0, 16), (1, 90)])
def test_an_answer_is_as_long_as_its_task_allows(number: int, budget: int) -> None:
    model, tokenizer = tiny_model()
    prompt = mixed_prompts(1)[number]
    settings = Sampling(temperature=0.0, max_new_tokens=budget)
    ids = [tokenizer.encode(prompt)]
    drawn = sample(model, ids, settings=settings, eos=tokenizer.eos, seed=0)
    assert drawn.lengths.tolist() == [budget]
    expected = Answer(tokenizer.decode(drawn.tokens[0].tolist()), finished=False)
    assert ModelAnswerer(model, tokenizer).answer([prompt]) == [expected]


def test_samples_of_a_prompt_differ_and_salts_tell_games_apart() -> None:
    model, tokenizer = tiny_model(spread=1.0)
    prompt = mixed_prompts(1)[0]
    many = ModelAnswerer(model, tokenizer, temperature=1.0, samples=3).answer([prompt, prompt])
    assert len({answer.text for answer in many}) == 3
    assert many[:3] == many[3:]
    once = ModelAnswerer(model, tokenizer, temperature=1.0)
    first, second = once.answer([prompt, prompt], salts=[0, 1])
    assert first != second
    assert first == once.answer([prompt])[0]
    greedy = once.sampling(0.0)
    assert len(set(greedy.answer([prompt, prompt], salts=[0, 1]))) == 1


def test_another_seed_draws_other_answers() -> None:
    model, tokenizer = tiny_model(spread=1.0)
    prompt = mixed_prompts(1)[:1]
    texts = {
        ModelAnswerer(model, tokenizer, temperature=1.0, seed=seed).answer(prompt)[0].text
        for seed in (0, 1)
    }
    assert len(texts) == 2


def test_changed_weights_are_seen() -> None:
    model, tokenizer = tiny_model()
    answerer = ModelAnswerer(model, tokenizer)
    prompts = mixed_prompts(1)
    before = answerer.answer(prompts)
    with torch.no_grad():
        dict(model.named_parameters())["h.0.mlp.c_fc.weight"].mul_(-3)
    after = answerer.answer(prompts)
    assert after != before
    assert after == ModelAnswerer(model, tokenizer).answer(prompts)


def test_progress_counts_to_the_end() -> None:
    model, tokenizer = tiny_model()
    seen: list[tuple[str, int, int]] = []
    answerer = ModelAnswerer(model, tokenizer, batch_size=4, progress=lambda *one: seen.append(one))
    answerer.answer(mixed_prompts(3))
    assert [done for _, done, _ in seen] == [4, 6]
    assert {total for *_, total in seen} == {6}


def test_no_prompts_no_answers() -> None:
    model, tokenizer = tiny_model()
    assert ModelAnswerer(model, tokenizer).answer([]) == []


def test_a_saved_folder_answers_like_the_model(tmp_path: Path) -> None:
    model, tokenizer = tiny_model()
    save_model(model, tmp_path / "model", tokenizer=tokenizer)
    prompts = mixed_prompts(2)
    expected = ModelAnswerer(model, tokenizer).answer(prompts)
    assert load_answerer(str(tmp_path / "model")).answer(prompts) == expected


def test_a_folder_without_tokenizer_is_one_line(tmp_path: Path) -> None:
    model, _ = tiny_model()
    save_model(model, tmp_path / "model")
    with pytest.raises(ModelError, match="no tokenizer in") as caught:
        load_answerer(str(tmp_path / "model"))
    assert "\n" not in str(caught.value)


def test_keys_do_not_depend_on_the_process() -> None:
    assert prompt_key("P: ") == 1_265_921_937_837_108_958
    assert Answer("x") == Answer("x", finished=True)
