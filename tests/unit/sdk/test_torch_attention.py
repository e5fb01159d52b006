"""Bounded attention by torch's products: the reference's numbers, whatever the window, pages and lengths."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from plugins.sdk import torch_attention
from plugins.sdk.reference import operators as reference

HEADS, GROUPS, SIZE = 6, 2, 8
BOUNDS = [(0, 0.0), (1, 0.0), (4, 1.5), (5, 0.0), (9, 0.7), (100, 2.0)]


def random(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("page", [1, 3, 4])
@pytest.mark.parametrize(("window", "soft_cap"), BOUNDS)
def test_decoding_rows_see_their_windows_and_nothing_past_their_lengths(
    page: int, window: int, soft_cap: float
) -> None:
    width = 24 // page
    lengths = torch.tensor([1, 7, 13, 24])
    table = torch.randperm(4 * width, generator=torch.Generator().manual_seed(1)).view(4, width)
    cache = random(2, 2, 4 * width, page, GROUPS, SIZE)
    query = random(3, 4, HEADS, SIZE)
    bounds = (0.4, window, soft_cap)
    expected = reference.attention_decode_bounded(query, cache, table, lengths, *bounds)
    past = torch.arange(width * page) >= lengths.unsqueeze(1)
    for row, column in torch.nonzero(past).tolist():
        cache[:, table[row, column // page], column % page] = float("nan")
    got = torch_attention.decode_bounded(query, cache, table, lengths, *bounds)
    torch.testing.assert_close(got, expected, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("page", [1, 3, 4])
@pytest.mark.parametrize(("start", "count"), [(0, 5), (11, 1), (11, 9), (20, 4)])
@pytest.mark.parametrize(("window", "soft_cap"), BOUNDS)
def test_a_run_of_tokens_sees_what_each_of_them_may(
    page: int, start: int, count: int, window: int, soft_cap: float
) -> None:
    pages = torch.randperm(24, generator=torch.Generator().manual_seed(4))[: -(-(start + count) // page)]
    cache, query = random(5, 2, 24, page, GROUPS, SIZE), random(6, count, HEADS, SIZE)
    bounds = (start, 0.4, window, soft_cap)
    expected = reference.attention_prefill_bounded(query, cache, pages, *bounds)
    got = torch_attention.prefill_bounded(query, cache, pages, *bounds)
    torch.testing.assert_close(got, expected, atol=1e-6, rtol=1e-5)
