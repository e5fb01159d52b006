"""Operators on the host: packed oneDNN products, torch's fused normalisation and attention."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional

from plugins.cpu.memory import PackedWeight
from plugins.sdk import torch_attention
from plugins.sdk.operators import OperatorSet
from plugins.sdk.reference import quantized, routing, sampling
from plugins.sdk.reference.operators import to_cell

_LEAST_ROWS = 4
"""A single row runs faster as one of four: oneDNN's kernel for one row reads the weights more slowly."""
_CANDIDATES = 1024
"""Largest scores looked at first by top-p; only a distribution flatter than that is sorted as a whole."""
_SORTED_ROWS = 32
"""Up to so many rows a sort of all experts is faster than finding the largest."""
_EXACT_TERMS = 1024
"""Products of int8 that float32 adds up exactly: 1024 * 127 * 127 < 2 ** 24."""


class CpuOperators(OperatorSet):
    """Covers the catalogue, but for what is as fast by its parts: qkv_rotary and experts, whose products
    oneDNN has packed weights for.
    """

    constraints: ClassVar[Mapping[str, Sequence[str]]] = {"linear_w4a16": ("J % Q == 0",)}
    """A byte has one scale and one zero point."""

    def embedding(self, token_ids: Tensor, weight: Tensor) -> Tensor:
        """torch's gather of rows."""
        return functional.embedding(token_ids, weight)

    def linear(self, x: Tensor, weight: Any, bias: Tensor | None = None) -> Tensor:
        """oneDNN on a packed weight, else torch's own product (a dtype that oneDNN cannot pack here)."""
        if not isinstance(weight, PackedWeight):
            return functional.linear(x, weight, bias)
        rows = x.shape[0]
        if rows < _LEAST_ROWS:
            x = x.repeat(_LEAST_ROWS, 1)
        product: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight.packed, bias, "none", [], "")
        return product[:rows]

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """torch's fused kernel."""
        return functional.rms_norm(x, (x.shape[-1],), weight, eps)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """torch's fused kernel after a plain sum."""
        total = x + residual
        return functional.rms_norm(total, (total.shape[-1],), weight, eps), total

    def rotary(self, query: Tensor, key: Tensor, positions: Tensor, cos_sin: Tensor) -> tuple[Tensor, Tensor]:
        """Both tensors with one look-up."""
        half = cos_sin.shape[1] // 2
        rows = cos_sin[positions].to(query.dtype).unsqueeze(1)
        cos, sin = rows[..., :half], rows[..., half:]
        return _rotate(query, cos, sin), _rotate(key, cos, sin)

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """Two passes, no concatenation."""
        half = gate_up.shape[-1] // 2
        return functional.silu(gate_up[..., :half]).mul_(gate_up[..., half:])

    def write_kv(self, key: Tensor, value: Tensor, kv_cache: Tensor, cells: Tensor) -> None:
        """Rows copied by index; float8 as its bits, for which torch has a copy."""
        dtype = kv_cache.dtype
        carrier = torch.uint8 if dtype.itemsize == 1 else dtype
        flat = kv_cache.view(carrier).view(2, -1, *kv_cache.shape[3:])
        flat[0].index_copy_(0, cells, to_cell(key, dtype).view(carrier))
        flat[1].index_copy_(0, cells, to_cell(value, dtype).view(carrier))

    def attention_prefill(
        self, query: Tensor, kv_cache: Tensor, page_ids: Tensor, start: int, scale: float
    ) -> Tensor:
        """Flash attention over the gathered pages."""
        count, heads, size = query.shape
        keys, values = _gather(kv_cache, page_ids.unsqueeze(0), query.dtype)
        total = start + count
        keys, values = keys[:, :, :total], values[:, :, :total]
        mask = None
        if start:
            mask = torch.ones(count, total, dtype=torch.bool).tril_(start)
        attended = functional.scaled_dot_product_attention(
            query.transpose(0, 1).unsqueeze(0),
            keys,
            values,
            attn_mask=mask,
            is_causal=not start,
            scale=scale,
            enable_gqa=True,
        )
        return attended.squeeze(0).transpose(0, 1).reshape(count, heads, size)

    def attention_decode(
        self, query: Tensor, kv_cache: Tensor, page_table: Tensor, lengths: Tensor, mask: Tensor, scale: float
    ) -> Tensor:
        """All rows at once over padded gathers; the query heads of a key/value head form its rows."""
        rows, heads, size = query.shape
        keys, values = _gather(kv_cache, page_table, query.dtype)
        groups = keys.shape[1]
        attended = functional.scaled_dot_product_attention(
            query.view(rows, groups, heads // groups, size),
            keys,
            values,
            attn_mask=mask[:, None, None, :],
            scale=scale,
        )
        return attended.reshape(rows, heads, size)

    def gelu_mul(self, gate_up: Tensor) -> Tensor:
        """Two passes, no concatenation."""
        half = gate_up.shape[-1] // 2
        return functional.gelu(gate_up[..., :half], approximate="tanh").mul_(gate_up[..., half:])

    def attention_prefill_bounded(
        self,
        query: Tensor,
        kv_cache: Tensor,
        page_ids: Tensor,
        start: int,
        scale: float,
        window: int,
        soft_cap: float,
    ) -> Tensor:
        """Two products over the gathered pages that the window reaches."""
        return torch_attention.prefill_bounded(query, kv_cache, page_ids, start, scale, window, soft_cap)

    def attention_decode_bounded(
        self,
        query: Tensor,
        kv_cache: Tensor,
        page_table: Tensor,
        lengths: Tensor,
        scale: float,
        window: int,
        soft_cap: float,
    ) -> Tensor:
        """All rows at once, of each the pages that its window reaches."""
        return torch_attention.decode_bounded(query, kv_cache, page_table, lengths, scale, window, soft_cap)

    def argmax(self, logits: Tensor) -> Tensor:
        """torch's own."""
        return logits.argmax(dim=-1)

    def sample(
        self,
        logits: Tensor,
        temperature: Tensor,
        top_k: Tensor,
        top_p: Tensor,
        min_p: Tensor,
        uniform: Tensor,
    ) -> Tensor:
        """As the reference, without sorting what no filter asks for."""
        scores = sampling.scaled_scores(logits, temperature)
        floor = sampling.min_p_floor(min_p)
        if bool((top_k > 0).any()) or bool((top_p < 1).any()):
            floor = torch.maximum(floor, _filter_floor(scores, top_k, top_p))
        return sampling.draw(scores, floor, uniform)

    def moe_route(self, router_logits: Tensor, top_k: int, renormalize: int) -> tuple[Tensor, Tensor]:
        """As the reference for few rows; else without sorting experts that are not chosen."""
        if len(router_logits) <= _SORTED_ROWS:
            return routing.moe_route(router_logits, top_k, renormalize)
        probabilities = router_logits.softmax(dim=-1, dtype=torch.float32)
        ids = _largest(probabilities, top_k)
        weights = probabilities.gather(1, ids)
        return (weights / weights.sum(dim=-1, keepdim=True) if renormalize else weights), ids

    def linear_w8a8(self, x: Tensor, weight: Any, scale: Any, bias: Tensor | None = None) -> Tensor:
        """Integer sums, in float32 where the processor has no exact ones."""
        values, step = quantized.quantize_rows(x)
        sums = torch._int_mm(values, weight.T) if _has_exact_int8() else _add_in_blocks(values, weight)
        product = sums.float().mul_(step.unsqueeze(-1)).mul_(scale)
        if bias is not None:
            product += bias
        return product.to(x.dtype)

    def linear_w4a16(
        self, x: Tensor, weight: Any, scale: Any, zero: Any, bias: Tensor | None = None
    ) -> Tensor:
        """Even and odd columns one after the other, so that unpacked weights need not be interleaved."""
        even, odd = x.float().reshape(len(x), -1, 2).unbind(-1)
        low, high = (_dequantise(half, scale, zero) for half in _halves(weight, scale.shape[1]))
        product = torch.addmm(even @ low.T, odd, high.T)
        if bias is not None:
            product += bias
        return product.to(x.dtype)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = cos.shape[-1]
    first, second = x[..., :half], x[..., half:]
    rotated = torch.empty(x.shape, dtype=x.dtype)
    torch.mul(first, cos, out=rotated[..., :half]).addcmul_(second, sin, value=-1)
    torch.mul(second, cos, out=rotated[..., half:]).addcmul_(first, sin)
    return rotated


def _gather(kv_cache: Tensor, page_table: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Keys and values [b, g, pages * page size, d] of each row's pages."""
    rows = page_table.shape[0]
    _, pages, _, groups, size = kv_cache.shape
    flat = kv_cache.view(2, pages, -1)
    # An embedding look-up is torch's fastest gather of whole rows.
    gathered = (functional.embedding(page_table, part).view(rows, -1, groups, size) for part in flat)
    keys, values = (part.to(dtype).transpose(1, 2) for part in gathered)
    return keys, values


def _filter_floor(scores: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """The floor of top-k and top-p from the largest scores, from all of them where those do not reach p."""
    count = min(scores.shape[1], max(_CANDIDATES, int(top_k.max())))
    largest = scores.topk(count, dim=-1).values
    by_k = sampling.top_k_floor(largest, top_k)
    by_p, found = sampling.top_p_floor(scores, largest, by_k, top_p)
    if not bool(found.all()):
        by_p = by_p.masked_fill(~found, float("-inf"))
        if count < scores.shape[1]:
            flat = torch.nonzero(~found).squeeze(1)
            by_p[flat] = _sorted_top_p(scores[flat], by_k[flat], top_p[flat])
    return torch.maximum(by_k, by_p)


def _sorted_top_p(scores: Tensor, by_k: Tensor, top_p: Tensor) -> Tensor:
    ordered = scores.sort(dim=-1, descending=True).values
    by_p, found = sampling.top_p_floor(scores, ordered, by_k, top_p)
    return by_p.masked_fill(~found, float("-inf"))


def _largest(probabilities: Tensor, count: int) -> Tensor:
    """Ids of the largest, the lowest first among equals: int64 [t, count].

    The bits of a float that is not negative order as it does; behind them the id makes equals differ.
    """
    experts = probabilities.shape[1]
    keys = (probabilities.view(torch.int32).long() << 16) | torch.arange(experts - 1, -1, -1)
    return experts - 1 - (keys.topk(count, dim=-1).values & 0xFFFF)


@functools.cache
def _has_exact_int8() -> bool:
    """Whether torch's integer product is one here. Where a processor lacks the instructions for it (VNNI),
    oneDNN adds pairs of products in 16 bits, which saturate.
    """
    values = torch.full((4, 64), quantized.LEVELS, dtype=torch.int8)
    sums: Tensor = torch._int_mm(values, values.T)
    return bool((sums == 64 * quantized.LEVELS**2).all())


def _add_in_blocks(values: Tensor, weight: Tensor) -> Tensor:
    """int8 [t, k] times int8 [n, k] transposed: float64 [t, n], each block of columns exact in float32."""
    total = torch.zeros(len(values), len(weight), dtype=torch.float64)
    for first in range(0, values.shape[1], _EXACT_TERMS):
        block = slice(first, first + _EXACT_TERMS)
        total += values[:, block].float() @ weight[:, block].float().T
    return total


def _halves(packed: Tensor, groups: int) -> tuple[Tensor, Tensor]:
    """uint8 [n, j] -> its low and its high halves, [n, groups, columns of a group / 2] each."""
    grouped = packed.reshape(len(packed), groups, -1)
    return grouped & 15, grouped >> 4


def _dequantise(values: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
    """float32 [n, columns], from [n, groups, columns of a group]."""
    return (values - zero.float().unsqueeze(-1)).mul_(scale.unsqueeze(-1)).flatten(1)
