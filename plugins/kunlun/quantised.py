"""Products with int8 weights through kunlun_ops, whose scales are maxima: a value is q * max / 127."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

LEVELS = 127
PRODUCTS = ("gemm_I8_I8_bf16_nt", "matmul")
"""Kernels to try, the likeliest first: vLLM-Kunlun uses the one, sglang-kunlun the other; a trial decides."""
_SCALES = frozenset(
    {("linear_w8a8", "scale"), ("moe_experts_w8a8", "gate_up_scale"), ("moe_experts_w8a8", "down_scale")}
)


def is_scale(operator: str, parameter: str) -> bool:
    """Whether a weight is a scale that the kernels want as a maximum."""
    return (operator, parameter) in _SCALES


def to_maxima(scale: Tensor) -> Tensor:
    """float32 [..., out] -> [..., out, 1]: what 127 stands for, one number a row of weights."""
    return (scale.float() * LEVELS).unsqueeze(-1).contiguous()


def quantise_rows(ops: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    """kunlun_ops.quant2d of x [t, k]: int8 [t, k] and maxima float32 [t, 1]."""
    x = x.contiguous()
    values = torch.empty_like(x, dtype=torch.int8)
    maxima = torch.empty((x.shape[0], 1), dtype=torch.float32, device=x.device)
    ops.quant2d(x, values, maxima, force_sdnn=True)
    return values, maxima


def multiply(ops: Any, kernel: str, x: Tensor, weight: Tensor, maxima: Tensor, bias: Tensor | None) -> Tensor:
    """x bfloat16 [t, in], quantised by row, times int8 weight [out, in], maxima [out, 1], plus bias [out].

    gemm_I8_I8_bf16_nt takes no bias: it is added to the rounded product, in float32.
    """
    values, largest = quantise_rows(ops, x)
    out = x.new_empty((x.shape[0], weight.shape[0]))
    if kernel == "matmul":
        ops.matmul(
            values,
            weight,
            out,
            bias=None if bias is None else bias.to(x.dtype),
            x_pc_max=largest.view(-1),
            w_pc_max=maxima.view(-1),
        )
        return out
    ops.gemm_I8_I8_bf16_nt((values, largest), (weight, maxima), out)
    return out if bias is None else (out.float() + bias.float()).to(x.dtype)
