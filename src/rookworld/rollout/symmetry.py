"""JOINT: the symmetries of chess x tokenizer -> arrays of ids, and the images of prompts.

Law: turned ids are the ids of the turned position and of the turned moves. Left out: the
environment's rows, whose move counter tells the colours apart.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from rookworld.model.sampling.decode_batch import round_up
from rookworld.model.tokenizer import Tokenizer
from rookworld.rollout.types import Prompt
from rookworld.tasks.notation import flip_move, mirror_move

SIDES = 4
"""From which a position may be looked at: two for its colours, and with left and right four."""


@dataclass(frozen=True)
class Symmetry:
    """A symmetry of chess as array operations: where a square goes, what a token becomes."""

    squares: NDArray[np.int64]
    """[64] board token i of the new row is board token squares[i] of the old."""
    renamed: NDArray[np.int64]
    """[vocabulary] token by token, after the slashes are taken off."""
    bare: NDArray[np.int64]
    """[vocabulary] a square's token without its slash."""
    slashed: NDArray[np.int64]
    """[vocabulary] a square's token with a slash."""
    needs_no_castling: bool
    """Whether it holds only where nobody may castle."""


def colour_flip(tokenizer: Tokenizer) -> Symmetry:
    """Ranks mirrored, colours and the side to move swapped."""
    squares = np.arange(64).reshape(8, 8)[::-1].reshape(-1).copy()

    def rename(text: str) -> str:
        if text.strip() in ("w", "b") and text.startswith(" "):
            return " b" if text == " w" else " w"
        if len(text.strip()) == 2 and text[1:2] in "abcdefgh" and text[2:] in ("3", "6"):
            return f" {text[1]}{'6' if text[2] == '3' else '3'}"
        if _is_castling(text):
            swapped = text.strip().swapcase()
            return " " + "".join(side for side in "KQkq" if side in swapped)
        return text.swapcase() if len(text) == 1 and text in "pnbrqkPNBRQK" else text

    return _symmetry(tokenizer, squares, rename, flip_move, needs_no_castling=False)


def left_right_mirror(tokenizer: Tokenizer) -> Symmetry:
    """Files mirrored; a symmetry only where nobody may castle."""
    squares = np.arange(64).reshape(8, 8)[:, ::-1].reshape(-1).copy()

    def rename(text: str) -> str:
        if len(text.strip()) == 2 and text[1:2] in "abcdefgh" and text[2:] in ("3", "6"):
            return f" {'hgfedcba'['abcdefgh'.index(text[1])]}{text[2]}"
        return text

    return _symmetry(tokenizer, squares, rename, mirror_move, needs_no_castling=True)


def _is_castling(text: str) -> bool:
    return text.startswith(" ") and len(text) > 1 and set(text[1:]) <= set("KQkq")


def _is_move(text: str) -> bool:
    return len(text) in (5, 6) and text[0] == " " and text[1].isalpha() and text[2].isdigit()


def _symmetry(
    tokenizer: Tokenizer,
    squares: NDArray[np.int64],
    rename: Callable[[str], str],
    move: Callable[[str], str],
    *,
    needs_no_castling: bool,
) -> Symmetry:
    size = tokenizer.vocab_size
    renamed, bare, slashed = (np.arange(size) for _ in range(3))
    for text, token in tokenizer.vocabulary().items():
        new = " " + move(text[1:]) if _is_move(text) else rename(text)
        renamed[token] = tokenizer.token(new)
        if len(text) == 2 and text[0] == "/":
            bare[token] = tokenizer.token(text[1])
            slashed[tokenizer.token(text[1])] = token
    return Symmetry(squares, renamed, bare, slashed, needs_no_castling)


BOARD = slice(1, 65)
"""Where the squares lie in a compact prompt: after the task letter."""
CASTLING = 66
"""Where the castling rights lie: after the side to move."""


def apply_symmetry(tokens: NDArray[np.int64], symmetry: Symmetry) -> NDArray[np.int64]:
    """Compact analysis rows [rows, width] under a symmetry (`batches.transform` without torch)."""
    out = symmetry.renamed[symmetry.bare[tokens]]
    board = out[:, BOARD][:, symmetry.squares]
    board[:, 8::8] = symmetry.slashed[board[:, 8::8]]
    out[:, BOARD] = board
    return out


@dataclass(frozen=True)
class Images:
    """Prompts as seen from each side of the board."""

    ids: NDArray[np.int64]
    """[images, tokens], padded with end tokens."""
    lengths: NDArray[np.int64]
    """[images] tokens of each."""
    prompts: NDArray[np.int64]
    """[images] the number of the prompt that it is an image of."""
    sides: NDArray[np.int64]
    """[images] its line of `token_permutations`."""


@lru_cache(maxsize=8)
def symmetries(tokenizer: Tokenizer) -> tuple[Symmetry, Symmetry]:
    """Colours exchanged, left and right exchanged."""
    return colour_flip(tokenizer), left_right_mirror(tokenizer)


@lru_cache(maxsize=8)
def token_permutations(tokenizer: Tokenizer) -> NDArray[np.int64]:
    """[sides, vocabulary] the id that each id becomes on each side of the board."""
    flip, mirror = (symmetry.renamed for symmetry in symmetries(tokenizer))
    return np.stack([np.arange(len(flip)), flip, mirror, mirror[flip]])


def prompt_images(prompts: Sequence[Prompt], tokenizer: Tokenizer, multiple: int = 1) -> Images:
    """Every prompt from every side from which it is the same question."""
    flip, mirror = symmetries(tokenizer)
    lengths = np.array([len(prompt.ids) for prompt in prompts])
    ids = np.full((len(prompts), round_up(int(lengths.max()), multiple)), tokenizer.eos)
    for line, prompt in zip(ids, prompts, strict=True):
        line[: len(prompt.ids)] = prompt.ids
    flipped = apply_symmetry(ids, flip)
    images = np.stack([ids, flipped, apply_symmetry(ids, mirror), apply_symmetry(flipped, mirror)])
    castles = ids[:, CASTLING] != tokenizer.token(" -")
    same = ~castles[:, None] | (np.arange(SIDES) < 2)
    number, side = same.nonzero()
    return Images(images[side, number], lengths[number], number, side)
