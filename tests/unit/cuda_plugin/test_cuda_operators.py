"""Tensor code of the operators against the reference on the host, and its corners."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from plugins.cuda.attention import TorchAttention
from plugins.cuda.memory import CudaMemory
from plugins.cuda.quantised import mix_experts, pad_int8_weight
from plugins.sdk.operators import REFERENCE
from plugins.sdk.reference import operators as reference
from plugins.sdk.reference import quantized
from tests.unit.cuda_plugin.stand_in import operators_of, random, runtime_of

OPERATORS = operators_of()
MEMORY = CudaMemory(runtime_of())
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}

dtypes = st.sampled_from(list(TOLERANCE))
seeds = st.integers(0, 2**31)
few = settings(max_examples=15)


def close(got: Tensor, wanted: Tensor) -> None:
    assert (got.dtype, got.shape) == (wanted.dtype, wanted.shape)
    tolerance = TOLERANCE[got.dtype]
    torch.testing.assert_close(got.float(), wanted.float(), atol=tolerance, rtol=tolerance)


@few
@given(seed=seeds, rows=st.integers(1, 9), dtype=dtypes)
def test_norms_gate_product_and_embedding(seed: int, rows: int, dtype: torch.dtype) -> None:
    x, residual = random(seed, rows, 96, dtype=dtype), random(seed + 1, rows, 96, dtype=dtype)
    weight, matrix = random(seed + 2, 96, dtype=dtype), random(seed + 3, 40, 96, dtype=dtype) / 10
    before = x.clone(), residual.clone()
    close(OPERATORS.rms_norm(x, weight, 1e-5), reference.rms_norm(x, weight, 1e-5))
    pairs = zip(
        OPERATORS.add_rms_norm(x, residual, weight, 1e-5),
        reference.add_rms_norm(x, residual, weight, 1e-5),
        strict=True,
    )
    for got, wanted in pairs:
        close(got, wanted)
    close(OPERATORS.silu_mul(x), reference.silu_mul(x))
    close(OPERATORS.linear(x, matrix, None), reference.linear(x, matrix))
    close(OPERATORS.embedding(torch.arange(rows), x), x)
    assert torch.equal(x, before[0])
    assert torch.equal(residual, before[1])


@few
@given(seed=seeds, count=st.integers(1, 9), dtype=dtypes, size=st.sampled_from([8, 64]))
def test_rotary_and_writes_to_the_cache(seed: int, count: int, dtype: torch.dtype, size: int) -> None:
    heads = random(seed, count, 5, size, dtype=dtype)
    angles = torch.outer(torch.arange(50.0), 100.0 ** -(torch.arange(0, size, 2) / size))
    table = torch.cat((angles.cos(), angles.sin()), dim=1)
    positions = torch.randint(50, (count,), generator=torch.Generator().manual_seed(seed))
    arguments = (heads[:, :3], heads[:, 3:], positions, table)
    for got, wanted in zip(OPERATORS.rotary(*arguments), reference.rotary(*arguments), strict=True):
        close(got, wanted)
    got_cache, wanted_cache = (random(seed, 2, 4, 3, 2, size, dtype=torch.float16) for _ in range(2))
    cells = torch.randperm(12, generator=torch.Generator().manual_seed(seed))[:count]
    OPERATORS.write_kv(heads[:, :2], heads[:, 3:], got_cache, cells)
    reference.write_kv(heads[:, :2], heads[:, 3:], wanted_cache, cells)
    assert torch.equal(got_cache, wanted_cache)


@few
@given(
    seed=seeds, page=st.sampled_from([1, 3, 16]), start=st.integers(0, 20), count=st.integers(1, 9),
    dtype=dtypes, kv_dtype=dtypes,
)  # fmt: skip
def test_prefill_over_gathered_pages(
    seed: int, page: int, start: int, count: int, dtype: torch.dtype, kv_dtype: torch.dtype
) -> None:
    cache = random(seed, 2, 32, page, 2, 8, dtype=kv_dtype)
    page_ids = torch.randperm(32, generator=torch.Generator().manual_seed(seed))
    query = random(seed + 1, count, 6, 8, dtype=dtype)
    arguments = (query, cache, page_ids, start, 0.35)
    close(OPERATORS.attention_prefill(*arguments), reference.attention_prefill(*arguments))


def decode_inputs(
    seed: int, rows: int, page: int, dtype: torch.dtype, kv_dtype: torch.dtype
) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    width = 4
    lengths = torch.randint(1, width * page + 1, (rows,), generator=generator)
    table = torch.randint(0, 12, (rows, width), generator=generator)
    hidden = torch.arange(width * page) >= lengths.unsqueeze(1)
    return {
        "query": random(seed + 1, rows, 6, 8, dtype=dtype),
        "kv_cache": random(seed, 2, 12, page, 2, 8, dtype=kv_dtype),
        "page_table": torch.where(torch.arange(width) * page < lengths.unsqueeze(1), table, 0),
        "lengths": lengths,
        "mask": torch.zeros(hidden.shape, dtype=dtype).masked_fill(hidden, float("-inf")),
    }


@few
@given(seed=seeds, page=st.sampled_from([1, 3, 16]), rows=st.integers(1, 5), dtype=dtypes, kv_dtype=dtypes)
def test_decode_over_rows_of_different_length(
    seed: int, page: int, rows: int, dtype: torch.dtype, kv_dtype: torch.dtype
) -> None:
    given_inputs = decode_inputs(seed, rows, page, dtype, kv_dtype)
    close(
        OPERATORS.attention_decode(**given_inputs, scale=0.35),
        reference.attention_decode(**given_inputs, scale=0.35),
    )


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_another_requests_poisoned_page_harms_no_neighbour(poison: float) -> None:
    """A short row's table ends in page 0, which belongs to somebody whose values are not finite."""
    cache = random(3, 2, 4, 4, 2, 8)
    table, lengths = torch.tensor([[1, 0, 0], [2, 3, 1]]), torch.tensor([3, 12])
    query = random(4, 2, 6, 8)
    clean = TorchAttention().decode(query, cache, table, lengths, 0.35)
    cache[:, 0] = poison
    poisoned = TorchAttention().decode(query, cache, table, lengths, 0.35)
    assert torch.equal(poisoned, clean)


def test_a_row_of_a_batch_is_attended_as_alone() -> None:
    given_inputs = decode_inputs(7, 5, 16, torch.float32, torch.float32)
    together = OPERATORS.attention_decode(**given_inputs, scale=0.35)
    for row in range(5):
        alone = {
            name: value if name == "kv_cache" else value[row : row + 1]
            for name, value in given_inputs.items()
        }
        close(OPERATORS.attention_decode(**alone, scale=0.35), together[row : row + 1])


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("renormalize", [0, 1])
def test_experts_that_tie_are_taken_by_the_lowest_id(dtype: torch.dtype, renormalize: int) -> None:
    logits = torch.tensor([[1.0, 3.0, 3.0, 1.0, 3.0], [2.0] * 5, [0.0, -1.0, 5.0, 5.0, 0.0]], dtype=dtype)
    weights, ids = OPERATORS.moe_route(logits, 4, renormalize)
    assert ids.tolist() == [[1, 2, 4, 0], [0, 1, 2, 3], [2, 3, 0, 4]]
    wanted_weights, wanted_ids = REFERENCE["moe_route"](logits, 4, renormalize)
    assert torch.equal(ids, wanted_ids)
    torch.testing.assert_close(weights, wanted_weights)
    assert bool((weights.sum(dim=-1) > 1 - 1e-6).all()) is bool(renormalize)


@few
@given(
    seed=seeds, rows=st.sampled_from([1, 5, 16, 17, 33, 40]), columns=st.integers(1, 40),
    outputs=st.integers(1, 40), dtype=dtypes, biased=st.booleans(),
)  # fmt: skip
def test_w8a8_equals_the_reference_for_any_size(
    seed: int, rows: int, columns: int, outputs: int, dtype: torch.dtype, biased: bool
) -> None:
    generator = torch.Generator().manual_seed(seed)
    x = random(seed, rows, columns, dtype=dtype)
    x[0] = 0.0
    weight = torch.randint(-127, 128, (outputs, columns), generator=generator).to(torch.int8)
    scale = torch.rand(outputs, generator=generator) / 100
    bias = random(seed + 1, outputs, dtype=dtype) if biased else None
    placed = MEMORY.relayout_weight(weight, operator="linear_w8a8", parameter="weight")
    assert placed.shape[0] % 8 == placed.shape[1] % 8 == 0
    got = OPERATORS.linear_w8a8(x, placed, scale, bias)
    close(got, quantized.linear_w8a8(x, weight, scale, bias))


def test_only_matrices_of_int8_products_are_padded() -> None:
    weight = torch.ones(2, 3, 5, dtype=torch.int8)
    for parameter in ("gate_up", "down"):
        padded = MEMORY.relayout_weight(weight, operator="moe_experts_w8a8", parameter=parameter)
        assert padded.shape == (2, 8, 8)
        assert torch.equal(padded[:, :3, :5], weight)
        assert int(padded.sum()) == weight.sum()
    scale = torch.ones(2, 3)
    assert MEMORY.relayout_weight(scale, operator="moe_experts_w8a8", parameter="down_scale") is scale
    assert MEMORY.relayout_weight(weight, operator="linear").shape == weight.shape
    assert pad_int8_weight(torch.ones(8, 16, dtype=torch.int8)).shape == (8, 16)


@few
@given(seed=seeds, rows=st.integers(1, 9), dtype=dtypes)
def test_w4a16_equals_the_reference(seed: int, rows: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(seed)
    packed = torch.randint(0, 256, (10, 12), generator=generator).to(torch.uint8)
    scale = torch.rand(10, 3, generator=generator) / 10
    zero = torch.randint(0, 16, (10, 3), generator=generator).to(torch.uint8)
    x, bias = random(seed, rows, 24, dtype=dtype), random(seed + 1, 10, dtype=dtype)
    got = OPERATORS.linear_w4a16(x, packed, scale, zero, bias)
    wanted = quantized.linear_w4a16(x, packed, scale, zero, bias)
    # Weights are rounded to the dtype: the error goes with the values that are summed.
    tolerance = TOLERANCE[dtype] * max(1.0, float(wanted.float().abs().max()))
    torch.testing.assert_close(got.float(), wanted.float(), atol=tolerance, rtol=0.0)


@few
@given(seed=seeds, rows=st.integers(1, 12), dtype=dtypes)
def test_experts_equal_the_reference_with_some_that_nobody_chose(
    seed: int, rows: int, dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(seed)
    x = random(seed, rows, 16, dtype=dtype)
    gate_up, down = (
        random(seed + 1, 6, 24, 16, dtype=dtype) / 4,
        random(seed + 2, 6, 16, 12, dtype=dtype) / 4,
    )
    ids = torch.rand(rows, 5, generator=generator).argsort(dim=1)[:, :2]
    weights = torch.rand(rows, 2, generator=generator)
    arguments = (x, gate_up, down, weights, ids)
    close(OPERATORS.moe_experts(*arguments), REFERENCE["moe_experts"](*arguments))


def test_experts_are_summed_in_the_order_of_the_choice() -> None:
    """Whatever order the experts ran in, so that equal calls give equal bits."""
    x = torch.ones(1, 1)
    ids, weights = torch.tensor([[2, 0, 1]]), torch.tensor([[1e8, 1.0, -1e8]])
    mixed = mix_experts(x, weights, ids, 3, lambda rows, expert: rows)
    assert mixed.item() == (torch.tensor([1e8, 1.0, -1e8]).sum()).item()


@few
@given(seed=seeds)
def test_a_draw_is_the_references_to_the_token(seed: int) -> None:
    logits = random(seed, 6, 300) * 3
    rows = {
        "temperature": torch.tensor([0.9, 0.3, 1.0, 1.7, 1.0, 0.8]),
        "top_k": torch.tensor([0, 5, 50, 300, 0, 0]),
        "top_p": torch.tensor([1.0, 0.9, 0.5, 0.99, 1.0, 1.0]),
        "min_p": torch.tensor([0.0, 0.0, 0.1, 0.0, 0.2, 0.0]),
        "uniform": torch.rand(6, generator=torch.Generator().manual_seed(seed), dtype=torch.float64),
    }
    assert torch.equal(OPERATORS.sample(logits, **rows), REFERENCE["sample"](logits, **rows))
    unfiltered = {**rows, "top_k": torch.zeros(6, dtype=torch.int64), "top_p": torch.ones(6)}
    assert torch.equal(OPERATORS.sample(logits, **unfiltered), REFERENCE["sample"](logits, **unfiltered))
