"""From all sides a position and its images are one question; a mask keeps illegal moves out."""

from __future__ import annotations

from pathlib import Path

import chess
import pytest

from rookworld.evaluation.generator import ModelAnswerer, analyses, load_answerer
from rookworld.evaluation.move_shares import choose, images_of, move_shares
from rookworld.evaluation.opinion import Thinker, Thinking
from rookworld.model.gpt2 import GPT2, GPT2Config
from rookworld.model.tokenizer import gpt2_tokenizer
from rookworld.runtime.checkpoint_names import model_of_run
from rookworld.runtime.errors import ConfigError, ModelError
from rookworld.tasks.notation import flip_fen, flip_move, is_move_text, mirror_fen, mirror_move
from rookworld.tasks.task import legal_moves
from rookworld.uci import serve

CASTLES = "r3k2r/pppq1ppp/2npbn2/4p3/4P3/2NPBN2/PPPQ1PPP/R3K2R w KQkq - 0 9"
ENDING = "8/5k2/8/3P4/2K5/8/1r6/5R2 b - - 3 51"
FENS = [chess.STARTING_FEN, CASTLES, ENDING]


@pytest.fixture(scope="module")
def tiny(tiny_folder: Path) -> ModelAnswerer:
    return load_answerer(str(tiny_folder))


@pytest.fixture(scope="module")
def nano() -> ModelAnswerer:
    return load_answerer("nano")


@pytest.mark.parametrize("fen", FENS)
def test_from_all_sides_a_position_and_its_images_are_judged_alike(
    nano: ModelAnswerer, fen: str
) -> None:
    (here,) = move_shares(nano, [fen], sides=True)
    (there,) = move_shares(nano, [flip_fen(fen)], sides=True)
    assert {flip_move(move): share for move, share in here.items()} == pytest.approx(there)
    (alone,) = move_shares(nano, [fen])
    (image,) = move_shares(nano, [flip_fen(fen)])
    mean = {move: (share + image[flip_move(move)]) / 2 for move, share in alone.items()}
    if images_of(fen) == 2:
        assert here == pytest.approx(mean, abs=1e-6)
    else:
        (mirror,) = move_shares(nano, [mirror_fen(fen)], sides=True)
        assert {mirror_move(move): share for move, share in here.items()} == pytest.approx(mirror)


def test_shares_do_not_depend_on_neighbours_and_agree_with_greedy_answers(
    nano: ModelAnswerer,
) -> None:
    together = move_shares(nano, FENS)
    for fen, shares in zip(FENS, together, strict=True):
        assert shares.keys() == legal_moves(fen)
        assert shares == pytest.approx(move_shares(nano, [fen])[0], abs=1e-6)
        (said,) = analyses(nano, [fen])
        assert choose(shares, temperature=0, top_p=1, seed=0, fen=fen, salt=0) == said.moves[0]


def test_a_move_is_drawn_from_its_shares() -> None:
    shares = {"a2a3": 0.5, "a2a4": 0.3, "b2b3": 0.001}

    def drawn(top_p: float, temperature: float = 1.0) -> list[str]:
        return [
            choose(shares, temperature=temperature, top_p=top_p, seed=1, fen="x", salt=salt)
            for salt in range(300)
        ]

    assert drawn(1.0) == drawn(1.0)
    assert 150 < drawn(1.0).count("a2a3") < 225
    assert set(drawn(0.5)) == {"a2a3"}
    assert set(drawn(1.0, temperature=0.05)) <= {"a2a3", "a2a4"}
    assert set(drawn(1.0, temperature=9.0)) == set(shares)
    assert choose({}, temperature=0, top_p=1, seed=0, fen="", salt=0) == ""


def test_the_mask_keeps_illegal_moves_out(tiny: ModelAnswerer) -> None:
    prompts = [f"P: {fen} M:" for fen in FENS * 4]

    def illegal(thinking: Thinking) -> set[str]:
        answers = Thinker(tiny, thinking).answerer.answer(prompts, range(12))
        return {
            word
            for prompt, answer in zip(prompts, answers, strict=True)
            for word in answer.text.split()
            if is_move_text(word) and word not in legal_moves(prompt[3:-3])
        }

    assert illegal(Thinking(temperature=2.0))
    assert not illegal(Thinking(temperature=2.0, legal_only=True))


@pytest.mark.parametrize("sides", [False, True])
@pytest.mark.parametrize("legal_only", [False, True])
def test_whatever_a_random_model_says_a_legal_move_is_played(
    tiny: ModelAnswerer, sides: bool, legal_only: bool
) -> None:
    boards = [chess.Board(fen) for fen in FENS]
    thinker = Thinker(tiny, Thinking(sides=sides, legal_only=legal_only))
    for board, found in zip(boards, thinker.opinions(boards), strict=True):
        assert found.move in legal_moves(board.fen())
        assert not found.by_name
    (found,) = thinker.opinions(boards[:1], only=["h2h4"])
    assert found.move == "h2h4"
    over = chess.Board("7k/5Q2/6K1/8/8/8/8/8 b - - 0 1")
    assert thinker.opinions([over])[0].move == ""


def test_where_nothing_said_can_be_played_the_most_probable_legal_move_is(
    tiny: ModelAnswerer,
) -> None:
    (found,) = Thinker(tiny).opinions([chess.Board()])
    (shares,) = move_shares(tiny, [chess.STARTING_FEN])
    assert found.candidates == () and "most probable" in found.note
    assert found.move == max(shares, key=lambda move: shares[move])


def test_a_move_that_is_asked_for_is_evaluated_though_it_was_not_listed(
    nano: ModelAnswerer,
) -> None:
    (found,) = Thinker(nano).opinions([chess.Board()], only=["a2a4"])
    (candidate,) = found.candidates
    assert found.move == candidate.move == "a2a4" and found.asked == 3
    assert abs(candidate.cp) < 100
    assert "not among those asked for" in found.note


def test_a_model_that_spells_moves_out_is_constrained_too() -> None:
    tokenizer = gpt2_tokenizer()
    config = GPT2Config(
        vocab_size=tokenizer.vocab_size, n_positions=256, n_embd=8, n_layer=1, n_head=1
    )
    spelling = ModelAnswerer(GPT2(config).init_weights(0).eval(), tokenizer)
    (shares,) = move_shares(spelling, [ENDING])
    assert shares.keys() == legal_moves(ENDING)
    assert 0 < sum(shares.values()) < 1
    (found,) = Thinker(spelling).opinions([chess.Board(ENDING)])
    assert found.move == max(shares, key=lambda move: shares[move])
    with pytest.raises(ConfigError, match="one token"):
        Thinker(spelling, Thinking(sides=True))
    lines = ["setoption name Sides value true", f"position fen {ENDING}", "go"]
    said = list(serve(lambda *_: Thinker(spelling), lines))
    assert any("looking from all sides needs a model" in line for line in said)
    assert said[-1] == f"bestmove {found.move}"


def test_a_run_names_its_checkpoints(tmp_path: Path) -> None:
    assert model_of_run("nano") == "nano"
    with pytest.raises(ModelError, match="no run's folder"):
        model_of_run("nano", "best")
    for name in ("step-000005", "step-000010"):
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
    run = str(tmp_path)
    assert model_of_run(run).endswith("step-000010")
    assert model_of_run(run, "5").endswith("step-000005")
    (tmp_path / "final").mkdir()
    assert model_of_run(run).endswith("final")
    with pytest.raises(ModelError, match="there are 5, 10, final"):
        model_of_run(run, "7")
