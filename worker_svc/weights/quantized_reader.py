"""Reads quantised checkpoints: tensors of AWQ, GPTQ and compressed-tensors as codes, scales and zero points.

Nothing goes through a float: four-bit codes are taken from the words that hold them, wherever the format lays
them. Facts of the layouts: docs/models.md, "Quantised checkpoints".
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from meshkit.modelstore import tensor_shapes
from meshkit.modelstore.checkpoint_quantization import CheckpointQuantization
from meshkit.modelstore.problems import model_path_error
from meshkit.modelstore.sharding import TensorPart
from worker_svc.weights.quantized import StoredQuantized
from worker_svc.weights.reader import WeightReader

_AWQ_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)
"""Of eight outputs of a word, the place of each: AWQ packs 0, 2, 4, 6, 1, 3, 5, 7 from the lowest bits up."""
_SYMMETRIC_ZERO = 8
"""Four-bit codes are stored without a sign: what was -8 to 7 lies 8 higher, zero points as well."""


class QuantizedWeights:
    """A checkpoint's tensors under the names of the unquantised model."""

    def __init__(
        self, reader: WeightReader, config: Mapping[str, Any], quantization: CheckpointQuantization
    ) -> None:
        """config: completed, as ModelFolder.config holds it; quantization: what it says."""
        self._reader = reader
        self._quantization = quantization
        self._stored = frozenset(reader.names())
        shapes = tensor_shapes(config)
        self._matrices = {
            name: shape
            for name, shape in shapes.items()
            if name.endswith(".weight") and quantization.holds(name.removesuffix(".weight"), shape)
        }
        self._names = self._plain_names(shapes)

    def __repr__(self) -> str:
        return f"<QuantizedWeights {self._quantization.label} matrices={len(self._matrices)}>"

    def names(self) -> tuple[str, ...]:
        """All names: the model's, then what else is in the files."""
        return self._names

    def shape(self, name: str) -> tuple[int, ...]:
        """The tensor's shape, unquantised. Raises KeyError for a name that is not there."""
        return self._matrices.get(name) or self._reader.shape(name)

    def read(self, name: str, dtype: torch.dtype = torch.float32, part: TensorPart | None = None) -> Tensor:
        """A new tensor of that name, or a part of it; of a quantised matrix what its codes mean."""
        stored = self.quantized(name)
        if stored is None:
            return self._reader.read(name, dtype, part)
        return stored.part(part).dequantize().to(dtype)

    def quantized(self, name: str) -> StoredQuantized | None:
        """The codes of a quantised matrix, new tensors.

        Raises:
            KeyError: a name that is not there.
            InvalidArgument: (model_path) an order of columns that does not fill its groups.
        """
        shape = self._matrices.get(name)
        if shape is None:
            self._reader.shape(name)
            return None
        matrix = name.removesuffix(".weight")
        made = getattr(self, f"_read_{self._quantization.scheme.layout}")(matrix, shape)
        assert isinstance(made, StoredQuantized)
        return made

    def _plain_names(self, shapes: Mapping[str, Any]) -> tuple[str, ...]:
        held = frozenset(name.removesuffix("weight") for name in self._matrices)
        beside = [
            name
            for name in self._reader.names()
            if name not in shapes and (name.endswith(".bias") or f"{name.rpartition('.')[0]}." not in held)
        ]
        return (*shapes, *beside)

    def _read_awq(self, matrix: str, shape: tuple[int, int]) -> StoredQuantized:
        out, inner = shape
        codes = self._words(f"{matrix}.qweight")[..., _AWQ_PLACES].reshape(inner, out).T
        zero = self._words(f"{matrix}.qzeros")[..., _AWQ_PLACES].reshape(-1, out).T
        scale = self._reader.read(f"{matrix}.scales").T
        return self._four_bit(codes, scale, zero, None)

    def _read_gptq(self, matrix: str, shape: tuple[int, int]) -> StoredQuantized:
        out, inner = shape
        codes = self._words(f"{matrix}.qweight").permute(1, 0, 2).reshape(out, inner)
        zero = self._words(f"{matrix}.qzeros").reshape(-1, out).T + self._quantization.scheme.zero_offset
        scale = self._reader.read(f"{matrix}.scales").T
        return self._four_bit(codes, scale, zero, self._column_order(f"{matrix}.g_idx", inner))

    def _read_packed(self, matrix: str, shape: tuple[int, int]) -> StoredQuantized:
        out, inner = shape
        codes = self._words(f"{matrix}.weight_packed").flatten(1)[:, :inner]
        scale = self._reader.read(f"{matrix}.weight_scale")
        if self._quantization.scheme.symmetric:
            zero = torch.full(scale.shape, _SYMMETRIC_ZERO, dtype=torch.uint8)
        else:
            # Words hold eight outputs of a group here, not eight groups of an output.
            zero = self._words(f"{matrix}.weight_zero_point").permute(0, 2, 1).flatten(0, 1)[:out]
        return self._four_bit(codes, scale, zero, self._column_order(f"{matrix}.weight_g_idx", inner))

    def _read_integers(self, matrix: str, shape: tuple[int, int]) -> StoredQuantized:
        codes = self._integers(f"{matrix}.weight", "I8").view(torch.int8).reshape(shape).clone()
        scale = self._reader.read(f"{matrix}.weight_scale").flatten().expand(shape[0])
        return StoredQuantized("w8a8", codes, scale.contiguous(), None, shape[1])

    def _four_bit(self, codes: Tensor, scale: Tensor, zero: Tensor, order: Tensor | None) -> StoredQuantized:
        if order is not None:
            codes = codes[:, order]
        group = self._quantization.scheme.columns_of_group(codes.shape[1])
        parts = (codes.contiguous(), scale.contiguous(), zero.contiguous())
        return StoredQuantized("w4a16", *parts, group, order)

    def _words(self, name: str) -> Tensor:
        """The four-bit values of a tensor of int32 words [a, b], from the lowest bits up: uint8 [a, b, 8]."""
        stored = self._integers(name, "I32").view(*self._reader.shape(name), 4)
        return torch.stack((stored & 15, stored >> 4), dim=-1).flatten(-2)

    def _integers(self, name: str, *encodings: str) -> Tensor:
        """The bytes of a tensor, uint8 [n], that is stored as one of `encodings`."""
        if (encoding := self._reader.encoding(name)) not in encodings:
            raise model_path_error(
                f"tensor {name} is stored as {encoding}; {self._quantization.label} has "
                f"{' or '.join(encodings)} there",
                reason="ENCODING_UNSUPPORTED",
            )
        return self._reader.raw(name)

    def _column_order(self, name: str, inner: int) -> Tensor | None:
        """Columns by their groups, int64 [inner]; None: they lie in the groups' order, as the scheme says."""
        scheme = self._quantization.scheme
        if not scheme.group or (not scheme.ordered and name not in self._stored):
            return None
        dtype = torch.int64 if self._reader.encoding(name) == "I64" else torch.int32
        stored = self._integers(name, "I32", "I64").view(dtype).long()
        wanted = torch.arange(inner) // scheme.group
        ordered, order = stored.sort(stable=True)
        if not torch.equal(ordered, wanted) or (not scheme.ordered and not torch.equal(stored, wanted)):
            raise model_path_error(
                f"{name} does not put {inner} columns into groups of {scheme.group}"
                + (
                    ""
                    if scheme.ordered
                    else " one after the other, and config.json names no activation order"
                ),
                reason="WEIGHTS_DAMAGED",
            )
        return order if scheme.ordered else None
