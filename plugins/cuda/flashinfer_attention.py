"""Attention by FlashInfer, which reads the pages where they are.

Unverified on hardware: written against flashinfer-python 0.2 to 0.7. The trial at start compares both halves
with the reference and denies them where they differ.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from plugins.cuda.attention import Attention

_WORKSPACE_BYTES = 128 << 20
"""What FlashInfer recommends for the partial results of split sequences."""
_HEAD_SIZES = (64, 128, 256)
_DTYPES = (torch.bfloat16, torch.float16)
_PLAIN_GROUPS = (1, 2)
"""Query heads of a key/value head with which decoding without tensor cores is faster; it has kernels for few
other numbers.
"""


@dataclass(frozen=True)
class _Shape:
    """What a plan is made for, beside the pages."""

    heads: int
    groups: int
    size: int
    page: int
    dtype: torch.dtype
    scale: float
    start: int = 0
    count: int = 1


@dataclass(frozen=True)
class _Plan:
    """A wrapper that was planned for these very tensors: every layer of a step brings the same ones."""

    wrapper: Any
    pages: Tensor
    lengths: Tensor | None
    shape: _Shape

    def serves(self, pages: Tensor, lengths: Tensor | None, shape: _Shape) -> bool:
        return self.pages is pages and self.lengths is lengths and self.shape == shape


class FlashInferAttention:
    """float16 and bfloat16 with a cache of the same dtype, head sizes 64, 128 and 256; all else goes to
    `otherwise`.
    """

    name: ClassVar[str] = "flashinfer"

    def __init__(self, library: Any, otherwise: Attention) -> None:
        self._library = library
        self._otherwise = otherwise
        self._workspaces: dict[torch.device, Tensor] = {}
        self._wrappers: dict[tuple[torch.device, str], Any] = {}
        self._prefill_plan: _Plan | None = None
        self._decode_plan: _Plan | None = None

    def prefill(self, query: Tensor, kv_cache: Tensor, page_ids: Tensor, start: int, scale: float) -> Tensor:
        """BatchPrefillWithPagedKVCacheWrapper, for a batch of one."""
        if not _takes(query, kv_cache):
            return self._otherwise.prefill(query, kv_cache, page_ids, start, scale)
        shape = _shape_of(query, kv_cache, scale, start=start, count=query.shape[0])
        plan = self._prefill_plan
        if plan is None or not plan.serves(page_ids, None, shape):
            plan = self._plan_prefill(page_ids, shape)
            self._prefill_plan = plan
        return _run(plan, query, kv_cache)

    def decode(
        self, query: Tensor, kv_cache: Tensor, page_table: Tensor, lengths: Tensor, scale: float
    ) -> Tensor:
        """BatchDecodeWithPagedKVCacheWrapper."""
        if not _takes(query, kv_cache):
            return self._otherwise.decode(query, kv_cache, page_table, lengths, scale)
        shape = _shape_of(query, kv_cache, scale)
        plan = self._decode_plan
        if plan is None or not plan.serves(page_table, lengths, shape):
            plan = self._plan_decode(page_table, lengths, shape)
            self._decode_plan = plan
        return _run(plan, query, kv_cache)

    def _plan_prefill(self, page_ids: Tensor, shape: _Shape) -> _Plan:
        """Lengths are known on the host, so that nothing waits for the device."""
        total = shape.start + shape.count
        pages = -(-total // shape.page)
        wrapper = self._wrapper(page_ids.device, "prefill")
        wrapper.plan(
            _int32(0, shape.count),
            _int32(0, pages),
            page_ids[:pages].to(torch.int32),
            _int32(total - (pages - 1) * shape.page),
            shape.heads,
            shape.groups,
            shape.size,
            shape.page,
            causal=True,
            sm_scale=shape.scale,
            q_data_type=shape.dtype,
            kv_data_type=shape.dtype,
        )
        return _Plan(wrapper, page_ids, None, shape)

    def _plan_decode(self, page_table: Tensor, lengths: Tensor, shape: _Shape) -> _Plan:
        """FlashInfer plans on the host: the device is waited for once a step."""
        indptr, last, used = page_lists(lengths.cpu(), shape.page, page_table.shape[1])
        plain = shape.heads // shape.groups in _PLAIN_GROUPS
        wrapper = self._wrapper(page_table.device, "decode" if plain else "decode_by_tensor_cores")
        wrapper.plan(
            indptr,
            page_table[used.to(page_table.device)].to(torch.int32),
            last,
            shape.heads,
            shape.groups,
            shape.size,
            shape.page,
            sm_scale=shape.scale,
            q_data_type=shape.dtype,
            kv_data_type=shape.dtype,
        )
        return _Plan(wrapper, page_table, lengths, shape)

    def _wrapper(self, device: torch.device, kind: str) -> Any:
        if (device, kind) not in self._wrappers:
            workspace = self._workspaces.get(device)
            if workspace is None:
                workspace = torch.zeros(_WORKSPACE_BYTES, dtype=torch.uint8, device=device)
                self._workspaces[device] = workspace
            self._wrappers[device, kind] = self._make_wrapper(kind, workspace)
        return self._wrappers[device, kind]

    def _make_wrapper(self, kind: str, workspace: Tensor) -> Any:
        if kind == "prefill":
            return self._library.BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD")
        return self._library.BatchDecodeWithPagedKVCacheWrapper(
            workspace, "NHD", use_tensor_cores=kind == "decode_by_tensor_cores"
        )


def page_lists(lengths: Tensor, page: int, width: int) -> tuple[Tensor, Tensor, Tensor]:
    """Lengths [b] on the host as FlashInfer wants them: where each row's pages begin in one list (int32
    [b + 1]), tokens of its last page (int32 [b]), and which places of a page table [b, width] are in the
    list (bool).
    """
    counts = (lengths + page - 1) // page
    indptr = torch.zeros(len(lengths) + 1, dtype=torch.int32)
    indptr[1:] = counts.cumsum(0)
    last = (lengths - (counts - 1) * page).to(torch.int32)
    return indptr, last, torch.arange(width) < counts.unsqueeze(1)


def _takes(query: Tensor, kv_cache: Tensor) -> bool:
    return query.dtype in _DTYPES and kv_cache.dtype == query.dtype and query.shape[-1] in _HEAD_SIZES


def _shape_of(query: Tensor, kv_cache: Tensor, scale: float, *, start: int = 0, count: int = 1) -> _Shape:
    _, _, page, groups, size = kv_cache.shape
    return _Shape(query.shape[1], groups, size, page, query.dtype, scale, start, count)


def _run(plan: _Plan, query: Tensor, kv_cache: Tensor) -> Tensor:
    keys, values = kv_cache.unbind(0)
    attended: Tensor = plan.wrapper.run(query.contiguous(), (keys, values))
    return attended


def _int32(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)
