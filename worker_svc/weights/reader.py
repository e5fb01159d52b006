"""Reads the tensors of a weight index from memory-mapped files: safetensors and GGUF alike."""

from __future__ import annotations

import mmap
from math import prod
from pathlib import Path

import torch

from meshkit.modelstore import BLOCK_LAYOUTS, TensorEntry, WeightIndex
from meshkit.modelstore.sharding import TensorPart
from worker_svc.weights.gguf_blocks import dequantize
from worker_svc.weights.quantized import StoredQuantized

# Values decoded at a time: keeps the temporaries of a large embedding to some ten MiB.
_CHUNK_VALUES = 1 << 22


class WeightReader:
    """One reader for all files of a model. Files are mapped when first read and never copied as a whole."""

    def __init__(self, index: WeightIndex) -> None:
        self._tensors = index.tensors
        self._maps: dict[Path, mmap.mmap] = {}

    def __repr__(self) -> str:
        return f"<WeightReader tensors={len(self._tensors)} mapped_files={len(self._maps)}>"

    def names(self) -> tuple[str, ...]:
        """All names, in the file's order."""
        return tuple(self._tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        """The tensor's shape. Raises KeyError for a name that is not there."""
        return self._tensors[name].shape

    def encoding(self, name: str) -> str:
        """How the tensor is stored, a key of `BLOCK_LAYOUTS`. Raises KeyError for a name that is not
        there.
        """
        return self._tensors[name].encoding

    def read(
        self, name: str, dtype: torch.dtype = torch.float32, part: TensorPart | None = None
    ) -> torch.Tensor:
        """A new tensor of that name, dequantised, rows in Hugging Face's rotary order.

        Values are made in float32 and then rounded to `dtype`. part: no more than that of it, padded with
        zeros; other rows are not read, other columns a chunk of rows at a time. Rows in rotary order part
        between heads. Raises KeyError for a name that is not there.
        """
        entry = self._tensors[name]
        if part is None:
            values = torch.empty(entry.shape, dtype=dtype)
            self._decode(name, _as_matrix(values))
            return _rotary_order(values, entry.rope_permuted_heads)
        values = torch.zeros(part.shape(entry.shape), dtype=dtype)
        matrix = _as_matrix(values)
        if part.axis == 0:
            self._decode(name, matrix[: part.stop - part.start], first=part.start)
        else:
            self._decode(name, matrix[:, : part.stop - part.start], columns=slice(part.start, part.stop))
        return _rotary_order(values, _heads_of(entry, len(values)))

    def _decode(
        self, name: str, values: torch.Tensor, *, first: int = 0, columns: slice = slice(None)
    ) -> None:
        """Fill values [rows, columns] from the tensor's rows `first` on, as stored, a chunk at a time."""
        entry = self._tensors[name]
        block_values, block_bytes = BLOCK_LAYOUTS[entry.encoding]
        width = prod(entry.shape[1:])
        stored = self.raw(name)
        step = max(1, _CHUNK_VALUES // max(width, 1))
        for row in range(0, len(values), step):
            count = min(step, len(values) - row)
            start, stop = (
                place * width * block_bytes // block_values for place in (first + row, first + row + count)
            )
            decoded = dequantize(stored[start:stop], entry.encoding)
            values[row : row + count] = decoded.view(count, width)[:, columns]

    def quantized(self, name: str) -> StoredQuantized | None:
        """None: `QuantizedWeights` reads what is. Raises KeyError for a name that is not there."""
        self.shape(name)
        return None

    def raw(self, name: str) -> torch.Tensor:
        """The bytes as stored (uint8, one dimension), a view of the mapped file: rows not brought into
        another order.

        Writing to it changes memory only, never the file. Raises KeyError for a name that is not there.
        """
        entry = self._tensors[name]
        if entry.nbytes == 0:
            return torch.empty(0, dtype=torch.uint8)
        return torch.frombuffer(
            self._map(entry.file), dtype=torch.uint8, count=entry.nbytes, offset=entry.offset
        )

    def raw_rows(self, name: str) -> torch.Tensor:
        """The stored bytes as [rows, bytes of a row] (uint8), rows in Hugging Face's rotary order.

        For kernels that pack the stored blocks themselves. A view where the order is right already, else a
        copy.
        """
        entry = self._tensors[name]
        return _rotary_order(self.raw(name).view(_row_count(entry), -1), entry.rope_permuted_heads)

    def _map(self, file: Path) -> mmap.mmap:
        if file not in self._maps:
            with file.open("rb") as stream:
                # Copy on write: torch wants memory that it may write to, the file must stay as it is.
                self._maps[file] = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_COPY)
        return self._maps[file]


def _as_matrix(values: torch.Tensor) -> torch.Tensor:
    """[rows, all that a row has]; one number is a row of one."""
    shape = values.shape or (1,)
    return values.view(shape[0], prod(shape[1:]))


def _heads_of(entry: TensorEntry, rows: int) -> int | None:
    """How many of the interleaved heads so many rows of a tensor are; None: not interleaved."""
    heads = entry.rope_permuted_heads
    return None if heads is None else heads * rows // entry.shape[0]


def _row_count(entry: TensorEntry) -> int:
    rows = 1
    for size in entry.shape[:-1]:
        rows *= size
    return rows


def _rotary_order(tensor: torch.Tensor, permuted_heads: int | None) -> torch.Tensor:
    """Undo the interleaving of the two rotary halves: row (head, i, half) goes to (head, half, i)."""
    if permuted_heads is None:
        return tensor
    rest = tensor.shape[1:]
    return tensor.reshape(permuted_heads, -1, 2, *rest).transpose(1, 2).reshape(tensor.shape)
