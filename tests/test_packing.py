"""Packed rows: ids add up, fields name tokens."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from rookworld.data.sources import load_rows
from rookworld.model.tokenizer import Tokenizer
from rookworld.pretrain import dataset
from rookworld.pretrain.dataset import TokenizedRows
from rookworld.pretrain.sources import pick_tokenizer
from rookworld.runtime.errors import DataError
from rookworld.tasks.policy import POLICY
from rookworld.tasks.task import EnvironmentRow, PolicyRow


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return pick_tokenizer("chess")


@pytest.fixture(scope="module")
def rows() -> list[PolicyRow]:
    found = [row for row in load_rows("embedded:train") if isinstance(row, PolicyRow)]
    return found[:300]


def test_a_packed_row_is_prompt_answer_end(tokenizer: Tokenizer, rows: list[PolicyRow]) -> None:
    packed = dataset.pack_policy(rows, tokenizer)
    for place in (0, 7, 99):
        row, length = rows[place], int(packed.lengths[place])
        text = POLICY.prompt(row, "compact") + POLICY.answer(row, "compact")
        assert packed.tokens[place, : length - 1].tolist() == tokenizer.encode(text)
        assert packed.tokens[place, length - 1] == tokenizer.eos
        assert tokenizer.encode(POLICY.prompt(row, "compact")) == (
            packed.tokens[place, : packed.prompts[place]].tolist()
        )


def test_fields_name_each_token(tokenizer: Tokenizer) -> None:
    moves = ("e1g1", "h1h3", "h1g1", "h1f1", "e1f1")
    row = PolicyRow("8/8/8/8/8/4k3/8/4K2R w K - 0 1", moves, (50, 20, 0, 0, 0))
    packed = dataset.pack_policy([row], tokenizer)
    fields = packed.fields[0, packed.prompts[0] :].tolist()
    first, other, value, best, marker = (
        dataset.FIRST_MOVE,
        dataset.OTHER_MOVE,
        dataset.EVALUATION,
        dataset.BEST_MOVE,
        dataset.MARKER,
    )
    assert fields == [first, *[other] * 4, marker, *[value] * 5, marker, best, marker]
    assert not packed.fields[0, : packed.prompts[0]].any()


def test_a_list_with_moves_missing_does_not_teach_where_a_list_ends(tokenizer: Tokenizer) -> None:
    short = PolicyRow("8/8/8/8/8/4k3/8/4K2R w K - 0 1", ("e1g1", "h1h3", "h1g1"), (50, 20, 0))
    forced = PolicyRow("7k/8/6K1/8/8/8/8/8 b - - 0 1", ("h8g8",), (0,))
    packed = dataset.pack_policy([short, forced], tokenizer)
    fields = packed.fields[0, packed.prompts[0] :].tolist()
    assert fields == [dataset.FIRST_MOVE, dataset.OTHER_MOVE, dataset.OTHER_MOVE, *[0] * 7]
    assert packed.fields[1, packed.lengths[1] - 1] == dataset.MARKER, "one move is all there is"


def test_the_first_move_is_spread_by_win_probability(tokenizer: Tokenizer) -> None:
    row = PolicyRow("4k3/8/8/8/8/8/8/4K2R w K - 0 1", ("e1g1", "h1h7"), (100, 100))
    worse = PolicyRow(row.fen, row.moves, (100, -500))
    packed = dataset.pack_policy([row, worse], tokenizer, hard=0.5)
    assert packed.choices[0, :2].tolist() == [tokenizer.token(" e1g1"), tokenizer.token(" h1h7")]
    assert packed.shares[0].tolist() == [191, 64, 0, 0, 0]
    assert packed.shares[1].tolist() == [255, 0, 0, 0, 0]


def test_only_the_first_move_of_a_mate_row_is_a_target(tokenizer: Tokenizer) -> None:
    packed = dataset.pack_mates([("7k/8/6K1/8/8/8/8/R5R1 w - - 0 1", ("a1a8", "g1h1"))], tokenizer)
    assert (packed.fields[0] == dataset.FIRST_MOVE).sum() == 1
    assert set(packed.fields[0].tolist()) == {dataset.PROMPT, dataset.FIRST_MOVE}
    assert packed.shares[0].tolist() == [128, 128, 0, 0, 0]


def test_every_token_of_an_environment_answer_is_a_target(tokenizer: Tokenizer) -> None:
    rows = [row for row in load_rows("embedded:train") if isinstance(row, EnvironmentRow)][:50]
    packed = dataset.pack_environment(rows, tokenizer)
    for place in range(len(rows)):
        start, stop = int(packed.prompts[place]), int(packed.lengths[place])
        assert (packed.fields[place, start : start + 69] == dataset.STATE).all()
        assert (packed.fields[place, start + 69 : stop - 1] == dataset.OUTCOME).all()
        assert stop - 1 - start - 69 == 6
        assert not packed.fields[place, stop:].any()


def test_padded_rows_have_fields_too(tokenizer: Tokenizer) -> None:
    """Character offsets, not token counts, say what a token is: it holds for byte pairs."""
    spans = dataset._policy_fields(" e2e4 d2d4          E: 0.3 0.1          B: e2e4")
    assert [field for _, field in spans] == [1, 2, 5, 3, 3, 5, 4]


def test_packed_rows_survive_the_disk(tokenizer: Tokenizer, tmp_path: Path) -> None:
    rows = [row for row in load_rows("embedded:train") if isinstance(row, PolicyRow)][:20]
    packed = dataset.pack_policy(rows, tokenizer)
    dataset.save_packed(packed, tmp_path / "rows.npz")
    back = dataset.load_packed(tmp_path / "rows.npz")
    for name in dataset.NAMES:
        assert np.array_equal(getattr(packed, name), getattr(back, name))
    (tmp_path / "bad.npz").write_bytes(b"PK not a zip")
    with pytest.raises(DataError, match="not a file of packed rows"):
        dataset.load_packed(tmp_path / "bad.npz")


def test_joining_pads_to_the_widest(tokenizer: Tokenizer) -> None:
    mate = dataset.pack_mates([("7k/8/6K1/8/8/8/8/R7 w - - 0 1", ("a1a8",))], tokenizer)
    rows = [row for row in load_rows("embedded:train") if isinstance(row, PolicyRow)][:3]
    joined: TokenizedRows = dataset.join([mate, dataset.pack_policy(rows, tokenizer)])
    assert len(joined) == 4
    assert (joined.tokens[0, int(joined.lengths[0]) :] == tokenizer.eos).all()
