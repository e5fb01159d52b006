"""Reference operators over quantised weights. Which layers hold such weights, and their scales, is the
framework's policy; a plugin brings the product.
"""

from __future__ import annotations

import torch
from torch import Tensor

LEVELS = 127
"""Largest magnitude of a symmetric int8 value: -128 is left out, so that negation is exact."""


def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Symmetric int8 by row: x [t, k] -> (int8 [t, k], float32 step [t]); x is about their product.

    The step is the row's largest magnitude / 127; halves round to even; a row of zeros has step 0.
    """
    wide = x.float()
    step = wide.abs().amax(dim=-1) / LEVELS
    divisor = torch.where(step > 0, step, 1.0).unsqueeze(-1)
    return (wide / divisor).round().clamp(-LEVELS, LEVELS).to(torch.int8), step


def linear_w8a8(x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [t, in], quantised by row, times int8 weight [out, in] transposed -> [t, out] in x's dtype.

    Sums are int32; each is multiplied by its row's step and its output's scale (float32 [out]) before bias
    [out] is added.
    """
    values, step = quantize_rows(x)
    # float64 holds every int32 sum, and its product is fast on any chip that has no integer one.
    sums = (values.double() @ weight.double().T).float()
    product = sums * step.unsqueeze(-1) * scale.float()
    if bias is not None:
        product = product + bias.float()
    return product.to(x.dtype)


def unpack_nibbles(packed: Tensor) -> Tensor:
    """uint8 [..., n] -> uint8 [..., 2n] in [0, 15]: the low half of a byte is the even column."""
    return torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2)


def dequantize_w4(weight: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
    """Packed uint8 [out, in / 2] -> float32 [out, in]: (value - zero) * scale, by groups of columns.

    scale: float32 [out, groups]. zero: uint8 [out, groups].
    """
    values = unpack_nibbles(weight).float()
    group = values.shape[-1] // scale.shape[-1]
    wide_scale = scale.float().repeat_interleave(group, dim=-1)
    return (values - zero.float().repeat_interleave(group, dim=-1)) * wide_scale


def linear_w4a16(
    x: Tensor, weight: Tensor, scale: Tensor, zero: Tensor, bias: Tensor | None = None
) -> Tensor:
    """x [t, in] times `dequantize_w4(weight, scale, zero)` transposed, plus bias -> [t, out] in x's dtype."""
    product = x.float() @ dequantize_w4(weight, scale, zero).T
    if bias is not None:
        product = product + bias.float()
    return product.to(x.dtype)
