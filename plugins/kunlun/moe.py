"""Mixture-of-experts layers through kunlun_ops: rows sorted by expert, two products, one weighted sum.

The order inside is the kernels' own business: moe_index and the starts are handed on as they come, and the
comparison at load tells whether the whole chain agrees with the reference.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from plugins.kunlun.quantised import quantise_rows

CLUSTERS = 12
"""Clusters of the chip, each of which counts its share of the tokens."""


@dataclass(frozen=True)
class _Sorted:
    """rows [t * a, k], each expert's together, from starts int32 [e + 1] on; index int32 [t * a]: where each
    pair of ids int32 [t, a] went.
    """

    rows: Tensor
    starts: Tensor
    index: Tensor
    ids: Tensor


Product = Callable[[_Sorted, Tensor], Tensor]
"""Rows [t * a, in], sorted by expert, to [t, a, out]."""


def route(ops: Any, router_logits: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    """The most probable experts of each token, weights divided by their sum: float32 and int64 [t, top_k].

    `stable`: the lowest id has to win among equals, so that every chip routes a token alike.
    """
    logits = router_logits.float().contiguous()
    shape = (logits.shape[0], top_k)
    weights = logits.new_empty(shape)
    ids = torch.empty(shape, dtype=torch.int32, device=logits.device)
    ops.moe_softmax_topk_norm(
        x=logits, normed_score=weights, topk_index=ids, block_statistic=None, stable=True
    )
    return weights, ids.long()


def mix_experts(
    ops: Any, x: Tensor, weights: Tensor, expert_ids: Tensor, *, experts: int, gate_up: Product, down: Product
) -> Tensor:
    """Weighted sum of each token's experts, x [t, k] -> [t, k].

    float16: sglang-kunlun clamps this sum to +-10. That is left out here: it changes results of models that
    need it not, and where sums overflow, the check of the first forward pass names layer and operator.
    """
    batch = _sort(ops, x.contiguous(), expert_ids.to(torch.int32).contiguous(), experts)
    joined = gate_up(batch, batch.rows)
    inner = joined.new_empty((*joined.shape[:-1], joined.shape[-1] // 2))
    ops.swiglu(joined, inner)
    outer = down(batch, inner.flatten(0, 1))
    mixed = torch.empty_like(x, memory_format=torch.contiguous_format)
    scale = weights.float().contiguous()
    ops.moe_post(
        x=outer,
        moe_index=batch.index.view(scale.shape),
        normed_scale=scale,
        dequant_scale=torch.ones_like(scale),
        y=mixed,
    )
    return mixed


def float_product(ops: Any, weight: Tensor) -> Product:
    """With weight [e, out, in] of the rows' dtype."""
    return lambda batch, rows: _multiply(ops, batch, rows, weight.to(rows.dtype), rows.dtype)


def int8_product(ops: Any, weight: Tensor, maxima: Tensor) -> Product:
    """With int8 weight [e, out, in] and maxima float32 [e, out, 1]; rows are quantised, one by one."""

    def run(batch: _Sorted, rows: Tensor) -> Tensor:
        values, largest = quantise_rows(ops, rows)
        return _multiply(ops, batch, values, weight, rows.dtype, rows_maxima=largest, maxima=maxima)

    return run


def _multiply(
    ops: Any,
    batch: _Sorted,
    rows: Tensor,
    weight: Tensor,
    dtype: torch.dtype,
    *,
    rows_maxima: Tensor | None = None,
    maxima: Tensor | None = None,
) -> Tensor:
    """[t, a, out] of `dtype`. Said as public code does, maxima and all: a build may have no defaults."""
    made = torch.empty((*batch.ids.shape, weight.shape[1]), dtype=dtype, device=rows.device)
    ops.moe_fc(
        x=rows,
        x_perchannel_max=rows_maxima,
        weight=weight,
        w_perchannel_max=maxima,
        sorted_tokens_num_lod=batch.starts,
        sorted_tokens_idx=batch.index,
        moe_topk=batch.ids.shape[1],
        y=made,
        topk_ids=batch.ids,
        act=None,
    )
    return made


def _sort(ops: Any, x: Tensor, ids: Tensor, experts: int) -> _Sorted:
    """Rows of x, once for each expert of their token, sorted by expert."""
    count = ids.numel()
    statistic = _zeros(ids, CLUSTERS, experts)
    ops.gen_block_statistic(ids, statistic)
    batch = _Sorted(x.new_empty((count, x.shape[1])), _zeros(ids, experts + 1), _zeros(ids, count), ids)
    ops.moe_pre_sorted(
        x=x,
        topk_index=ids,
        block_statistic=statistic,
        moe_expand=batch.rows,
        moe_index=batch.index,
        expert_m=_zeros(ids, experts),
        sorted_tokens_num_lod=batch.starts,
    )
    return batch


def _zeros(like: Tensor, *shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.int32, device=like.device)
