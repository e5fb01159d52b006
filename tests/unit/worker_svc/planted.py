"""Back ends for tests of `chipmesh diff`: the reference in float32, save for one operator that is wrong."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from plugins.sdk.backend import Backend
from plugins.sdk.capabilities import CapabilityReport
from plugins.sdk.operators import OperatorSet
from plugins.sdk.reference import operators as reference
from worker_svc.diff.reference_backend import ReferenceBackend, ReferenceMemory


class PlantedBackend(ReferenceBackend):
    """Reference operators, some of them overridden."""

    def __init__(self, operators: type[OperatorSet], page_sizes: tuple[int, ...] = ()) -> None:
        super().__init__()
        self._planted = operators(ReferenceMemory(count=1))
        self._page_sizes = page_sizes

    @property
    def operators(self) -> OperatorSet | None:
        return self._planted

    def capabilities(self) -> CapabilityReport:
        return CapabilityReport(
            chip="planted",
            operators=self._planted.capabilities(),
            kv_layout=self._planted.kv_layout.name,
            page_sizes_tokens=self._page_sizes,
        )


class ForgetsEps(OperatorSet):
    """Divides by the root mean square alone."""

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return reference.rms_norm(x, weight, 0.0)


class OffByOne(OperatorSet):
    """Counts positions from 1."""

    def rotary(self, query: Tensor, key: Tensor, positions: Tensor, cos_sin: Tensor) -> tuple[Tensor, Tensor]:
        return reference.rotary(query, key, positions + 1, cos_sin)


class RoundsWeights(OperatorSet):
    """Multiplies by weights in bfloat16 though asked for float32."""

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return reference.linear(x, weight.to(torch.bfloat16), bias)


class ForgetsCache(OperatorSet):
    """Attends to the run of tokens alone: right only where nothing is in the cache yet."""

    def attention_prefill(
        self, query: Tensor, kv_cache: Tensor, page_ids: Tensor, start: int, scale: float
    ) -> Tensor:
        if not start:
            return reference.attention_prefill(query, kv_cache, page_ids, start, scale)
        hidden = kv_cache.clone()
        cells = hidden[:, page_ids].flatten(1, 2)
        cells[:, :start] = 0
        hidden[:, page_ids] = cells.view(2, len(page_ids), *kv_cache.shape[2:])
        return reference.attention_prefill(query, hidden, page_ids, start, scale)


class WritesNextCell(OperatorSet):
    """Keys and values land one cell further."""

    def write_kv(self, key: Tensor, value: Tensor, kv_cache: Tensor, cells: Tensor) -> None:
        count = kv_cache.shape[1] * kv_cache.shape[2]
        reference.write_kv(key, value, kv_cache, (cells + 1) % count)


class AddsConstant(OperatorSet):
    """A gate with a small constant on top."""

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        return reference.silu_mul(gate_up) + 1e-5


class BreaksInDecode(OperatorSet):
    """Not a number where one token is decoded."""

    def attention_decode(
        self, query: Tensor, kv_cache: Tensor, page_table: Tensor, lengths: Tensor, mask: Tensor, scale: float
    ) -> Tensor:
        return torch.full_like(query, torch.nan)


class WrongInSecondLayer(OperatorSet):
    """The gate of every second call, so of layer 1 of two, is doubled."""

    _calls = 0

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        self._calls += 1
        return reference.silu_mul(gate_up) * (2 if self._calls % 2 == 0 else 1)


def factory_of(operators: type[OperatorSet], *pages: int) -> Callable[[Mapping[str, str]], Backend]:
    """For register_backend."""
    return lambda options: PlantedBackend(operators, pages)
