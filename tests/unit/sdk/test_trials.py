"""Trials at start: they pass for the reference, and find each kind of fault in an operator."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from plugins.sdk.catalogue import CATALOGUE
from plugins.sdk.host import HostMemory
from plugins.sdk.kv_layout import KvLayout
from plugins.sdk.operators import REFERENCE, OperatorSet
from plugins.sdk.trials import (
    EXPERT_CHOICES,
    TRIALS,
    Inputs,
    MakeInputs,
    OperatorTrials,
    TrialMaker,
    TrialSizes,
    distance,
    tried_operators,
)

DTYPES = ("float32", "bfloat16", "float16")


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    """Tensors are small, and spinning threads beside a busy process take minutes."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def trials(**changes: Any) -> OperatorTrials:
    return OperatorTrials(
        **{"memory": HostMemory(), "place": torch.clone, "synchronize": lambda: None, **changes}
    )


def problem_of(name: str, operator: Callable[..., Any], *dtypes: str, **changes: Any) -> str:
    """What the trial says of operators of which one was replaced."""
    operators = OperatorSet(HostMemory())
    setattr(operators, name, operator)
    return trials(**changes).find_problem(operators, name, dtypes or DTYPES)


@pytest.mark.parametrize("name", tried_operators())
def test_the_reference_agrees_with_itself(name: str) -> None:
    sizes = (TrialSizes(), TrialSizes(heads=8, groups=1, size=128, page=3))
    assert trials(sizes=sizes).find_problem(OperatorSet(HostMemory()), name, DTYPES) == ""


def test_all_operators_are_tried_but_those_that_round_between_products() -> None:
    assert set(CATALOGUE) - set(tried_operators()) == {"moe_experts_w8a8", "moe_experts_w4a16"}
    untried = OperatorSet(HostMemory())
    assert trials().find_problem(untried, "moe_experts_w8a8", DTYPES) == ""


@pytest.mark.parametrize("name", tried_operators())
def test_inputs_are_all_that_the_catalogue_lists_in_its_order(name: str) -> None:
    spec = CATALOGUE[name]
    names = [each.name for each in spec.inputs] + [each.name for each in spec.attributes]
    assert TRIALS[name]
    for make in TRIALS[name]:
        inputs = make(TrialMaker(TrialSizes(), torch.float32))
        assert list(inputs) == names
        shapes = {each.name: len(each.shape) for each in spec.inputs}
        assert {key: value.dim() for key, value in inputs.items() if isinstance(value, Tensor)} == {
            key: dimensions for key, dimensions in shapes.items() if inputs[key] is not None
        }


def changing(name: str, change: Callable[[Any], Any]) -> Callable[..., Any]:
    """The reference, its result changed."""

    def call(*arguments: Any) -> Any:
        return change(REFERENCE[name](*arguments))

    return call


def _one_cell_further(key: Tensor, value: Tensor, kv_cache: Tensor, cells: Tensor) -> None:
    REFERENCE["write_kv"](key, value, kv_cache, cells + 1)


def _topk(router_logits: Tensor, top_k: int, renormalize: int) -> tuple[Tensor, Tensor]:
    """The last among equals first."""
    weights, ids = REFERENCE["moe_route"](router_logits.flip(-1), top_k, renormalize)
    return weights, router_logits.shape[-1] - 1 - ids


def _in_place(gate_up: Tensor) -> Tensor:
    result: Tensor = REFERENCE["silu_mul"](gate_up)
    gate_up.zero_()
    return result


def _raises(*arguments: Any) -> Tensor:
    raise RuntimeError("no kernel image is available for execution on the device")


FAULTS: dict[str, tuple[str, Callable[..., Any], str]] = {
    "wrong factor": ("linear", changing("linear", lambda y: y * 1.01), "off by"),
    "not a number": ("rms_norm", changing("rms_norm", lambda y: y * float("nan")), "off by nan"),
    "another dtype": ("embedding", changing("embedding", Tensor.double), "the result is torch.float64"),
    "another shape": ("argmax", changing("argmax", lambda y: y.unsqueeze(1)), "[2, 1], not torch.int64 [2]"),
    "another cell": ("write_kv", _one_cell_further, "off by"),
    "another of equals": ("moe_route", _topk, "results differ"),
    "an input overwritten": ("silu_mul", _in_place, "it changed its input gate_up"),
    "a kernel that is not there": ("sample", _raises, "RuntimeError: no kernel image"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_found_and_described(fault: str) -> None:
    name, operator, words = FAULTS[fault]
    found = problem_of(name, operator, "float32")
    assert found.startswith("compared with the reference at load in float32: ")
    assert words in found


def test_a_fault_of_one_dtype_or_one_size_is_found() -> None:
    def only_in(dtype: torch.dtype, y: Tensor) -> Tensor:
        return y * 2 if y.dtype == dtype else y

    operator = changing("linear", partial(only_in, torch.bfloat16))
    assert problem_of("linear", operator, "float32") == ""
    assert "in bfloat16" in problem_of("linear", operator, "float32", "bfloat16")

    def for_size(y: Tensor) -> Tensor:
        return y + 1 if y.shape[-1] == 128 else y

    wrong = changing("attention_decode", for_size)
    assert problem_of("attention_decode", wrong, "float32") == ""
    both = (TrialSizes(), TrialSizes(size=128))
    assert "off by" in problem_of("attention_decode", wrong, "float32", sizes=both)


def test_an_error_that_comes_late_is_found_when_the_device_is_waited_for() -> None:
    def asleep() -> None:
        raise RuntimeError("an illegal memory access was encountered")

    found = problem_of("argmax", REFERENCE["argmax"], "float32", synchronize=asleep)
    assert "illegal memory access" in found


def test_caches_lie_in_the_order_that_the_chip_wants() -> None:
    layout = KvLayout(("kv", "page", "head", "token", "value"))
    seen: list[bool] = []

    def attend(query: Tensor, kv_cache: Tensor, *rest: Any) -> Any:
        seen.append(layout.in_memory(kv_cache).is_contiguous())
        return REFERENCE["attention_decode"](query, kv_cache, *rest)

    assert problem_of("attention_decode", attend, "float32", layout=layout, place=lambda each: each) == ""
    assert seen == [True, True]


def test_query_and_key_lie_as_parts_of_one_product_and_by_themselves() -> None:
    seen: list[tuple[int, ...]] = []

    def rotary(query: Tensor, key: Tensor, *rest: Any) -> Any:
        seen.extend((query.stride(), key.stride()))
        return REFERENCE["rotary"](query, key, *rest)

    sizes = (TrialSizes(heads=3, groups=1, size=8),)
    assert problem_of("rotary", rotary, "float32", sizes=sizes) == ""
    assert seen[:2] == [(32, 8, 1), (32, 8, 1)], "rows of 4 heads, whoever takes 3 and 1 of them"
    assert seen[2:] == [(24, 8, 1), (8, 8, 1)]


def test_a_chips_own_trials_stand_in_place_of_the_common_ones() -> None:
    def wide(make: TrialMaker) -> Inputs:
        x, weight = make.random(1, 2, 16 * make.sizes.hidden), make.random(2, 3, 16 * make.sizes.hidden)
        return {"x": x, "weight": weight, "bias": None}

    seen: list[tuple[int, ...]] = []

    def linear(x: Tensor, weight: Any, bias: Tensor | None) -> Any:
        seen.append(tuple(x.shape))
        return REFERENCE["linear"](x, weight, bias)

    sizes = (TrialSizes(), TrialSizes(hidden=2))
    assert problem_of("linear", linear, "float32", sizes=sizes, own={"linear": (wide,)}) == ""
    assert seen == [(2, 1536), (2, 32)]
    assert problem_of("argmax", _raises, "float32", own={"linear": (wide,)}), "others are tried as ever"


def test_an_operator_that_only_the_chip_tries_is_compared_too() -> None:
    def experts(make: TrialMaker) -> Inputs:
        count, choice = make.sizes.experts, make.choice(3)
        gate_up, down = make.int8(2, count, 32, 16), make.int8(3, count, 16, 16)
        scales = make.positive(4, count, 32), make.positive(5, count, 16)
        return {
            "x": make.random(1, 3, 16),
            "gate_up": gate_up,
            "gate_up_scale": scales[0],
            "down": down,
            "down_scale": scales[1],
            **choice,
        }

    name = "moe_experts_w8a8"
    wrong = changing(name, lambda y: 2 * y)
    assert problem_of(name, wrong, "bfloat16") == ""
    assert problem_of(name, REFERENCE[name], "bfloat16", own={name: (experts,)}) == ""
    assert "off by" in problem_of(name, wrong, "bfloat16", own={name: (experts,)})


@pytest.mark.parametrize("choose", EXPERT_CHOICES)
def test_no_token_has_an_expert_twice_and_one_is_chosen_by_nobody(choose: MakeInputs) -> None:
    made = choose(TrialMaker(TrialSizes(experts=7, chosen=3), torch.float32))
    ids = made["expert_ids"]
    assert made["weights"].shape == ids.shape
    assert ids.max() < 6
    assert all(len(set(row)) == len(row) for row in ids.tolist())


def test_weights_come_as_the_chips_memory_makes_them() -> None:
    class Turned(HostMemory):
        def relayout_weight(self, weight: Any, *, operator: str, parameter: str = "weight") -> Any:
            assert (operator, parameter) == ("linear", "weight")
            return weight.T.contiguous()

    def linear(x: Tensor, weight: Any, bias: Tensor | None) -> Any:
        return REFERENCE["linear"](x, weight.T, bias)

    assert problem_of("linear", linear, "float32", memory=Turned()) == ""


def test_rounding_of_a_dtype_is_no_difference_and_more_is() -> None:
    wanted = torch.tensor([1.0, 100.0])
    assert distance(wanted.bfloat16(), wanted.bfloat16()) == ""
    assert distance(wanted + 1e-4, wanted) == ""
    assert "limit" in distance(wanted + 1e-2, wanted)
    assert distance((wanted + 1e-2).half(), wanted.half()) == ""
