"""Inputs of products over quantised weights.

The first row of x has one sign, and so have some rows of the weights: their sums do not cancel, so that a
factor that is one percent off shows even where results are rounded to bfloat16.
"""

from __future__ import annotations

import torch
from torch import Tensor

from plugins.conformance.cases_maker import Maker, Parts

_LEVELS = 127
_INT8_DEVIATION = 73.0
"""Of uniform values from -127 to 127."""
_NIBBLE_DEVIATION = 6.5
"""Of the difference of two uniform values from 0 to 15."""


def linear_w8a8(make: Maker) -> Parts:
    """x with edges; weights with both extremes."""
    inputs = {"x": activations(make), **int8_weights(make, "weight", "scale", make.sizes["K"])}
    return _with_bias(make, inputs), {}


def linear_w4a16(make: Maker) -> Parts:
    """x with edges; groups with all zero points, the extremes among them."""
    inputs = {"x": activations(make), **int4_weights(make, "weight", "scale", "zero", 2 * make.sizes["J"])}
    return _with_bias(make, inputs), {}


def activations(make: Maker, **edges: float) -> Tensor:
    """x of a product: rows of zeros, a large and a tiny one, and a first one of one sign."""
    x = make.normal("x", edges=True, **edges)
    x[0] = x[0].abs()
    return x


def int8_weights(make: Maker, weight: str, scale: str, inner: int) -> dict[str, Tensor]:
    """int8 [..., n, inner], whose first outputs are all 127 and all -127, and positive scales [..., n] that
    differ by a factor of three.
    """
    values = make.integers(-_LEVELS, _LEVELS + 1, *make.shape(weight))
    values[..., 0, :], values[..., 1, :] = _LEVELS, -_LEVELS
    scales = (0.5 + make.uniform(*make.shape(scale))) * inner**-0.5 / _INT8_DEVIATION
    return {weight: make.shaped(weight, values), scale: make.shaped(scale, scales)}


def int4_weights(make: Maker, weight: str, scale: str, zero: str, inner: int) -> dict[str, Tensor]:
    """Bytes [..., n, inner / 2] and, by group of columns, scales and zero points [..., n, groups]; the first
    outputs have zero points of 0 and of 15, so that all their weights have one sign.
    """
    zeros = make.integers(0, 16, *make.shape(zero))
    zeros[..., 0, :], zeros[..., 1, :] = 0, 15
    scales = (0.5 + make.uniform(*make.shape(scale))) * inner**-0.5 / _NIBBLE_DEVIATION
    # Of eight bits: files have them in a dtype of two bytes, and so may a chip.
    scales = scales.to(torch.bfloat16)
    return {
        weight: make.integers(0, 256, *make.shape(weight)).to(torch.uint8),
        scale: make.shaped(scale, scales),
        zero: make.shaped(zero, zeros),
    }


def _with_bias(make: Maker, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """Single rows come without a bias, all others with one."""
    if make.sizes["T"] != 1:
        inputs["bias"] = make.normal("bias")
    return inputs
