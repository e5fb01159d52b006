"""Attention with a sliding window or a soft cap in torch's own products, for plugins without a kernel for it.

Runs on any torch device and waits for none: sizes come from shapes, never from values.
"""

from __future__ import annotations

import torch
from torch import Tensor


def prefill_bounded(
    query: Tensor, kv_cache: Tensor, page_ids: Tensor, start: int, scale: float, window: int, soft_cap: float
) -> Tensor:
    """As the operator attention_prefill_bounded; only pages that the window reaches are gathered."""
    page = kv_cache.shape[2]
    unreached = max(0, start - window + 1) // page if window else 0
    cells = _gather(kv_cache, page_ids[None, unreached:])
    own = torch.arange(start, start + query.shape[0], device=query.device).unsqueeze(0) - unreached * page
    return _attend(query.unsqueeze(0), cells, own, scale, window, soft_cap)[0]


def decode_bounded(
    query: Tensor,
    kv_cache: Tensor,
    page_table: Tensor,
    lengths: Tensor,
    scale: float,
    window: int,
    soft_cap: float,
) -> Tensor:
    """As the operator attention_decode_bounded; of each row the pages that its window reaches."""
    page, own = kv_cache.shape[2], lengths - 1
    if window:
        first = (lengths - window).clamp(min=0) // page
        count = min(page_table.shape[1], (window + page - 2) // page + 1)
        columns = first.unsqueeze(1) + torch.arange(count, device=query.device)
        # Behind the table's end a page comes twice; its second cells are later than the row's own.
        page_table = page_table.gather(1, columns.clamp(max=page_table.shape[1] - 1))
        own = own - first * page
    cells = _gather(kv_cache, page_table)
    return _attend(query.unsqueeze(1), cells, own.unsqueeze(1), scale, window, soft_cap).squeeze(1)


def _gather(kv_cache: Tensor, page_table: Tensor) -> Tensor:
    """Keys and values float32 [2, b, g, cells, d] of each row's pages, copied."""
    rows = page_table.shape[0]
    gathered = kv_cache.index_select(1, page_table.flatten()).float()
    return gathered.view(2, rows, -1, *kv_cache.shape[3:]).transpose(2, 3)


def _attend(query: Tensor, cells: Tensor, own: Tensor, scale: float, window: int, soft_cap: float) -> Tensor:
    """query [b, n, h, d] at positions own [b, n] among the gathered cells -> as query, summed in float32."""
    batch, count, heads, size = query.shape
    keys, values = cells
    groups = keys.shape[1]
    rows = query.float().view(batch, count, groups, heads // groups, size).permute(0, 2, 3, 1, 4)
    scores = (rows @ keys.unsqueeze(2).transpose(-1, -2)) * scale
    if soft_cap:
        scores = (scores / soft_cap).tanh() * soft_cap
    cell = torch.arange(keys.shape[2], device=query.device)
    hidden = cell > own.unsqueeze(-1)
    if window:
        hidden = hidden | (cell <= own.unsqueeze(-1) - window)
    weights = scores.masked_fill(hidden[:, None, None], float("-inf")).softmax(dim=-1)
    # Cells that nobody here sees may be another request's, and a weight of 0 times NaN would be NaN.
    values = values.masked_fill(hidden.all(dim=1)[:, None, :, None], 0.0)
    attended: Tensor = weights @ values.unsqueeze(2)
    return attended.permute(0, 3, 1, 2, 4).reshape(query.shape).to(query.dtype)
