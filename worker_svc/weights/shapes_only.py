"""Weights that have a shape and no values: what a model is built on to see which operators it calls."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from meshkit.modelstore import tensor_shapes


class ShapesOnly:
    """Tensors on torch's meta device: no memory, no file."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        """`config`: a completed configuration, as `ModelFolder.config` holds it."""
        self._shapes = tensor_shapes(config)

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
