"""Every native operator against the reference, over random shapes and both dtypes."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from plugins.cpu import operators as cpu_operators
from plugins.cpu.memory import CpuMemory, PackedWeight, can_pack
from plugins.cpu.operators import CpuOperators
from plugins.sdk.catalogue import CATALOGUE
from plugins.sdk.operators import REFERENCE
from plugins.sdk.planning import CallSite
from plugins.sdk.reference import operators as reference
from plugins.sdk.reference import quantized
from plugins.sdk.reference.routing import moe_route

MEMORY = CpuMemory()
OPERATORS = CpuOperators(MEMORY)
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 3e-2}

dtypes = st.sampled_from(list(TOLERANCE))
seeds = st.integers(0, 2**31)


def random(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def close(native: Tensor, wanted: Tensor) -> None:
    assert native.dtype == wanted.dtype
    assert native.shape == wanted.shape
    tolerance = TOLERANCE[native.dtype]
    torch.testing.assert_close(native.float(), wanted.float(), atol=tolerance, rtol=tolerance)


def sites() -> list[CallSite]:
    """One for each shape class of the catalogue."""
    return [
        CallSite(name, each.name, {symbol: each.sizes[symbol] for symbol in spec.fixed_symbols})
        for name, spec in CATALOGUE.items()
        for each in spec.shape_classes
    ]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_whole_catalogue_runs_on_the_plugin_s_own_operators_or_on_their_parts(dtype: str) -> None:
    table = OPERATORS.choose(sites(), dtype=dtype, strict=True)
    assert {each.name for each in table.decisions if each.choice == "decomposed"} == {
        "qkv_rotary", "moe_experts", "moe_experts_w8a8", "moe_experts_w4a16"
    }  # fmt: skip
    assert {each.choice for each in table.decisions} == {"native", "fused", "decomposed"}


@given(seed=seeds, rows=st.sampled_from([1, 2, 3, 4, 5, 17, 40]), dtype=dtypes, biased=st.booleans())
def test_linear(seed: int, rows: int, dtype: torch.dtype, biased: bool) -> None:
    x, weight = random(seed, rows, 48, dtype=dtype), random(seed + 1, 40, 48, dtype=dtype) / 7
    bias = random(seed + 2, 40, dtype=dtype) if biased else None
    packed = MEMORY.relayout_weight(weight, operator="linear")
    assert isinstance(packed, PackedWeight) is can_pack(dtype)
    close(OPERATORS.linear(x, packed, bias), reference.linear(x, weight, bias))


def test_only_matrices_of_linear_are_packed() -> None:
    weight = torch.ones(4, 4)
    assert MEMORY.relayout_weight(weight, operator="embedding") is weight
    assert MEMORY.relayout_weight(weight.double(), operator="linear").dtype == torch.float64


@given(seed=seeds, rows=st.integers(1, 9), dtype=dtypes)
def test_norms_gate_and_embedding(seed: int, rows: int, dtype: torch.dtype) -> None:
    x, residual = random(seed, rows, 64, dtype=dtype), random(seed + 1, rows, 64, dtype=dtype)
    weight = random(seed + 2, 64, dtype=dtype)
    close(OPERATORS.rms_norm(x, weight, 1e-5), reference.rms_norm(x, weight, 1e-5))
    before = x.clone(), residual.clone()
    for native, wanted in zip(
        OPERATORS.add_rms_norm(x, residual, weight, 1e-5),
        reference.add_rms_norm(x, residual, weight, 1e-5),
        strict=True,
    ):
        close(native, wanted)
    assert torch.equal(x, before[0])
    assert torch.equal(residual, before[1])
    close(OPERATORS.silu_mul(x), reference.silu_mul(x))
    ids = torch.arange(rows) % 5
    close(OPERATORS.embedding(ids, x[:1].expand(5, -1)), reference.embedding(ids, x[:1].expand(5, -1)))


@given(seed=seeds, rows=st.integers(1, 9), dtype=dtypes)
def test_rotary_on_views_of_one_product(seed: int, rows: int, dtype: torch.dtype) -> None:
    heads = random(seed, rows, 7, 8, dtype=dtype)
    query, key = heads[:, :4], heads[:, 4:6]
    positions = torch.arange(rows) * 3
    angles = torch.outer(torch.arange(30.0), torch.tensor([1.0, 0.3, 0.1, 0.01]))
    cos_sin = torch.cat((angles.cos(), angles.sin()), dim=1)
    for native, wanted in zip(
        OPERATORS.rotary(query, key, positions, cos_sin),
        reference.rotary(query, key, positions, cos_sin),
        strict=True,
    ):
        close(native, wanted)


def filled_cache(seed: int, page: int, dtype: torch.dtype) -> Tensor:
    return random(seed, 2, 12, page, 2, 8, dtype=dtype)


@given(
    seed=seeds,
    page=st.sampled_from([1, 3, 16]),
    start=st.integers(0, 8),
    count=st.integers(1, 4),
    dtype=dtypes,
    kv_dtype=dtypes,
)
def test_prefill_attention(
    seed: int, page: int, start: int, count: int, dtype: torch.dtype, kv_dtype: torch.dtype
) -> None:
    cache = filled_cache(seed, page, kv_dtype)
    page_ids = torch.randperm(12, generator=torch.Generator().manual_seed(seed))
    page_ids = page_ids[: (start + count - 1) // page + 1]
    query = random(seed + 1, count, 6, 8, dtype=dtype)
    close(
        OPERATORS.attention_prefill(query, cache, page_ids, start, 0.35),
        reference.attention_prefill(query, cache, page_ids, start, 0.35),
    )


@given(seed=seeds, page=st.sampled_from([1, 3, 16]), rows=st.integers(1, 5), dtype=dtypes, kv_dtype=dtypes)
def test_decode_attention_over_rows_of_different_length(
    seed: int, page: int, rows: int, dtype: torch.dtype, kv_dtype: torch.dtype
) -> None:
    cache = filled_cache(seed, page, kv_dtype)
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, 12, (rows,), generator=generator)
    width = (int(lengths.max()) - 1) // page + 1
    page_table = torch.randint(0, 12, (rows, width), generator=generator)
    hidden = torch.arange(width * page) >= lengths.unsqueeze(1)
    mask = torch.zeros(hidden.shape, dtype=dtype).masked_fill(hidden, float("-inf"))
    query = random(seed + 1, rows, 6, 8, dtype=dtype)
    close(
        OPERATORS.attention_decode(query, cache, page_table, lengths, mask, 0.35),
        reference.attention_decode(query, cache, page_table, lengths, mask, 0.35),
    )


@given(seed=seeds, dtype=dtypes, kv_dtype=dtypes)
def test_write_kv_touches_its_cells_and_no_other(
    seed: int, dtype: torch.dtype, kv_dtype: torch.dtype
) -> None:
    native, wanted = filled_cache(seed, 4, kv_dtype), filled_cache(seed, 4, kv_dtype)
    key, value = random(seed + 1, 3, 2, 8, dtype=dtype), random(seed + 2, 3, 2, 8, dtype=dtype)
    cells = torch.tensor([5, 0, 47])
    OPERATORS.write_kv(key, value, native, cells)
    reference.write_kv(key, value, wanted, cells)
    assert torch.equal(native, wanted)


@pytest.mark.parametrize("rows", [1, 2, 4, 33])
def test_a_row_of_linear_does_not_depend_on_its_neighbours_beyond_rounding(rows: int) -> None:
    weight = MEMORY.relayout_weight(random(1, 64, 128), operator="linear")
    x = random(2, 33, 128)
    together = OPERATORS.linear(x, weight)
    torch.testing.assert_close(OPERATORS.linear(x[:rows], weight), together[:rows], atol=1e-4, rtol=1e-4)


@given(
    seed=seeds,
    rows=st.sampled_from([1, 7, 33, 64]),
    experts=st.sampled_from([8, 60]),
    renormalize=st.integers(0, 1),
    dtype=dtypes,
)
def test_routes_are_the_reference_s_with_ties_and_without(
    seed: int, rows: int, experts: int, renormalize: int, dtype: torch.dtype
) -> None:
    logits = random(seed, rows, experts, dtype=dtype) * 40
    logits[:, ::3] = logits[:, :1]  # equals, and others whose probability underflows
    weights, ids = OPERATORS.moe_route(logits, 5, renormalize)
    wanted_weights, wanted_ids = moe_route(logits, 5, renormalize)
    assert torch.equal(ids, wanted_ids)
    torch.testing.assert_close(weights, wanted_weights)


def int8(seed: int, *shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    values = torch.randint(-127, 128, shape, generator=generator, dtype=torch.int8)
    values[..., 0, :] = 127  # the largest sums there are
    return values


@pytest.mark.parametrize("exact_int8", [True, False])
@pytest.mark.parametrize("inner", [63, 1024, 2500])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_int8_sums_are_exact_with_the_processor_s_instructions_and_without(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, inner: int, exact_int8: bool
) -> None:
    if exact_int8 and not cpu_operators._has_exact_int8():
        pytest.skip("this processor saturates sums of int8 products")
    monkeypatch.setattr(cpu_operators, "_has_exact_int8", lambda: exact_int8)
    x, weight, scale = random(1, 6, inner, dtype=dtype), int8(2, 40, inner), random(3, 40).abs()
    x[0], x[1] = 1.0, 0.0
    for bias in (None, random(4, 40, dtype=dtype)):
        close(OPERATORS.linear_w8a8(x, weight, scale, bias), quantized.linear_w8a8(x, weight, scale, bias))


@given(seed=seeds, rows=st.integers(1, 9), groups=st.sampled_from([1, 3]), dtype=dtypes, biased=st.booleans())
def test_four_bit_weights(seed: int, rows: int, groups: int, dtype: torch.dtype, biased: bool) -> None:
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randint(0, 256, (40, 33), generator=generator, dtype=torch.uint8)
    zero = torch.randint(0, 16, (40, groups), generator=generator, dtype=torch.uint8)
    scale, x = random(seed, 40, groups).abs() / 50, random(seed + 1, rows, 66, dtype=dtype)
    bias = random(seed + 2, 40, dtype=dtype) if biased else None
    close(
        OPERATORS.linear_w4a16(x, weight, scale, zero, bias),
        quantized.linear_w4a16(x, weight, scale, zero, bias),
    )


def test_groups_that_share_a_byte_are_left_to_the_reference() -> None:
    site = CallSite("linear_w4a16", "proj", {"J": 33, "N": 4, "Q": 6})
    (decision,) = OPERATORS.choose([site], dtype="float32").decisions
    assert decision.choice == "reference"
    assert "J % Q == 0" in decision.reason


@given(seed=seeds, rows=st.integers(1, 9), dtype=dtypes)
def test_experts_by_their_parts_over_packed_weights(seed: int, rows: int, dtype: torch.dtype) -> None:
    sizes = {"K": 32, "I": 24, "E": 6, "A": 2}
    x, gate_up = random(seed, rows, 32, dtype=dtype), random(seed + 1, 6, 48, 32, dtype=dtype) / 6
    down = random(seed + 2, 6, 32, 24, dtype=dtype) / 5
    weights, ids = moe_route(random(seed + 3, rows, 6), 2, 1)
    table = OPERATORS.choose([CallSite("moe_experts", "mlp", sizes)], dtype=str(dtype).removeprefix("torch."))
    bound = table.bind("moe_experts", "mlp", **sizes)
    placed = bound.place("gate_up", gate_up), bound.place("down", down)
    assert isinstance(placed[0][0], PackedWeight) is can_pack(dtype)
    close(bound.call(x, *placed, weights, ids), REFERENCE["moe_experts"](x, gate_up, down, weights, ids))
