"""Every native operator against the reference, over random shapes and both dtypes."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from plugins.cpu.memory import CpuMemory, PackedWeight, can_pack
from plugins.cpu.operators import CpuOperators
from plugins.sdk.operators import REFERENCE, OperatorSet
from plugins.sdk.reference import operators as reference

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


def test_the_whole_catalogue_is_covered() -> None:
    OPERATORS.choose("float32", strict=True)
    OPERATORS.choose("bfloat16", strict=True)
    assert all(getattr(CpuOperators, name) is not getattr(OperatorSet, name) for name in REFERENCE)


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
