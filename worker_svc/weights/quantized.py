"""A matrix that is stored in integers: its codes, scales and zero points, whatever file they came from."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from meshkit.errors import InvalidArgument
from meshkit.modelstore.quantization_schemes import QuantizationScheme
from meshkit.modelstore.sharding import TensorPart


@dataclass(frozen=True)
class StoredQuantized:
    """A matrix [out, in] in integers. On `meta` where only shapes are known.

    kind: "w4a16": codes uint8 from 0 to 15, value = (code - zero) * scale by groups of columns, scale float32
    and zero uint8 [out, in / group]. "w8a8": codes int8, value = code * scale, scale float32 [out], no zero,
    group = in. order: int64 [in], the model's column that each column of codes belongs to; None: the same.
    """

    kind: str
    codes: Tensor
    scale: Tensor
    zero: Tensor | None
    group: int
    order: Tensor | None = None

    @property
    def shape(self) -> tuple[int, int]:
        """(out, in)."""
        rows, columns = self.codes.shape
        return rows, columns

    def to(self, device: torch.device) -> StoredQuantized:
        """The same on a device."""
        zero, order = (None if each is None else each.to(device) for each in (self.zero, self.order))
        return replace(self, codes=self.codes.to(device), scale=self.scale.to(device), zero=zero, order=order)

    def part(self, part: TensorPart | None) -> StoredQuantized:
        """Rows or columns of it, as a rank holds them; None: all.

        Raises:
            InvalidArgument: (tensor_parallel_size) columns that cut a group, or that activation order has
                scattered over the groups; a part with padding.
        """
        if part is None:
            return self
        if part.padding:
            raise _cannot_split(f"a quantised matrix {list(self.shape)} has no rows of zeros to pad with")
        chosen = slice(part.start, part.stop)
        if part.axis == 0:
            zero = None if self.zero is None else self.zero[chosen]
            return replace(self, codes=self.codes[chosen].clone(), scale=self.scale[chosen], zero=zero)
        return self._columns(chosen)

    def _columns(self, chosen: slice) -> StoredQuantized:
        if self.order is not None:
            raise _cannot_split(
                "its columns were quantised in the order of activations (desc_act), so each rank's columns "
                "lie in all groups"
            )
        codes = self.codes[:, chosen].clone()
        if self.kind == "w8a8" or self.group == self.shape[1]:
            # One scale for a whole row goes with every part of it.
            return replace(self, codes=codes, group=codes.shape[1])
        if chosen.start % self.group or chosen.stop % self.group:
            raise _cannot_split(
                f"columns {chosen.start} to {chosen.stop} of {self.shape[1]} do not begin and end with a "
                f"group of {self.group} columns"
            )
        groups = slice(chosen.start // self.group, chosen.stop // self.group)
        zero = None if self.zero is None else self.zero[:, groups]
        return replace(self, codes=codes, scale=self.scale[:, groups], zero=zero)

    @classmethod
    def of_shape(cls, scheme: QuantizationScheme, shape: tuple[int, int]) -> StoredQuantized:
        """On `meta`: what a matrix of `shape` becomes, without values."""
        out, inner = shape
        group = scheme.columns_of_group(inner)
        if scheme.kind == "w8a8":
            return cls("w8a8", _shaped(torch.int8, *shape), _shaped(torch.float32, out), None, inner)
        scale, zero = (_shaped(dtype, out, inner // group) for dtype in (torch.float32, torch.uint8))
        order = _shaped(torch.int64, inner) if scheme.ordered else None
        return cls("w4a16", _shaped(torch.uint8, *shape), scale, zero, group, order)

    def dequantize(self) -> Tensor:
        """float32 [out, in], columns in the model's order: what the codes mean."""
        values = self.codes.float()
        if self.zero is not None:
            values -= self.zero.float().repeat_interleave(self.group, dim=1)
        if self.scale.dim() == 1:
            values *= self.scale.unsqueeze(1)
        else:
            values *= self.scale.repeat_interleave(self.group, dim=1)
        if self.order is None:
            return values
        return torch.empty_like(values).index_copy_(1, self.order, values)


def _shaped(dtype: torch.dtype, *shape: int) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _cannot_split(cause: str) -> InvalidArgument:
    return InvalidArgument(
        f"the checkpoint's quantised matrices do not split over the ranks: {cause}; take a smaller "
        "tensor_parallel_size, pipeline_parallel_size, or another checkpoint",
        field="tensor_parallel_size",
        reason="QUANTIZATION_DOES_NOT_SPLIT",
    )
