# mypy: ignore-errors
"""Products of a few rows and a large matrix in Triton: the time they take is that of reading it.

Laws: the parts of a product sum to it in float32; `linear_gelu` is gelu_tanh of it, rounded once. A
program takes a few columns and a piece of the inner side, and has asked for its piece of the matrix
before it waits for the rows. Left out: many rows, where cuBLAS is at home, and float32.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.compiler.compiler import max_shared_mem

from rookworld.model.inference import Dense
from rookworld.model.kernels.triton_launch import await_previous, begin, early

MOST_ROWS = 64
"""One tile of a program; all that was measured. With more, cuBLAS does it."""
COLUMNS, PIECE, WARPS = 32, 512, 4
PROGRAMS = 64
"""Pieces are halved until there are so many: half of a large GPU's multiprocessors."""
LEAST_PIECE = 64
WIDE_COLUMNS, WIDE_PIECE, WIDE_WARPS = 32, 256, 4


def suits(x: Tensor) -> bool:
    """Whether products of `x` are taken in parts here."""
    if len(x) > MOST_ROWS or x.dtype is torch.float32:
        return False
    return _tile(len(x)) * PIECE + PIECE * COLUMNS <= _room(x)


def suits_linear_gelu(x: Tensor) -> bool:
    """Whether `linear_gelu` takes `x`: a program holds all it needs of the matrix at once."""
    held = triton.cdiv(x.shape[1], WIDE_PIECE) * WIDE_PIECE * WIDE_COLUMNS
    return suits(x) and _tile(len(x)) * WIDE_PIECE + held <= _room(x)


def _tile(rows: int) -> int:
    return max(16, triton.next_power_of_2(rows))


def _room(x: Tensor) -> int:
    """How many elements like those of `x` a program may hold in shared memory."""
    if x.device.type != "cuda":
        return 1 << 30
    # The limit that a launch is held to, on every make of GPU.
    return max_shared_mem(x.device.index) // x.element_size()


def linear_parts(dense: Dense, x: Tensor) -> Tensor:
    """fp32 parts [parts, rows, width] whose sum is the product; the bias is left to the reader.

    cuBLAS also cuts such a product, and then needs a kernel of its own to sum it up.
    """
    (rows, inner), width = x.shape, len(dense.weight)
    across, piece = triton.cdiv(width, COLUMNS), PIECE
    while piece > LEAST_PIECE and across * triton.cdiv(inner, piece) < PROGRAMS:
        piece //= 2
    count = triton.cdiv(inner, piece)
    parts = torch.empty(count, rows, width, dtype=torch.float32, device=x.device)
    _part_kernel[(across, count)](
        x, dense.weight, parts, rows, inner, width, ROWS=_tile(rows), COLUMNS=COLUMNS, PIECE=piece,
        num_warps=WARPS, **early(x.device),
    )  # fmt: skip
    return parts


def linear_gelu(dense: Dense, x: Tensor) -> Tensor:
    """gelu_tanh(x @ weight.T + bias) [rows, width], in one kernel and of the dtype of `x`."""
    (rows, inner), width = x.shape, len(dense.weight)
    out = torch.empty(rows, width, dtype=x.dtype, device=x.device)
    _widen_kernel[(triton.cdiv(width, WIDE_COLUMNS),)](
        x, dense.weight, dense.bias, out, rows, inner, width,
        PIECES=triton.cdiv(inner, WIDE_PIECE), ROWS=_tile(rows), COLUMNS=WIDE_COLUMNS,
        PIECE=WIDE_PIECE, num_warps=WIDE_WARPS, **early(x.device),
    )  # fmt: skip
    return out


@triton.jit
def _matrix(w, column, k, inner, width):
    """A piece of the matrix, turned: [inner, columns]."""
    inside = (column[None, :] < width) & (k[:, None] < inner)
    return tl.load(w + column[None, :] * inner + k[:, None], mask=inside, other=0.0)


@triton.jit
def _rows(x, row, k, rows, inner):
    inside = (row[:, None] < rows) & (k[None, :] < inner)
    return tl.load(x + row[:, None] * inner + k[None, :], mask=inside, other=0.0)


@triton.jit
def _part_kernel(
    x, w, parts, rows, inner, width,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, PIECE: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """One part: x [rows, inner] @ w [width, inner].T over one piece of the inner side."""
    begin(EARLY)
    part = tl.program_id(1)
    row, column = tl.arange(0, ROWS), tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    k = part * PIECE + tl.arange(0, PIECE)
    matrix = _matrix(w, column, k, inner, width)
    await_previous(EARLY)
    total = tl.dot(_rows(x, row, k, rows, inner), matrix)
    tl.store(
        parts + part * rows * width + row[:, None] * width + column[None, :],
        total,
        mask=(row[:, None] < rows) & (column[None, :] < width),
    )


@triton.jit
def _widen_kernel(
    x, w, bias, out, rows, inner, width,
    PIECES: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, PIECE: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """gelu_tanh needs the whole sum, so nobody shares a column."""
    begin(EARLY)
    row, column = tl.arange(0, ROWS), tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    k = tl.arange(0, PIECE)
    matrix = ()
    for piece in tl.static_range(PIECES):
        # The compiler of kernels knows no unpacking.
        matrix = matrix + (_matrix(w, column, piece * PIECE + k, inner, width),)  # noqa: RUF005
    total = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    total += tl.load(bias + column, mask=column < width, other=0.0).to(tl.float32)[None, :]
    await_previous(EARLY)
    for piece in tl.static_range(PIECES):
        total = tl.dot(_rows(x, row, piece * PIECE + k, rows, inner), matrix[piece], total)
    tl.store(
        out + row[:, None] * width + column[None, :],
        _gelu_tanh(total).to(out.dtype.element_ty),
        mask=(row[:, None] < rows) & (column[None, :] < width),
    )


@triton.jit
def _gelu_tanh(z):
    """z * sigmoid(2 y) is 0.5 * z * (1 + tanh(y))."""
    y = 0.7978845608028654 * (z + 0.044715 * z * z * z)
    return z / (1.0 + tl.exp(-2.0 * y))
