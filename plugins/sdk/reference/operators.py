"""Reference operators: written to be read, float32 accumulation whatever the dtype, one sequence at a time.

Shapes: t tokens, h query heads, g key/value heads, d head size, i inner size. One layer's KV cache is
[2, pages, page size, g, d]: keys, then values; cell c is page c // page size, offset c % page size.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

INT8_CELL = 127
"""Largest magnitude in a cache of int8."""


def embedding(token_ids: Tensor, weight: Tensor) -> Tensor:
    """Rows of weight [vocab, hidden] for token_ids [t] (int64) -> [t, hidden]."""
    return weight[token_ids]


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [t, in] times weight [out, in] transposed, plus bias [out] -> [t, out] in x's dtype."""
    product = x.float() @ weight.float().T
    if bias is not None:
        product = product + bias.float()
    return product.to(x.dtype)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x**2) + eps) * weight over the last dimension (Zhang & Sennrich 2019, without the
    mean).
    """
    wide = x.float()
    scale = torch.rsqrt(wide.pow(2).mean(dim=-1, keepdim=True) + eps)
    return (wide * scale * weight.float()).to(x.dtype)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(rms_norm(x + residual), x + residual)."""
    total = x + residual
    return rms_norm(total, weight, eps), total


def rotary(query: Tensor, key: Tensor, positions: Tensor, cos_sin: Tensor) -> tuple[Tensor, Tensor]:
    """Rotate query [t, h, d] and key [t, g, d] by position (Su et al. 2021, halves as Hugging Face has them).

    positions: int64 [t]. cos_sin: float32 [context, d]; the first d/2 columns are cosines, the rest sines.
    """
    cos, sin = cos_sin[positions].unsqueeze(1).chunk(2, dim=-1)
    return _rotate(query, cos, sin), _rotate(key, cos, sin)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)


def silu_mul(gate_up: Tensor) -> Tensor:
    """silu(gate) * up for gate_up [t, 2i], gate first -> [t, i]."""
    gate, up = gate_up.float().chunk(2, dim=-1)
    return (gate * torch.sigmoid(gate) * up).to(gate_up.dtype)


def gelu_mul(gate_up: Tensor) -> Tensor:
    """gelu(gate) * up for gate_up [t, 2i], gate first -> [t, i]; gelu by its approximation with tanh
    (Hendrycks & Gimpel 2016).
    """
    gate, up = gate_up.float().chunk(2, dim=-1)
    inner = math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3)
    return (0.5 * gate * (1 + inner.tanh()) * up).to(gate_up.dtype)


def write_kv(key: Tensor, value: Tensor, kv_cache: Tensor, cells: Tensor) -> None:
    """Write key and value [t, g, d] to cells [t] (int64) of one layer's cache, in place, as `to_cell` has
    them.
    """
    page, offset = cells // kv_cache.shape[2], cells % kv_cache.shape[2]
    kv_cache[0, page, offset] = to_cell(key, kv_cache.dtype)
    kv_cache[1, page, offset] = to_cell(value, kv_cache.dtype)


def to_cell(values: Tensor, dtype: torch.dtype) -> Tensor:
    """values as a cache of `dtype` holds them: rounded to nearest, halves to even. Cells of 8 bits take what
    is beyond their range as their largest value (int8: 127), since infinity or a wrapped sign would spoil a
    whole sequence.
    """
    if dtype == torch.int8:
        return values.round().clamp(-INT8_CELL, INT8_CELL).to(dtype)
    if dtype.itemsize == 1:
        largest = torch.finfo(dtype).max
        return values.clamp(-largest, largest).to(dtype)
    return values.to(dtype)


def attention_prefill(query: Tensor, kv_cache: Tensor, page_ids: Tensor, start: int, scale: float) -> Tensor:
    """Causal attention of one sequence's run of tokens over all that its pages hold up to each of them.

    query: [n, h, d], positions start to start + n - 1, whose keys and values are written already.
    page_ids: int64 [pages], the sequence's page table. -> [n, h, d].
    """
    return attention_prefill_bounded(query, kv_cache, page_ids, start, scale, 0, 0.0)


def attention_prefill_bounded(
    query: Tensor, kv_cache: Tensor, page_ids: Tensor, start: int, scale: float, window: int, soft_cap: float
) -> Tensor:
    """`attention_prefill` with a bound on its reach and one on its scores.

    window: each token sees itself and the window - 1 before it; 0: all before it. soft_cap: scaled scores
    become soft_cap * tanh(score / soft_cap); 0: they stay.
    """
    count = query.shape[0]
    keys, values = _read_sequence(kv_cache, page_ids, start + count, query.shape[1])
    scores = torch.einsum("nhd,lhd->hnl", query.float(), keys) * scale
    if soft_cap:
        scores = (scores / soft_cap).tanh() * soft_cap
    own = torch.arange(start, start + count, device=query.device).unsqueeze(1)
    cells = torch.arange(start + count, device=query.device).unsqueeze(0)
    hidden = cells > own
    if window:
        hidden = hidden | (cells <= own - window)
    weights = scores.masked_fill(hidden, float("-inf")).softmax(dim=-1)
    return torch.einsum("hnl,lhd->nhd", weights, values).to(query.dtype)


def attention_decode(
    query: Tensor, kv_cache: Tensor, page_table: Tensor, lengths: Tensor, mask: Tensor, scale: float
) -> Tensor:
    """Attention of one token of each of b sequences over its pages.

    query: [b, h, d]. page_table: int64 [b, pages]. lengths: int64 [b], tokens that each sequence has, its
    new one
    included. mask: [b, pages * page size], 0 below the length, -inf from it on: the same in another form, for
    kernels that want it. -> [b, h, d].
    """
    rows = [
        attention_prefill(query[row : row + 1], kv_cache, page_table[row], int(length) - 1, scale)
        for row, length in enumerate(lengths.tolist())
    ]
    return torch.cat(rows)


def attention_decode_bounded(
    query: Tensor,
    kv_cache: Tensor,
    page_table: Tensor,
    lengths: Tensor,
    scale: float,
    window: int,
    soft_cap: float,
) -> Tensor:
    """`attention_decode` with the bounds of `attention_prefill_bounded`. It has no mask: a plain one would
    not know of the window.
    """
    rows = [
        attention_prefill_bounded(
            query[row : row + 1], kv_cache, page_table[row], int(length) - 1, scale, window, soft_cap
        )
        for row, length in enumerate(lengths.tolist())
    ]
    return torch.cat(rows)


def _read_sequence(kv_cache: Tensor, page_ids: Tensor, length: int, heads: int) -> tuple[Tensor, Tensor]:
    """Keys and values [length, heads, d] in float32, each key/value head repeated for its query heads."""
    cells = kv_cache[:, page_ids].flatten(1, 2)[:, :length].float()
    repeated = cells.repeat_interleave(heads // cells.shape[2], dim=2)
    return repeated[0], repeated[1]
