"""Reads the tensors of a weight index from memory-mapped files: safetensors and GGUF alike."""

from __future__ import annotations

import mmap
from pathlib import Path

import torch

from meshkit.modelstore import BLOCK_LAYOUTS, TensorEntry, WeightIndex
from worker_svc.weights.gguf_blocks import dequantize

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

    def read(self, name: str, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """A new tensor of that name, dequantised, rows in Hugging Face's rotary order.

        Values are made in float32 and then rounded to `dtype`. Raises KeyError for a name that is not there.
        """
        entry = self._tensors[name]
        stored = self.raw(name)
        block_values, block_bytes = BLOCK_LAYOUTS[entry.encoding]
        chunk_blocks = max(1, _CHUNK_VALUES // block_values)
        values = torch.empty(entry.nbytes // block_bytes * block_values, dtype=dtype)
        for start, piece in enumerate(torch.split(stored, chunk_blocks * block_bytes)):
            offset = start * chunk_blocks * block_values
            decoded = dequantize(piece, entry.encoding)
            values[offset : offset + decoded.numel()] = decoded
        return _rotary_order(values.reshape(entry.shape), entry.rope_permuted_heads)

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
