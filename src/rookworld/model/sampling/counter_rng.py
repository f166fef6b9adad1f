"""Randomness that is a function of what is sampled, not of when or beside whom.

Law: the noise of a token is determined by (seed, step, prompt key, sample, token index) alone, so a
sample is the same whatever its neighbours, the batch size, the order or the number of ranks; and
the integers are the same on every device. Keys are 64 bits, mixed as in splitmix64; the noise of a
vocabulary entry is a 32-bit mix of its id with both halves of its row's key.
Left out: a `torch.Generator`, whose stream depends on the shape of everything drawn before.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

GOLDEN_64 = 0x9E3779B97F4A7C15
MIX_64 = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
GOLDEN_32 = 0x9E3779B9
MIX_32 = (0x85EBCA6B, 0xC2B2AE35)

UNIT_31 = 2.0**-31 * (1 - 2.0**-23)
"""Scales (a 31-bit integer + ½) into (0, 1): without the last factor the largest rounds to 1."""


def to_signed(value: int, bits: int) -> int:
    """`value` modulo 2**bits as a two's complement integer, which is what tensors hold."""
    value &= (1 << bits) - 1
    return value - (1 << bits) if value >> (bits - 1) else value


Whole = TypeVar("Whole", Tensor, NDArray[np.int64])


def mix(x: Whole) -> Whole:
    """splitmix64's finaliser: every bit of the int64 `x` reaches every bit of the result."""
    x = (x ^ ((x >> 30) & (2**34 - 1))) * to_signed(MIX_64[0], 64)
    x = (x ^ ((x >> 27) & (2**37 - 1))) * to_signed(MIX_64[1], 64)
    return x ^ ((x >> 31) & (2**33 - 1))


def fold(key: Whole, part: Whole | int) -> Whole:
    """A new key from a key and one more thing it depends on."""
    return mix(key + (part + 1) * to_signed(GOLDEN_64, 64))


def row_keys(
    seed: int,
    step: int,
    keys: Sequence[int] | NDArray[np.int64],
    samples: Sequence[int] | NDArray[np.int64],
) -> Tensor:
    """One int64 key per row, from its prompt's key and its index among the prompt's samples."""
    # numpy, whose operations on a few numbers take a tenth of the time of torch's
    key = np.zeros(1, dtype=np.int64)
    for part in ([seed], [step], keys, samples):
        key = fold(key, wrap_int64(part))
    return torch.from_numpy(key)


def wrap_int64(values: Sequence[int] | NDArray[np.int64]) -> NDArray[np.int64]:
    """Integers of any size modulo 2**64, as tensors hold them."""
    found = np.asarray(values)
    if found.dtype == np.int64:
        return found
    return np.array([to_signed(int(value), 64) for value in values], dtype=np.int64)


def exponential_noise(keys: Tensor, vocabulary: int) -> Tensor:
    """Exp(1) noise [rows, vocabulary] for the int64 `keys` [rows]; never 0, never infinite.

    The token with the least wait/p is a sample from p: an exponential race needs no cumulative
    sum, and no token of probability 0 can win it.
    """
    low = (((keys & 0xFFFFFFFF) ^ 0x80000000) - 0x80000000).to(torch.int32)[:, None]
    high = (keys >> 32).to(torch.int32)[:, None]
    ids = torch.arange(vocabulary, dtype=torch.int32, device=keys.device)
    x = ids * to_signed(GOLDEN_32, 32) + low
    x ^= _shift_right(x, 16)
    x *= to_signed(MIX_32[0], 32)
    x ^= high
    x ^= _shift_right(x, 13)
    x *= to_signed(MIX_32[1], 32)
    x ^= _shift_right(x, 16)
    negative = _shift_right(x, 1).float().add_(0.5).mul_(-UNIT_31)
    # log1p keeps short waits exact, and short waits are the ones that win.
    return negative.log1p_().neg_()


def _shift_right(x: Tensor, bits: int) -> Tensor:
    """The int32 `x` shifted right with zeros coming in."""
    shifted = x >> bits
    shifted &= (1 << (32 - bits)) - 1
    return shifted
