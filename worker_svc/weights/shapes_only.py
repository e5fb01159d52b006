"""Weights that have a shape and no values: what a model is built on to see which operators it calls."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from meshkit.modelstore import tensor_shapes
from meshkit.modelstore.checkpoint_quantization import check_divides, read_quantization
from worker_svc.weights.quantized import StoredQuantized


class ShapesOnly:
    """Tensors on torch's meta device: no memory, no file."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        """`config`: a completed configuration, as `ModelFolder.config` holds it."""
        self._shapes = tensor_shapes(config)
        self._quantization = read_quantization(config)

    def __repr__(self) -> str:
        return f"<ShapesOnly tensors={len(self._shapes)}>"

    def names(self) -> tuple[str, ...]:
        """All names, in the model's order."""
        return tuple(self._shapes)

    def shape(self, name: str) -> tuple[int, ...]:
        """The tensor's shape. Raises KeyError for a name that is not there."""
        return self._shapes[name]

    def read(self, name: str, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """A tensor without values. Raises KeyError for a name that is not there."""
        return torch.empty(self._shapes[name], dtype=dtype, device="meta")

    def quantized(self, name: str) -> StoredQuantized | None:
        """A matrix without values, where the checkpoint's is quantised. Raises KeyError for a name that is
        not there.
        """
        shape = self._shapes[name]
        if self._quantization is None or not self._quantization.holds(name.removesuffix(".weight"), shape):
            return None
        check_divides(self._quantization.scheme, name, shape)
        return StoredQuantized.of_shape(self._quantization.scheme, (shape[0], shape[1]))
