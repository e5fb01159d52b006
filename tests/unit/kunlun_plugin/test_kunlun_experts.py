"""Routing, experts and int8 products against the reference, and what the comparison at load denies."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from meshkit.errors import FailedPrecondition
from plugins.kunlun import memory
from plugins.kunlun.operators import KunlunOperators
from plugins.sdk.operators import REFERENCE
from plugins.sdk.planning import CallSite
from tests.unit.kunlun_plugin.emulated import (
    RUNTIME,
    Call,
    changing,
    denied,
    operators_of,
    random,
    runtime_with,
)

OPS = RUNTIME.ops
OPERATORS = operators_of(RUNTIME)
ROUNDOFF = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float32: 2.0**-24}
HALVES = st.sampled_from([torch.bfloat16, torch.float16])
EXPERT_OPERATORS = {"moe_experts", "moe_experts_w8a8"}
INT8_OPERATORS = {"linear_w8a8", "moe_experts_w8a8"}

few = settings(max_examples=20)


def close(got: Tensor, wanted: Tensor, *, roundings: int) -> None:
    """Within some roundings of the largest value."""
    assert (got.dtype, got.shape) == (wanted.dtype, wanted.shape)
    limit = roundings * ROUNDOFF[got.dtype] * float(wanted.float().abs().max())
    assert float((got.float() - wanted.float()).abs().max()) <= limit


def both(name: str, inputs: dict[str, Tensor], **attributes: int) -> tuple[Any, Any]:
    """An operator by name on the chip, its weights laid out for it, and on the reference."""
    return OPERATORS.run(name, inputs, attributes), OPERATORS.run(
        name, inputs, attributes, use_reference=True
    )


def choice(seed: int, tokens: int, experts: int, top: int) -> dict[str, Tensor]:
    ids = random(seed, tokens, experts).argsort(dim=1)[:, :top].contiguous()
    return {"weights": random(seed + 1, tokens, top).softmax(dim=1), "expert_ids": ids}


def int8(seed: int, *shape: int) -> tuple[Tensor, Tensor]:
    values = (40 * random(seed, *shape)).round().clamp(-127, 127).to(torch.int8)
    return values, (1 + random(seed + 1, *shape[:-1]).abs()) / (60 * shape[-1] ** 0.5)


@few
@given(
    seed=st.integers(0, 2**31),
    tokens=st.integers(1, 40),
    experts=st.integers(1, 21),
    data=st.data(),
    dtype=st.sampled_from(list(ROUNDOFF)),
    renormalize=st.integers(0, 1),
)
def test_routing_is_the_references_with_ties_to_the_lowest_id(
    seed: int, tokens: int, experts: int, data: st.DataObject, dtype: torch.dtype, renormalize: int
) -> None:
    top = data.draw(st.integers(1, experts))
    logits = (2 * random(seed, tokens, experts)).round().to(dtype)
    (got, wanted) = both("moe_route", {"router_logits": logits}, top_k=top, renormalize=renormalize)
    assert torch.equal(got[1], wanted[1])
    assert got[1].dtype == torch.int64
    close(got[0], wanted[0], roundings=8)


@few
@given(
    seed=st.integers(0, 2**31),
    tokens=st.integers(1, 40),
    experts=st.integers(1, 9),
    data=st.data(),
    dtype=HALVES,
)
def test_experts_are_the_references(
    seed: int, tokens: int, experts: int, data: st.DataObject, dtype: torch.dtype
) -> None:
    hidden, inner = data.draw(st.sampled_from([(64, 96), (63, 37), (40, 8)]))
    inputs = {
        "x": random(seed, tokens, hidden, dtype=dtype),
        "gate_up": (random(seed + 1, experts, 2 * inner, hidden) / 8).to(dtype),
        "down": (random(seed + 2, experts, hidden, inner) / 8).to(dtype),
        **choice(seed + 3, tokens, experts, data.draw(st.integers(1, experts))),
    }
    (got,), (wanted,) = both("moe_experts", inputs)
    close(got, wanted, roundings=8)


@few
@given(seed=st.integers(0, 2**31), tokens=st.integers(1, 40), experts=st.integers(1, 9), data=st.data())
def test_int8_experts_are_the_references(seed: int, tokens: int, experts: int, data: st.DataObject) -> None:
    gate_up, down = int8(seed, experts, 96, 64), int8(seed + 5, experts, 64, 48)
    inputs = {
        "x": random(seed, tokens, 64, dtype=torch.bfloat16),
        "gate_up": gate_up[0], "gate_up_scale": gate_up[1], "down": down[0], "down_scale": down[1],
        **choice(seed + 3, tokens, experts, data.draw(st.integers(1, experts))),
    }  # fmt: skip
    (got,), (wanted,) = both("moe_experts_w8a8", inputs)
    close(got, wanted, roundings=12)


@few
@given(seed=st.integers(0, 2**31), tokens=st.integers(1, 40), biased=st.booleans())
def test_int8_products_are_the_references(seed: int, tokens: int, biased: bool) -> None:
    weight, scale = int8(seed, 48, 96)
    x = random(seed + 2, tokens, 96, dtype=torch.bfloat16)
    # Half of a row's largest value is 63.5 steps: a tie.
    x[0, 1] = x[0].abs().max() / 2
    inputs = {"x": x, "weight": weight, "scale": scale}
    if biased:
        inputs["bias"] = random(seed + 3, 48, dtype=torch.bfloat16)
    (got,), (wanted,) = both("linear_w8a8", inputs)
    close(got, wanted, roundings=3)


@pytest.mark.parametrize("name", ["moe_experts", "moe_experts_w8a8"])
def test_experts_that_nobody_or_everybody_chooses(name: str) -> None:
    gate_up, down = int8(1, 5, 96, 64), int8(2, 5, 64, 48)
    weights: dict[str, Tensor] = (
        {"gate_up": gate_up[0], "gate_up_scale": gate_up[1], "down": down[0], "down_scale": down[1]}
        if name == "moe_experts_w8a8"
        else {"gate_up": gate_up[0].bfloat16() / 300, "down": down[0].bfloat16() / 300}
    )
    for expert in (0, 4):
        chosen = {"weights": torch.full((13, 1), 0.7), "expert_ids": torch.full((13, 1), expert)}
        (got,), (wanted,) = both(name, {"x": random(3, 13, 64, dtype=torch.bfloat16), **weights, **chosen})
        close(got, wanted, roundings=12)


def test_a_sum_beyond_ten_is_not_clamped_in_float16() -> None:
    weight = torch.full((1, 64, 64), 0.125, dtype=torch.float16)
    inputs = {
        "x": torch.ones(1, 64, dtype=torch.float16),
        "gate_up": weight,
        "down": weight[:, :, :32].contiguous(),
        "weights": torch.ones(1, 1),
        "expert_ids": torch.zeros(1, 1, dtype=torch.int64),
    }
    (got,), (wanted,) = both("moe_experts", inputs)
    assert float(wanted.max()) > 10
    close(got, wanted, roundings=4)


def test_int8_products_of_widths_that_no_kernel_is_known_to_take_are_refused() -> None:
    weight, scale = int8(1, 48, 63)
    inputs = {"x": random(2, 4, 63, dtype=torch.bfloat16), "weight": weight, "scale": scale}
    with pytest.raises(FailedPrecondition, match="K % 16 == 0 only, and here K is 63"):
        OPERATORS.run("linear_w8a8", inputs, {})


EXPERT_SIZES = {"K": 64, "I": 48, "E": 5, "A": 2}
SITES = [
    CallSite("moe_route", "layers.0", {"E": 5, "A": 2}),
    CallSite("moe_experts", "layers.0", EXPERT_SIZES),
    CallSite("moe_experts_w8a8", "layers.1", EXPERT_SIZES),
    CallSite("linear_w8a8", "layers.1", {"K": 64, "N": 48}),
    CallSite("linear_w4a16", "layers.2", {"J": 32, "N": 48, "Q": 2}),
    CallSite("qkv_rotary", "layers.2", {"K": 64, "H": 2, "G": 1, "D": 32, "C": 16}),
]


@pytest.mark.parametrize(
    ("dtype", "choices"),
    [
        ("bfloat16", ["fused", "fused", "fused", "native", "reference", "decomposed"]),
        ("float16", ["fused", "fused", "decomposed", "reference", "reference", "decomposed"]),
        ("float32", ["fused", "decomposed", "decomposed", "reference", "reference", "decomposed"]),
    ],
)
def test_the_plan_says_what_runs_on_the_chip_and_why_not(dtype: str, choices: list[str]) -> None:
    decisions = OPERATORS.choose(SITES, dtype=dtype).decisions
    assert [each.choice for each in decisions] == choices
    assert "4-bit kernels" in decisions[4].reason
    if dtype != "bfloat16":
        assert f"covers bfloat16, not {dtype}" in decisions[3].reason


def model_difference(operators: KunlunOperators, dtype: str) -> tuple[str, float]:
    """What int8 experts are decided to be, and how far a model's call lies from the reference, as a share of
    the largest value.
    """
    table = operators.choose(SITES, dtype=dtype)
    bound = table.bind("moe_experts_w8a8", "layers.1", **EXPERT_SIZES)
    gate_up, down = int8(1, 5, 96, 64), int8(2, 5, 64, 48)
    weights = dict(zip(("gate_up", "gate_up_scale", "down", "down_scale"), (*gate_up, *down), strict=True))
    x, chosen = random(3, 7, 64, dtype=getattr(torch, dtype)), choice(4, 7, 5, 2)
    placed = [bound.place(name, weight) for name, weight in weights.items()]
    got = bound.call(x, *placed, *chosen.values())
    wanted = REFERENCE["moe_experts_w8a8"](x, *weights.values(), *chosen.values())
    largest = float(wanted.float().abs().max())
    return table.decisions[2].choice, float((got.float() - wanted.float()).abs().max()) / largest


# A value next to a tie of its quantisation may be rounded to either side: one step of 127.
ONE_STEP = 0.04


@pytest.mark.parametrize(("dtype", "expected"), [("bfloat16", "fused"), ("float32", "decomposed")])
def test_a_model_calls_int8_experts_with_weights_laid_out_once(dtype: str, expected: str) -> None:
    decided, difference = model_difference(OPERATORS, dtype)
    assert decided == expected
    assert difference < ONE_STEP


def test_where_experts_are_denied_their_int8_products_stay_on_the_chip() -> None:
    operators = operators_of(runtime_with(without=("moe_post",)))
    assert set(denied(operators)) == EXPERT_OPERATORS
    decided, difference = model_difference(operators, "bfloat16")
    assert decided == "decomposed"
    assert difference < ONE_STEP


def _counts_forgotten(topk_ids: Tensor, block_statistic: Tensor) -> None:
    del topk_ids, block_statistic


def _scale_for_a_maximum(x: Tensor, values: Tensor, maxima: Tensor, force_sdnn: bool) -> None:
    OPS.quant2d(x, values, maxima, force_sdnn=force_sdnn)
    maxima.div_(127)


def _one_maximum_for_all(x: Tensor, values: Tensor, maxima: Tensor, force_sdnn: bool) -> None:
    OPS.quant2d(x, values, maxima, force_sdnn=force_sdnn)
    maxima.fill_(maxima.max())


def _back_in_token_order(y: Tensor, sorted_tokens_idx: Tensor, **given: Any) -> None:
    OPS.moe_fc(y=y, sorted_tokens_idx=sorted_tokens_idx, **given)
    rows = y.view(-1, y.shape[-1])
    rows.copy_(rows[sorted_tokens_idx.long()])


def _weights_unnormed(x: Tensor, normed_score: Tensor, topk_index: Tensor, **rest: Any) -> None:
    OPS.moe_softmax_topk_norm(x=x, normed_score=normed_score, topk_index=topk_index, **rest)
    normed_score.copy_(x.softmax(dim=1).gather(1, topk_index.long()))


def rolled(tensor: Tensor) -> Tensor:
    return tensor.roll(1, 0)


def rolled_outputs(tensor: Tensor) -> Tensor:
    return tensor.roll(1, 1)


def of_given(change: Callable[[Tensor], Tensor]) -> Callable[[Tensor | None], Tensor | None]:
    """Floats have no maxima."""
    return lambda tensor: None if tensor is None else change(tensor)


def next_expert(lod: Tensor) -> Tensor:
    """The first two experts' border one row too early, where it can be."""
    moved = lod.clone()
    moved[1] = (moved[1] - 1).clamp(min=0)
    return moved


MUTATIONS: dict[str, tuple[set[str], str, Call]] = {
    "index of other rows": (EXPERT_OPERATORS, "moe_post", changing("moe_post", moe_index=rolled)),
    "weights of other tokens": (EXPERT_OPERATORS, "moe_post", changing("moe_post", normed_scale=rolled)),
    "weights left out": (EXPERT_OPERATORS, "moe_post", changing("moe_post", normed_scale=torch.ones_like)),
    "scale missing": (EXPERT_OPERATORS, "moe_post", changing("moe_post", dequant_scale=torch.zeros_like)),
    "starts off by one": (EXPERT_OPERATORS, "moe_fc", changing("moe_fc", sorted_tokens_num_lod=next_expert)),
    "starts too few": (
        EXPERT_OPERATORS, "moe_fc", changing("moe_fc", sorted_tokens_num_lod=lambda lod: lod[:-1])),
    "experts exchanged": (EXPERT_OPERATORS, "moe_fc", changing("moe_fc", weight=rolled)),
    "rows in token order": (EXPERT_OPERATORS, "moe_fc", _back_in_token_order),
    "counts forgotten": (EXPERT_OPERATORS, "gen_block_statistic", _counts_forgotten),
    "maxima of other rows": (
        {"moe_experts_w8a8"}, "moe_fc", changing("moe_fc", x_perchannel_max=of_given(rolled))),
    "maxima of other outputs": (
        {"moe_experts_w8a8"}, "moe_fc", changing("moe_fc", w_perchannel_max=of_given(rolled_outputs))),
    "order among equals": (
        {"moe_route"}, "moe_softmax_topk_norm", changing("moe_softmax_topk_norm", stable=lambda _: False)),
    "weights not divided by their sum": ({"moe_route"}, "moe_softmax_topk_norm", _weights_unnormed),
    "a scale where a maximum should be": (INT8_OPERATORS, "quant2d", _scale_for_a_maximum),
    "one maximum for all rows": (INT8_OPERATORS, "quant2d", _one_maximum_for_all),
}  # fmt: skip
"""What is wrong: (operators that have to be denied, the vendor's operator, how it is called)."""


@pytest.mark.parametrize("mutation", MUTATIONS)
def test_a_mutation_is_denied_by_name_and_nothing_else_is(mutation: str) -> None:
    wrong, kernel, call = MUTATIONS[mutation]
    reasons = denied(operators_of(runtime_with(without=(), **{kernel: call})))
    assert set(reasons) == wrong
    assert all("compared with the reference at load" in reason for reason in reasons.values())


def _no_maxima(lhs: tuple[Tensor, Tensor], rhs: tuple[Tensor, Tensor], out: Tensor) -> None:
    """A build that wants scales, not maxima."""
    OPS.gemm_I8_I8_bf16_nt((lhs[0], lhs[1] * 127), (rhs[0], rhs[1] * 127), out)


def _maxima_by_block(lhs: tuple[Tensor, Tensor], rhs: tuple[Tensor, Tensor], out: Tensor) -> None:
    """A build that reads one maximum for each 128 columns: after the first it finds those of other rows."""

    def widened(values: Tensor, maxima: Tensor) -> Tensor:
        blocks = [
            block * maxima.roll(-at, 0) for at, block in enumerate(torch.split(values.float(), 128, dim=1))
        ]
        return torch.cat(blocks, dim=1) / 127

    out.copy_(widened(*lhs) @ widened(*rhs).T)


def test_an_int8_product_that_disagrees_gives_way_to_the_other_kernel() -> None:
    scales = operators_of(runtime_with(gemm_I8_I8_bf16_nt=_no_maxima))
    blocks = operators_of(runtime_with(gemm_I8_I8_bf16_nt=_maxima_by_block))
    lacks = operators_of(runtime_with(without=("gemm_I8_I8_bf16_nt",)))
    for operators in (scales, blocks, lacks):
        assert denied(operators) == {}
        assert operators._findings.int8_product == "matmul"
    weight, scale = int8(1, 48, 96)
    inputs = {"x": random(2, 4, 96, dtype=torch.bfloat16), "weight": weight, "scale": scale}
    inputs["bias"] = random(3, 48, dtype=torch.bfloat16)
    (got,), (wanted,) = lacks.run("linear_w8a8", inputs, {}), OPERATORS.run("linear_w8a8", inputs, {})
    close(got, wanted, roundings=2)


def test_a_build_without_an_int8_product_denies_it() -> None:
    operators = operators_of(runtime_with(without=("gemm_I8_I8_bf16_nt", "matmul")))
    assert set(denied(operators)) == {"linear_w8a8"}
    (decision,) = operators.choose(
        [CallSite("linear_w8a8", "x", {"K": 64, "N": 48})], dtype="bfloat16"
    ).decisions
    assert decision.choice == "reference"
    assert "gemm_I8_I8_bf16_nt" in decision.reason


def test_scales_that_were_not_laid_out_for_the_kernels_are_denied(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "to_maxima", lambda scale: scale.unsqueeze(-1).contiguous())
    assert set(denied(operators_of(RUNTIME))) == INT8_OPERATORS


def test_experts_that_write_to_their_weights_are_denied(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = KunlunOperators.moe_experts

    def spoiling(
        self: KunlunOperators, x: Tensor, gate_up: Any, down: Any, weights: Tensor, expert_ids: Tensor
    ) -> Tensor:
        made = plain(self, x, gate_up, down, weights, expert_ids)
        down.zero_()
        return made

    monkeypatch.setattr(KunlunOperators, "moe_experts", spoiling)
    assert "changed its input down" in denied(operators_of(RUNTIME))["moe_experts"]
