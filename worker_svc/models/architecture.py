"""What the model runner asks of an architecture."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from plugins.sdk.operator_table import OperatorBinder
from worker_svc.kv_scales import KvScales
from worker_svc.layers.quantization import QuantizationPolicy
from worker_svc.layers.step_tensors import StepTensors
from worker_svc.parallel.links import NoLinks, RankLinks
from worker_svc.weights.source import WeightSource

Observer = Callable[[str, Tensor], None]
"""Called with the name and the result of each stage of a forward pass, for precision tools."""


@dataclass(frozen=True)
class KvShape:
    """What a layer's cache holds for a token: keys and values, each [heads, head_dim]."""

    layers: int
    heads: int
    head_dim: int

    @property
    def values_per_token(self) -> int:
        """Numbers stored for one token over all layers."""
        return 2 * self.layers * self.heads * self.head_dim


class Model(Protocol):
    """Weights on a device and the passes over them; of a split model one rank's part, which makes its passes
    together with the others.
    """

    @property
    def kv_shape(self) -> KvShape:
        """Form of the cache that `forward` takes."""
        ...

    @property
    def has_head(self) -> bool:
        """Whether it makes logits: not before the last stage of a split model."""
        ...

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights as held."""
        ...

    def forward(
        self, step: StepTensors, kv_caches: Sequence[Tensor], observe: Observer | None = None
    ) -> Tensor:
        """Hidden states [t, hidden] before the head's norm; writes the caches, one [2, pages, page, g, d] a
        layer. Without a head: they are sent to the next stage, and what is returned is of no use.
        """
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """Hidden states [r, hidden] of rows that sample -> logits [r, vocab]. Only where there is a head."""
        ...


@dataclass(frozen=True)
class ModelContext:
    """What a model is built from. `progress`: called with the share of weights loaded, in [0, 1].

    source: what `links.place` holds of the model; sizes follow from the place, too.
    """

    config: Mapping[str, Any]
    source: WeightSource
    operators: OperatorBinder
    dtype: torch.dtype
    device: torch.device
    progress: Callable[[float], None]
    policy: QuantizationPolicy = field(default_factory=QuantizationPolicy)
    links: RankLinks = field(default_factory=NoLinks)
    kv_scales: KvScales = field(default_factory=KvScales)


ModelFactory = Callable[[ModelContext], Model]
