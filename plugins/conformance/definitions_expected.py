"""What a definition hands out: exact outputs, and the magnitudes that their tolerances are made of."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

Inputs = Mapping[str, Tensor]
Attributes = Mapping[str, Any]


@dataclass(frozen=True)
class Ranking:
    """By which an output's ids were chosen, for every candidate of a row: [rows, candidates].

    keys: candidates of equal keys are equals, and the lowest id comes first. scores: what is ranked, float64.
    doubt: how far a chip's score may lie from it, so which candidates may change places.
    """

    keys: Tensor
    scores: Tensor
    doubt: Tensor


@dataclass(frozen=True)
class Expected:
    """One output: float64, or int64 for ids; `rounded` and `summed` as plugins.sdk.op_spec.Tolerance.

    underflow: by how much an intermediate that was flushed to zero may have been multiplied.
    slack: absolute, what values that were quantised one step off change, where they lie that close to a tie.
    ranking: of ids, where near equals may change places.
    """

    value: Tensor
    rounded: Tensor | None = None
    summed: Tensor | None = None
    underflow: Tensor | None = None
    slack: Tensor | None = None
    ranking: Ranking | None = None
