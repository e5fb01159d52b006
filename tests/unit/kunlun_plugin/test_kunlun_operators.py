"""Operators through the emulated kunlun_ops against the reference, over random sizes and dtypes."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from meshkit.errors import FailedPrecondition
from plugins.kunlun.memory import KunlunMemory
from plugins.kunlun.operators import KV_LAYOUT
from plugins.sdk.capabilities import Coverage
from plugins.sdk.operators import REFERENCE
from plugins.sdk.planning import CallSite
from plugins.sdk.reference import operators as reference
from tests.unit.kunlun_plugin.emulated import RUNTIME, denied, operators_of, random

MEMORY = KunlunMemory(RUNTIME)
OPERATORS = operators_of(RUNTIME)
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}

dtypes = st.sampled_from(list(TOLERANCE))
seeds = st.integers(0, 2**31)
few = settings(max_examples=12)


def close(got: Tensor, wanted: Tensor) -> None:
    assert (got.dtype, got.shape) == (wanted.dtype, wanted.shape)
    tolerance = TOLERANCE[got.dtype]
    torch.testing.assert_close(got.float(), wanted.float(), atol=tolerance, rtol=tolerance)


def cache_of(seed: int, pages: int, page: int, groups: int, size: int, dtype: torch.dtype) -> Tensor:
    """As the runner allocates it: [2, pages, page, g, d] over memory in the chip's order."""
    shape = KV_LAYOUT.memory_shape((2, pages, page, groups, size))
    cache: Tensor = KV_LAYOUT.as_cache(random(seed, *shape, dtype=dtype))
    return cache


WITHOUT_KERNEL = {
    "sample",
    "qkv_rotary",
    "linear_w4a16",
    "moe_experts_w4a16",
    "gelu_mul",
    "attention_prefill_bounded",
    "attention_decode_bounded",
}


def test_everything_that_has_a_kernel_is_native_and_passed_its_comparison() -> None:
    assert denied(OPERATORS) == {}
    report = OPERATORS.capabilities()
    covered = {each.name for each in report if each.coverage is Coverage.NATIVE}
    assert covered == REFERENCE.keys() - WITHOUT_KERNEL
    reasons = {each.name: each.reason for each in report if each.coverage is Coverage.REFERENCE}
    assert reasons.keys() == WITHOUT_KERNEL
    assert "4-bit kernels" in reasons["linear_w4a16"]
    assert "no kernel" in reasons["qkv_rotary"]


@few
@given(seed=seeds, rows=st.integers(1, 9), dtype=dtypes)
def test_norms_gate_product_and_embedding(seed: int, rows: int, dtype: torch.dtype) -> None:
    x, residual = random(seed, rows, 96, dtype=dtype), random(seed + 1, rows, 96, dtype=dtype)
    weight, matrix = random(seed + 2, 96, dtype=dtype), random(seed + 3, 40, 96, dtype=dtype) / 10
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
    ids = torch.arange(rows)
    close(OPERATORS.embedding(ids, x), reference.embedding(ids, x))


@few
@given(seed=seeds, count=st.integers(1, 9), dtype=dtypes, size=st.sampled_from([32, 64, 128]))
def test_rotary_leaves_its_inputs_alone(seed: int, count: int, dtype: torch.dtype, size: int) -> None:
    heads = random(seed, count, 5, size, dtype=dtype)
    kept = heads.clone()
    angles = torch.outer(torch.arange(50.0), 100.0 ** -(torch.arange(0, size, 2) / size))
    table = torch.cat((angles.cos(), angles.sin()), dim=1)
    positions = torch.randint(50, (count,), generator=torch.Generator().manual_seed(seed))
    arguments = (heads[:, :3], heads[:, 3:], positions, table)
    for got, wanted in zip(OPERATORS.rotary(*arguments), reference.rotary(*arguments), strict=True):
        close(got, wanted)
    assert torch.equal(heads, kept)


@few
@given(seed=seeds, dtype=dtypes, page=st.sampled_from([16, 64]), start=st.integers(0, 40))
def test_cache_writes_and_attention(seed: int, dtype: torch.dtype, page: int, start: int) -> None:
    count, pages = 7, 6
    cache = cache_of(seed, pages, page, 2, 64, dtype)
    expected = cache.clone()
    ids = torch.randperm(pages, generator=torch.Generator().manual_seed(seed))
    ids = ids[: (start + count - 1) // page + 1]
    run = torch.arange(start, start + count)
    cells = ids[run // page] * page + run % page
    key, value = random(seed + 1, count, 2, 64, dtype=dtype), random(seed + 2, count, 2, 64, dtype=dtype)
    OPERATORS.write_kv(key, value, cache, cells)
    reference.write_kv(key, value, expected, cells)
    assert torch.equal(cache, expected)
    query = random(seed + 3, count, 6, 64, dtype=dtype)
    close(
        OPERATORS.attention_prefill(query, cache, ids, start, 0.1),
        reference.attention_prefill(query, expected, ids, start, 0.1),
    )


@few
@given(seed=seeds, dtype=dtypes, lengths=st.lists(st.integers(1, 48), min_size=1, max_size=4))
def test_decode_attention(seed: int, dtype: torch.dtype, lengths: list[int]) -> None:
    cache = cache_of(seed, 8, 16, 3, 64, dtype)
    table = torch.randint(8, (len(lengths), 3), generator=torch.Generator().manual_seed(seed))
    query = random(seed + 1, len(lengths), 9, 64, dtype=dtype)
    arguments = (query, cache, table, torch.tensor(lengths), torch.empty(0), 0.2)
    close(OPERATORS.attention_decode(*arguments), reference.attention_decode(*arguments))


def test_operators_by_name_take_a_cache_in_any_order_and_write_it_in_place() -> None:
    plain = random(1, 2, 4, 16, 2, 64)
    expected = plain.clone()
    inputs = {"key": random(2, 3, 2, 64), "value": random(3, 3, 2, 64), "cells": torch.tensor([5, 40, 17])}
    (written,) = OPERATORS.run("write_kv", {**inputs, "kv_cache": plain}, {})
    reference.write_kv(**inputs, kv_cache=expected)
    assert written is plain
    assert torch.equal(plain, expected)
    prefill = {"query": random(4, 3, 4, 64), "kv_cache": plain, "page_ids": torch.tensor([2])}
    settings_ = {"start": 4, "scale": 0.125}
    (got,) = OPERATORS.run("attention_prefill", prefill, settings_)
    (wanted,) = OPERATORS.run("attention_prefill", prefill, settings_, use_reference=True)
    close(got, wanted)


def test_a_cache_in_another_order_is_refused_not_read_wrongly() -> None:
    with pytest.raises(ValueError, match="layer_kv_page_head_token_value"):
        OPERATORS.attention_prefill(
            random(1, 2, 4, 64), random(2, 2, 4, 16, 2, 64), torch.tensor([0]), 0, 0.1
        )


def test_head_and_page_sizes_without_a_kernel_are_refused() -> None:
    key = random(1, 1, 2, 40)
    with pytest.raises(FailedPrecondition, match="head size is 40") as head:
        OPERATORS.write_kv(key, key, cache_of(1, 2, 16, 2, 40, torch.float32), torch.tensor([0]))
    assert head.value.field == "model_path"
    key = random(1, 1, 2, 64)
    with pytest.raises(FailedPrecondition, match="page_size is 3") as page:
        OPERATORS.write_kv(key, key, cache_of(1, 2, 3, 2, 64, torch.float32), torch.tensor([0]))
    assert page.value.field == "page_size"


def test_a_draw_is_the_references_to_the_token() -> None:
    logits = random(1, 4, 300) * 3
    rows = {
        "temperature": torch.full((4,), 0.9),
        "top_k": torch.tensor([0, 5, 50, 300]),
        "top_p": torch.tensor([1.0, 0.9, 0.5, 0.99]),
        "min_p": torch.tensor([0.0, 0.0, 0.1, 0.0]),
        "uniform": torch.tensor([0.1, 0.5, 0.9, 0.3], dtype=torch.float64),
    }
    table = OPERATORS.choose([CallSite("sample", "sampler", {"V": 300})], dtype="float32")
    drawn = table.bind("sample", "sampler", V=300).call(logits, *rows.values())
    assert torch.equal(drawn, REFERENCE["sample"](logits, **rows))
    (decision,) = table.decisions
    assert decision.choice == "reference"
    assert "float64" in decision.reason
