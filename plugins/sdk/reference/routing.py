"""Reference of the choice of experts."""

from __future__ import annotations

import torch
from torch import Tensor


def moe_route(router_logits: Tensor, top_k: int, renormalize: int) -> tuple[Tensor, Tensor]:
    """The `top_k` most probable experts of each token: router_logits [t, experts] -> (float32 weights
    [t, top_k] in descending order, int64 expert ids [t, top_k]); the lowest id comes first among equals.

    Probabilities are a float32 softmax over all experts; renormalize 1: divided by the sum of those chosen.
    """
    probabilities = torch.softmax(router_logits.float(), dim=-1)
    # topk promises no order among equals; a stable sort does.
    weights, ids = probabilities.sort(dim=-1, descending=True, stable=True)
    weights, ids = weights[:, :top_k], ids[:, :top_k]
    if renormalize:
        weights = weights / weights.sum(dim=-1, keepdim=True)
    return weights, ids
