"""Stand-in for the mixture-of-experts operators of `kunlun_ops`: route, count, sort, multiply, combine.

Names, arguments, shapes and dtypes are the vendor's. What an index or a count means inside the chain is read
from how public code passes it on; each docstring says so: unverified on hardware.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from plugins.kunlun_emulator.limits import (
    XpuError,
    check_float,
    check_float32,
    check_int32,
    check_shape,
    require,
)
from plugins.kunlun_emulator.quantised import check_int8, multiply_int8

CLUSTERS = 12
"""Rows of `block_statistic`: one for each cluster of the chip."""


def moe_softmax_topk_norm(
    x: Tensor,
    normed_score: Tensor,
    topk_index: Tensor,
    block_statistic: Tensor | None = None,
    stable: bool = False,
) -> None:
    """normed_score, topk_index [m, k]: the k largest of softmax(x [m, e]), descending, divided by their sum.

    Read so, unverified on hardware: with `stable` the lowest id among equals comes first. Without it the
    order among equals is nobody's promise: here the highest comes first, so that who counts on it is seen.
    """
    name = "moe_softmax_topk_norm"
    require(block_statistic is None, f"{name}: block_statistic is made by gen_block_statistic only")
    check_float32(name, x=x, normed_score=normed_score)
    check_int32(name, topk_index=topk_index)
    require(x.dim() == 2, f"{name}: x is [tokens, experts], not {list(x.shape)}")
    rows, count = x.shape
    top = topk_index.shape[-1]
    require(0 < top <= count, f"{name}: the {top} largest of {count} experts")
    check_shape(name, (rows, top), topk_index=topk_index, normed_score=normed_score)
    left = (x - x.amax(1, keepdim=True)).exp()
    left = left / left.sum(1, keepdim=True)
    for place in range(top):
        best = left.argmax(1) if stable else count - 1 - left.flip(1).argmax(1)
        topk_index[:, place] = best
        normed_score[:, place] = left.take_along_dim(best[:, None], 1)[:, 0]
        left.scatter_(1, best[:, None], -1.0)
    normed_score.div_(normed_score.sum(1, keepdim=True))


def gen_block_statistic(topk_ids: Tensor, block_statistic: Tensor) -> None:
    """block_statistic [12, e]: how often each expert stands in topk_ids [m, k], by cluster of the chip.

    Read so, unverified on hardware: each cluster counts one run of neighbouring tokens.
    """
    name = "gen_block_statistic"
    check_int32(name, topk_ids=topk_ids, block_statistic=block_statistic)
    require(topk_ids.dim() == 2, f"{name}: topk_ids is [tokens, topk], not {list(topk_ids.shape)}")
    require(
        block_statistic.dim() == 2 and block_statistic.shape[0] == CLUSTERS,
        f"{name}: block_statistic is {list(block_statistic.shape)}; it is [{CLUSTERS}, experts]",
    )
    count = block_statistic.shape[1]
    _check_ids(name, topk_ids, count)
    block_statistic.zero_()
    for cluster, run in enumerate(topk_ids.tensor_split(CLUSTERS)):
        block_statistic[cluster] = torch.bincount(run.flatten(), minlength=count)


def moe_pre_sorted(
    x: Tensor,
    topk_index: Tensor,
    block_statistic: Tensor,
    moe_expand: Tensor,
    moe_index: Tensor,
    expert_m: Tensor,
    sorted_tokens_num_lod: Tensor,
) -> None:
    """moe_expand [m * k, h]: rows of x [m, h], once for each expert of a token, ordered by expert.

    sorted_tokens_num_lod [e + 1]: where each expert's rows begin. expert_m [e]: how many it has. Read so,
    unverified on hardware: moe_index [m * k] holds for each pair (token, choice) the row that it went to,
    which is what moe_post needs to bring it back.
    """
    name = "moe_pre_sorted"
    _check_half(name, x=x, moe_expand=moe_expand)
    check_int32(
        name,
        topk_index=topk_index,
        block_statistic=block_statistic,
        moe_index=moe_index,
        expert_m=expert_m,
        sorted_tokens_num_lod=sorted_tokens_num_lod,
    )
    require(
        x.dim() == 2 and topk_index.dim() == 2 and topk_index.shape[0] == x.shape[0],
        f"{name}: x {list(x.shape)} is [tokens, hidden], topk_index {list(topk_index.shape)} [tokens, topk]",
    )
    (tokens, hidden), top, count = x.shape, topk_index.shape[1], expert_m.numel()
    check_shape(name, (tokens * top, hidden), moe_expand=moe_expand)
    check_shape(name, (tokens * top,), moe_index=moe_index)
    check_shape(name, (CLUSTERS, count), block_statistic=block_statistic)
    check_shape(name, (count + 1,), sorted_tokens_num_lod=sorted_tokens_num_lod)
    _check_ids(name, topk_index, count)
    held = torch.bincount(topk_index.flatten(), minlength=count).int()
    require(
        torch.equal(block_statistic.sum(0).int(), held),
        f"{name}: block_statistic does not count topk_index: rows would be written over one another",
    )
    order = topk_index.flatten().argsort(stable=True)
    moe_index[order] = torch.arange(tokens * top, dtype=torch.int32)
    moe_expand.copy_(x[order // top])
    expert_m.copy_(held)
    sorted_tokens_num_lod[0] = 0
    sorted_tokens_num_lod[1:] = held.cumsum(0)


def moe_fc(
    x: Tensor,
    weight: Tensor,
    sorted_tokens_num_lod: Tensor,
    sorted_tokens_idx: Tensor,
    moe_topk: int,
    y: Tensor,
    *,
    act: str | None = None,
    x_perchannel_max: Tensor | None = None,
    w_perchannel_max: Tensor | None = None,
    topk_ids: Tensor | None = None,
) -> None:
    """y [m, k, n]: each expert's rows of x [m * k, i] times its weight [e, n, i] transposed, by expert still.

    int8: x and weight int8, with the largest magnitudes that their rows stood for (x_perchannel_max
    [m * k, 1], w_perchannel_max [e, n, 1], fp32); y is a float of the caller's. Read so, unverified on
    hardware: y keeps x's order, so that the product does not need sorted_tokens_idx; it has to fit all the
    same.
    """
    name = "moe_fc"
    require(act is None, f"{name}: activations inside the kernel are not emulated")
    check_int32(name, sorted_tokens_num_lod=sorted_tokens_num_lod, sorted_tokens_idx=sorted_tokens_idx)
    require(
        weight.dim() == 3 and x.dim() == 2 and x.shape[1] == weight.shape[2],
        f"{name}: x {list(x.shape)} is [rows, inner], weight {list(weight.shape)} [experts, outputs, inner]",
    )
    rows, (count, outputs, _) = x.shape[0], weight.shape
    require(moe_topk > 0 and rows % moe_topk == 0, f"{name}: {rows} rows are not {moe_topk} a token")
    check_shape(name, (rows // moe_topk, moe_topk, outputs), y=y)
    check_shape(name, (rows,), sorted_tokens_idx=sorted_tokens_idx)
    starts = _check_starts(name, sorted_tokens_num_lod, count, rows)
    _check_rows(name, sorted_tokens_idx, rows)
    if topk_ids is not None:
        check_int32(name, topk_ids=topk_ids)
        check_shape(name, (rows // moe_topk, moe_topk), topk_ids=topk_ids)
    flat = y.view(rows, outputs)
    if x.dtype == torch.int8:
        flat.copy_(_by_expert_int8(name, x, weight, starts, x_perchannel_max, w_perchannel_max, y))
        return
    _check_half(name, x=x, weight=weight, y=y)
    require(x_perchannel_max is None and w_perchannel_max is None, f"{name}: maxima belong to int8")
    for expert, (first, last) in enumerate(pairwise(starts)):
        flat[first:last] = torch.mm(x[first:last].float(), weight[expert].float().t()).to(y.dtype)


def _by_expert_int8(
    operator: str,
    x: Tensor,
    weight: Tensor,
    starts: list[int],
    x_max: Tensor | None,
    w_max: Tensor | None,
    y: Tensor,
) -> Tensor:
    """float32 [rows, outputs]."""
    check_int8(operator, x=x, weight=weight)
    _check_half(operator, y=y)
    if x_max is None or w_max is None:
        raise XpuError(f"{operator}: int8 wants x_perchannel_max and w_perchannel_max")
    check_float32(operator, x_perchannel_max=x_max, w_perchannel_max=w_max)
    check_shape(operator, (x.shape[0], 1), x_perchannel_max=x_max)
    check_shape(operator, (*weight.shape[:2], 1), w_perchannel_max=w_max)
    return torch.cat(
        [
            multiply_int8(x[first:last], weight[expert], x_max[first:last, 0], w_max[expert, :, 0])
            for expert, (first, last) in enumerate(pairwise(starts))
        ]
    )


def moe_post(x: Tensor, moe_index: Tensor, normed_scale: Tensor, dequant_scale: Tensor, y: Tensor) -> None:
    """y [m, h]: rows of x [m, k, h] that moe_index [m, k] names, times both scales fp32 [m, k], summed by k.

    Read so, unverified on hardware: the sum is float32 and rounded once.
    """
    name = "moe_post"
    _check_half(name, x=x, y=y)
    check_int32(name, moe_index=moe_index)
    check_float32(name, normed_scale=normed_scale, dequant_scale=dequant_scale)
    require(x.dim() == 3, f"{name}: x is [tokens, topk, hidden], not {list(x.shape)}")
    tokens, top, hidden = x.shape
    check_shape(
        name, (tokens, top), moe_index=moe_index, normed_scale=normed_scale, dequant_scale=dequant_scale
    )
    check_shape(name, (tokens, hidden), y=y)
    _check_rows(name, moe_index.flatten(), tokens * top)
    chosen = x.view(tokens * top, hidden)[moe_index.flatten().long()].view(tokens, top, hidden)
    y.copy_(torch.einsum("tah,ta->th", chosen.float(), normed_scale * dequant_scale))


def _check_half(operator: str, **tensors: Tensor) -> None:
    """All `tensors` are contiguous and of one dtype, fp16 or bf16: no public code calls experts in fp32."""
    dtype = check_float(operator, **tensors)
    require(dtype != torch.float32, f"{operator}: float32 is not emulated; it takes fp16 and bf16")


def _check_ids(operator: str, ids: Tensor, count: int) -> None:
    outside = ids[(ids < 0) | (ids >= count)]
    require(not outside.numel(), f"{operator}: expert {outside[:1].tolist()} lies outside {count} experts")


def _check_starts(operator: str, lod: Tensor, count: int, rows: int) -> list[int]:
    check_shape(operator, (count + 1,), sorted_tokens_num_lod=lod)
    starts: list[int] = lod.tolist()
    rises = all(first <= second for first, second in pairwise(starts))
    require(
        starts[0] == 0 and rises and starts[-1] == rows,
        f"{operator}: sorted_tokens_num_lod {starts} is not cumulative from 0 to {rows}",
    )
    return starts


def _check_rows(operator: str, index: Tensor, rows: int) -> None:
    """Each row is named once."""
    require(
        torch.equal(index.sort().values, torch.arange(rows, dtype=torch.int32)),
        f"{operator}: the index does not name each of {rows} rows once",
    )
