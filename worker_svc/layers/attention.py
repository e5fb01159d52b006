"""Paged attention of a step's decode and prefill rows in one layer."""

from __future__ import annotations

import torch
from torch import Tensor

from plugins.sdk.operators import OperatorTable
from worker_svc.layers.step_tensors import StepTensors


def attend(
    query: Tensor, key: Tensor, value: Tensor, kv_cache: Tensor, step: StepTensors, operators: OperatorTable
) -> Tensor:
    """Write keys and values [t, g, d] to the layer's cache [2, pages, page, g, d], then attend: query [t, h,
    d] -> [t, h, d]. Scaled by 1 / sqrt(d).
    """
    operators.write_kv(key, value, kv_cache, step.cells)
    scale = query.shape[-1] ** -0.5
    parts: list[Tensor] = []
    if step.decode is not None:
        rows = step.decode
        parts.append(
            operators.attention_decode(
                query[: rows.count], kv_cache, rows.page_table, rows.lengths, rows.mask, scale
            )
        )
    for run in step.prefill:
        part = query[run.first : run.first + run.count]
        parts.append(operators.attention_prefill(part, kv_cache, run.page_ids, run.start, scale))
    return parts[0] if len(parts) == 1 else torch.cat(parts)
