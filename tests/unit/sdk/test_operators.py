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
from plugins.sdk.planning import CallSite
from plugins.sdk.reference import operators as reference
from plugins.sdk.runner import OperatorDecision


class _Memory(HostMemory):
    def relayout_weight(self, weight: Any, *, operator: str, parameter: str = "weight") -> Any:
        return ("packed", weight)


class Partial(OperatorSet):
    """Covers linear, experts in multiples of four and, for bfloat16 only, silu_mul."""

    dtypes: ClassVar[dict[str, tuple[str, ...]]] = {"silu_mul": ("bfloat16",)}
    constraints: ClassVar[dict[str, tuple[str, ...]]] = {"moe_experts": ("E % 4 == 0",)}

    def linear(self, x: Tensor, weight: Any, bias: Tensor | None = None) -> Tensor:
        assert weight[0] == "packed"
        matrix: Tensor = weight[1]
        return x @ matrix.T

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        return reference.silu_mul(gate_up)

    def moe_experts(self, x: Tensor, gate_up: Any, down: Any, weights: Tensor, expert_ids: Tensor) -> Tensor:
        assert gate_up[1].shape[0] % 4 == 0
        made: Tensor = REFERENCE["moe_experts"](x, gate_up[1], down[1], weights, expert_ids)
        return made


def site(name: str, **sizes: int) -> CallSite:
    return CallSite(name, "layers.0", sizes)


def test_the_report_names_each_operator_with_its_reason_and_limits() -> None:
    entries = {entry.name: entry for entry in Partial(_Memory()).capabilities()}
    assert entries.keys() == REFERENCE.keys()
    assert entries["linear"].coverage is Coverage.NATIVE
    assert entries["rms_norm"].coverage is Coverage.REFERENCE
    assert entries["rms_norm"].reason == "the plugin does not cover it"
    assert entries["silu_mul"].dtypes == ("bfloat16",)
    assert entries["moe_experts"].constraints == ("E % 4 == 0",)


def test_a_weight_is_placed_for_a_native_operator_only() -> None:
    weight, where = torch.ones(2, 3), site("linear", N=2, K=3)
    native = Partial(_Memory()).choose([where], dtype="float32").bind("linear", "layers.0", N=2, K=3)
    assert native.place("weight", weight) == ("packed", weight)
    declined = Partial(_Memory(), declined={"linear": "the library is missing"})
    table = declined.choose([where], dtype="float32")
    bound = table.bind("linear", "layers.0", N=2, K=3)
    assert bound.place("weight", weight) is weight
    assert bound.call(torch.ones(1, 3), weight, None).tolist() == [[3.0, 3.0]]
    assert table.decisions[0].reason == "the library is missing"


def test_a_fused_operator_runs_by_the_plugins_own_parts() -> None:
    sizes = {"K": 6, "H": 2, "G": 1, "D": 4, "C": 8}
    table = Partial(_Memory()).choose([site("qkv_rotary", **sizes)], dtype="float32")
    assert table.decisions[0].choice == "decomposed"
    bound = table.bind("qkv_rotary", "layers.0", **sizes)
    generator = torch.Generator().manual_seed(1)
    x, weight = torch.randn(3, 6, generator=generator), torch.randn(16, 6, generator=generator)
    angles = torch.randn(8, 4, generator=generator)
    positions = torch.tensor([0, 5, 2])
    placed = bound.place("weight", weight)
    assert placed[0] == "packed"
    made = bound.call(x, placed, None, positions, angles, 2, 1)
    wanted = REFERENCE["qkv_rotary"](x, weight, None, positions, angles, 2, 1)
    assert [tuple(each.shape) for each in made] == [(3, 2, 4), (3, 1, 4), (3, 1, 4)]
    for got, right in zip(made, wanted, strict=True):
        torch.testing.assert_close(got, right)


def test_experts_are_placed_one_by_one_for_a_plugin_that_covers_their_products_only() -> None:
    sizes = {"E": 3, "A": 2, "K": 4, "I": 2}
    operators = Partial(_Memory(), declined={"moe_experts": "no kernel"})
    bound = operators.choose([site("moe_experts", **sizes)], dtype="float32").bind(
        "moe_experts", "layers.0", **sizes
    )
    inputs = expert_inputs(experts=3)
    placed = [bound.place(name, inputs[name]) for name in ("gate_up", "down")]
    assert [each[0] for each in placed[0]] == ["packed"] * 3
    made = bound.call(inputs["x"], *placed, inputs["weights"], inputs["expert_ids"])
    torch.testing.assert_close(made, REFERENCE["moe_experts"](*inputs.values()))


def test_experts_are_padded_to_what_the_chip_takes() -> None:
    sizes = {"E": 3, "A": 2, "K": 4, "I": 2}
    table = Partial(_Memory()).choose([site("moe_experts", **sizes)], dtype="float32", strict=True)
    decision = table.decisions[0]
    assert (decision.choice, dict(decision.padded)) == ("padded", {"E": 4})
    assert "E is 3" in decision.reason
    bound = table.bind("moe_experts", "layers.0", **sizes)
    inputs = expert_inputs(experts=3)
    placed = [bound.place(name, inputs[name]) for name in ("gate_up", "down")]
    made = bound.call(inputs["x"], *placed, inputs["weights"], inputs["expert_ids"])
    torch.testing.assert_close(made, REFERENCE["moe_experts"](*inputs.values()))


def expert_inputs(*, experts: int) -> dict[str, Tensor]:
    """K 4, I 2, two experts for each of five tokens."""
    generator = torch.Generator().manual_seed(2)
    return {
        "x": torch.randn(5, 4, generator=generator),
        "gate_up": torch.randn(experts, 4, 4, generator=generator),
        "down": torch.randn(experts, 4, 2, generator=generator),
        "weights": torch.rand(5, 2, generator=generator),
        "expert_ids": torch.stack([torch.randperm(experts, generator=generator)[:2] for _ in range(5)]),
    }


def test_an_operator_outside_the_plan_cannot_be_bound() -> None:
    table = Partial(_Memory()).choose([site("linear", N=2, K=3)], dtype="float32")
    with pytest.raises(KeyError):
        table.bind("linear", "layers.0", N=2, K=4)


def test_a_report_that_declares_what_the_plugin_has_not_is_refused() -> None:
    decision = OperatorDecision("rms_norm", "native", "so it says", sizes={"K": 4})
    with pytest.raises(FailedPrecondition, match="rms_norm") as caught:
        Partial(_Memory()).table([decision])
    assert caught.value.reason == "CONTRADICTORY_REPORT"


def test_run_refuses_sizes_that_a_constraint_excludes() -> None:
    with pytest.raises(FailedPrecondition, match=r"E % 4 == 0 only, and here E is 3") as caught:
        Partial(_Memory()).run("moe_experts", expert_inputs(experts=3), {})
    assert caught.value.reason == "CONSTRAINT_UNMET"
    by_reference = Partial(_Memory()).run("moe_experts", expert_inputs(experts=3), {}, use_reference=True)
    assert by_reference[0].shape == (5, 4)


@pytest.mark.parametrize("constraint", ["T >= 4", "Z == 1"])
def test_a_constraint_on_what_no_model_fixes_is_a_mistake_of_the_plugins(constraint: str) -> None:
    class Wrong(OperatorSet):
        constraints: ClassVar[dict[str, tuple[str, ...]]] = {"linear": (constraint,)}

    with pytest.raises(ValueError, match="it may name K, N"):
        Wrong(_Memory())


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
