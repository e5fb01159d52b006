"""Tensors of the framework from values on the host, and back. Imports torch."""

from __future__ import annotations

import torch
from torch import Tensor

from plugins.sdk.tensors import HostTensor


def raw_bytes(value: Tensor) -> bytes:
    """The elements of a tensor on the host: contiguous, row-major."""
    if not value.numel():
        return b""
    raw: bytes = value.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
    return raw


def to_host_tensor(value: Tensor) -> HostTensor:
    """The value of a tensor on the host."""
    return HostTensor(str(value.dtype).removeprefix("torch."), tuple(value.shape), raw_bytes(value))


def from_host_tensor(value: HostTensor) -> Tensor:
    """A new tensor on the host with that value."""
    dtype: torch.dtype = getattr(torch, value.dtype)
    if not value.data:
        return torch.empty(value.shape, dtype=dtype)
    return torch.frombuffer(bytearray(value.data), dtype=torch.uint8).view(dtype).reshape(value.shape)
