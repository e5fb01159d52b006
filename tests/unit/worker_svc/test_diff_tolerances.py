"""Tolerances of `chipmesh diff` over the catalogue: honest roundings are within, wrong results are not."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from plugins.conformance.cases import Case, make_case
from plugins.cpu.memory import CpuMemory
from plugins.cpu.operators import CpuOperators
from plugins.sdk.catalogue import CATALOGUE, COMPUTE, KV, LARGEST, ShapeClass
from plugins.sdk.kv_layout import KvLayout
from plugins.sdk.operator_table import BoundOperator, OperatorBinder
from plugins.sdk.operators import OperatorSet
from plugins.sdk.planning import CallSite
from worker_svc.diff.calls import Form, OperatorCall, RecordingOperators, RepeatedCall, RepeatingOperators
from worker_svc.diff.comparison import CallDifference, compare_call
from worker_svc.diff.tolerances import Precision

WRONG = {"float32": 2e-3, "bfloat16": 0.25, "float16": 0.05}
"""Of the value: an error that has to be found, by dtype."""
WRONG_INT8_EXPERTS = 0.5
"""The same where a rounding between two products may be one of 127 steps."""
CASES = [
    (spec.name, shape_class, dtype)
    for spec in CATALOGUE.values()
    for shape_class in spec.shape_classes
    for dtype in spec.dtypes
    if spec.follows_compute_dtype
    and (shape_class is spec.shape_classes[0] or shape_class.name in ("odd", "prefill"))
]


def repeat(case: Case) -> RepeatedCall:
    """The host in the case's dtype on the left, the reference in float32 on the right."""
    memory = CpuMemory()
    calls: deque[OperatorCall] = deque()
    found: list[RepeatedCall] = []
    left = RecordingOperators(_table(CpuOperators(memory), case, case.dtype), calls)
    form = Form(torch.float32, torch.device("cpu"), KvLayout())
    right = RepeatingOperators(_table(OperatorSet(memory), case, "float32"), form, calls, found.append)
    _run(left, case, dict(case.inputs))
    _run(right, case, {name: _widened(case, name, value) for name, value in case.inputs.items()})
    (repeated,) = found
    return repeated


def judge(repeated: RepeatedCall, dtype: str) -> CallDifference:
    """dtype: of the left."""
    precisions = (Precision(dtype, "float32"), Precision("float32", "float32"))
    return compare_call(repeated, "a step", precisions, first_is_left=True)


def spoil(repeated: RepeatedCall, change: Callable[[Tensor], Tensor]) -> RepeatedCall:
    """The same call with other results on the right; tokens and ids stay."""
    outputs = [change(each) if each.is_floating_point() else each for each in repeated.outputs]
    return replace(repeated, outputs=outputs)


def _sizes(case: Case) -> dict[str, int]:
    return {
        symbol: size
        for symbol, size in case.shape_class.sizes.items()
        if symbol in case.spec.fixed_symbols - {"S"}
    }


def _table(operators: OperatorSet, case: Case, dtype: str) -> OperatorBinder:
    return operators.choose([CallSite(case.spec.name, "layers.0", _sizes(case))], dtype=dtype)


def _run(operators: OperatorBinder, case: Case, inputs: Mapping[str, Tensor]) -> None:
    bound: BoundOperator = operators.bind(case.spec.name, "layers.0", **_sizes(case))
    given: list[Any] = []
    for tensor in case.spec.inputs:
        value = inputs.get(tensor.name)
        placed = tensor.name in case.spec.weights and value is not None
        given.append(bound.place(tensor.name, value) if placed and value is not None else value)
    bound.call(*given, *case.attributes.values())


def _widened(case: Case, name: str, value: Tensor) -> Tensor:
    kind = next(each.dtype for each in case.spec.inputs if each.name == name)
    return value.float() if kind in (COMPUTE, KV) else value.clone()


def _make(name: str, shape_class: ShapeClass, dtype: str) -> Case:
    return make_case(CATALOGUE[name], shape_class, dtype=dtype, kv_dtype=dtype)


@pytest.mark.parametrize(("name", "shape_class", "dtype"), CASES)
def test_an_honest_chip_is_within_and_a_wrong_factor_is_not(
    name: str, shape_class: ShapeClass, dtype: str
) -> None:
    repeated = repeat(_make(name, shape_class, dtype))
    honest = judge(repeated, dtype)
    if honest.non_finite[0]:
        # Of a result that the dtype cannot hold; that it is infinite is told as well.
        assert abs(honest.worst.right) > LARGEST[dtype]
        return
    assert honest.ratio <= 1.0, honest
    assert honest.over == 0
    factor = WRONG_INT8_EXPERTS if name == "moe_experts_w8a8" else WRONG[dtype]
    wrong = judge(spoil(repeated, lambda values: values * (1 + factor)), dtype)
    assert wrong.diverges, wrong
    assert wrong.nature.slope == pytest.approx(factor, rel=0.3)


def test_one_element_that_is_not_a_number_diverges_without_end() -> None:
    case = _make("silu_mul", CATALOGUE["silu_mul"].shape_classes[0], "float32")

    def break_one(values: Tensor) -> Tensor:
        broken = values.clone()
        broken[0, 7] = torch.nan
        return broken

    found = judge(spoil(repeat(case), break_one), "float32")
    assert (found.ratio, found.over, found.non_finite) == (float("inf"), 1, (0, 1))
    assert tuple(found.worst.index) == (0, 7)
