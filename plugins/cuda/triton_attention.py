"""Decode attention by this plugin's Triton kernel; prefill by whatever else there is."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor

from plugins.cuda.attention import Attention
from plugins.cuda.launch import block_of, on_device_of

_PART_TOKENS = 512
"""Tokens that one program goes through. Parts begin at its multiples whatever the batch, so that a row's
result does not depend on its neighbours.
"""
_BLOCK_TOKENS = 32
_MOST_HEAD_SIZE = 256


class TritonAttention:
    """Any dtype, head sizes up to 256; larger ones go to `otherwise`, as all prefill does.

    kernels: plugins.cuda.triton_kernels, or what stands in for it.
    """

    name: ClassVar[str] = "triton"

    def __init__(self, kernels: Any, otherwise: Attention) -> None:
        self._kernels = kernels
        self._otherwise = otherwise

    def prefill(self, query: Tensor, kv_cache: Tensor, page_ids: Tensor, start: int, scale: float) -> Tensor:
        """The other implementation's."""
        return self._otherwise.prefill(query, kv_cache, page_ids, start, scale)

    def decode(
        self, query: Tensor, kv_cache: Tensor, page_table: Tensor, lengths: Tensor, scale: float
    ) -> Tensor:
        """Parts of each row side by side, then their mean by weight. Nothing waits for the device."""
        if query.shape[-1] > _MOST_HEAD_SIZE:
            return self._otherwise.decode(query, kv_cache, page_table, lengths, scale)
        partial, weight_logs = self._attend_parts(query, kv_cache, page_table, lengths, scale)
        return merge_parts(partial, weight_logs).to(query.dtype)

    def _attend_parts(
        self, query: Tensor, kv_cache: Tensor, page_table: Tensor, lengths: Tensor, scale: float
    ) -> tuple[Tensor, Tensor]:
        rows, heads, size = query.shape
        keys, values = kv_cache.unbind(0)
        _, page, groups, _ = keys.shape
        parts = -(-page_table.shape[1] * page // _PART_TOKENS)
        partial = torch.empty(rows, heads, parts, size, dtype=torch.float32, device=query.device)
        weight_logs = torch.empty(rows, heads, parts, dtype=torch.float32, device=query.device)
        table = page_table.contiguous()
        with on_device_of(query):
            self._kernels.decode_part[rows, groups, parts](
                query.contiguous(),
                keys,
                values,
                table,
                lengths,
                partial,
                weight_logs,
                scale,
                parts,
                keys.stride(0),
                keys.stride(1),
                keys.stride(2),
                table.stride(0),
                group=heads // groups,
                size=size,
                page=page,
                part_tokens=_PART_TOKENS,
                block_heads=block_of(heads // groups),
                block_size=block_of(size),
                block_tokens=_BLOCK_TOKENS,
            )
        return partial, weight_logs


def merge_parts(partial: Tensor, weight_logs: Tensor) -> Tensor:
    """Means [b, h, parts, d] of parts whose weights sum to exp(weight_logs [b, h, parts]) -> [b, h, d]."""
    if partial.shape[2] == 1:
        return partial.squeeze(2)
    shares = weight_logs.softmax(dim=-1)
    return (partial * shares.unsqueeze(-1)).sum(dim=2)
