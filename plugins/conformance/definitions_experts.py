"""Choice of experts and their gated feed-forward layers, in float64."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from plugins.conformance.definitions_expected import Attributes, Expected, Inputs, Ranking
from plugins.conformance.definitions_products import (
    Uncertain,
    certain,
    multiply,
    multiply_int8,
    spread,
    unpack,
)
from plugins.sdk.op_spec import SMALLEST_NORMAL, UNIT_ROUNDOFF

Product = Callable[[Uncertain, int], Uncertain]
"""Rows of tokens through one matrix of an expert."""


def route(inputs: Inputs, attributes: Attributes) -> tuple[Expected, ...]:
    """The most probable experts of each token, and their shares."""
    logits, count = inputs["router_logits"], attributes["top_k"]
    below = logits - logits.amax(dim=-1, keepdim=True)
    probabilities = below.exp() / below.exp().sum(dim=-1, keepdim=True)
    ids = _descending(logits)[:, :count]
    chosen = probabilities.gather(-1, ids)
    weights = chosen / chosen.sum(dim=-1, keepdim=True) if attributes["renormalize"] else chosen
    largest = logits.abs().amax(dim=-1, keepdim=True)
    # A score is off by a few roundings and by those of its logit; equals within twice that may change places.
    relative = 4 * logits.shape[-1] ** 0.5 * UNIT_ROUNDOFF["float32"] * (1 + largest)
    ranking = Ranking(logits, probabilities, relative * probabilities + SMALLEST_NORMAL["float32"])
    return (
        Expected(weights, rounded=weights, summed=weights * (1 + largest)),
        Expected(ids, ranking=ranking),
    )


def _descending(logits: Tensor) -> Tensor:
    """Ids by falling logit, then by rising id."""
    rows = [sorted((-logit, each) for each, logit in enumerate(row)) for row in logits.tolist()]
    return torch.tensor([[each for _, each in row] for row in rows], dtype=torch.int64)


def experts(inputs: Inputs, _: Attributes) -> tuple[Expected, ...]:
    """Over plain weights."""

    def through(parameter: str) -> Product:
        return lambda x, expert: multiply(x, inputs[parameter][expert])

    return (_mix(inputs, through("gate_up"), through("down"), inputs["down"].abs().sum(dim=-1)),)


def experts_w8a8(inputs: Inputs, attributes: Attributes) -> tuple[Expected, ...]:
    """Over int8 weights; the activations between the two products are quantised again."""
    roundoff = attributes["roundoff"]

    def through(parameter: str) -> Product:
        weight, scale = inputs[parameter], inputs[f"{parameter}_scale"]
        return lambda x, expert: multiply_int8(x, weight[expert], scale[expert], roundoff)

    down = inputs["down"].double().abs().sum(dim=-1) * inputs["down_scale"]
    return (_mix(inputs, through("gate_up"), through("down"), down),)


def experts_w4a16(inputs: Inputs, _: Attributes) -> tuple[Expected, ...]:
    """Over 4-bit weights."""

    def unpacked(parameter: str) -> Tensor:
        parts = (inputs[parameter], inputs[f"{parameter}_scale"], inputs[f"{parameter}_zero"])
        return torch.stack([unpack(*expert) for expert in zip(*parts, strict=True)])

    gate_up, down = unpacked("gate_up"), unpacked("down")
    return (
        _mix(
            inputs,
            lambda x, expert: multiply(x, gate_up[expert], rounded_weight=True),
            lambda x, expert: multiply(x, down[expert], rounded_weight=True),
            down.abs().sum(dim=-1),
        ),
    )


def _mix(inputs: Inputs, gate_up: Product, down: Product, reach: Tensor) -> Expected:
    """Expert by expert. reach: [experts, k], by how much an inner value that was flushed to zero counts."""
    total = torch.zeros(6, *inputs["x"].shape, dtype=torch.float64)
    for expert in torch.unique(inputs["expert_ids"]).tolist():
        tokens, places = torch.nonzero(inputs["expert_ids"] == expert, as_tuple=True)
        weight = inputs["weights"][tokens, places].unsqueeze(-1)
        joined = gate_up(certain(inputs["x"][tokens]), expert).stored()
        made = down(_gate(joined), expert)
        flushed = (1 + joined.value.abs().amax(dim=-1, keepdim=True)) * (1 + reach[expert])
        size = made.value.abs()
        parts = (made.value, size, weight * made.rounded.square(), made.summed + size, made.slack, flushed)
        total.index_add_(1, tokens, weight * torch.stack(parts))
    value, stored, squares, summed, slack, underflow = total
    return Expected(
        value,
        # Each expert's output may be rounded, and their sum is.
        rounded=(value.abs() + stored) / 2 + spread(squares.sqrt()),
        summed=summed,
        underflow=1 + underflow,
        slack=slack,
    )


def _gate(joined: Uncertain) -> Uncertain:
    """silu(gate) * up, gate first; it may be rounded before and after the product."""
    size = joined.value.shape[-1] // 2
    gate, up = joined.value[..., :size], joined.value[..., size:]
    share = 1 / (1 + (-gate).exp())
    value = gate * share * up
    slope = share * (1 + gate * (1 - share))

    through_gate, through_up = (slope * up).abs(), (gate * share).abs()

    def carried(error: Tensor) -> tuple[Tensor, Tensor]:
        return through_gate * error[..., :size], through_up * error[..., size:]

    by_gate, by_up = carried(joined.rounded)
    return Uncertain(
        value,
        rounded=(by_gate.square() + by_up.square() + 2 * value.square()).sqrt(),
        summed=sum(carried(joined.summed), (1 + gate.abs()) * value.abs()),
        slack=sum(carried(joined.slack), torch.zeros_like(value)),
    )
