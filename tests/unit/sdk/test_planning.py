"""The capability report decides how each operator runs, and every choice has its reason."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from meshkit.errors import FailedPrecondition, InvalidArgument
from plugins.sdk.capabilities import CapabilityReport, Coverage, OperatorCapability
from plugins.sdk.planning import (
    CallSite,
    ExecutionPlan,
    PlanRequest,
    choose_chunk,
    choose_page_size,
    choose_window,
    plan_execution,
    plan_operators,
)
from plugins.sdk.runner import OperatorDecision

ATTENTION = {"H": 9, "G": 3, "D": 64}
LINEAR = {"N": 8, "K": 4}
EXPERTS = {"E": 6, "A": 2, "K": 4, "I": 2}


def native(name: str, *, dtypes: Sequence[str] = (), constraints: Sequence[str] = ()) -> OperatorCapability:
    return OperatorCapability(name, Coverage.NATIVE, dtypes=dtypes, constraints=constraints)


def decide(
    operators: Sequence[OperatorCapability], name: str, sizes: dict[str, int], **more: Any
) -> OperatorDecision:
    (decision,) = plan_operators(
        operators, [CallSite(name, "model.layers.0", sizes)], dtype="float32", **more
    )
    return decision


def plan(report: CapabilityReport, **request: Any) -> ExecutionPlan:
    return plan_execution(report, [], PlanRequest(**request))


def test_an_operator_of_the_plugins_own_is_native_or_fused() -> None:
    assert decide([native("linear")], "linear", LINEAR).choice == "native"
    assert decide([native("silu_mul")], "silu_mul", {"I": 4}).choice == "fused"


@pytest.mark.parametrize(
    ("entry", "reason"),
    [
        ([], "the plugin does not cover it"),
        ([OperatorCapability("linear", Coverage.REFERENCE, reason="differs from the reference")], "differs"),
        ([native("linear", dtypes=("bfloat16",))], "the plugin covers bfloat16, not float32"),
        ([native("linear", constraints=("K % 16 == 0",))], "it takes K % 16 == 0 only, and here K is 4"),
        ([OperatorCapability("linear", Coverage.FUSED)], "within a fused operator only"),
    ],
)
def test_what_the_chip_cannot_run_runs_on_the_reference_and_says_why(
    entry: list[OperatorCapability], reason: str
) -> None:
    decision = decide(entry, "linear", LINEAR)
    assert decision.choice == "reference"
    assert reason in decision.reason


def test_a_fused_operator_falls_back_to_its_parts_where_any_of_them_is_the_chips_own() -> None:
    decision = decide([native("rms_norm")], "add_rms_norm", {"K": 4})
    assert decision.choice == "decomposed"
    assert [(part.name, part.choice) for part in decision.parts] == [("rms_norm", "native")]
    assert decide([], "add_rms_norm", {"K": 4}).choice == "reference"


def test_sizes_of_one_operator_are_decided_one_by_one() -> None:
    sites = [CallSite("linear", f"model.layers.{layer}.mlp", {"N": 8, "K": size}) for layer in range(3)
             for size in (16, 4)]  # fmt: skip
    decisions = plan_operators([native("linear", constraints=("K % 16 == 0",))], sites, dtype="float32")
    assert [(each.choice, each.calls) for each in decisions] == [("native", 3), ("reference", 3)]
    assert decisions[0].where == "model.layers.*.mlp"


def test_experts_are_padded_to_the_next_count_that_the_chip_takes() -> None:
    decision = decide([native("moe_experts", constraints=("E % 4 == 0",))], "moe_experts", EXPERTS)
    assert (decision.choice, dict(decision.padded)) == ("padded", {"E": 8})
    assert "E is 6" in decision.reason


@pytest.mark.parametrize(
    ("name", "sizes", "constraint"),
    [("attention_decode", ATTENTION, "D in (128, 256)"), ("moe_experts", EXPERTS, "E == 100")],
)
def test_sizes_that_decide_a_models_state_are_refused_and_named(
    name: str, sizes: dict[str, int], constraint: str
) -> None:
    with pytest.raises(FailedPrecondition, match="does not run on this chip") as caught:
        decide([native(name, constraints=(constraint,))], name, sizes)
    assert (caught.value.field, caught.value.reason) == ("model_path", "CONSTRAINT_UNMET")
    assert caught.value.metadata["constraint"] == constraint


def test_a_constraint_on_the_page_size_waits_until_the_page_size_is_known() -> None:
    operators = [native("attention_decode", constraints=("S in (16, 64)",))]
    assert decide(operators, "attention_decode", ATTENTION).choice == "native"
    assert decide(operators, "attention_decode", ATTENTION, page_size=16).sizes["S"] == 16
    with pytest.raises(FailedPrecondition, match="S is 3"):
        decide(operators, "attention_decode", ATTENTION, page_size=3)


def test_strict_refuses_references_and_their_use_as_parts() -> None:
    assert decide([native("rms_norm")], "add_rms_norm", {"K": 4}, strict=True).choice == "decomposed"
    for operators, name, sizes in (
        ([], "linear", LINEAR),
        ([native("linear")], "qkv_rotary", {"K": 4, "H": 2, "G": 1, "D": 4, "C": 8}),
    ):
        with pytest.raises(FailedPrecondition, match="would run on the reference") as caught:
            decide(operators, name, sizes, strict=True)
        assert caught.value.reason == "OPERATOR_NOT_NATIVE"


REPORT = CapabilityReport(
    chip="toy", compute_dtypes=("bfloat16", "float32"), kv_cache_dtypes=("bfloat16", "float8_e4m3fn")
)


def test_auto_is_the_chips_first_choice() -> None:
    made = plan(REPORT)
    assert (made.dtype.value, made.kv_cache_dtype.value) == ("bfloat16", "bfloat16")
    assert plan(REPORT, dtype="float32").kv_cache_dtype.value == "bfloat16"


def test_a_dtype_that_the_chip_lacks_is_refused_with_those_it_has() -> None:
    with pytest.raises(InvalidArgument, match="auto, bfloat16, float32") as caught:
        plan(REPORT, dtype="float16")
    assert caught.value.field == "dtype"
    with pytest.raises(InvalidArgument, match="no operator that converts") as caught:
        plan(replace(REPORT, kv_cache_dtypes=("bfloat16",)), kv_cache_dtype="fp8_e4m3")
    assert caught.value.field == "kv_cache_dtype"


def test_a_cache_in_another_dtype_needs_operators_that_convert() -> None:
    with pytest.raises(FailedPrecondition, match="write_kv, attention_prefill, attention_decode") as caught:
        plan(REPORT, kv_cache_dtype="fp8_e4m3")
    assert caught.value.reason == "KV_CONVERSION_MISSING"
    converting = [native(name) for name in ("write_kv", "attention_prefill", "attention_decode")]
    made = plan(replace(REPORT, operators=converting), kv_cache_dtype="fp8_e4m3")
    assert made.kv_cache_dtype.value == "float8_e4m3fn"


def test_the_page_size_is_the_configured_then_the_preferred_one() -> None:
    assert choose_page_size(None, ()).value == 16
    assert choose_page_size(None, (64, 128)).value == 64
    assert choose_page_size(128, (64, 128)).value == 128
    assert choose_page_size(5, ()).value == 5
    with pytest.raises(InvalidArgument, match="64, 128") as refused:
        choose_page_size(16, (64, 128))
    assert refused.value.field == "page_size"


def test_chunk_and_window_are_as_asked_then_as_the_chip_prefers() -> None:
    assert [choose_chunk(*each).value for each in ((7, 512), (None, 512), (None, 0))] == [7, 512, None]
    assert [choose_window(*each).value for each in ((7, 32), (None, 32), (None, 0))] == [7, 32, 64]


def test_quantisation_says_whether_the_chip_has_operators_for_it() -> None:
    assert "reference" in plan(REPORT, quantization="w8a8").quantization.reason
    offered = replace(REPORT, operators=[native("linear_w8a8")])
    assert "has products" in plan(offered, quantization="w8a8").quantization.reason


def test_a_plan_is_json_with_a_reason_for_each_choice() -> None:
    made = plan_execution(
        replace(REPORT, operators=[native("rms_norm")]),
        [CallSite("add_rms_norm", "norm", {"K": 4})],
        PlanRequest(),
    ).to_json()
    assert made["page_size"] == {"value": 16, "reason": "the default; the chip takes any size"}
    (line,) = made["operators"]
    assert (line["operator"], line["choice"], line["parts"][0]["choice"]) == (
        "add_rms_norm", "decomposed", "native",
    )  # fmt: skip
    assert all(each["reason"] for each in made.values() if isinstance(each, dict))
