"""Fused operators as their parts: the reference of each over reference parts, and what a plugin that covers
only the parts runs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

Part = Callable[..., Any]
Parts = Mapping[str, Part]
"""By role, as `OpSpec.parts` names them."""
Weights = Tensor | Sequence[Any]
"""One matrix for each expert: a tensor [experts, out, in], or a list of what a part's plugin made of them."""


def add_rms_norm(parts: Parts) -> Part:
    """A sum, then the part `norm`."""
    norm = parts["norm"]

    def run(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        total = x + residual
        return norm(total, weight, eps), total

    return run


def qkv_rotary(parts: Parts) -> Part:
    """The part `qkv` makes all heads in one product; the part `rotary` turns those of query and key."""
    product, rotary = parts["qkv"], parts["rotary"]

    def run(
        x: Tensor,
        weight: Any,
        bias: Tensor | None,
        positions: Tensor,
        cos_sin: Tensor,
        heads: int,
        kv_heads: int,
    ) -> tuple[Tensor, Tensor, Tensor]:
        rows = product(x, weight, bias).view(x.shape[0], heads + 2 * kv_heads, -1)
        query, key, value = rows[:, :heads], rows[:, heads : heads + kv_heads], rows[:, heads + kv_heads :]
        query, key = rotary(query, key, positions, cos_sin)
        return query, key, value

    return run


def moe_experts(parts: Parts) -> Part:
    """Each expert's rows through the parts `gate_up`, `silu_mul` and `down`, weighted sums in float32."""

    def run(x: Tensor, gate_up: Weights, down: Weights, weights: Tensor, expert_ids: Tensor) -> Tensor:
        def feed_forward(rows: Tensor, expert: int) -> Tensor:
            inner: Tensor = parts["silu_mul"](parts["gate_up"](rows, gate_up[expert], None))
            outer: Tensor = parts["down"](inner, down[expert], None)
            return outer

        return _mixed(x, weights, expert_ids, feed_forward)

    return run


def moe_experts_w8a8(parts: Parts) -> Part:
    """As `moe_experts`, over int8 weights with their scales."""

    def run(
        x: Tensor,
        gate_up: Weights,
        gate_up_scale: Weights,
        down: Weights,
        down_scale: Weights,
        weights: Tensor,
        expert_ids: Tensor,
    ) -> Tensor:
        def feed_forward(rows: Tensor, expert: int) -> Tensor:
            joined = parts["gate_up"](rows, gate_up[expert], gate_up_scale[expert], None)
            outer: Tensor = parts["down"](parts["silu_mul"](joined), down[expert], down_scale[expert], None)
            return outer

        return _mixed(x, weights, expert_ids, feed_forward)

    return run


def moe_experts_w4a16(parts: Parts) -> Part:
    """As `moe_experts`, over packed 4-bit weights with scales and zero points."""

    def run(
        x: Tensor,
        gate_up: Weights,
        gate_up_scale: Weights,
        gate_up_zero: Weights,
        down: Weights,
        down_scale: Weights,
        down_zero: Weights,
        weights: Tensor,
        expert_ids: Tensor,
    ) -> Tensor:
        def feed_forward(rows: Tensor, expert: int) -> Tensor:
            first = (gate_up[expert], gate_up_scale[expert], gate_up_zero[expert])
            second = (down[expert], down_scale[expert], down_zero[expert])
            inner = parts["silu_mul"](parts["gate_up"](rows, *first, None))
            outer: Tensor = parts["down"](inner, *second, None)
            return outer

        return _mixed(x, weights, expert_ids, feed_forward)

    return run


COMPOSITIONS: Mapping[str, Callable[[Parts], Part]] = {
    "add_rms_norm": add_rms_norm,
    "qkv_rotary": qkv_rotary,
    "moe_experts": moe_experts,
    "moe_experts_w8a8": moe_experts_w8a8,
    "moe_experts_w4a16": moe_experts_w4a16,
}
"""By the name of the fused operator. The result takes its operator's parameters in order."""


def _mixed(
    x: Tensor, weights: Tensor, expert_ids: Tensor, feed_forward: Callable[[Tensor, int], Tensor]
) -> Tensor:
    """The weighted sum of each token's experts, x [t, k] -> [t, k]. Experts that nobody chose do no work."""
    total = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for expert in torch.unique(expert_ids).tolist():
        tokens, places = torch.nonzero(expert_ids == expert, as_tuple=True)
        made = feed_forward(x[tokens].contiguous(), expert).float()
        total.index_add_(0, tokens, made * weights[tokens, places].unsqueeze(-1))
    return total.to(x.dtype)
