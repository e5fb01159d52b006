"""What one rank of a set holds of a model's weights, shown as a source of its own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from meshkit.modelstore.sharding import RankPlace, TensorPart, rank_parts
from worker_svc.weights.quantized import StoredQuantized
from worker_svc.weights.quantized_reader import QuantizedWeights
from worker_svc.weights.reader import WeightReader
from worker_svc.weights.source import WeightSource


class RankWeights:
    """The tensors of a rank, cut from those of `source`; names keep the layer's number in the whole model.

    Of a file only the rank's part is decoded. Other sources make a tensor, which is cut then.
    """

    def __init__(self, source: WeightSource, config: Mapping[str, Any], place: RankPlace) -> None:
        """`config`: completed. Raises InvalidArgument as meshkit.modelstore.sharding.check_layout."""
        parts = rank_parts(config, place)
        self._source = source
        self._parts = {name: parts[name] for name in source.names() if name in parts}

    def __repr__(self) -> str:
        return f"<RankWeights tensors={len(self._parts)} of {self._source!r}>"

    def names(self) -> tuple[str, ...]:
        """Names of what the rank holds, in the source's order."""
        return tuple(self._parts)

    def shape(self, name: str) -> tuple[int, ...]:
        """The part's shape, padding included. Raises KeyError for a name that is not there."""
        part, whole = self._parts[name], self._source.shape(name)
        return part.shape(whole) if part else whole

    def read(self, name: str, dtype: torch.dtype = torch.float32) -> Tensor:
        """The part. Raises KeyError for a name that is not there."""
        part = self._parts[name]
        if part is None:
            return self._source.read(name, dtype)
        if isinstance(self._source, WeightReader | QuantizedWeights):
            return self._source.read(name, dtype, part)
        return cut(self._source.read(name, dtype), part)

    def quantized(self, name: str) -> StoredQuantized | None:
        """The part of a matrix that is stored quantised. Raises KeyError for a name that is not there."""
        part, stored = self._parts[name], self._source.quantized(name)
        return None if stored is None else stored.part(part)


def cut(whole: Tensor, part: TensorPart) -> Tensor:
    """A part of a tensor with its padding; of one without values, on `meta`, the shape."""
    shape = part.shape(tuple(whole.shape))
    if whole.is_meta:
        return whole.new_empty(shape)
    made = whole.new_zeros(shape)
    length = part.stop - part.start
    made.narrow(part.axis, 0, length).copy_(whole.narrow(part.axis, part.start, length))
    return made
