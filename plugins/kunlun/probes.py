"""Start-up trials: open points of the runtime are found out, and each operator compared with the reference.

An operator that differs in any dtype, or changes an input that is not its own, is declined: the framework
runs its reference instead, and the report, the log and the loaded model's decisions say why.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from meshkit.telemetry.logging import get_logger
from plugins.kunlun.decode import find_decode_variants
from plugins.kunlun.memory import TORCH_DTYPES
from plugins.kunlun.operators import DTYPES, KV_LAYOUT, PAGE_SIZES, Findings, KunlunOperators
from plugins.kunlun.quantised import PRODUCTS
from plugins.kunlun.runtime import Runtime
from plugins.sdk.catalogue import CATALOGUE
from plugins.sdk.declined import declined_at_start
from plugins.sdk.memory import MemoryManager
from plugins.sdk.operators import REFERENCE

log = get_logger(__name__)

_ROUNDINGS = 16
"""Results may lie this many unit roundoffs of the largest value apart: sums in another order stay far below,
a wrong scale, length, slot or layout lies far above.
"""
_LEAST_ROUNDOFF = 2.0**-20
"""In float32 sums of hundreds of terms matter more than the rounding of the result."""
_DEVICE = 0
_HEADS, _GROUPS, _SIZE = 6, 2, 64
_PAGE = PAGE_SIZES[0]
_PAGES = 6
_INT8_WIDTH = 272
"""More than two blocks of 128: a build whose int8 kernels want one maximum a block is told apart."""

Inputs = dict[str, Any]


@dataclass(frozen=True)
class _Case:
    """One comparison. make: inputs on the host for a dtype. writes: the input that is the result."""

    operator: str
    make: Callable[[torch.dtype], Inputs]
    writes: str = ""


def start_operators(memory: MemoryManager, runtime: Runtime) -> KunlunOperators:
    """The operators of a runtime, settled and compared."""
    with torch.inference_mode():
        runtime.synchronize(_DEVICE)
        findings = _settle(memory, runtime)
        trial = KunlunOperators(memory, runtime, findings)
        differences = {name: _difference(trial, name, memory, runtime) for name in _operators()}
    declined = {name: declined_at_start(reason) for name, reason in differences.items() if reason}
    for name, reason in declined.items():
        log.warning("operator is denied: it failed its comparison at load", operator=name, reason=reason)
    return KunlunOperators(memory, runtime, findings, declined=declined)


def _settle(memory: MemoryManager, runtime: Runtime) -> Findings:
    """Open points by trial, in the likeliest order; where nothing agrees, the first choice is compared again
    with all others, and declined.
    """

    def agrees(name: str, findings: Findings) -> bool:
        return not _difference(KunlunOperators(memory, runtime, findings), name, memory, runtime)

    causal = [choice for choice in (True, False) if agrees("attention_prefill", Findings(choice, None))]
    variants = find_decode_variants(runtime.ops)
    decodes = [variant for variant in variants if agrees("attention_decode", Findings(True, variant))]
    products = [product for product in PRODUCTS if agrees("linear_w8a8", Findings(True, None, product))]
    return Findings(
        prefix_is_causal=causal[0] if causal else True,
        decode=next(iter(decodes or variants), None),
        int8_product=(products or PRODUCTS)[0],
    )


def _difference(operators: KunlunOperators, name: str, memory: MemoryManager, runtime: Runtime) -> str:
    """How an operator differs from the reference; "" where it does not."""
    for case in _CASES:
        if case.operator != name:
            continue
        for dtype in operators.dtypes.get(name, DTYPES):
            try:
                problem = _compare(operators, case, TORCH_DTYPES[dtype], memory, runtime)
            except Exception as error:  # noqa: BLE001 - whatever a kernel raises is a reason to decline it
                problem = f"{type(error).__name__}: {error}"
            if problem:
                return f"compared with the reference at load in {dtype}: {problem}"
    return ""


def _compare(
    operators: KunlunOperators, case: _Case, dtype: torch.dtype, memory: MemoryManager, runtime: Runtime
) -> str:
    inputs = case.make(dtype)
    wanted = _results(REFERENCE[case.operator](**(expected := _copied(inputs))), expected, case)
    given = {name: _on_device(value, runtime) for name, value in _copied(inputs).items()}
    weights = {
        name: memory.relayout_weight(given[name], operator=case.operator, parameter=name)
        for name in CATALOGUE[case.operator].weights
    }
    got = _results(getattr(operators, case.operator)(**{**given, **weights}), given, case)
    runtime.synchronize(_DEVICE)
    changed = [name for name, value in given.items() if name != case.writes and _changed(value, inputs[name])]
    if changed:
        return f"it changed its input {changed[0]}"
    for part, other in zip(got, wanted, strict=True):
        if problem := _distance(part.cpu(), other):
            return problem
    return ""


def _distance(got: Tensor, wanted: Tensor) -> str:
    if got.shape != wanted.shape or got.dtype != wanted.dtype:
        return f"the result is {got.dtype} {list(got.shape)}, not {wanted.dtype} {list(wanted.shape)}"
    if not wanted.is_floating_point():
        return "" if torch.equal(got, wanted) else "results differ"
    roundoff = max(torch.finfo(wanted.dtype).eps / 2, _LEAST_ROUNDOFF)
    limit = _ROUNDINGS * roundoff * float(wanted.float().abs().max())
    error = float((got.float() - wanted.float()).abs().max())
    # Written so that NaN is a difference.
    return "" if error <= limit else f"off by {error:.3g}, limit {limit:.3g}"


def _results(outcome: Any, inputs: Inputs, case: _Case) -> Sequence[Tensor]:
    if case.writes:
        return (inputs[case.writes],)
    return outcome if isinstance(outcome, tuple) else (outcome,)


def _copied(inputs: Mapping[str, Any]) -> Inputs:
    return {name: value.clone() if isinstance(value, Tensor) else value for name, value in inputs.items()}


def _on_device(value: Any, runtime: Runtime) -> Any:
    return value.to(runtime.torch_device(_DEVICE)) if isinstance(value, Tensor) else value


def _changed(value: Any, before: Any) -> bool:
    return isinstance(value, Tensor) and not torch.equal(value.cpu(), before)


def _random(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def _cache(dtype: torch.dtype) -> Tensor:
    shape = KV_LAYOUT.memory_shape((2, _PAGES, _PAGE, _GROUPS, _SIZE))
    cache: Tensor = KV_LAYOUT.as_cache(_random(3, *shape).to(dtype))
    return cache


def _linear(dtype: torch.dtype) -> Inputs:
    return {
        "x": _random(1, 5, 96).to(dtype),
        "weight": (_random(2, 40, 96) / 10).to(dtype),
        "bias": _random(4, 40).to(dtype),
    }


def _embedding(dtype: torch.dtype) -> Inputs:
    return {"token_ids": torch.tensor([6, 0, 6, 3]), "weight": _random(1, 7, 32).to(dtype)}


def _rms_norm(dtype: torch.dtype) -> Inputs:
    return {"x": _random(1, 5, 96).to(dtype), "weight": (1 + _random(2, 96) / 4).to(dtype), "eps": 1e-5}


def _add_rms_norm(dtype: torch.dtype) -> Inputs:
    return {**_rms_norm(dtype), "residual": _random(5, 5, 96).to(dtype)}


def _rotary(dtype: torch.dtype) -> Inputs:
    angles = torch.outer(torch.arange(12.0), 10000.0 ** -(torch.arange(0, _SIZE, 2) / _SIZE))
    heads = _random(1, 5, _HEADS + _GROUPS, _SIZE).to(dtype)
    return {
        "query": heads[:, :_HEADS],
        "key": heads[:, _HEADS:],
        "positions": torch.tensor([3, 0, 11, 1, 9]),
        "cos_sin": torch.cat((angles.cos(), angles.sin()), dim=1),
    }


def _silu_mul(dtype: torch.dtype) -> Inputs:
    return {"gate_up": (2 * _random(1, 5, 96)).to(dtype)}


def _write_kv(dtype: torch.dtype) -> Inputs:
    """Rows that cross pages, among cells that nobody may touch."""
    return {
        "key": _random(1, 6, _GROUPS, _SIZE).to(dtype),
        "value": _random(2, 6, _GROUPS, _SIZE).to(dtype),
        "kv_cache": _cache(dtype),
        "cells": torch.tensor([_PAGE - 1, 4 * _PAGE, 4 * _PAGE + 1, 2, 2 * _PAGE - 1, 3 * _PAGE + 5]),
    }


def _prefill(start: int, count: int) -> Callable[[torch.dtype], Inputs]:
    def make(dtype: torch.dtype) -> Inputs:
        return {
            "query": _random(1, count, _HEADS, _SIZE).to(dtype),
            "kv_cache": _cache(dtype),
            "page_ids": torch.tensor([4, 0, 5])[: (start + count - 1) // _PAGE + 1],
            "start": start,
            "scale": 0.75 * _SIZE**-0.5,
        }

    return make


def _decode(dtype: torch.dtype) -> Inputs:
    lengths = torch.tensor([1, _PAGE, 2 * _PAGE + 7])
    hidden = torch.arange(3 * _PAGE) >= lengths.unsqueeze(1)
    return {
        "query": _random(1, 3, _HEADS, _SIZE).to(dtype),
        "kv_cache": _cache(dtype),
        "page_table": torch.tensor([[2, 0, 0], [1, 0, 0], [5, 3, 4]]),
        "lengths": lengths,
        "mask": torch.zeros(hidden.shape, dtype=dtype).masked_fill(hidden, float("-inf")),
        "scale": 0.75 * _SIZE**-0.5,
    }


def _moe_route(rows: int, experts: int, top_k: int, renormalize: int) -> Callable[[torch.dtype], Inputs]:
    """Whole numbers, among which equals are common: the lowest id has to come first."""

    def make(dtype: torch.dtype) -> Inputs:
        logits = (1.5 * _random(1, rows, experts)).round()
        return {"router_logits": logits.to(dtype), "top_k": top_k, "renormalize": renormalize}

    return make


def _choices(rows: int, experts: int, top_k: int) -> Inputs:
    """Different experts for each token, in no order; the last one is nobody's."""
    ids = _random(6, rows, experts - 1).argsort(dim=1)[:, :top_k].contiguous()
    return {"weights": _random(7, rows, top_k).softmax(dim=1), "expert_ids": ids}


def _all_to_one(rows: int, expert: int) -> Inputs:
    return {"weights": torch.full((rows, 1), 0.75), "expert_ids": torch.full((rows, 1), expert)}


def _moe_experts(experts: int, choices: Inputs) -> Callable[[torch.dtype], Inputs]:
    def make(dtype: torch.dtype) -> Inputs:
        return {
            "x": _random(1, choices["expert_ids"].shape[0], 96).to(dtype),
            "gate_up": (_random(2, experts, 80, 96) / 10).to(dtype),
            "down": (_random(3, experts, 96, 40) / 6).to(dtype),
            **choices,
        }

    return make


def _int8_weight(seed: int, *shape: int) -> tuple[Tensor, Tensor]:
    """Random int8 [..., out, in] and scales [..., out], no two alike, for products of about 1."""
    values = (40 * _random(seed, *shape)).round().clamp(-127, 127).to(torch.int8)
    scales = (1 + _random(seed + 10, *shape[:-1]).abs()) / (60 * shape[-1] ** 0.5)
    return values, scales


def _linear_w8a8(rows: int, *, biased: bool) -> Callable[[torch.dtype], Inputs]:
    """Rows of different magnitude; of several the last one is zeros."""

    def make(dtype: torch.dtype) -> Inputs:
        weight, scale = _int8_weight(2, 48, _INT8_WIDTH)
        x = _random(1, rows, _INT8_WIDTH) * torch.arange(1, rows + 1).unsqueeze(1)
        if rows > 1:
            x[-1] = 0
        inputs: Inputs = {"x": x.to(dtype), "weight": weight, "scale": scale}
        return {**inputs, "bias": _random(4, 48).to(dtype)} if biased else inputs

    return make


def _moe_experts_w8a8(experts: int, choices: Inputs) -> Callable[[torch.dtype], Inputs]:
    def make(dtype: torch.dtype) -> Inputs:
        gate_up, gate_up_scale = _int8_weight(2, experts, 96, _INT8_WIDTH)
        down, down_scale = _int8_weight(3, experts, _INT8_WIDTH, 48)
        return {
            "x": _random(1, choices["expert_ids"].shape[0], _INT8_WIDTH).to(dtype),
            "gate_up": gate_up,
            "gate_up_scale": gate_up_scale,
            "down": down,
            "down_scale": down_scale,
            **choices,
        }

    return make


def _argmax(dtype: torch.dtype) -> Inputs:
    """The lowest among equals wins."""
    del dtype
    return {"logits": torch.tensor([[0.0, 2.0, -1.0, 2.0], [-3.0, -4.0, -3.5, -3.0]])}


_CASES = (
    _Case("embedding", _embedding),
    _Case("linear", _linear),
    _Case("rms_norm", _rms_norm),
    _Case("add_rms_norm", _add_rms_norm),
    _Case("rotary", _rotary),
    _Case("silu_mul", _silu_mul),
    _Case("write_kv", _write_kv, writes="kv_cache"),
    _Case("attention_prefill", _prefill(0, 7)),
    _Case("attention_prefill", _prefill(0, _PAGE)),
    _Case("attention_prefill", _prefill(_PAGE + 5, 20)),
    _Case("attention_decode", _decode),
    _Case("argmax", _argmax),
    _Case("moe_route", _moe_route(5, 13, 4, renormalize=1)),
    _Case("moe_route", _moe_route(1, 60, 4, renormalize=1)),
    _Case("moe_route", _moe_route(5, 13, 4, renormalize=0)),
    _Case("linear_w8a8", _linear_w8a8(5, biased=True)),
    _Case("linear_w8a8", _linear_w8a8(1, biased=False)),
    *(
        _Case(operator, make(experts, choices))
        for operator, make in (("moe_experts", _moe_experts), ("moe_experts_w8a8", _moe_experts_w8a8))
        for experts, choices in ((7, _choices(29, 7, 3)), (13, _choices(1, 13, 4)), (5, _all_to_one(9, 3)))
    ),
)


def _operators() -> list[str]:
    return list(dict.fromkeys(case.operator for case in _CASES))
