"""A cache's order in memory: operators index one order, chips lay out another, nothing is moved."""

from __future__ import annotations

import pytest
import torch

from plugins.sdk.kv_layout import DIMENSIONS, KvLayout
from plugins.sdk.reference import operators as reference

HEADS_FIRST = KvLayout(("kv", "page", "head", "token", "value"))
SHAPE = (2, 5, 16, 3, 8)


def test_the_default_order_is_the_operators_own() -> None:
    layout = KvLayout()
    cache = torch.zeros(SHAPE)
    assert layout.memory_shape(SHAPE) == SHAPE
    assert layout.as_cache(cache).is_contiguous()
    assert layout.place(cache) is cache
    assert layout.name == "layer_kv_page_token_head_value"


def test_a_cache_is_a_view_of_its_memory_both_ways() -> None:
    memory = torch.randn(HEADS_FIRST.memory_shape(SHAPE))
    assert memory.shape == (2, 5, 3, 16, 8)
    cache = HEADS_FIRST.as_cache(memory)
    assert cache.shape == SHAPE
    assert cache[1, 4, 15, 2, 7] == memory[1, 4, 2, 15, 7]
    back = HEADS_FIRST.in_memory(cache)
    assert back.data_ptr() == cache.data_ptr() == memory.data_ptr()
    assert torch.equal(back, memory)


def test_a_cache_in_another_order_is_refused_or_placed_anew() -> None:
    cache = torch.randn(SHAPE)
    with pytest.raises(ValueError, match="layer_kv_page_head_token_value"):
        HEADS_FIRST.in_memory(cache)
    placed = HEADS_FIRST.place(cache)
    assert torch.equal(placed, cache)
    assert HEADS_FIRST.in_memory(placed).is_contiguous()
    assert HEADS_FIRST.place(placed) is placed


def test_an_order_that_is_none_cannot_be_made() -> None:
    for order in (DIMENSIONS[1:], (*DIMENSIONS[:4], "head"), ("layer", *DIMENSIONS[1:])):
        with pytest.raises(ValueError, match="orders"):
            KvLayout(order)


def test_reference_operators_read_and_write_any_order() -> None:
    plain = torch.randn(SHAPE)
    other = HEADS_FIRST.place(plain)
    plain = plain.clone()
    key, value, cells = torch.randn(3, 3, 8), torch.randn(3, 3, 8), torch.tensor([0, 33, 79])
    for cache in (plain, other):
        reference.write_kv(key, value, cache, cells)
    assert torch.equal(plain, other)
    assert torch.equal(plain[0, 2, 1], key[1])
    query, pages = torch.randn(4, 6, 8), torch.tensor([4, 0, 2])
    assert torch.equal(
        reference.attention_prefill(query, plain, pages, 30, 0.3),
        reference.attention_prefill(query, other, pages, 30, 0.3),
    )
