"""Attention over the paged cache: what every implementation offers, and the one by torch alone.

The tensor code runs on any torch device; a GPU changes only which kernel of torch runs.
"""

from __future__ import annotations

from typing import ClassVar, Protocol

import torch
from torch import Tensor
from torch.nn import functional


class Attention(Protocol):
    """One way to attend. Shapes and meaning as the operators of the same names on OperatorSet; the cache is
    [2, pages, page, g, d] and contiguous.
    """

    name: ClassVar[str]

    def prefill(self, query: Tensor, kv_cache: Tensor, page_ids: Tensor, start: int, scale: float) -> Tensor:
        """Causal attention of one sequence's run of tokens: query [n, h, d] -> [n, h, d]."""
        ...

    def decode(
        self, query: Tensor, kv_cache: Tensor, page_table: Tensor, lengths: Tensor, scale: float
    ) -> Tensor:
        """Attention of one token of each of b sequences: query [b, h, d] -> [b, h, d]."""
        ...


class TorchAttention:
    """torch's scaled_dot_product_attention over gathered pages: keys and values are copied at each call."""

    name: ClassVar[str] = "torch"

    def prefill(self, query: Tensor, kv_cache: Tensor, page_ids: Tensor, start: int, scale: float) -> Tensor:
        """Key/value heads are repeated: torch's kernels with a mask take as many as query heads."""
        count, heads, _ = query.shape
        total = start + count
        cells = _gather(kv_cache, page_ids.unsqueeze(0))[:, :, :total].to(query.dtype)
        repeated = cells.repeat_interleave(heads // cells.shape[3], dim=3)
        keys, values = repeated.transpose(2, 3)
        seen = None
        if start:
            seen = torch.ones(count, total, dtype=torch.bool, device=query.device).tril_(start)
        attended = functional.scaled_dot_product_attention(
            query.transpose(0, 1).unsqueeze(0),
            keys,
            values,
            attn_mask=seen,
            is_causal=not start,
            scale=scale,
        )
        return attended.squeeze(0).transpose(0, 1).contiguous()

    def decode(
        self, query: Tensor, kv_cache: Tensor, page_table: Tensor, lengths: Tensor, scale: float
    ) -> Tensor:
        """All rows at once; the query heads of a key/value head form its rows.

        Cells past a row's length belong to nobody or to another request: they are cleared in the copy, since
        a weight of 0 times NaN would be NaN.
        """
        rows, heads, size = query.shape
        cells = _gather(kv_cache, page_table).to(query.dtype)
        hidden = torch.arange(cells.shape[2], device=query.device) >= lengths.unsqueeze(1)
        cells.masked_fill_(hidden[None, :, :, None, None], 0.0)
        keys, values = cells.transpose(2, 3)
        groups = keys.shape[1]
        attended = functional.scaled_dot_product_attention(
            query.reshape(rows, groups, heads // groups, size),
            keys,
            values,
            attn_mask=~hidden[:, None, None, :],
            scale=scale,
        )
        return attended.reshape(rows, heads, size)


def _gather(kv_cache: Tensor, page_table: Tensor) -> Tensor:
    """Keys and values [2, b, pages * page, g, d] of each row's pages, copied."""
    rows = page_table.shape[0]
    flat = kv_cache.flatten(2)
    gathered = flat.index_select(1, page_table.flatten())
    return gathered.view(2, rows, -1, *kv_cache.shape[3:])
