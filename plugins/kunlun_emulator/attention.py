"""The emulated chip's attention: one sequence of queries over keys and values in float32."""

from __future__ import annotations

import torch
from torch import Tensor

from plugins.kunlun_emulator.limits import require


def attend(query: Tensor, keys: Tensor, values: Tensor, *, scale: float, causal: bool) -> Tensor:
    """query [n, h, d], keys and values [g, l, d] -> [n, h, d]. causal: the last query sees all keys."""
    count, heads, size = query.shape
    groups, length, _ = keys.shape
    stacked = query.float().permute(1, 0, 2).reshape(groups, heads // groups * count, size)
    scores = torch.bmm(stacked * scale, keys.float().transpose(1, 2))
    scores = scores.view(groups, heads // groups, count, length)
    if causal:
        visible = torch.ones(count, length, dtype=torch.bool).tril(length - count)
        scores = scores.where(visible, torch.tensor(float("-inf")))
    weights = (scores - scores.amax(-1, keepdim=True)).exp()
    mixed = torch.bmm(weights.flatten(1, 2), values.float()).view(groups, -1, count, size)
    mixed = mixed / weights.sum(-1, keepdim=True)
    return mixed.reshape(heads, count, size).permute(1, 0, 2).to(query.dtype)


def gather(operator: str, cache: Tensor, blocks: Tensor, length: int) -> Tensor:
    """The first `length` rows of a sequence's blocks in a cache [blocks, g, block, d] -> [g, length, d]."""
    size = cache.shape[2]
    needed = -(-length // size)
    require(
        needed <= blocks.numel(), f"{operator}: {length} tokens do not fit {blocks.numel()} blocks of {size}"
    )
    used: list[int] = blocks[:needed].tolist()
    require(
        all(0 <= block < cache.shape[0] for block in used),
        f"{operator}: block_table holds {used}; the cache has {cache.shape[0]} blocks",
    )
    return torch.cat([cache[block] for block in used], dim=1)[:, :length]
