"""How large the weights of an operator are: all that a tolerance needs of them, in a number or two a row."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from plugins.sdk.reference.quantized import dequantize_w4


@dataclass(frozen=True)
class WeightSizes:
    """float64 [out] on the host, by row of the weight [out, in].

    length: square root of the sum of squares, so that |x| |W|^T <= |x|'s length times it (Cauchy-Schwarz).
    largest: largest magnitude.
    """

    length: Tensor
    largest: Tensor


def measure_weights(operator: str, weights: Mapping[str, Tensor]) -> WeightSizes | None:
    """Of an operator's weights before they are laid out; None: of one whose tolerance needs none."""
    if operator in ("linear", "qkv_rotary"):
        return _measure(weights["weight"])
    if operator == "linear_w8a8":
        return _measure(weights["weight"].float() * weights["scale"].float().unsqueeze(-1))
    if operator == "linear_w4a16":
        return _measure(dequantize_w4(weights["weight"], weights["scale"], weights["zero"]))
    return None


def _measure(weight: Tensor) -> WeightSizes:
    length = torch.linalg.vector_norm(weight, dim=-1, dtype=torch.float32)
    return WeightSizes(length.double().cpu(), weight.abs().amax(dim=-1).double().cpu())
