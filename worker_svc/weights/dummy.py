"""Weights without a file, for load-format dummy: the right names and shapes, small values from a seed."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from meshkit.modelstore import tensor_shapes
from meshkit.modelstore.checkpoint_quantization import check_divides, read_quantization
from worker_svc.weights.quantized import StoredQuantized
from worker_svc.weights.rounding import round_to

_SPREAD = 0.02


class DummyWeights:
    """Values depend on (seed, name) only: the same on every machine and in whatever order they are read."""

    def __init__(self, config: Mapping[str, Any], seed: int = 0) -> None:
        """`config`: a completed configuration, as `ModelFolder.config` holds it."""
        self._shapes = tensor_shapes(config)
        self._quantization = read_quantization(config)
        self._norm = 1.0 - config.get("rms_norm_offset", 0.0)
        self._seed = seed

    def __repr__(self) -> str:
        return f"<DummyWeights tensors={len(self._shapes)} seed={self._seed}>"

    def names(self) -> tuple[str, ...]:
        """All names, in the model's order."""
        return tuple(self._shapes)

    def shape(self, name: str) -> tuple[int, ...]:
        """The tensor's shape. Raises KeyError for a name that is not there."""
        return self._shapes[name]

    def read(self, name: str, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Normal values of spread 0.02, around 0, and for norms around what makes them multiply by 1.

        Raises KeyError for a name that is not there.
        """
        shape = self._shapes[name]
        digest = hashlib.sha256(f"{self._seed}\0{name}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "little"))
        values = torch.randn(shape, generator=generator) * _SPREAD
        if name.endswith("norm.weight"):
            values += self._norm
        return values.to(dtype)

    def quantized(self, name: str) -> StoredQuantized | None:
        """The same values rounded, where the checkpoint's matrix is quantised. Raises KeyError for a name
        that is not there.
        """
        shape = self._shapes[name]
        if self._quantization is None or not self._quantization.holds(name.removesuffix(".weight"), shape):
            return None
        scheme = self._quantization.scheme
        check_divides(scheme, name, shape)
        made = round_to(scheme.kind, self.read(name), scheme.columns_of_group(shape[1]))
        return replace(made, order=torch.arange(shape[1])) if scheme.ordered else made
