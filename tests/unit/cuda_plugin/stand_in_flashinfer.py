"""A stand-in for FlashInfer on the host: its two wrappers by what its documentation says of their arguments.

Parameters have FlashInfer's names, so that a call with another one fails. It shows that pages, lengths and
plans are handed over as documented; it shows nothing of FlashInfer's kernels.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class _Paged:
    """What both wrappers have in common. plans: how often a plan was made, by all wrappers of the library."""

    plans = 0

    def __init__(self, float_workspace_buffer: Tensor, kv_layout: str = "NHD") -> None:
        assert float_workspace_buffer.dtype == torch.uint8
        assert float_workspace_buffer.numel() >= 1 << 20
        assert kv_layout == "NHD"
        self._rows: list[tuple[Tensor, int]] = []
        self._sm_scale = 0.0

    def _take(
        self, indptr: Tensor, indices: Tensor, last_page_len: Tensor, page_size: int, sm_scale: float
    ) -> None:
        assert {tensor.dtype for tensor in (indptr, indices, last_page_len)} == {torch.int32}
        assert int(indptr[-1]) == len(indices)
        assert bool(((last_page_len >= 1) & (last_page_len <= page_size)).all())
        type(self).plans += 1
        self._sm_scale = sm_scale
        self._rows = []
        for row, (begin, end) in enumerate(zip(indptr[:-1].tolist(), indptr[1:].tolist(), strict=True)):
            length = (end - begin - 1) * page_size + int(last_page_len[row])
            self._rows.append((indices[begin:end].long(), length))

    def _attend(self, query: Tensor, cache: tuple[Tensor, Tensor], row: int) -> Tensor:
        """The last len(query) tokens of a row, each over all up to itself."""
        pages, length = self._rows[row]
        count, heads, _ = query.shape
        keys, values = (
            part[pages].flatten(0, 1)[:length].float().repeat_interleave(heads // part.shape[2], dim=1)
            for part in cache
        )
        scores = torch.einsum("nhd,lhd->hnl", query.float(), keys) * self._sm_scale
        late = torch.arange(length) > torch.arange(length - count, length).unsqueeze(1)
        weights = scores.masked_fill(late, float("-inf")).softmax(dim=-1)
        return torch.einsum("hnl,lhd->nhd", weights, values).to(query.dtype)


class BatchPrefillWithPagedKVCacheWrapper(_Paged):
    """For a batch of one: what the plugin asks for."""

    def plan(
        self,
        qo_indptr: Tensor,
        paged_kv_indptr: Tensor,
        paged_kv_indices: Tensor,
        paged_kv_last_page_len: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        *,
        causal: bool = False,
        sm_scale: float,
        q_data_type: torch.dtype,
        kv_data_type: torch.dtype,
    ) -> None:
        assert causal
        assert q_data_type == kv_data_type
        self._form = (int(qo_indptr[-1]), num_qo_heads, head_dim_qk, num_kv_heads)
        self._take(paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len, page_size, sm_scale)

    def run(self, q: Tensor, paged_kv_cache: tuple[Tensor, Tensor]) -> Tensor:
        assert (*q.shape, paged_kv_cache[0].shape[2]) == self._form
        return self._attend(q, paged_kv_cache, 0)


class BatchDecodeWithPagedKVCacheWrapper(_Paged):
    """One token of each row."""

    def __init__(
        self, float_workspace_buffer: Tensor, kv_layout: str = "NHD", *, use_tensor_cores: bool = False
    ) -> None:
        super().__init__(float_workspace_buffer, kv_layout)
        self._use_tensor_cores = use_tensor_cores

    def plan(
        self,
        indptr: Tensor,
        indices: Tensor,
        last_page_len: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        *,
        sm_scale: float,
        q_data_type: torch.dtype,
        kv_data_type: torch.dtype,
    ) -> None:
        assert q_data_type == kv_data_type
        assert self._use_tensor_cores or num_qo_heads // num_kv_heads in (1, 2, 4, 8)
        self._form = (num_qo_heads, head_dim, num_kv_heads)
        self._take(indptr, indices, last_page_len, page_size, sm_scale)

    def run(self, q: Tensor, paged_kv_cache: tuple[Tensor, Tensor]) -> Tensor:
        assert (*q.shape[1:], paged_kv_cache[0].shape[2]) == self._form
        rows = [self._attend(q[row : row + 1], paged_kv_cache, row) for row in range(q.shape[0])]
        return torch.cat(rows)


class Library:
    """The module. Each has plans of its own to count; `changes` replace wrappers."""

    def __init__(self, **changes: type) -> None:
        self.prefill: Any = type("Prefill", (BatchPrefillWithPagedKVCacheWrapper,), {"plans": 0})
        self.decode: Any = type("Decode", (BatchDecodeWithPagedKVCacheWrapper,), {"plans": 0})
        self.BatchPrefillWithPagedKVCacheWrapper = changes.get("prefill", self.prefill)
        self.BatchDecodeWithPagedKVCacheWrapper = changes.get("decode", self.decode)
