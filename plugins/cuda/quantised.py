"""Products with int8 and 4-bit weights, and experts mixed without atomic sums. Any torch device."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

LEVELS = 127
"""Largest magnitude of a symmetric int8 value."""
INT8_WEIGHTS = frozenset(
    {("linear_w8a8", "weight"), ("moe_experts_w8a8", "gate_up"), ("moe_experts_w8a8", "down")}
)
"""(operator, parameter) of matrices that `pad_int8_weight` prepares."""
_MULTIPLE = 8
_LEAST_ROWS = 32
"""cuBLAS takes more than 16 rows of int8, and columns by eights."""


def pad_int8_weight(weight: Tensor) -> Tensor:
    """int8 [..., N, K] with N and K grown to multiples of 8 by zeros."""
    rows, columns = weight.shape[-2:]
    padded = functional.pad(weight, (0, -columns % _MULTIPLE, 0, -rows % _MULTIPLE))
    return padded.contiguous()


def linear_w8a8(x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:
    """x [t, k] times int8 weight (as `pad_int8_weight` made it) -> [t, n] in x's dtype; scale float32 [n].

    Sums are int32; the rest is float32, rounded once.
    """
    values, step = _quantise_rows(x, weight.shape[-1])
    sums = torch._int_mm(values, weight.T)[: x.shape[0], : scale.shape[0]]
    product = sums.float() * step.unsqueeze(-1) * scale.float()
    if bias is not None:
        product = product + bias.float()
    return product.to(x.dtype)


def _quantise_rows(x: Tensor, columns: int) -> tuple[Tensor, Tensor]:
    """int8 [at least 32 rows, columns], padded by zeros, and the float32 step of each row of x."""
    wide = x.float()
    # Divided by a tensor: by a number, CUDA multiplies with the reciprocal, which rounds once more.
    step = wide.abs().amax(dim=-1) / torch.full((), float(LEVELS), device=x.device)
    divisor = torch.where(step > 0, step, 1.0).unsqueeze(-1)
    values = (wide / divisor).round().clamp(-LEVELS, LEVELS).to(torch.int8)
    missing_rows = max(_LEAST_ROWS - x.shape[0], 0)
    return functional.pad(values, (0, columns - x.shape[1], 0, missing_rows)), step


def dequantise_w4(weight: Tensor, scale: Tensor, zero: Tensor, dtype: torch.dtype) -> Tensor:
    """Packed uint8 [n, k / 2], the low half of a byte first -> [n, k]: (value - zero) * scale by groups of
    columns, in float32, rounded once to `dtype`. scale float32 [n, groups], zero uint8 [n, groups].
    """
    rows, groups = scale.shape
    values = torch.stack((weight & 15, weight >> 4), dim=-1).view(rows, groups, -1)
    wide = (values.float() - zero.float().unsqueeze(-1)) * scale.float().unsqueeze(-1)
    return wide.view(rows, -1).to(dtype)


def mix_experts(
    x: Tensor,
    weights: Tensor,
    expert_ids: Tensor,
    experts: int,
    feed_forward: Callable[[Tensor, int], Tensor],
) -> Tensor:
    """The weighted sum of each token's experts: x [t, k], weights float32 [t, a], expert_ids int64 [t, a] ->
    [t, k] in x's dtype.

    feed_forward(rows [n, k], expert) -> [n, k]. Rows are sorted by expert, so that each runs once; the host
    waits for the device once. Sums run over a in order, in float32: atomic ones would change from call to
    call.
    """
    tokens, chosen = expert_ids.shape
    order = torch.argsort(expert_ids.flatten(), stable=True)
    counts = torch.bincount(expert_ids.flatten(), minlength=experts).tolist()
    rows = x[order // chosen]
    made = torch.empty_like(rows)
    first = 0
    for expert, count in enumerate(counts):
        if count:
            made[first : first + count] = feed_forward(rows[first : first + count], expert)
            first += count
    by_token = torch.empty_like(made)
    by_token[order] = made
    shares = by_token.view(tokens, chosen, -1).float() * weights.unsqueeze(-1)
    return shares.sum(dim=1).to(x.dtype)
