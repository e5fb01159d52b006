"""Host memory as torch tensors, and weights packed for oneDNN."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from meshkit.errors import InvalidArgument
from plugins.sdk.host import HostMemory
from plugins.sdk.host_limits import read_memory_limit
from plugins.sdk.tensors import DTYPE_BYTES, HostTensor

_ALIGNMENT = 64
"""A cache line: what vector loads like best."""
_TORCH_DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in DTYPE_BYTES}
_DTYPE_NAMES = {dtype: name for name, dtype in _TORCH_DTYPES.items()}


@dataclass(frozen=True)
class PackedWeight:
    """A matrix [out, in] in oneDNN's blocked layout."""

    packed: Tensor
    shape: tuple[int, int]

    @property
    def nbytes(self) -> int:
        """Bytes of the values; blocks may pad a little beyond."""
        return self.shape[0] * self.shape[1] * self.packed.element_size()


class CpuMemory(HostMemory):
    """The host's memory as torch tensors: buffers of devices and of the host are the same kind."""

    def upload(self, value: HostTensor, device: int) -> Any:
        """A tensor of its own memory."""
        self._check_device(device)
        tensor = torch.empty(value.shape, dtype=_TORCH_DTYPES[value.dtype])
        if value.data:
            raw = torch.frombuffer(bytearray(value.data), dtype=torch.uint8)
            tensor.view(-1).view(torch.uint8).copy_(raw)
        return tensor

    def download(self, tensor: Any) -> HostTensor:
        """From any tensor that torch can bring to the host."""
        held: Tensor = tensor.detach().cpu().contiguous()
        dtype = _DTYPE_NAMES.get(held.dtype)
        if dtype is None:
            raise InvalidArgument(f"{held.dtype} is not on the contract", field="dtype")
        data = held.reshape(-1).view(torch.uint8).numpy().tobytes() if held.numel() else b""
        return HostTensor(dtype, tuple(held.shape), data)

    def relayout_weight(self, weight: Any, *, operator: str, parameter: str = "weight") -> Any:
        """Matrices of `linear` in oneDNN's blocks; everything else as it is."""
        if operator != "linear" or not isinstance(weight, Tensor) or not can_pack(weight.dtype):
            return weight
        # The layout depends on the batch; None lets oneDNN choose one that serves all.
        packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), None)
        return PackedWeight(packed, (weight.shape[0], weight.shape[1]))

    def _reserve(self, nbytes: int, device: int | None) -> Any:
        self._check_device(device or 0)
        free = read_memory_limit().free_bytes
        if nbytes > free:
            raise MemoryError(f"{free} bytes are free")
        # numpy's zeros are calloc's: pages are taken when they are written. torch.zeros writes them all at
        # once.
        raw = np.zeros(nbytes + _ALIGNMENT, dtype=np.uint8)
        offset = -raw.ctypes.data % _ALIGNMENT
        return torch.from_numpy(raw[offset : offset + nbytes])

    def _view(self, memory: Any, shape: tuple[int, ...], dtype: str) -> Any:
        count = torch.Size(shape).numel() * DTYPE_BYTES[dtype]
        return memory[:count].view(_TORCH_DTYPES[dtype]).view(shape)

    def _bytes_of(self, memory: Any) -> memoryview:
        return memoryview(memory.numpy())


def can_pack(dtype: torch.dtype) -> bool:
    """Whether oneDNN multiplies packed weights of this dtype here."""
    if not onednn_is_available():
        return False
    if dtype == torch.float32:
        return True
    return dtype == torch.bfloat16 and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def onednn_is_available() -> bool:
    """Whether this torch has oneDNN and its packed product."""
    return bool(torch._C._has_mkldnn) and hasattr(torch.ops.mkldnn, "_linear_pointwise")
