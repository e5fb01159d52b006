"""What each operator is, in float64 and independent of the SDK's reference, with the magnitudes of its
tolerance. Products and experts: definitions_products and definitions_experts.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from plugins.conformance import definitions_experts, definitions_products
from plugins.conformance.definitions_expected import Attributes, Expected, Inputs
from plugins.sdk.op_spec import UNIT_ROUNDOFF


def define(name: str, inputs: Inputs, attributes: Attributes) -> tuple[Expected, ...]:
    """The outputs of an operator; of write_kv the cache; of sample see `acceptable_tokens`."""
    wide = {
        key: value.double() if value.is_floating_point() or key == "kv_cache" else value
        for key, value in inputs.items()
    }
    if "x" in inputs:
        dtype = str(inputs["x"].dtype).removeprefix("torch.")
        attributes = {**attributes, "roundoff": UNIT_ROUNDOFF[dtype]}
    return _DEFINITIONS[name](wide, attributes)


def _embedding(inputs: Inputs, _: Attributes) -> tuple[Expected, ...]:
    return (Expected(torch.stack([inputs["weight"][int(row)] for row in inputs["token_ids"]])),)


def _normalised(x: Tensor, weight: Tensor, eps: float) -> Expected:
    value = x / (x.square().mean(dim=-1, keepdim=True) + eps).sqrt() * weight
    return Expected(value, value.abs(), value.abs(), 1 + weight.abs().expand_as(value))


def _rms_norm(inputs: Inputs, attributes: Attributes) -> tuple[Expected, ...]:
    return (_normalised(inputs["x"], inputs["weight"], attributes["eps"]),)


def _add_rms_norm(inputs: Inputs, attributes: Attributes) -> tuple[Expected, ...]:
    total = inputs["x"] + inputs["residual"]
    return (
        _normalised(total, inputs["weight"], attributes["eps"]),
        Expected(total, total.abs(), torch.zeros_like(total)),
    )


def _rotary(inputs: Inputs, _: Attributes) -> tuple[Expected, ...]:
    cos, sin = _angles(inputs)
    return _rotated(inputs["query"], cos, sin), _rotated(inputs["key"], cos, sin)


def _angles(inputs: Inputs) -> tuple[Tensor, Tensor]:
    size = inputs["cos_sin"].shape[1]
    rows = inputs["cos_sin"][inputs["positions"]].unsqueeze(1)
    return rows[..., : size // 2], rows[..., size // 2 :]


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Expected:
    value = _turn(x, cos, sin)
    return Expected(value, _turn_magnitude(x.abs(), cos, sin), torch.zeros_like(value))


def _turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def _turn_magnitude(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    cos, sin = cos.abs(), sin.abs()
    return torch.cat((first * cos + second * sin, second * cos + first * sin), dim=-1)


def _qkv_rotary(inputs: Inputs, attributes: Attributes) -> tuple[Expected, ...]:
    joined = definitions_products.biased_product(inputs)
    heads, kv_heads = attributes["heads"], attributes["kv_heads"]
    cos, sin = _angles(inputs)

    def split(values: Tensor) -> tuple[Tensor, ...]:
        rows = values.view(len(values), heads + 2 * kv_heads, -1)
        return rows[:, :heads], rows[:, heads : heads + kv_heads], rows[:, heads + kv_heads :]

    parts = list(zip(split(joined.value), split(joined.rounded), split(joined.summed), strict=True))
    turned = [
        Expected(
            _turn(value, cos, sin), _turn_magnitude(rounded, cos, sin), _turn_magnitude(summed, cos, sin)
        )
        for value, rounded, summed in parts[:2]
    ]
    return (*turned, Expected(*parts[2]))


def _silu_mul(inputs: Inputs, _: Attributes) -> tuple[Expected, ...]:
    size = inputs["gate_up"].shape[-1] // 2
    gate, up = inputs["gate_up"][..., :size], inputs["gate_up"][..., size:]
    value = gate / (1 + (-gate).exp()) * up
    underflow = (1 + gate.abs()) * (1 + up.abs())  # the sigmoid may vanish before it is multiplied
    return (Expected(value, value.abs(), (1 + gate.abs()) * value.abs(), underflow),)


def _gelu_mul(inputs: Inputs, _: Attributes) -> tuple[Expected, ...]:
    size = inputs["gate_up"].shape[-1] // 2
    gate, up = inputs["gate_up"][..., :size], inputs["gate_up"][..., size:]
    # (1 + tanh z) / 2 is the logistic function of 2 z: no difference of equals here.
    argument = math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3)
    value = gate / (1 + (-2 * argument).exp()) * up
    return (Expected(value, value.abs(), (gate * up).abs(), (1 + gate.abs()) * (1 + up.abs())),)


def _write_kv(inputs: Inputs, _: Attributes) -> tuple[Expected, ...]:
    cache = inputs["kv_cache"].clone()
    page = cache.shape[2]
    for token, cell in enumerate(inputs["cells"].tolist()):
        cache[0, cell // page, cell % page] = inputs["key"][token]
        cache[1, cell // page, cell % page] = inputs["value"][token]
    return (Expected(cache),)


def nearest_cell(values: Tensor, dtype: torch.dtype) -> Tensor:
    """values as a cache of `dtype` holds them: the nearest, ties to even; of 8 bits within their range, of
    int8 without -128.
    """
    if dtype.itemsize > 1:
        return values.to(dtype)
    if dtype == torch.int8:
        return values.round().clamp(-127, 127).to(dtype)
    limit = torch.finfo(dtype).max
    return values.clamp(-limit, limit).to(dtype)


def _attention_prefill(inputs: Inputs, attributes: Attributes) -> tuple[Expected, ...]:
    query, start = inputs["query"], attributes["start"]
    return (_attended(query, inputs["kv_cache"], inputs["page_ids"], int(start), attributes),)


def _attention_decode(inputs: Inputs, attributes: Attributes) -> tuple[Expected, ...]:
    rows = [
        _attended(inputs["query"][row : row + 1], inputs["kv_cache"], table, int(length) - 1, attributes)
        for row, (table, length) in enumerate(zip(inputs["page_table"], inputs["lengths"], strict=True))
    ]
    value, rounded, summed = (
        torch.cat([getattr(row, field) for row in rows]) for field in ("value", "rounded", "summed")
    )
    return (Expected(value, rounded, summed),)


def _attended(
    query: Tensor, kv_cache: Tensor, page_ids: Tensor, start: int, attributes: Attributes
) -> Expected:
    """Softmax attention of tokens at positions start, start + 1, ... over the cells up to each; of those
    the last `window`, scores bent under `soft_cap`, where they are given and not 0.
    """
    scale, window = attributes["scale"], int(attributes.get("window", 0))
    soft_cap = attributes.get("soft_cap", 0.0)
    count, heads, _ = query.shape
    length = start + count
    page = kv_cache.shape[2]
    cells = (page_ids.unsqueeze(1) * page + torch.arange(page)).flatten()[:length]
    per_group = heads // kv_cache.shape[3]
    keys, values = (
        part[cells].repeat_interleave(per_group, dim=1).transpose(0, 1) for part in kv_cache.flatten(1, 2)
    )
    rows = query.transpose(0, 1)
    seen = torch.arange(length).unsqueeze(0) <= torch.arange(start, length).unsqueeze(1)
    if window:
        seen &= torch.arange(length).unsqueeze(0) > torch.arange(start, length).unsqueeze(1) - window
    scores = rows @ keys.transpose(1, 2) * scale
    if soft_cap:
        scores = soft_cap * (scores / soft_cap).tanh()
    scores = scores.masked_fill(~seen, float("-inf"))
    weights = (scores - scores.amax(dim=-1, keepdim=True)).exp()
    weights = weights / weights.sum(dim=-1, keepdim=True)
    magnitudes = (rows.abs() @ keys.abs().transpose(1, 2) * scale).masked_fill(~seen, 0.0)
    rounded = weights @ values.abs()
    summed = rounded * (1 + 2 * magnitudes.amax(dim=-1, keepdim=True))
    value = weights @ values
    return Expected(value.transpose(0, 1), rounded.transpose(0, 1), summed.transpose(0, 1))


def _argmax(inputs: Inputs, _: Attributes) -> tuple[Expected, ...]:
    logits = inputs["logits"]
    ids = torch.arange(logits.shape[1]).expand_as(logits)
    largest = logits == logits.amax(dim=-1, keepdim=True)
    return (Expected(torch.where(largest, ids, logits.shape[1]).amin(dim=-1)),)


_DEFINITIONS: dict[str, Callable[[Inputs, Attributes], tuple[Expected, ...]]] = {
    "embedding": _embedding,
    "linear": definitions_products.linear,
    "rms_norm": _rms_norm,
    "add_rms_norm": _add_rms_norm,
    "rotary": _rotary,
    "silu_mul": _silu_mul,
    "write_kv": _write_kv,
    "attention_prefill": _attention_prefill,
    "attention_decode": _attention_decode,
    "gelu_mul": _gelu_mul,
    "attention_prefill_bounded": _attention_prefill,
    "attention_decode_bounded": _attention_decode,
    "argmax": _argmax,
    "qkv_rotary": _qkv_rotary,
    "moe_route": definitions_experts.route,
    "moe_experts": definitions_experts.experts,
    "linear_w8a8": definitions_products.linear_w8a8,
    "linear_w4a16": definitions_products.linear_w4a16,
    "moe_experts_w8a8": definitions_experts.experts_w8a8,
    "moe_experts_w4a16": definitions_experts.experts_w4a16,
}

_SLACK = 1e-6
"""Share of probability by which a draw may differ: about the rounding of a distribution in float32."""


def acceptable_tokens(inputs: Inputs) -> list[set[int]]:
    """Tokens that `sample` may return for each row: one, or those at an edge within rounding."""
    return [_acceptable(inputs, row) for row in range(inputs["logits"].shape[0])]


def _acceptable(inputs: Inputs, row: int) -> set[int]:
    scores = inputs["logits"][row].double()
    scores = (scores - scores.max()) / inputs["temperature"][row].double()
    top_k, top_p = int(inputs["top_k"][row]), float(inputs["top_p"][row])
    min_p, uniform = float(inputs["min_p"][row]), float(inputs["uniform"][row])
    tokens: set[int] = set()
    for slack in (-_SLACK, 0.0, _SLACK):
        kept = _kept(scores, top_k, top_p + slack if top_p < 1 else 1.0, min_p * (1 + slack))
        cumulative = torch.where(kept, scores.exp(), 0.0).cumsum(dim=0)
        for draw in (uniform - _SLACK, uniform, uniform + _SLACK):
            target = min(max(draw, 0.0), 1.0) * cumulative[-1]
            found = torch.nonzero((cumulative > target) & kept)
            tokens.add(int(found[0]) if len(found) else int(torch.nonzero(kept)[-1]))
    return tokens


def _kept(scores: Tensor, top_k: int, top_p: float, min_p: float) -> Tensor:
    """Which tokens the filters leave, those that tie with the last one included."""
    kept = scores > float("-inf")
    if top_k:
        kept &= scores >= scores.sort(descending=True).values[min(top_k, len(scores)) - 1]
    if top_p < 1:
        ordered = torch.where(kept, scores, float("-inf")).sort(descending=True).values
        share = ordered.exp().cumsum(dim=0) / ordered.exp().sum()
        reached = torch.nonzero(share >= top_p)
        kept &= scores >= (ordered[int(reached[0])] if len(reached) else float("-inf"))
    return kept & (scores.exp() >= min_p)
