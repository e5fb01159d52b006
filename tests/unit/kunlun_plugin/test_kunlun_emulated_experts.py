"""The emulated operators of expert layers and int8 products: what they do, and each of their limits."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor

from plugins.kunlun_emulator.limits import XpuError
from tests.unit.kunlun_plugin.emulated import RUNTIME, random

OPS = RUNTIME.ops
TOKENS, HIDDEN, INNER, EXPERTS, TOP = 5, 8, 6, 4, 2
IDS = torch.tensor([[3, 0], [0, 1], [3, 1], [1, 0], [0, 3]], dtype=torch.int32)
"""Nobody chooses expert 2."""


def int32(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.int32)


def half(seed: int, *shape: int) -> Tensor:
    return random(seed, *shape, dtype=torch.bfloat16)


def int8(seed: int, *shape: int) -> Tensor:
    return (40 * random(seed, *shape)).round().clamp(-127, 127).to(torch.int8)


def routing(**changes: Any) -> dict[str, Any]:
    given = {
        "x": random(1, TOKENS, EXPERTS), "normed_score": torch.empty(TOKENS, TOP),
        "topk_index": int32(TOKENS, TOP), "block_statistic": None, "stable": True,
    }  # fmt: skip
    return {**given, **changes}


def counting(**changes: Any) -> dict[str, Any]:
    return {"topk_ids": IDS, "block_statistic": int32(12, EXPERTS), **changes}


def counted() -> Tensor:
    given = counting()
    OPS.gen_block_statistic(**given)
    statistic: Tensor = given["block_statistic"]
    return statistic


def sorting(**changes: Any) -> dict[str, Any]:
    given = {
        "x": half(1, TOKENS, HIDDEN), "topk_index": IDS, "block_statistic": counted(),
        "moe_expand": half(2, TOKENS * TOP, HIDDEN), "moe_index": int32(TOKENS * TOP),
        "expert_m": int32(EXPERTS), "sorted_tokens_num_lod": int32(EXPERTS + 1),
    }  # fmt: skip
    return {**given, **changes}


def multiplying(**changes: Any) -> dict[str, Any]:
    done = sorting()
    OPS.moe_pre_sorted(**done)
    given = {
        "x": done["moe_expand"], "weight": half(3, EXPERTS, INNER, HIDDEN),
        "sorted_tokens_num_lod": done["sorted_tokens_num_lod"], "sorted_tokens_idx": done["moe_index"],
        "moe_topk": TOP, "y": half(4, TOKENS, TOP, INNER),
    }  # fmt: skip
    return {**given, **changes}


def multiplying_int8(**changes: Any) -> dict[str, Any]:
    given = multiplying(
        x=int8(5, TOKENS * TOP, HIDDEN),
        weight=int8(6, EXPERTS, INNER, HIDDEN),
        x_perchannel_max=random(7, TOKENS * TOP, 1).abs(),
        w_perchannel_max=random(8, EXPERTS, INNER, 1).abs(),
        topk_ids=IDS,
        act=None,
    )
    return {**given, **changes}


def combining(**changes: Any) -> dict[str, Any]:
    done = sorting()
    OPS.moe_pre_sorted(**done)
    given = {
        "x": half(1, TOKENS, TOP, HIDDEN), "moe_index": done["moe_index"].view(TOKENS, TOP),
        "normed_scale": random(2, TOKENS, TOP), "dequant_scale": torch.ones(TOKENS, TOP),
        "y": half(3, TOKENS, HIDDEN),
    }  # fmt: skip
    return {**given, **changes}


def quantising(**changes: Any) -> dict[str, Any]:
    given = {"x": half(1, 3, 8), "y": int8(2, 3, 8), "max": torch.empty(3, 1), "force_sdnn": True}
    return {**given, **changes}


def gemm(**changes: Any) -> dict[str, Any]:
    given = {
        "lhs": (int8(1, 3, 8), random(2, 3, 1).abs()), "rhs": (int8(3, 5, 8), random(4, 5, 1).abs()),
        "out": half(5, 3, 5),
    }  # fmt: skip
    return {**given, **changes}


def matmul(**changes: Any) -> dict[str, Any]:
    given = {
        "x": int8(1, 3, 8), "w": int8(3, 5, 8), "out": half(5, 3, 5), "bias": half(6, 5),
        "x_pc_max": random(2, 3).abs(), "w_pc_max": random(4, 5).abs(),
    }  # fmt: skip
    return {**given, **changes}


CALLS = {
    "moe_softmax_topk_norm": routing, "gen_block_statistic": counting, "moe_pre_sorted": sorting,
    "moe_fc": multiplying, "moe_fc int8": multiplying_int8, "moe_post": combining, "quant2d": quantising,
    "gemm_I8_I8_bf16_nt": gemm, "matmul": matmul,
}  # fmt: skip
REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("moe_softmax_topk_norm", {"x": half(1, TOKENS, EXPERTS)}, "x is torch.bfloat16; it takes fp32"),
    ("moe_softmax_topk_norm", {"x": random(1, TOKENS, 2 * EXPERTS)[:, ::2]}, "x is not contiguous"),
    ("moe_softmax_topk_norm", {"topk_index": int32(TOKENS, TOP).long()}, "topk_index is torch.int64"),
    ("moe_softmax_topk_norm", {"topk_index": int32(TOKENS, 5)}, "the 5 largest of 4 experts"),
    ("moe_softmax_topk_norm", {"normed_score": torch.empty(TOKENS, 3)}, "is [5, 3]; it is [5, 2]"),
    ("moe_softmax_topk_norm", {"block_statistic": int32(12, EXPERTS)}, "gen_block_statistic only"),
    ("gen_block_statistic", {"topk_ids": IDS.long()}, "topk_ids is torch.int64"),
    ("gen_block_statistic", {"block_statistic": int32(8, EXPERTS)}, "it is [12, experts]"),
    ("gen_block_statistic", {"topk_ids": IDS + 1}, "expert [4] lies outside 4 experts"),
    ("gen_block_statistic", {"topk_ids": IDS - 1}, "expert [-1] lies outside"),
    ("moe_pre_sorted", {"x": random(1, TOKENS, HIDDEN)}, "dtypes differ"),
    ("moe_pre_sorted", {"x": random(1, TOKENS, HIDDEN), "moe_expand": random(2, TOKENS * TOP, HIDDEN)},
     "it takes fp16 and bf16"),
    ("moe_pre_sorted", {"topk_index": IDS.long()}, "topk_index is torch.int64"),
    ("moe_pre_sorted", {"x": half(1, 4, HIDDEN)}, "x [4, 8] is [tokens, hidden], topk_index [5, 2]"),
    ("moe_pre_sorted", {"moe_expand": half(1, TOKENS, HIDDEN)}, "moe_expand is [5, 8]; it is [10, 8]"),
    ("moe_pre_sorted", {"moe_index": int32(TOKENS)}, "moe_index is [5]; it is [10]"),
    ("moe_pre_sorted", {"sorted_tokens_num_lod": int32(EXPERTS)}, "lod is [4]; it is [5]"),
    ("moe_pre_sorted", {"block_statistic": int32(12, EXPERTS)}, "block_statistic does not count topk_index"),
    ("moe_fc", {"act": "swiglu"}, "activations inside the kernel"),
    ("moe_fc", {"weight": random(1, EXPERTS, INNER, HIDDEN)}, "dtypes differ"),
    ("moe_fc", {"weight": half(1, EXPERTS, INNER, 7)}, "weight [4, 6, 7] [experts, outputs, inner]"),
    ("moe_fc", {"weight": half(1, EXPERTS, HIDDEN, INNER).transpose(1, 2)}, "weight is not contiguous"),
    ("moe_fc", {"moe_topk": 3}, "10 rows are not 3 a token"),
    ("moe_fc", {"y": half(1, TOKENS * TOP, INNER)}, "y is [10, 6]; it is [5, 2, 6]"),
    ("moe_fc", {"sorted_tokens_num_lod": torch.tensor([0, 4, 7, 7, 9], dtype=torch.int32)},
     "is not cumulative from 0 to 10"),
    ("moe_fc", {"sorted_tokens_num_lod": torch.tensor([0, 7, 4, 7, 10], dtype=torch.int32)},
     "is not cumulative from 0 to 10"),
    ("moe_fc", {"sorted_tokens_num_lod": int32(EXPERTS)}, "lod is [4]; it is [5]"),
    ("moe_fc", {"sorted_tokens_idx": int32(TOKENS * TOP)}, "does not name each of 10 rows once"),
    ("moe_fc", {"topk_ids": IDS.long()}, "topk_ids is torch.int64"),
    ("moe_fc", {"x_perchannel_max": torch.ones(TOKENS * TOP, 1)}, "maxima belong to int8"),
    ("moe_fc int8", {"weight": half(1, EXPERTS, INNER, HIDDEN)}, "weight is torch.bfloat16; it takes int8"),
    ("moe_fc int8", {"x_perchannel_max": None}, "int8 wants x_perchannel_max"),
    ("moe_fc int8", {"w_perchannel_max": torch.ones(EXPERTS, INNER)}, "w_perchannel_max is [4, 6]"),
    ("moe_fc int8", {"x_perchannel_max": half(1, TOKENS * TOP, 1)}, "it takes fp32"),
    ("moe_fc int8", {"y": random(1, TOKENS, TOP, INNER)}, "it takes fp16 and bf16"),
    ("moe_post", {"x": half(1, TOKENS * TOP, HIDDEN)}, "x is [tokens, topk, hidden]"),
    ("moe_post", {"normed_scale": half(1, TOKENS, TOP)}, "normed_scale is torch.bfloat16; it takes fp32"),
    ("moe_post", {"dequant_scale": torch.ones(TOKENS)}, "dequant_scale is [5]; it is [5, 2]"),
    ("moe_post", {"moe_index": int32(TOKENS, TOP)}, "does not name each of 10 rows once"),
    ("moe_post", {"y": half(1, TOKENS, 7)}, "y is [5, 7]; it is [5, 8]"),
    ("quant2d", {"force_sdnn": False}, "only force_sdnn=True"),
    ("quant2d", {"x": half(1, 3, 8).double()}, "fp64 is off"),
    ("quant2d", {"x": half(1, 3, 16)[:, ::2]}, "x is not contiguous"),
    ("quant2d", {"y": half(1, 3, 8)}, "y is torch.bfloat16; it takes int8"),
    ("quant2d", {"y": int8(1, 3, 7)}, "y is [3, 7]; it is [3, 8]"),
    ("quant2d", {"max": half(1, 3, 1)}, "max is torch.bfloat16; it takes fp32"),
    ("quant2d", {"max": torch.empty(8)}, "not one a row"),
    ("gemm_I8_I8_bf16_nt", {"out": random(1, 3, 5)}, "out is torch.float32; it is bf16"),
    ("gemm_I8_I8_bf16_nt", {"lhs": (half(1, 3, 8), torch.ones(3, 1))}, "x is torch.bfloat16; it takes int8"),
    ("gemm_I8_I8_bf16_nt", {"lhs": (int8(1, 3, 7), torch.ones(3, 1))}, "x [3, 7] is [rows, inner]"),
    ("gemm_I8_I8_bf16_nt", {"lhs": (int8(1, 3, 8), torch.ones(3))}, "x_max is [3]; it is [3, 1]"),
    ("gemm_I8_I8_bf16_nt", {"rhs": (int8(3, 8, 5).t(), torch.ones(5, 1))}, "w is not contiguous"),
    ("gemm_I8_I8_bf16_nt", {"rhs": (int8(3, 5, 8), torch.ones(1, 1))}, "w_max is [1, 1]; it is [5, 1]"),
    ("matmul", {"w_pc_max": None}, "int8 wants x_pc_max and w_pc_max"),
    ("matmul", {"x_pc_max": torch.ones(3, 1)}, "x_pc_max is [3, 1]; it is [3]"),
    ("matmul", {"bias": random(1, 5)}, "dtypes differ"),
    ("matmul", {"bias": half(1, 3)}, "bias is [3]; it is [5]"),
    ("matmul", {"x_trans": True}, "are not emulated"),
    ("matmul", {"alpha": 2.0}, "are not emulated"),
    ("matmul", {"x": half(1, 3, 8), "w": half(2, 5, 8)}, "maxima by row belong to int8"),
]  # fmt: skip


@pytest.mark.parametrize("call", CALLS)
def test_the_right_call_is_taken(call: str) -> None:
    getattr(OPS, call.partition(" ")[0])(**CALLS[call]())


@pytest.mark.parametrize(("call", "changes", "message"), REFUSED)
def test_a_limit_is_an_error(call: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(XpuError, match=re.escape(message)):
        getattr(OPS, call.partition(" ")[0])(**CALLS[call](**changes))


def test_routing_is_in_descending_order_and_sums_to_one() -> None:
    given = routing(
        x=torch.tensor([[0.0, 2.0, 1.0, -1.0]]), normed_score=torch.empty(1, 2), topk_index=int32(1, 2)
    )
    OPS.moe_softmax_topk_norm(**given)
    assert given["topk_index"].tolist() == [[1, 2]]
    share = 1 / (1 + torch.tensor(-1.0).exp().item())
    torch.testing.assert_close(given["normed_score"], torch.tensor([[share, 1 - share]]))


@pytest.mark.parametrize(("stable", "chosen"), [(True, [0, 1, 3]), (False, [3, 1, 0])])
def test_only_stable_routing_promises_an_order_among_equals(stable: bool, chosen: list[int]) -> None:
    given = routing(
        x=torch.tensor([[5.0, 5.0, 1.0, 5.0]]),
        normed_score=torch.empty(1, 3),
        topk_index=int32(1, 3),
        stable=stable,
    )
    OPS.moe_softmax_topk_norm(**given)
    assert given["topk_index"].tolist() == [chosen]


def test_counts_are_by_cluster_and_start_from_zero() -> None:
    ids = torch.arange(26, dtype=torch.int32).remainder(3).unsqueeze(1)
    statistic = torch.full((12, 3), 7, dtype=torch.int32)
    OPS.gen_block_statistic(ids, statistic)
    assert statistic.sum(dim=0).tolist() == [9, 9, 8]
    assert int(statistic.sum(dim=1).max()) == 3


def test_sorted_rows_come_back_by_their_index() -> None:
    given = sorting()
    OPS.moe_pre_sorted(**given)
    assert given["expert_m"].tolist() == [4, 3, 0, 3]
    assert given["sorted_tokens_num_lod"].tolist() == [0, 4, 7, 7, 10]
    lod = given["sorted_tokens_num_lod"]
    for token in range(TOKENS):
        for choice in range(TOP):
            row = int(given["moe_index"][token * TOP + choice])
            expert = int(IDS[token, choice])
            assert lod[expert] <= row < lod[expert + 1]
            assert torch.equal(given["moe_expand"][row], given["x"][token])


def test_each_expert_multiplies_its_own_rows() -> None:
    given = multiplying()
    OPS.moe_fc(**given)
    rows = given["y"].view(TOKENS * TOP, INNER)
    for row, expert in enumerate([0] * 4 + [1] * 3 + [3] * 3):
        wanted = given["weight"][expert].float() @ given["x"][row].float()
        torch.testing.assert_close(rows[row].float(), wanted, atol=1e-2, rtol=1e-2)


def test_int8_rows_are_scaled_by_both_maxima() -> None:
    given = multiplying_int8()
    OPS.moe_fc(**given)
    wide = given["weight"].double() * given["w_perchannel_max"].double() / 127
    rows = given["x"].double() * given["x_perchannel_max"].double() / 127
    for row, expert in enumerate([0] * 4 + [1] * 3 + [3] * 3):
        got = given["y"].view(TOKENS * TOP, INNER)[row].double()
        torch.testing.assert_close(got, wide[expert] @ rows[row], atol=1e-2, rtol=1e-2)


def test_combined_rows_are_weighted_by_both_scales() -> None:
    given = combining(dequant_scale=torch.full((TOKENS, TOP), 0.5))
    OPS.moe_post(**given)
    rows = given["x"].view(TOKENS * TOP, HIDDEN).float()
    for token in range(TOKENS):
        index, scale = given["moe_index"][token].long(), given["normed_scale"][token] / 2
        torch.testing.assert_close(given["y"][token].float(), scale @ rows[index], atol=1e-2, rtol=1e-2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_quantised_rows_span_127_and_zeros_stay_zeros(dtype: torch.dtype) -> None:
    x = torch.tensor([[-2.0, -1.0, 0.0, 1.5], [0.0, 0.0, 0.0, 0.0], [0.25, -0.5, 1.0, -0.125]], dtype=dtype)
    values, maxima = torch.empty_like(x, dtype=torch.int8), torch.empty(3)
    OPS.quant2d(x, values, maxima, force_sdnn=True)
    assert maxima.tolist() == [2.0, 0.0, 1.0]
    # -63.5 is a tie: the even -64 is taken.
    assert values.tolist() == [[-127, -64, 0, 95], [0, 0, 0, 0], [32, -64, 127, -16]]


def test_both_int8_products_divide_by_127_twice() -> None:
    x, w, bias = int8(1, 3, 8), int8(2, 5, 8), half(3, 5)
    x_max, w_max = random(4, 3).abs() * 127, random(5, 5).abs() * 127
    wanted = (x.double() @ w.double().T) * x_max[:, None].double() / 127 * w_max.double() / 127
    out = half(6, 3, 5)
    OPS.gemm_I8_I8_bf16_nt((x, x_max[:, None]), (w, w_max[:, None]), out)
    torch.testing.assert_close(out.double(), wanted, atol=0, rtol=2**-8)
    wide = torch.empty(3, 5)
    OPS.matmul(x, w, wide, bias=bias.float(), x_pc_max=x_max, w_pc_max=w_max)
    torch.testing.assert_close(wide.double(), wanted + bias.double(), atol=1e-2, rtol=1e-6)


def test_a_float_product_adds_its_bias() -> None:
    x, w, bias, out = random(1, 3, 8), random(2, 5, 8), random(3, 5), torch.empty(3, 5)
    OPS.matmul(x, w, out, bias=bias)
    torch.testing.assert_close(out, x @ w.T + bias)
