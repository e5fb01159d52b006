"""Draws the tensors of a case, seeded by its name."""

from __future__ import annotations

import zlib

import torch
from torch import Tensor

from plugins.sdk.op_spec import COMPUTE, KV, OpSpec, ShapeClass, TensorSpec

_SEED = 20240229
_LARGE, _TINY = 100.0, 1e-3

Parts = tuple[dict[str, Tensor], dict[str, int | float]]
"""Inputs and attributes."""


class Maker:
    """Draws tensors of one case from one generator, in order."""

    def __init__(self, spec: OpSpec, shape_class: ShapeClass, dtype: str, kv_dtype: str) -> None:
        self.sizes = shape_class.sizes
        self.class_name = shape_class.name
        self._dtypes = {COMPUTE: dtype, KV: kv_dtype}
        self._specs = {tensor.name: tensor for tensor in spec.inputs}
        seed = zlib.crc32(f"{spec.name}/{shape_class.name}".encode()) ^ _SEED
        self.generator = torch.Generator().manual_seed(seed)

    def normal(self, name: str, *, scale: float = 1.0, edges: bool = False, large: float = _LARGE) -> Tensor:
        """Normally distributed; with `edges` some rows are zero, large or tiny where there are four."""
        spec = self._specs[name]
        values = torch.randn(spec.sizes(self.sizes), generator=self.generator, dtype=torch.float64) * scale
        if edges and values.shape[0] >= 4:
            values[1] = 0.0
            values[2] *= large
            values[3] *= _TINY
        return self.rounded(values, spec)

    def rounded(self, values: Tensor, spec: TensorSpec) -> Tensor:
        """In the dtype of the signature. Cells of integers: 16 of them to 1, for they hold no fractions."""
        dtype: torch.dtype = getattr(torch, self._dtypes.get(spec.dtype, spec.dtype))
        if dtype == torch.int8 and spec.dtype == KV:
            values = (values * 16).round().clamp(-127, 127)
        return values.to(dtype)

    @property
    def largest_cell(self) -> float:
        """The largest number that a cell of the cache holds."""
        dtype: torch.dtype = getattr(torch, self._dtypes[KV])
        return torch.finfo(dtype).max if dtype.is_floating_point else torch.iinfo(dtype).max

    def takes(self, name: str) -> bool:
        """Whether the operator has an input of that name."""
        return name in self._specs

    def shape(self, name: str) -> tuple[int, ...]:
        """Of that input."""
        return self._specs[name].sizes(self.sizes)

    def shaped(self, name: str, values: Tensor) -> Tensor:
        """Values given, in the dtype of that input."""
        return self.rounded(values, self._specs[name])

    def integers(self, low: int, high: int, *shape: int) -> Tensor:
        """int64 in [low, high)."""
        return torch.randint(low, high, shape, generator=self.generator)

    def uniform(self, *shape: int) -> Tensor:
        """float64 in [0, 1)."""
        return torch.rand(shape, generator=self.generator, dtype=torch.float64)

    def permutation(self, count: int) -> Tensor:
        """int64 [count]."""
        return torch.randperm(count, generator=self.generator)
