"""Products over plain and quantised weights in float64, each with how far an honest chip may lie from it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from plugins.conformance.definitions_expected import Attributes, Expected, Inputs
from plugins.sdk.op_spec import UNIT_ROUNDOFF

_LEVELS = 127
_NEAR = 1e-4
"""Of a step: how far x / step may be off in float32, divided or multiplied by a reciprocal (127 * 4 * u)."""
_SUMS = 16 * UNIT_ROUNDOFF["float32"]
_SLACK_DEVIATIONS = 3.0
_FLIP_DEVIATIONS = 1.5
"""As above, where one in nine is off: what is near a tie within 3.7 deviations of its error."""
_SPREAD = 1.5
"""Twice this, in roundings, times the root of summed squares: five deviations of rounding to nearest, whose
own is u / sqrt(3) at most.
"""


@dataclass(frozen=True)
class Uncertain:
    """float64 values and how far a chip's may lie from them.

    rounded: in unit roundoffs of the compute dtype, by errors that are independent of each other.
    summed: in errors of accumulation. slack: absolute, by values that were quantised one step off.
    """

    value: Tensor
    rounded: Tensor
    summed: Tensor
    slack: Tensor

    def stored(self) -> Uncertain:
        """Rounded once more, to the compute dtype."""
        return Uncertain(self.value, self.rounded + self.value.abs(), self.summed, self.slack)


def certain(x: Tensor) -> Uncertain:
    """An input: it is what it is."""
    nothing = torch.zeros_like(x)
    return Uncertain(x, nothing, nothing, nothing)


def multiply(x: Uncertain, weight: Tensor, *, rounded_weight: bool = False) -> Uncertain:
    """x [t, k] times weight [n, k] transposed. rounded_weight: a chip may hold it in the compute dtype."""
    own = x.value.square() if rounded_weight else torch.zeros_like(x.value)
    return Uncertain(
        value=x.value @ weight.T,
        rounded=_through(x.rounded.square() + own, weight.square()).sqrt(),
        summed=(x.value.abs() + x.summed) @ weight.abs().T,
        slack=_jointly(x.slack, weight, deviations=_SLACK_DEVIATIONS),
    )


def multiply_int8(x: Uncertain, weight: Tensor, scale: Tensor, roundoff: float) -> Uncertain:
    """x [t, k], quantised by row, times int8 weight [n, k] transposed, scaled by output [n]. Sums are exact.

    roundoff: of the compute dtype, in which x may be off.
    """
    wide = weight.double() * scale.unsqueeze(-1)
    quantised, at_ties, by_rounding = _quantise(x, roundoff)
    value = quantised @ wide.T
    carried = _jointly(x.slack, wide, deviations=_SLACK_DEVIATIONS)
    return Uncertain(
        value=value,
        rounded=_through(x.rounded.square(), wide.square()).sqrt(),
        summed=_through(x.summed, wide.abs()) + value.abs(),
        slack=carried
        + _through(at_ties, wide.abs())
        + _jointly(by_rounding, wide, deviations=_FLIP_DEVIATIONS),
    )


def _jointly(errors: Tensor, weight: Tensor, *, deviations: float) -> Tensor:
    """Absolute errors [t, k] through weight [n, k]: their sum, or where many of them would all have to have
    one sign for that, the largest one and some deviations of all.
    """
    largest = errors.amax(dim=-1, keepdim=True) * weight.abs().amax(dim=-1)
    many = largest + deviations * _through(errors.square(), weight.square()).sqrt()
    return torch.minimum(_through(errors, weight.abs()), many)


def _through(errors: Tensor, weight: Tensor) -> Tensor:
    """The product of what is zero most often, which then costs nothing."""
    return errors @ weight.T if bool(errors.any()) else torch.zeros(len(errors), len(weight)).double()


def _quantise(x: Uncertain, roundoff: float) -> tuple[Tensor, Tensor, Tensor]:
    """Values of each row after symmetric int8; then their step where they may be one off, else 0: at ties,
    and where roundings of the compute dtype take them there.
    """
    largest, position = x.value.abs().max(dim=-1, keepdim=True)
    step = (largest.float() / _LEVELS).double()
    divisor = torch.where(step > 0, step, 1.0)
    levels = x.value / divisor

    def near(doubt: Tensor) -> Tensor:
        """doubt: of a value; the step follows the largest one, and all others move by their share of that."""
        moved = doubt / divisor
        moved = moved + levels.abs() / _LEVELS * moved.gather(-1, position)
        return (levels - levels.floor() - 0.5).abs() <= _NEAR + moved

    at_ties = near(_SUMS * x.summed)
    by_rounding = near(roundoff * spread(x.rounded) + _SUMS * x.summed + x.slack) & ~at_ties
    values = levels.round().clamp(-_LEVELS, _LEVELS) * step
    return values, torch.where(at_ties, step, 0.0), torch.where(by_rounding, step, 0.0)


def unpack(weight: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
    """4-bit values [n, j], two a byte and the even column in the low half -> float64 [n, 2j]."""
    values = torch.empty(weight.shape[0], 2 * weight.shape[1], dtype=torch.float64)
    values[:, 0::2] = (weight % 16).double()
    values[:, 1::2] = (weight // 16).double()
    grouped = values.view(weight.shape[0], scale.shape[1], -1)
    return ((grouped - zero.double().unsqueeze(-1)) * scale.unsqueeze(-1)).flatten(1)


def linear(inputs: Inputs, _: Attributes) -> tuple[Expected, ...]:
    """x W^T + bias."""
    return (_expected(biased_product(inputs)),)


def biased_product(inputs: Inputs) -> Uncertain:
    """x W^T + bias."""
    return _with_bias(multiply(certain(inputs["x"]), inputs["weight"]), inputs)


def linear_w8a8(inputs: Inputs, _: Attributes) -> tuple[Expected, ...]:
    """The same over int8 weights; x is exact, so its dtype's roundoff plays no part."""
    product = multiply_int8(certain(inputs["x"]), inputs["weight"], inputs["scale"], 0.0)
    return (_expected(_with_bias(product, inputs)),)


def linear_w4a16(inputs: Inputs, _: Attributes) -> tuple[Expected, ...]:
    """The same over 4-bit weights."""
    weight = unpack(inputs["weight"], inputs["scale"], inputs["zero"])
    product = multiply(certain(inputs["x"]), weight, rounded_weight=True)
    return (_expected(_with_bias(product, inputs)),)


def _with_bias(product: Uncertain, inputs: Inputs) -> Uncertain:
    """The sum, which may be rounded before and after its bias is added."""
    bias = inputs.get("bias", torch.zeros(product.value.shape[-1], dtype=torch.float64))
    value = product.value + bias
    rounded = torch.maximum(value.abs(), product.value.abs()) + spread(product.rounded)
    return Uncertain(value, rounded, product.summed + bias.abs(), product.slack)


def _expected(made: Uncertain) -> Expected:
    return Expected(made.value, rounded=made.rounded, summed=made.summed, slack=made.slack)


def spread(roots: Tensor) -> Tensor:
    """As much of many independent errors as two roundings have to allow; roots: of their summed squares."""
    return _SPREAD * roots
