"""The differences of two sides in numbers: of each operator call, and of each stage of the model."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from plugins.sdk.catalogue import CATALOGUE
from plugins.sdk.differences import Kind, Nature, describe_difference
from worker_svc.diff.calls import RepeatedCall
from worker_svc.diff.tolerances import Precision, allowed_differences, terms_of


@dataclass(frozen=True)
class Element:
    """The place of a difference and what is there."""

    index: Sequence[int]
    left: float
    right: float
    allowed: float


@dataclass(frozen=True)
class CallDifference:
    """One call's output that differs most, right - left. step: of the run, for people.

    ratio: the largest difference in tolerances; infinite where one has to be equal and is not, or is finite
    on one side only. over: elements out of tolerance. largest, rms: of the difference. relative: rms in that
    of the values. non_finite: elements that are not finite, left and right.
    """

    operator: str
    where: str
    step: str
    output: str
    elements: int
    over: int
    ratio: float
    largest: float
    rms: float
    relative: float
    non_finite: tuple[int, int]
    worst: Element
    nature: Nature

    @property
    def diverges(self) -> bool:
        """Whether it is out of tolerance."""
        return self.ratio > 1.0

    @property
    def layer(self) -> str:
        """The stage of the model that it is in."""
        return layer_of(self.where)


@dataclass
class Statistics:
    """Of the values of one side at one stage. largest: magnitude. non_finite: share of all, in [0, 1]."""

    count: int = 0
    finite: int = 0
    total: float = 0.0
    squares: float = 0.0
    largest: float = 0.0

    def add(self, values: Tensor) -> None:
        """values: float64."""
        kept = values[torch.isfinite(values)]
        self.count += values.numel()
        self.finite += kept.numel()
        if kept.numel():
            self.total += float(kept.sum())
            self.squares += float(kept.square().sum())
            self.largest = max(self.largest, float(kept.abs().max()))

    @property
    def mean(self) -> float:
        """Of the finite values."""
        return self.total / self.finite if self.finite else 0.0

    @property
    def rms(self) -> float:
        """Root mean square of the finite values."""
        return math.sqrt(self.squares / self.finite) if self.finite else 0.0

    @property
    def deviation(self) -> float:
        """Standard deviation of the finite values."""
        return math.sqrt(max(self.rms**2 - self.mean**2, 0.0))

    @property
    def non_finite(self) -> float:
        """Share of all values."""
        return 1 - self.finite / self.count if self.count else 0.0


@dataclass
class StageDifference:
    """One stage of the model over all steps, each side on its own inputs: errors accumulate.

    difference: right - left, where both are finite. rows, shares: rows, and the sum over them of the mean
    square of the difference in that of the values: a row counts alike however large its values are.
    """

    name: str
    left: Statistics = field(default_factory=Statistics)
    right: Statistics = field(default_factory=Statistics)
    difference: Statistics = field(default_factory=Statistics)
    rows: int = 0
    shares: float = 0.0

    def add(self, left: Tensor, right: Tensor) -> None:
        """One step's values, on the host."""
        wide, other = left.double(), right.double()
        self.left.add(wide)
        self.right.add(other)
        self.difference.add(other - wide)
        both = torch.isfinite(wide) & torch.isfinite(other)
        wrong = torch.where(both, other - wide, 0.0).square().mean(dim=-1)
        right = torch.where(both, wide, 0.0).square().mean(dim=-1)
        shares = torch.where(wrong > 0, wrong / right, 0.0)
        self.rows += shares.numel()
        self.shares += float(shares.sum())

    @property
    def largest_relative(self) -> float:
        """Largest difference in the largest value."""
        return _ratio(self.difference.largest, self.left.largest or self.right.largest)

    @property
    def rms_relative(self) -> float:
        """Root mean square of the difference in that of the values, over rows."""
        return math.sqrt(self.shares / self.rows) if self.rows else 0.0


def compare_call(
    repeated: RepeatedCall, step: str, precisions: Sequence[Precision], *, first_is_left: bool
) -> CallDifference:
    """The output of a call that differs most. precisions: of both sides. first_is_left: the recorded side is
    the left one.
    """
    pairs = [
        (one.double(), other.double())
        for one, other in zip(repeated.call.outputs, repeated.outputs, strict=True)
    ]
    values = [torch.where(torch.isfinite(one), one, 0.0) for one, _ in pairs]
    allowed = allowed_differences(repeated, values, precisions)
    found = [
        _compare_output(repeated, index, step, pair if first_is_left else pair[::-1], allowed[index])
        for index, pair in enumerate(pairs)
    ]
    return max(found, key=lambda each: each.ratio)


def layer_of(where: str) -> str:
    """The stage that a place belongs to: embedding, layers.N or head."""
    numbered = re.search(r"layers\.\d+", where)
    if numbered:
        return numbered.group()
    return "embedding" if "embed" in where else "head"


def _compare_output(
    repeated: RepeatedCall, index: int, step: str, pair: tuple[Tensor, Tensor], allowed: Tensor
) -> CallDifference:
    left, right = pair
    both = torch.isfinite(left) & torch.isfinite(right)
    difference = torch.where(both, right - left, 0.0)
    value = torch.where(both, left, 0.0)
    ratio = _ratios(left, right, difference, allowed)
    worst = int(ratio.flatten().argmax()) if ratio.numel() else 0
    rms = _rms(difference)
    return CallDifference(
        operator=repeated.call.name,
        where=repeated.call.where,
        step=step,
        output=_output_name(repeated.call.name, index),
        elements=left.numel(),
        over=int((ratio > 1).sum()),
        ratio=float(ratio.max()),
        largest=float(difference.abs().max()),
        rms=rms,
        relative=_ratio(rms, _rms(value)),
        non_finite=(int((~torch.isfinite(left)).sum()), int((~torch.isfinite(right)).sum())),
        worst=Element(
            _unravel(worst, left.shape),
            float(left.flatten()[worst]),
            float(right.flatten()[worst]),
            float(allowed.flatten()[worst]),
        ),
        nature=_nature(difference, value, both, terms_of(repeated, index)),
    )


def _ratios(left: Tensor, right: Tensor, difference: Tensor, allowed: Tensor) -> Tensor:
    """|difference| in tolerances. Infinite where one side alone is finite, or two infinities differ."""
    size = difference.abs()
    ratio = torch.where(size > 0, size / allowed, 0.0)
    same = (left == right) | (torch.isnan(left) & torch.isnan(right))
    odd = ~(torch.isfinite(left) & torch.isfinite(right)) & ~same
    return ratio.masked_fill(odd, math.inf)


def _nature(difference: Tensor, value: Tensor, both: Tensor, terms: int) -> Nature:
    if not bool(both.all()):
        return Nature(Kind.SYSTEMATIC, "values that are not finite", count=difference.numel())
    return describe_difference(difference, value, terms=terms)


def _output_name(name: str, index: int) -> str:
    spec = CATALOGUE[name]
    return spec.outputs[index].name if spec.outputs else spec.writes[index]


def _unravel(place: int, shape: Sequence[int]) -> tuple[int, ...]:
    index: list[int] = []
    for size in reversed(shape):
        index.append(place % size)
        place //= size
    return tuple(reversed(index))


def _rms(values: Tensor) -> float:
    return float(values.square().mean().sqrt())


def _ratio(part: float, whole: float) -> float:
    if not part:
        return 0.0
    return part / whole if whole else math.inf
