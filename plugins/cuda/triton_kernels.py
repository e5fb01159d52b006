"""Kernels in Triton: root-mean-square norms by row, and decode attention over the paged cache by parts.

Imported only where Triton is. On the host its interpreter checks their arithmetic and its compiler takes them
(tests/unit/cuda_plugin/test_cuda_triton.py); on hardware they are unverified, and the trial at start denies
what differs there. `triton.jit` is called, not written above: a kernel stays a function that tools can read.
Parameters are annotated by names of `tl`: the compiler reads annotations, and takes no other globals.
"""

from __future__ import annotations

from typing import Any

import triton  # type: ignore[import-not-found,import-untyped,unused-ignore]
import triton.language as tl  # type: ignore[import-not-found,import-untyped,unused-ignore]


def _rms_norm_row(
    x: tl.tensor,
    weight: tl.tensor,
    output: tl.tensor,
    eps: tl.tensor,
    width: tl.tensor,
    stride: tl.tensor,
    block: tl.constexpr,
) -> None:
    """One row: output = x / sqrt(mean(x**2) + eps) * weight, in float32, rounded once."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, block)
    real = columns < width
    values = tl.load(x + row * stride + columns, mask=real, other=0.0).to(tl.float32)
    factors = tl.load(weight + columns, mask=real, other=0.0).to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(values * values, axis=0) / width + eps)
    result = (values * scale * factors).to(output.dtype.element_ty)
    tl.store(output + row * width + columns, result, mask=real)


def _add_rms_norm_row(
    x: tl.tensor,
    residual: tl.tensor,
    weight: tl.tensor,
    output: tl.tensor,
    total: tl.tensor,
    eps: tl.tensor,
    width: tl.tensor,
    x_stride: tl.tensor,
    residual_stride: tl.tensor,
    block: tl.constexpr,
) -> None:
    """One row: total = x + residual, rounded; output = the norm of what was stored."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, block)
    real = columns < width
    left = tl.load(x + row * x_stride + columns, mask=real, other=0.0).to(tl.float32)
    right = tl.load(residual + row * residual_stride + columns, mask=real, other=0.0).to(tl.float32)
    rounded = (left + right).to(total.dtype.element_ty)
    tl.store(total + row * width + columns, rounded, mask=real)
    values = rounded.to(tl.float32)
    factors = tl.load(weight + columns, mask=real, other=0.0).to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(values * values, axis=0) / width + eps)
    result = (values * scale * factors).to(output.dtype.element_ty)
    tl.store(output + row * width + columns, result, mask=real)


def _decode_part(  # noqa: PLR0913, PLR0917 - a kernel takes pointers, strides and sizes one by one
    query: tl.tensor,
    keys: tl.tensor,
    values: tl.tensor,
    page_table: tl.tensor,
    lengths: tl.tensor,
    partial: tl.tensor,
    weight_logs: tl.tensor,
    scale: tl.tensor,
    parts: tl.tensor,
    page_stride: tl.tensor,
    token_stride: tl.tensor,
    head_stride: tl.tensor,
    table_stride: tl.tensor,
    group: tl.constexpr,
    size: tl.constexpr,
    page: tl.constexpr,
    part_tokens: tl.constexpr,
    block_heads: tl.constexpr,
    block_size: tl.constexpr,
    block_tokens: tl.constexpr,
) -> None:
    """The query heads of one key/value head of one row over one part of its tokens.

    Program (row, key/value head, part). Writes the softmax-weighted mean of the part's values, float32
    [b, h, parts, d], and the logarithm of its weights' sum, float32 [b, h, parts]; -inf for a part without
    tokens. The running maximum keeps exponents at most 0 (Milakov & Gimelshein 2018, online softmax).
    """
    row = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1)
    part = tl.program_id(2)
    heads = tl.arange(0, block_heads)
    dims = tl.arange(0, block_size)
    real_heads = heads < group
    real_dims = dims < size
    # Row, head and size of query lie one behind the other: index (row * all heads + head) * size + dim.
    own = (row * tl.num_programs(1) + kv_head) * group + heads
    q = tl.load(
        query + own[:, None] * size + dims[None, :], mask=real_heads[:, None] & real_dims[None, :], other=0.0
    )
    length = tl.load(lengths + row)
    first = part * part_tokens
    last = tl.minimum(first + part_tokens, length)
    largest = tl.full((block_heads,), float("-inf"), tl.float32)
    weight_sum = tl.zeros((block_heads,), tl.float32)
    mean = tl.zeros((block_heads, block_size), tl.float32)
    for begin in range(first, last, block_tokens):
        tokens = begin + tl.arange(0, block_tokens)
        seen = tokens < last
        pages = tl.load(page_table + row * table_stride + tokens // page, mask=seen, other=0).to(tl.int64)
        cells = pages * page_stride + (tokens % page) * token_stride + kv_head * head_stride
        k = tl.load(
            keys + cells[None, :] + dims[:, None], mask=seen[None, :] & real_dims[:, None], other=0.0
        ).to(q.dtype)
        v = tl.load(
            values + cells[:, None] + dims[None, :], mask=seen[:, None] & real_dims[None, :], other=0.0
        ).to(q.dtype)
        # "ieee": float32 operands stay float32 instead of becoming TF32.
        scores = tl.dot(q, k, input_precision="ieee") * scale
        scores = tl.where(seen[None, :], scores, float("-inf"))
        higher = tl.maximum(largest, tl.max(scores, axis=1))
        shrink = tl.exp(largest - higher)
        weights = tl.exp(scores - higher[:, None])
        weight_sum = weight_sum * shrink + tl.sum(weights, axis=1)
        mean = mean * shrink[:, None] + tl.dot(weights.to(q.dtype), v, input_precision="ieee")
        largest = higher
    some = weight_sum > 0
    divisor = tl.where(some, weight_sum, 1.0)
    place = own * parts + part
    tl.store(weight_logs + place, tl.where(some, largest + tl.log(divisor), float("-inf")), mask=real_heads)
    tl.store(
        partial + place[:, None] * size + dims[None, :],
        mean / divisor[:, None],
        mask=real_heads[:, None] & real_dims[None, :],
    )


rms_norm_row: Any = triton.jit(_rms_norm_row)
add_rms_norm_row: Any = triton.jit(_add_rms_norm_row)
decode_part: Any = triton.jit(_decode_part)
