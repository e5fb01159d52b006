"""Inputs of an operator for one dtype and shape class: seeded, so that two runs and two chips see the same.

Values are drawn in float64 and rounded to their dtype. Beside random rows there are edges: rows of zeros,
large and tiny rows, ties, last and first cells, single tokens, cells that must not be read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from plugins.conformance import cases_experts, cases_quantized
from plugins.conformance.cases_maker import Maker, Parts
from plugins.sdk.op_spec import OpSpec, ShapeClass

_EPS = 1e-5
_ROTARY_BASE = 10000.0
_NARROW = 60000.0
"""Cells that hold no more are of 8 bits."""
_GARBAGE = 1000.0
"""In cells that no token was written to: who reads them is found out."""


@dataclass(frozen=True)
class Case:
    """One call of an operator; all tensors on the host."""

    spec: OpSpec
    shape_class: ShapeClass
    dtype: str
    kv_dtype: str
    inputs: Mapping[str, Tensor]
    attributes: Mapping[str, int | float]


def make_case(spec: OpSpec, shape_class: ShapeClass, *, dtype: str, kv_dtype: str) -> Case:
    """The inputs of one combination.

    Raises:
        KeyError: an operator of the catalogue for which this file has no inputs.
    """
    inputs, attributes = _MAKERS[spec.name](Maker(spec, shape_class, dtype, kv_dtype))
    return Case(spec, shape_class, dtype, kv_dtype, inputs, attributes)


def _embedding(make: Maker) -> Parts:
    ids = make.integers(0, make.sizes["V"], make.sizes["T"])
    ids[0] = make.sizes["V"] - 1
    ids[-1] = ids[-1] if len(ids) == 1 else 0
    return {"token_ids": ids, "weight": make.normal("weight")}, {}


def _linear(make: Maker) -> Parts:
    inputs = {
        "x": make.normal("x", edges=True),
        "weight": make.normal("weight", scale=make.sizes["K"] ** -0.5),
    }
    if make.sizes["T"] != 1:  # single rows come without a bias, all others with one
        inputs["bias"] = make.normal("bias")
    return inputs, {}


def _rms_norm(make: Maker) -> Parts:
    return {"x": make.normal("x", edges=True), "weight": make.normal("weight")}, {"eps": _EPS}


def _add_rms_norm(make: Maker) -> Parts:
    inputs = {
        "x": make.normal("x", edges=True),
        "residual": make.normal("residual"),
        "weight": make.normal("weight"),
    }
    if make.sizes["T"] >= 4:
        inputs["residual"][1] = -inputs["x"][1]
        inputs["residual"][3] = inputs["x"][3].flip(0)  # so small a sum that eps outweighs its squares
        inputs["residual"][-1] = -inputs["x"][-1]  # a sum of zero
    return inputs, {"eps": _EPS}


def _rotary(make: Maker) -> Parts:
    positions, cos_sin = _positions(make)
    inputs = {
        "query": make.normal("query", edges=True),
        "key": make.normal("key"),
        "positions": positions,
        "cos_sin": cos_sin,
    }
    return inputs, {}


def _positions(make: Maker) -> tuple[Tensor, Tensor]:
    """The first and the last one of a table among them, and the table."""
    context, size = make.sizes["C"], make.sizes["D"]
    exponents = torch.arange(0, size, 2, dtype=torch.float64) / size
    angles = torch.outer(torch.arange(context, dtype=torch.float64), _ROTARY_BASE**-exponents)
    positions = make.integers(0, context, make.sizes["T"])
    positions[-1] = context - 1
    positions[0] = 0 if len(positions) > 1 else positions[0]
    return positions, make.shaped("cos_sin", torch.cat((angles.cos(), angles.sin()), dim=1))


def _qkv_rotary(make: Maker) -> Parts:
    inputs, _ = _linear(make)
    positions, cos_sin = _positions(make)
    inputs |= {"positions": positions, "cos_sin": cos_sin}
    return inputs, {"heads": make.sizes["H"], "kv_heads": make.sizes["G"]}


def _silu_mul(make: Maker) -> Parts:
    return {"gate_up": make.normal("gate_up", scale=2.0, edges=True)}, {}


def _write_kv(make: Maker) -> Parts:
    """First and last cell of the cache among those written: a write beside them leaves the cache."""
    last = make.sizes["P"] * make.sizes["S"] - 1
    cells = make.permutation(last - 1)[: make.sizes["T"]] + 1
    cells[0] = last
    if len(cells) > 1:
        cells[1] = 0
    # Up to what cells of 8 bits hold, and beyond it.
    wide = 40.0 if make.largest_cell < _NARROW else 1.0
    inputs = {
        "key": make.normal("key", scale=wide, edges=wide > 1),
        "value": make.normal("value", scale=wide, edges=wide > 1, large=2 * _NARROW),
        "kv_cache": make.normal("kv_cache"),
        "cells": cells,
    }
    return inputs, {}


def _attention_prefill(make: Maker) -> Parts:
    sizes = make.sizes
    page_ids = make.permutation(sizes["P"])[: sizes["M"]]
    length = sizes["X"] + sizes["T"]
    cache = _cache(make, [(page_ids, length)])
    inputs = {"query": make.normal("query", edges=True), "kv_cache": cache, "page_ids": page_ids}
    return inputs, {"start": sizes["X"], "scale": sizes["D"] ** -0.5}


def _attention_decode(make: Maker) -> Parts:
    """Row 0 fills its pages, row 1 has a single token, the others something between."""
    sizes = make.sizes
    rows, pages, page = sizes["B"], sizes["M"], sizes["S"]
    lengths = make.integers(1, pages * page + 1, rows)
    lengths[0] = pages * page
    if rows > 1:
        lengths[1] = 1
    drawn = make.integers(0, sizes["P"], rows, pages)
    used = torch.arange(pages) * page < lengths.unsqueeze(1)
    page_table = torch.where(used, drawn, 0)
    tables = [
        (row[: -(-int(length) // page)], int(length)) for row, length in zip(drawn, lengths, strict=True)
    ]
    hidden = torch.arange(pages * page) >= lengths.unsqueeze(1)
    mask = torch.zeros(hidden.shape, dtype=torch.float64).masked_fill(hidden, float("-inf"))
    inputs = {
        "query": make.normal("query", edges=True),
        "kv_cache": _cache(make, tables),
        "page_table": page_table,
        "lengths": lengths,
    }
    if make.takes("mask"):
        inputs["mask"] = make.shaped("mask", mask)
    return inputs, {"scale": sizes["D"] ** -0.5}


def _bounded(plain: Parts, make: Maker, length: int) -> Parts:
    """A window of about a third, and scores under a cap that bends most; one class each without."""
    inputs, attributes = plain
    window = 0 if make.class_name == "odd" else length // 3 + 1
    soft_cap = 0.0 if "gqa8" in make.class_name else 2.0
    return inputs, {**attributes, "window": window, "soft_cap": soft_cap}


def _attention_prefill_bounded(make: Maker) -> Parts:
    return _bounded(_attention_prefill(make), make, make.sizes["X"] + make.sizes["T"])


def _attention_decode_bounded(make: Maker) -> Parts:
    return _bounded(_attention_decode(make), make, make.sizes["M"] * make.sizes["S"])


def _cache(make: Maker, sequences: list[tuple[Tensor, int]]) -> Tensor:
    """A cache whose cells outside all sequences hold large values."""
    cache = make.normal("kv_cache")
    page = make.sizes["S"]
    written = torch.zeros(make.sizes["P"] * page, dtype=torch.bool)
    for page_ids, length in sequences:
        cells = (page_ids.unsqueeze(1) * page + torch.arange(page)).flatten()[:length]
        written[cells] = True
    # By index: a mask cannot be filled in every dtype of a cache.
    cells = torch.nonzero(~written).flatten()
    garbage = torch.full((2, len(cells), *cache.shape[3:]), min(_GARBAGE, make.largest_cell))
    cache.flatten(1, 2)[:, cells] = garbage.to(cache.dtype)
    return cache


def _argmax(make: Maker) -> Parts:
    logits = make.normal("logits", scale=4.0)
    if logits.shape[0] >= 4:
        logits[1] = -1.0  # all equal
        logits[2, [3, 9]] = logits[2].max() + 1.0  # two equals
        logits[3] = -logits[3].abs() - 1.0
        logits[3, 0] = float("-inf")  # a token that is suppressed
    return {"logits": logits}, {}


def _sample(make: Maker) -> Parts:
    """Rows take turns: no filter, top-k, top-p, min-p, all three."""
    rows = make.sizes["R"]
    turn = torch.arange(rows) % 5
    logits = make.normal("logits", scale=3.0)
    if rows >= 4:
        logits[3, ::7] = float("-inf")
    uniform = make.uniform(rows)
    uniform[-1] = 0.0
    inputs = {
        "logits": logits,
        "temperature": make.shaped("temperature", 0.3 + make.uniform(rows)),
        "top_k": torch.where((turn == 1) | (turn == 4), 12, 0),
        "top_p": make.shaped("top_p", torch.where((turn == 2) | (turn == 4), 0.8, 1.0)),
        "min_p": make.shaped("min_p", torch.where((turn == 3) | (turn == 4), 0.05, 0.0)),
        "uniform": uniform,
    }
    return inputs, {}


_MAKERS: dict[str, Callable[[Maker], Parts]] = {
    "embedding": _embedding,
    "linear": _linear,
    "rms_norm": _rms_norm,
    "add_rms_norm": _add_rms_norm,
    "rotary": _rotary,
    "silu_mul": _silu_mul,
    "write_kv": _write_kv,
    "attention_prefill": _attention_prefill,
    "attention_decode": _attention_decode,
    "gelu_mul": _silu_mul,
    "attention_prefill_bounded": _attention_prefill_bounded,
    "attention_decode_bounded": _attention_decode_bounded,
    "argmax": _argmax,
    "sample": _sample,
    "qkv_rotary": _qkv_rotary,
    "moe_route": cases_experts.route,
    "moe_experts": cases_experts.experts,
    "linear_w8a8": cases_quantized.linear_w8a8,
    "linear_w4a16": cases_quantized.linear_w4a16,
    "moe_experts_w8a8": cases_experts.experts_w8a8,
    "moe_experts_w4a16": cases_experts.experts_w4a16,
}
