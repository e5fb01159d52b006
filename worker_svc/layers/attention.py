"""Attention of a layer: query, key and value with their positions, then paged attention of a step's rows."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from plugins.sdk.operator_table import OperatorBinder
from worker_svc.layers.linear import Linear, LinearLoader
from worker_svc.layers.step_tensors import StepTensors


@dataclass(frozen=True)
class HeadSizes:
    """Query heads, key/value heads, head size, positions of the rotary table."""

    heads: int
    kv_heads: int
    head_dim: int
    context: int


class QkvRotary:
    """One product for query, key and value, and their positions: fused where the layer is not quantised."""

    def __init__(
        self, prefix: str, loader: LinearLoader, operators: OperatorBinder, sizes: HeadSizes
    ) -> None:
        self._sizes = sizes
        names = [f"{prefix}.{part}_proj" for part in "qkv"]
        where = f"{prefix}.qkv_proj"
        symbols = {"H": sizes.heads, "G": sizes.kv_heads, "D": sizes.head_dim, "C": sizes.context}
        self._product: Linear | None = None
        if loader.quantizes:
            self._product = loader.load(where, *names)
            self.weight_bytes = self._product.weight_bytes
            self._call = operators.bind("rotary", where, **symbols).call
            return
        weight, self._bias = loader.joined(*names)
        self.weight_bytes = weight.nbytes + (self._bias.nbytes if self._bias is not None else 0)
        fused = operators.bind("qkv_rotary", where, K=weight.shape[1], **symbols)
        self._weight = fused.place("weight", weight)
        self._call = fused.call

    def __call__(self, x: Tensor, positions: Tensor, cos_sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """x [t, hidden] -> query [t, h, d], key and value [t, g, d]."""
        heads, kv_heads = self._sizes.heads, self._sizes.kv_heads
        if self._product is None:
            made: tuple[Tensor, Tensor, Tensor] = self._call(
                x, self._weight, self._bias, positions, cos_sin, heads, kv_heads
            )
            return made
        rows = self._product(x).view(x.shape[0], heads + 2 * kv_heads, -1)
        query, key, value = rows[:, :heads], rows[:, heads : heads + kv_heads], rows[:, heads + kv_heads :]
        query, key = self._call(query, key, positions, cos_sin)
        return query, key, value


class PagedAttention:
    """Writes keys and values to the layer's cache, then attends. Scaled by 1 / sqrt(d)."""

    def __init__(self, where: str, operators: OperatorBinder, sizes: HeadSizes) -> None:
        shape = {"G": sizes.kv_heads, "D": sizes.head_dim}
        self._write = operators.bind("write_kv", where, **shape).call
        self._prefill = operators.bind("attention_prefill", where, H=sizes.heads, **shape).call
        self._decode = operators.bind("attention_decode", where, H=sizes.heads, **shape).call
        self._scale = sizes.head_dim**-0.5

    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, kv_cache: Tensor, step: StepTensors
    ) -> Tensor:
        """query [t, h, d], key and value [t, g, d], kv_cache [2, pages, page, g, d] -> [t, h, d]."""
        self._write(key, value, kv_cache, step.cells)
        parts: list[Tensor] = []
        if step.decode is not None:
            rows = step.decode
            parts.append(
                self._decode(
                    query[: rows.count], kv_cache, rows.page_table, rows.lengths, rows.mask, self._scale
                )
            )
        for run in step.prefill:
            part = query[run.first : run.first + run.count]
            parts.append(self._prefill(part, kv_cache, run.page_ids, run.start, self._scale))
        return parts[0] if len(parts) == 1 else torch.cat(parts)
