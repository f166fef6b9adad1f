"""Laws of the tokenizers: rows come back, prompts have one length, nothing is ever unknown."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import chess
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from rookworld.model.tokenizer import END, Tokenizer, chess_tokenizer
from rookworld.runtime.errors import ModelError
from rookworld.tasks.notation import CASTLING, EN_PASSANT, EVALS, MOVES

FENS = (
    chess.STARTING_FEN,
    "8/8/8/8/8/4k3/4p3/4K3 w - - 0 199",
    "1k6/8/8/8/8/8/7p/K7 b - - 99 150",
    "r3k2r/8/8/3pP3/8/8/8/R3K2R w Kq d6 0 12",
    "b1q1n1r1/P7/8/1p1p1p1p/8/8/8/B1K1k3 b - - 3 77",
)


@cache
def native() -> Tokenizer:
    return chess_tokenizer(MOVES, EVALS, CASTLING, EN_PASSANT)


@cache
def rows(count: int = 1500) -> tuple[tuple[str, str], ...]:
    """(prompt, completion) of both tasks, from random games and the positions above."""
    rng = random.Random(3)
    found: list[tuple[str, str]] = []
    starts = [*FENS, *[chess.STARTING_FEN] * count]
    while len(found) < count:
        board = chess.Board(starts.pop(0))
        history: list[str] = []
        while not board.is_game_over() and board.fullmove_number < 200 and len(history) < 120:
            fen = board.fen()
            legal = [move.uci() for move in board.legal_moves]
            best = rng.sample(legal, min(5, len(legal)))
            evals = " ".join(rng.choice(EVALS) for _ in best)
            found.append((f"P: {fen} M:", f" {' '.join(best)} E: {evals} B: {best[0]}"))
            history.append(best[0])
            board.push_uci(best[0])
            prompt = f"A: {fen}+{best[0]}+{' '.join(history[-10:])}+"
            over = int(board.is_game_over())
            reward = rng.choice(("0.001", "1.0", "0.5", "-1.0"))
            found.append((prompt, f"{board.fen()}+{reward}+{over}+0"))
    return tuple(found)


def tokens(text: str, tokenizer: Tokenizer | None = None) -> list[str]:
    """The pieces of `text`, each decoded as the vocabulary spells it."""
    tokenizer = tokenizer or native()
    spelled = {index: token for token, index in vocabulary(tokenizer).items()}
    return [spelled[index] for index in tokenizer.encode(text)]


def vocabulary(tokenizer: Tokenizer) -> dict[str, int]:
    vocab: dict[str, int] = json.loads(tokenizer._core.to_str())["model"]["vocab"]
    return vocab


def test_a_policy_row_by_hand() -> None:
    prompt = "P: r3k2r/8/8/3pP3/8/8/8/R3K2R w Kq d6 0 12 M:"
    board = ["r", *"___k__r", *["/_", *"_______"] * 2, "/_", *"__pP___"]
    board += [*["/_", *"_______"] * 3, "/R", *"___K__R"]
    assert len(board) == 64
    assert tokens(prompt) == ["P: ", *board, " w", " Kq", " d6", " 0", " 12", " M:"]
    answer = " e5d6 e1g1 E: 0.3 -999.99 B: e5d6"
    assert tokens(answer) == [" e5d6", " e1g1", " E:", " 0.3", " -999.99", " B:", " e5d6"]


def test_an_environment_row_by_hand() -> None:
    empty = ["/_", *"_______"]
    before = ["_", *"_______", "/P", *"_______", *empty * 5, "/K", *"______k"]
    after = ["Q", *"_______", *empty * 6, "/K", *"______k"]
    row = "A: 8/P7/8/8/8/8/8/K6k w - - 5 60+a7a8q+h2h1 a7a8q+Q7/8/8/8/8/8/8/K6k b - - 0 60"
    assert tokens(row + "+0.001+0+0") == [
        *("A: ", *before, " w", " -", " -", " 5", " 60", "+", " a7a8q", "+", " h2h1", " a7a8q"),
        *("+", *after, " b", " -", " -", " 0", " 60", "+", " 0.001", "+", " 0", "+", " 0"),
    ]


def test_prompt_ids_and_completion_ids_are_row_ids_and_rows_come_back() -> None:
    tokenizer = native()
    texts = [prompt + completion for prompt, completion in rows()]
    ids = tokenizer.encode_batch(texts)
    prompts = tokenizer.encode_batch([prompt for prompt, _ in rows()])
    completions = tokenizer.encode_batch([completion for _, completion in rows()])
    assert [a + b for a, b in zip(prompts, completions, strict=True)] == ids
    assert tokenizer.decode_batch(ids) == texts
    assert tokenizer.decode_batch(completions) == [completion for _, completion in rows()]
    lengths = {len(one) for one, (text, _) in zip(prompts, rows(), strict=True) if text[0] == "P"}
    assert lengths == {71}
    lengths = {
        len(one) for one, (text, _) in zip(completions, rows(), strict=True) if text[0] == "A"
    }
    assert lengths == {75}


def test_padded_rows_collapse_to_compact_ones() -> None:
    fen = FENS[3]
    padded = f"P: {fen:<90}M: {'e5d6 e1g1':<30}E: {'0.3 -1.5':<40}B: e5d6"
    compact = f"P: {fen} M: e5d6 e1g1 E: 0.3 -1.5 B: e5d6"
    assert native().encode(padded) == native().encode(compact)
    assert native().decode(native().encode(padded)) == compact


def test_every_value_is_one_token_and_the_vocabulary_is_of_round_size() -> None:
    counters = [str(number) for number in range(200)]
    for values in (MOVES, EVALS, CASTLING, EN_PASSANT, counters, ("0.001", "w", "b")):
        assert {len(ids) for ids in native().encode_batch([f" {text}" for text in values])} == {1}
    assert len(vocabulary(native())) == native().vocab_size == 2496
    assert native().style == "compact"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (" 0.35", [" ", *"0.35"]),
        (" 1.0 1.05", [" 1.0", " ", *"1.05"]),
        (" 200", [" ", *"200"]),
        (" e7e8q e7e8", [" e7e8q", " e7e8"]),
        (" e2e4x e2e4", [" ", *"e2e4x", " e2e4"]),
        (" e2e4q", [" ", *"e2e4q"]),
        (" a1h2", [" ", *"a1h2"]),
        ("e2e4", [*"e2e4"]),
        ("+a1h2+0000", ["+", " ", *"a1h2", "+", " ", *"0000"]),
        ("+-1.0+1", ["+", " -1.0", "+", " 1"]),
        (" KQkq Kkq KkQ", [" KQkq", " Kkq", " ", *"KkQ"]),
        (" M:e2e4", [" ", *"M:e2e4"]),
        ("4P3 b", [*"4P3", " b"]),
        ("44/8 w - - 0 1", [*"44", "/_", *"_______", " w", " -", " -", " 0", " 1"]),
        ("né\n\ue000", ["n", "?", "?", "?"]),
    ],
)
def test_near_misses_are_spelled_in_characters(text: str, expected: list[str]) -> None:
    assert tokens(text) == expected


fragments = st.sampled_from(
    [*("P: ", "A: ", " M:", " E:", "+", "/", " ", "8", "44", " w ", " - ", " KQkq ", "-", "."),
     *(" e2e4", "e7e8q", " 0.3", "0.001", " 199", "rnbqkbnr", FENS[0], FENS[1], "+8/8 b - ")]
)  # fmt: skip
junk = st.lists(fragments | st.text(st.characters(codec="ascii"), max_size=4)).map("".join)


@settings(deadline=None)
@given(junk | st.text())
def test_junk_is_never_unknown_and_comes_back(text: str) -> None:
    assume(END not in text)
    expected = re.sub("  +", " ", re.sub("[^ -~]", "?", text))
    ids = native().encode(text)
    back = native().decode(ids)
    assert ids.count(vocabulary(native())["?"]) == expected.count("?")
    if "_" not in text and "+ " not in text:
        assert back == expected


@settings(deadline=None)
@given(st.lists(st.integers(0, 2600)))
def test_whatever_a_model_samples_is_decoded(ids: list[int]) -> None:
    text = native().decode(ids)
    assert END not in text
    assert native().decode([*ids, native().eos, 5, 6]) == text


def test_decode_stops_at_the_first_end() -> None:
    tokenizer = native()
    ids = [*tokenizer.encode(" e2e4"), tokenizer.eos, *tokenizer.encode(" d2d4"), tokenizer.eos]
    assert tokenizer.decode(ids) == " e2e4"
    assert tokenizer.decode([tokenizer.eos, *ids]) == ""
    assert tokenizer.decode_batch([ids, []]) == [" e2e4", ""]
    assert tokenizer.encode(f"{END} e2e4") == [tokenizer.eos, *tokenizer.encode(" e2e4")]


def test_a_saved_tokenizer_is_the_same_here_and_in_transformers(tmp_path: Path) -> None:
    from transformers import PreTrainedTokenizerFast

    native().save(tmp_path)
    texts = ["".join(row) for row in rows()[:40]] + ["+e2e4 junk é"]
    expected = native().encode_batch(texts)
    again = Tokenizer.load(tmp_path)
    assert again.encode_batch(texts) == expected
    assert (again.style, again.eos, again.vocab_size) == ("compact", native().eos, 2496)
    theirs = PreTrainedTokenizerFast.from_pretrained(tmp_path)
    assert theirs(texts)["input_ids"] == expected
    assert theirs.decode(expected[1]) == texts[1]
    assert {theirs.eos_token_id, theirs.bos_token_id, theirs.pad_token_id} == {again.eos}


def write_byte_pairs(folder: Path, merges: Sequence[tuple[str, str]]) -> None:
    """GPT-2's two files with a handful of merges; "Ġ" is its spelling of a space."""
    letters = [chr(code) for code in range(0x21, 0x7F)] + ["Ġ"]
    vocab = [*letters, *("".join(pair) for pair in merges), END]
    (folder / "vocab.json").write_text(json.dumps({token: i for i, token in enumerate(vocab)}))
    lines = ["#version: 0.2", *(" ".join(pair) for pair in merges)]
    (folder / "merges.txt").write_text("\n".join(lines) + "\n")


def test_gpt2_files_load_and_are_saved_as_one(tmp_path: Path) -> None:
    write_byte_pairs(tmp_path, [("Ġ", "M"), ("e", "n")])
    tokenizer = Tokenizer.load(tmp_path)
    text = f"P: {FENS[0]}  M: e2e4"
    assert tokenizer.style == "padded"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    # The 95 letters come first, then the merges in their order, then the end.
    assert tokenizer.encode(f" M:en{END}") == [95, ord(":") - 0x21, 96, 97]
    tokenizer.save(tmp_path / "saved")
    assert Tokenizer.load(tmp_path / "saved").encode(text) == tokenizer.encode(text)


def test_unusable_tokenizers_are_one_line(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"no tokenizer in .*tokenizer\.json or vocab\.json"):
        Tokenizer.load(tmp_path)
    write_byte_pairs(tmp_path, [])
    (tmp_path / "merges.txt").write_text("#version: 0.2\nx y z\n")
    with pytest.raises(ModelError, match="cannot read the tokenizer"):
        Tokenizer.load(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ModelError, match="cannot read the tokenizer"):
        Tokenizer.load(tmp_path)
    native().save(tmp_path)
    text = (tmp_path / "tokenizer.json").read_text().replace(END, "<end>")
    (tmp_path / "tokenizer.json").write_text(text)
    with pytest.raises(ModelError, match="has no token"):
        Tokenizer.load(tmp_path)
