"""Inputs of the choice of experts and of their layers."""

from __future__ import annotations

import torch
from torch import Tensor

from plugins.conformance.cases_maker import Maker, Parts
from plugins.conformance.cases_quantized import activations, int4_weights, int8_weights

_LARGE = 20.0
"""Times a row of x: the square of what float16 holds lies behind a gate."""


def route(make: Maker) -> Parts:
    """Rows of equals, of zeros, with equals at the edge of the choice, and of one certain expert. Weights are
    normalised where the number of tokens is even.
    """
    tokens, experts, chosen = (make.sizes[symbol] for symbol in "TEA")
    logits = make.normal("router_logits", scale=2.0, edges=True)
    if tokens >= 4:
        logits[0] = -1.5
        top = logits[3].abs().max() + 1.0
        logits[3] = top * torch.linspace(-1.0, 0.0, experts).to(logits.dtype)
        logits[3, : 2 * chosen + 2 : 2] = top  # more equals than there are places
        logits[-1, [1, -2]] = logits[-1].max() + 1.0
    return {"router_logits": logits}, {"top_k": chosen, "renormalize": int(tokens % 2 == 0)}


def experts(make: Maker) -> Parts:
    """Plain weights."""
    inputs = {
        "x": activations(make, large=_LARGE),
        "gate_up": make.normal("gate_up", scale=make.sizes["K"] ** -0.5),
        "down": make.normal("down", scale=make.sizes["I"] ** -0.5),
        **_choice(make),
    }
    return inputs, {}


def experts_w8a8(make: Maker) -> Parts:
    """int8 weights."""
    inputs = {
        "x": activations(make, large=_LARGE),
        **int8_weights(make, "gate_up", "gate_up_scale", make.sizes["K"]),
        **int8_weights(make, "down", "down_scale", make.sizes["I"]),
        **_choice(make),
    }
    return inputs, {}


def experts_w4a16(make: Maker) -> Parts:
    """4-bit weights."""
    inputs = {
        "x": activations(make, large=_LARGE),
        **int4_weights(make, "gate_up", "gate_up_scale", "gate_up_zero", 2 * make.sizes["J"]),
        **int4_weights(make, "down", "down_scale", "down_zero", 2 * make.sizes["L"]),
        **_choice(make),
    }
    return inputs, {}


def _choice(make: Maker) -> dict[str, Tensor]:
    """Weights that fall and experts in any order, the middle one unused. A decode batch is of one mind; its
    weights add up to one. Others have a token of equal weights and one that counts an expert for nothing.
    """
    tokens, count, chosen = (make.sizes[symbol] for symbol in "TEA")
    used = torch.tensor([each for each in range(count) if each != count // 2])
    ids = torch.stack([used[make.permutation(len(used))[:chosen]] for _ in range(tokens)])
    weights = (0.1 + make.uniform(tokens, chosen)).sort(dim=-1, descending=True).values
    if make.class_name == "decode_batch":
        ids[:] = ids[0]
        weights = weights / weights.sum(dim=-1, keepdim=True)
    elif tokens >= 4:
        weights[0] = 1.0 / chosen
        weights[1, -1] = 0.0
    return {"weights": make.shaped("weights", weights), "expert_ids": ids}
