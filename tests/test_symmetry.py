"""Symmetries of ids are those of chess."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from rookworld.data.sources import load_rows
from rookworld.model.tokenizer import Tokenizer
from rookworld.pretrain import dataset
from rookworld.pretrain.sources import pick_tokenizer
from rookworld.rollout import symmetry
from rookworld.rollout.symmetry import Symmetry
from rookworld.tasks.notation import flip_fen, flip_move, mirror_fen, mirror_move
from rookworld.tasks.task import PolicyRow


@pytest.mark.parametrize(
    ("make", "fen", "move"),
    [
        (symmetry.colour_flip, flip_fen, flip_move),
        (symmetry.left_right_mirror, mirror_fen, mirror_move),
    ],
)
def test_a_symmetry_of_the_array_is_a_symmetry_of_chess(
    make: Callable[[Tokenizer], Symmetry],
    fen: Callable[[str], str],
    move: Callable[[str], str],
) -> None:
    tokenizer = pick_tokenizer("chess")
    rows = [row for row in load_rows("embedded:train") if isinstance(row, PolicyRow)][:300]
    kind = make(tokenizer)
    if kind.needs_no_castling:
        rows = [row for row in rows if row.fen.split()[2] == "-"]
    assert len(rows) > 50
    other = [PolicyRow(fen(row.fen), tuple(map(move, row.moves)), row.cp) for row in rows]
    ours = symmetry.apply_symmetry(
        dataset.pack_policy(rows, tokenizer).tokens.astype(np.int64), kind
    )
    assert np.array_equal(ours, dataset.pack_policy(other, tokenizer).tokens)
