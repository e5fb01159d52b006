"""The arithmetic of `quantization=a8` in numpy: what the kernel's int8 products must give, bit for bit."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from plugins.sdk.runner import FloatArray
from plugins.sdk.step_program import StoredMatrix

BLOCK = 32
SMALLEST = np.float32(2.0**-120)
Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Rounded:
    """values [rows, blocks, 32] in [-127, 127]; scales float32 [rows, blocks]."""

    values: Ints
    scales: FloatArray


def round_rows(x: FloatArray) -> Rounded:
    """Each 32 values of a row by their largest magnitude / 127, halves to even."""
    blocks = x.reshape(len(x), -1, BLOCK)
    with np.errstate(all="ignore"):
        largest = np.abs(blocks).max(axis=-1)
        finite = np.isfinite(blocks).all(axis=-1)
        rounds = finite & (largest >= SMALLEST)
        factor = np.where(rounds, np.float32(127.0) / largest, np.float32(0.0)).astype(np.float32)
        scales = np.where(rounds, largest / np.float32(127.0), np.where(finite, np.float32(0.0), np.nan))
        values = np.rint(blocks * factor[..., None])
    values = np.where(rounds[..., None], values, 0.0)
    return Rounded(values.astype(np.int64), scales.astype(np.float32))


def stored_blocks(matrix: StoredMatrix) -> tuple[Ints, FloatArray, FloatArray | None]:
    """Whole numbers [outputs, blocks, 32]; scales and, where there are any, minima [outputs, blocks]."""
    blocks = np.ascontiguousarray(matrix.rows).reshape(len(matrix.rows), matrix.inner // BLOCK, -1)
    halves = np.ascontiguousarray(blocks[..., :4]).view(np.float16).astype(np.float32)
    if matrix.encoding == "Q8_0":
        return np.ascontiguousarray(blocks[..., 2:]).view(np.int8).astype(np.int64), halves[..., 0], None
    packed = blocks[..., 4 if matrix.encoding == "Q4_1" else 2 :].astype(np.int64)
    nibbles = np.concatenate((packed & 15, packed >> 4), axis=-1)
    if matrix.encoding == "Q4_1":
        return nibbles, halves[..., 0], halves[..., 1]
    return nibbles - 8, halves[..., 0], None


def multiply(x: FloatArray, matrix: StoredMatrix) -> FloatArray:
    """float32 [rows, outputs], one block after the other."""
    rounded = round_rows(x)
    values, scales, minima = stored_blocks(matrix)
    sums = np.zeros((len(x), len(values)), dtype=np.float32)
    with np.errstate(all="ignore"):
        for block in range(values.shape[1]):
            products = (rounded.values[:, block] @ values[:, block].T).astype(np.float32)
            row_scale = rounded.scales[:, block, None]
            sums = fused(scales[:, block] * row_scale, products, sums)
            if minima is not None:
                scaled = row_scale * rounded.values[:, block].sum(axis=-1).astype(np.float32)[:, None]
                sums = fused(minima[:, block], scaled, sums)
    return sums


def fused(a: Any, b: Any, c: Any) -> FloatArray:
    """a * b + c of float32, rounded once.

    The product is exact in float64; its sum with c is rounded to odd there, so that rounding to float32 is
    right.
    """
    product, addend = np.broadcast_arrays(np.float64(a) * np.float64(b), np.float64(c))
    total = product + addend
    back = total - product
    error = (product - (total - back)) + (addend - back)
    bits = total.view(np.int64)
    inexact = np.isfinite(total) & (error != 0) & (bits & 1 == 0)
    # Towards the error: away from zero where it has the sum's sign.
    away = (error > 0) == (total > 0)
    odd = np.where(inexact, np.where(away, bits + 1, bits - 1), bits)
    made: FloatArray = odd.view(np.float64).astype(np.float32)
    return made
