"""What a plugin does not cover runs on the reference, and everybody can see it; strict refuses."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from meshkit.errors import FailedPrecondition, InvalidArgument, NotFound
from plugins.sdk.capabilities import Coverage
from plugins.sdk.host import HostMemory
from plugins.sdk.operators import REFERENCE, OperatorSet
from plugins.sdk.reference import operators as reference


class _Memory(HostMemory):
    def relayout_weight(self, weight: Any, *, operator: str) -> Any:
        return ("packed", weight)


class Partial(OperatorSet):
    """Covers linear and, for bfloat16 only, silu_mul."""

    constraints: ClassVar[dict[str, tuple[str, ...]]] = {"silu_mul": ("bfloat16",)}

    def linear(self, x: Tensor, weight: Any, bias: Tensor | None = None) -> Tensor:
        assert weight[0] == "packed"
        matrix: Tensor = weight[1]
        return x @ matrix.T

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        return reference.silu_mul(gate_up)


def test_decisions_name_each_operator_with_its_reason() -> None:
    table = Partial(_Memory()).choose("float32", strict=False)
    decisions = {decision.name: decision for decision in table.decisions}
    assert decisions.keys() == REFERENCE.keys()
    assert decisions["linear"].choice == "native"
    assert decisions["rms_norm"].choice == "reference"
    assert decisions["rms_norm"].reason == "the plugin does not cover it"
    assert decisions["silu_mul"].choice == "reference"
    assert decisions["silu_mul"].reason == "the plugin covers bfloat16, not float32"
    assert table.rms_norm is reference.rms_norm
    by_dtype = {
        item.name: item.choice for item in Partial(_Memory()).choose("bfloat16", strict=False).decisions
    }
    assert by_dtype["silu_mul"] == "native"


def test_strict_refuses_and_names_the_operators() -> None:
    with pytest.raises(FailedPrecondition, match=r"rms_norm \(the plugin does not cover it\)") as caught:
        Partial(_Memory()).choose("float32", strict=True)
    assert caught.value.field == "strict"
    assert "linear" not in caught.value.message


def test_a_weight_is_packed_for_a_native_operator_only() -> None:
    weight = torch.ones(2, 3)
    assert Partial(_Memory()).choose("float32", strict=False).relayout(weight, "linear") == ("packed", weight)
    declined = Partial(_Memory(), declined={"linear": "the library is missing"})
    table = declined.choose("float32", strict=False)
    assert table.relayout(weight, "linear") is weight
    assert table.linear(torch.ones(1, 3), weight, None).tolist() == [[3.0, 3.0]]
    assert next(item for item in table.decisions if item.name == "linear").reason == "the library is missing"


def test_declining_an_operator_that_does_not_exist_is_a_mistake() -> None:
    with pytest.raises(ValueError, match="softmax"):
        Partial(_Memory(), declined={"softmax": "?"})


def test_coverage_is_reported_and_run_follows_it() -> None:
    operators = Partial(_Memory())
    coverage = {item.name: item.coverage for item in operators.capabilities()}
    assert coverage["linear"] is Coverage.NATIVE
    assert coverage["attention_decode"] is Coverage.REFERENCE
    inputs = {"x": torch.ones(1, 3), "weight": torch.ones(2, 3)}
    for use_reference in (False, True):
        assert operators.run("linear", inputs, {}, use_reference=use_reference)[0].tolist() == [[3.0, 3.0]]


def test_run_refuses_unknown_operators_and_inputs_that_do_not_fit() -> None:
    operators = Partial(_Memory())
    with pytest.raises(NotFound, match="rms_norm"):
        operators.run("softmax", {}, {})
    with pytest.raises(InvalidArgument, match="rms_norm"):
        operators.run("rms_norm", {"x": torch.ones(1, 3)}, {})
    with pytest.raises(InvalidArgument, match="linear"):
        operators.run("linear", {"x": torch.ones(1, 3), "weight": torch.ones(2, 4)}, {})


def test_run_returns_the_cache_that_write_kv_wrote() -> None:
    inputs = {
        "key": torch.ones(1, 1, 2),
        "value": torch.full((1, 1, 2), 2.0),
        "kv_cache": torch.zeros(2, 2, 2, 1, 2),
        "cells": torch.tensor([3]),
    }
    (cache,) = OperatorSet(_Memory()).run("write_kv", inputs, {})
    assert cache[0, 1, 1].tolist() == [[1.0, 1.0]]
    assert cache[1, 1, 1].tolist() == [[2.0, 2.0]]
    assert cache.sum() == 6.0
