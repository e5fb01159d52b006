"""Round to nearest: a matrix of floats as one of integers."""

from __future__ import annotations

import torch
from torch import Tensor

from plugins.sdk.reference.quantized import quantize_rows
from worker_svc.weights.quantized import StoredQuantized

_LEVELS_4BIT = 15


def round_to(kind: str, weight: Tensor, group: int) -> StoredQuantized:
    """weight [out, in] as "w8a8" or "w4a16". group: columns that share a scale; w8a8 has one for all."""
    return _w8a8(weight) if kind == "w8a8" else _w4a16(weight, group)


def _w8a8(weight: Tensor) -> StoredQuantized:
    values, scale = quantize_rows(weight)
    return StoredQuantized("w8a8", values, scale, None, weight.shape[1])


def _w4a16(weight: Tensor, group: int) -> StoredQuantized:
    """The range of each group, zero included, over 16 levels."""
    rows, columns = weight.shape
    grouped = weight.float().view(rows, columns // group, group)
    low, high = grouped.amin(dim=-1).clamp(max=0.0), grouped.amax(dim=-1).clamp(min=0.0)
    scale = (high - low) / _LEVELS_4BIT
    scale = torch.where(scale > 0, scale, 1.0)
    zero = (-low / scale).round()
    levels = (grouped / scale.unsqueeze(-1) + zero.unsqueeze(-1)).round().clamp(0, _LEVELS_4BIT)
    codes = levels.to(torch.uint8).view(rows, columns)
    return StoredQuantized("w4a16", codes, scale, zero.to(torch.uint8), group)
