"""What kind of difference lies between two results of the same thing: without direction, or with one."""

from __future__ import annotations

import enum
from dataclasses import dataclass

import torch
from torch import Tensor

from plugins.sdk.op_spec import UNIT_ROUNDOFF

LEAST_DIRECTION = 0.1
"""Share of a difference, in [0, 1], that has to go one way to be called systematic."""
_BY_CHANCE = 4.0
"""... and by how many standard errors: a small sample shows some direction by chance."""
_SHORTEST = "bfloat16"
_FEW_ROUNDINGS = 2.0
"""Of a size, in unit roundoffs: what some roundings of one value make together."""
_OF_SUMS = 0.5
"""The same for the root of the terms of a sum: partial sums are smaller than their end."""


class Kind(enum.Enum):
    """NONE: there is no difference. RANDOM: as roundings make it. SYSTEMATIC: a wrong factor, sign, index,
    bias, or a size that no rounding has.
    """

    NONE = "none"
    RANDOM = "random"
    SYSTEMATIC = "systematic"


@dataclass(frozen=True)
class Nature:
    """One difference in numbers. Rows count alike: each is measured by the root mean square of its values.

    size: root mean square of the difference. slope: difference per value, by regression through the origin.
    along: mean of the difference in the direction of the value (away from 0: positive), in `size`, so in
    [-1, 1]; along_errors: the same in its standard errors. bias, bias_errors: of the mean of the difference
    likewise, but `bias` in units of the values. reason: why it is of its kind, for people.
    """

    kind: Kind
    reason: str
    count: int = 0
    size: float = 0.0
    slope: float = 0.0
    along: float = 0.0
    along_errors: float = 0.0
    bias: float = 0.0
    bias_errors: float = 0.0


def describe_difference(difference: Tensor, value: Tensor, *, terms: int = 1) -> Nature:
    """Say of what kind a difference of `value` [..., n] is; both finite, float64. terms: of the longest sum
    behind each value.

    Rounding the n partial sums of a value makes an error of about 0.3 * sqrt(n) * u * |value| without
    direction, u of the shortest dtype at most. What goes with the value, has a mean, or is larger is no
    rounding. Direction is asked of the value's sign rather than the value: models have single values a
    thousand times as large as all others, whose one rounding a regression would take for a rule.
    """
    scale = value.square().mean(dim=-1, keepdim=True).sqrt()
    # Rows of zeros have no size to measure by: a difference there is taken as it is.
    scale = torch.where(scale > 0, scale, 1.0)
    wrong, right = (difference / scale).flatten(), (value / scale).flatten()
    count = wrong.numel()
    size = float(wrong.square().mean().sqrt()) if count else 0.0
    if size == 0.0:
        return Nature(Kind.NONE, "equal", count=count)
    energy = float(right.square().mean())
    slope = float((wrong * right).mean()) / energy if energy else 0.0
    along = float((wrong * right.sign()).mean()) / size
    bias = float(wrong.mean())
    kind, reason = _judge(size, along, bias / size, count=count, terms=terms)
    # Standard errors of a mean where there is no direction: size / sqrt(count).
    errors = count**0.5
    return Nature(kind, reason, count, size, slope, along, along * errors, bias, bias / size * errors)


def _judge(size: float, along: float, bias: float, *, count: int, terms: int) -> tuple[Kind, str]:
    least = max(LEAST_DIRECTION, _BY_CHANCE / count**0.5)
    if abs(along) >= least and abs(along) >= abs(bias):
        return Kind.SYSTEMATIC, "it goes with the value: a wrong factor, sign or index"
    if abs(bias) >= least:
        return Kind.SYSTEMATIC, "it has a bias: its mean is not 0"
    if size > UNIT_ROUNDOFF[_SHORTEST] * (_FEW_ROUNDINGS + _OF_SUMS * max(terms, 1) ** 0.5):
        return Kind.SYSTEMATIC, f"it is larger than roundings to {_SHORTEST} make it"
    return Kind.RANDOM, "it has no direction, as roundings"
