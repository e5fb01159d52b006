"""Attention of a layer: query, key and value with their positions, then paged attention of a step's rows."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from plugins.sdk.operator_table import OperatorBinder
from worker_svc.layers.linear import Linear, LinearLoader
from worker_svc.layers.norm import Norm
from worker_svc.layers.step_tensors import StepTensors
from worker_svc.parallel.split import RowPart


@dataclass(frozen=True)
class HeadSizes:
    """Query heads, key/value heads, head size, positions of the rotary table."""

    heads: int
    kv_heads: int
    head_dim: int
    context: int


@dataclass(frozen=True)
class ScoreRules:
    """What becomes of scores. scale: their factor. window: tokens that attention reaches back, its own
    included; 0: all. soft_cap: the limit that they near; 0: none. cell_scales: what keys and values are
    divided by in the cache.
    """

    scale: float
    window: int = 0
    soft_cap: float = 0.0
    cell_scales: tuple[float, float] = (1.0, 1.0)


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
        sizes = self._sizes
        if self._product is None:
            made: tuple[Tensor, Tensor, Tensor] = self._call(
                x, self._weight, self._bias, positions, cos_sin, sizes.heads, sizes.kv_heads
            )
            return made
        query, key, value = _split_heads(self._product(x), sizes)
        query, key = self._call(query, key, positions, cos_sin)
        return query, key, value


class NormedQkvRotary:
    """As QkvRotary, with query and key normalised by head before their positions."""

    def __init__(
        self,
        prefix: str,
        loader: LinearLoader,
        operators: OperatorBinder,
        sizes: HeadSizes,
        *,
        eps: float,
        offset: float,
    ) -> None:
        self._sizes = sizes
        where = f"{prefix}.qkv_proj"
        self._product = loader.load(where, *(f"{prefix}.{part}_proj" for part in "qkv"))
        self._query_norm = Norm(f"{prefix}.q_norm", loader, operators, eps=eps, offset=offset)
        self._key_norm = Norm(f"{prefix}.k_norm", loader, operators, eps=eps, offset=offset)
        symbols = {"H": sizes.heads, "G": sizes.kv_heads, "D": sizes.head_dim, "C": sizes.context}
        self._rotate = operators.bind("rotary", where, **symbols).call
        parts = (self._product, self._query_norm, self._key_norm)
        self.weight_bytes = sum(part.weight_bytes for part in parts)

    def __call__(self, x: Tensor, positions: Tensor, cos_sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """x [t, hidden] -> query [t, h, d], key and value [t, g, d]."""
        query, key, value = _split_heads(self._product(x), self._sizes)
        query, key = _by_head(self._query_norm, query), _by_head(self._key_norm, key)
        query, key = self._rotate(query, key, positions, cos_sin)
        return query, key, value


def _split_heads(rows: Tensor, sizes: HeadSizes) -> tuple[Tensor, Tensor, Tensor]:
    heads, kv_heads = sizes.heads, sizes.kv_heads
    by_head = rows.view(rows.shape[0], heads + 2 * kv_heads, -1)
    return by_head[:, :heads], by_head[:, heads : heads + kv_heads], by_head[:, heads + kv_heads :]


def _by_head(norm: Norm, x: Tensor) -> Tensor:
    """[t, h, d] as rows [t * h, d], which is the form that the operator's signature has."""
    return norm(x.reshape(-1, x.shape[-1])).view(x.shape)


class PagedAttention:
    """Writes keys and values to the layer's cache, then attends; the cache keeps what a window has left
    behind, and the window hides it.
    """

    def __init__(self, where: str, operators: OperatorBinder, sizes: HeadSizes, rules: ScoreRules) -> None:
        shape = {"G": sizes.kv_heads, "D": sizes.head_dim}
        self._bounded = bool(rules.window or rules.soft_cap)
        suffix = "_bounded" if self._bounded else ""
        self._write = operators.bind("write_kv", where, **shape).call
        self._prefill = operators.bind(f"attention_prefill{suffix}", where, H=sizes.heads, **shape).call
        self._decode = operators.bind(f"attention_decode{suffix}", where, H=sizes.heads, **shape).call
        self._key_scale, self._value_scale = rules.cell_scales
        # A query times the scale of keys is their product: operators need not know of it.
        scale = rules.scale * self._key_scale
        self._rules = (scale, rules.window, rules.soft_cap) if self._bounded else (scale,)

    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, kv_cache: Tensor, step: StepTensors
    ) -> Tensor:
        """query [t, h, d], key and value [t, g, d], kv_cache [2, pages, page, g, d] -> [t, h, d]."""
        if self._key_scale != 1.0:
            key = key / self._key_scale
        if self._value_scale != 1.0:
            value = value / self._value_scale
        self._write(key, value, kv_cache, step.cells)
        parts: list[Tensor] = []
        if step.decode is not None:
            rows = step.decode
            mask = () if self._bounded else (rows.mask,)
            where = (rows.page_table, rows.lengths, *mask)
            parts.append(self._decode(query[: rows.count], kv_cache, *where, *self._rules))
        for run in step.prefill:
            part = query[run.first : run.first + run.count]
            parts.append(self._prefill(part, kv_cache, run.page_ids, run.start, *self._rules))
        attended = parts[0] if len(parts) == 1 else torch.cat(parts)
        return attended if self._value_scale == 1.0 else attended * self._value_scale


class Attention:
    """Attention of a layer as a whole: projections, positions by `cos_sin`, cache, output."""

    def __init__(
        self, projections: QkvRotary | NormedQkvRotary, attend: PagedAttention, out: RowPart, cos_sin: Tensor
    ) -> None:
        self._project, self._attend, self._out = projections, attend, out
        self._cos_sin = cos_sin
        self.weight_bytes = projections.weight_bytes + out.weight_bytes

    def __call__(self, x: Tensor, step: StepTensors, kv_cache: Tensor) -> Tensor:
        """[t, hidden] as it is; writes the layer's cache."""
        query, key, value = self._project(x, step.positions, self._cos_sin)
        return self._out(self._attend(query, key, value, kv_cache, step).flatten(1))
