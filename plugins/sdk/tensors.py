"""Tensors as the contract names them: dtype names, sizes, and small values on the host as bytes. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from meshkit.errors import InvalidArgument

DTYPE_BYTES: dict[str, int] = {
    "float64": 8,
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "int64": 8,
    "int32": 4,
    "int8": 1,
    "uint8": 1,
    "bool": 1,
}

CACHE_DTYPE_BYTES: dict[str, int] = {"float8_e4m3fn": 1, "float8_e5m2": 1}
"""Dtypes that only a KV cache has: no tensor of the contract does, its memory is allocated as uint8."""


def dtype_size(dtype: str) -> int:
    """Bytes of one element. Raises InvalidArgument (dtype) for a name that the contract does not know."""
    size = {**DTYPE_BYTES, **CACHE_DTYPE_BYTES}.get(dtype)
    if size is None:
        raise InvalidArgument(f"dtype {dtype!r} is unknown; known: {', '.join(DTYPE_BYTES)}", field="dtype")
    return size


def carrier_of(dtype: str) -> str:
    """The dtype of the contract's tensors that holds a cache's cells: its own, or uint8."""
    return "uint8" if dtype in CACHE_DTYPE_BYTES else dtype


def tensor_bytes(shape: Sequence[int], dtype: str) -> int:
    """Bytes of a contiguous tensor. Raises InvalidArgument for a negative size or an unknown dtype."""
    if any(size < 0 for size in shape):
        raise InvalidArgument(f"shape {list(shape)} has a negative size", field="shape")
    if dtype in CACHE_DTYPE_BYTES:
        raise InvalidArgument(f"dtype {dtype!r} is a KV cache's only; its carrier is uint8", field="dtype")
    return prod(shape) * dtype_size(dtype)


@dataclass(frozen=True)
class HostTensor:
    """A small tensor by value, as TensorValue carries it: contiguous, row-major, little-endian; bool as a
    byte.
    """

    dtype: str
    shape: tuple[int, ...]
    data: bytes

    def __post_init__(self) -> None:
        wanted = tensor_bytes(self.shape, self.dtype)
        if len(self.data) != wanted:
            raise InvalidArgument(
                f"a {self.dtype} tensor of shape {list(self.shape)} has {wanted} bytes, not {len(self.data)}",
                field="data",
            )
