"""Memory of the chip as torch tensors: the chip's own for devices, the host's beside it."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from meshkit.errors import InvalidArgument, NotFound
from plugins.kunlun.devices import check_device
from plugins.kunlun.runtime import Runtime
from plugins.sdk.memory import Buffer, HostBytes, MemoryStats, PooledMemory
from plugins.sdk.tensors import DTYPE_BYTES, HostTensor

TORCH_DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in DTYPE_BYTES}
_DTYPE_NAMES = {dtype: name for name, dtype in TORCH_DTYPES.items()}


class KunlunMemory(PooledMemory):
    """Blocks of bytes on a device; copies go through torch, since a device's bytes are not the host's."""

    def __init__(self, runtime: Runtime) -> None:
        super().__init__()
        self._runtime = runtime

    def stats(self, device: int) -> MemoryStats:
        """Totals are the device's, what is allocated is this process's."""
        check_device(self._runtime, device)
        free, total = self._runtime.cuda.mem_get_info(device)
        return MemoryStats(
            total_bytes=total,
            free_bytes=free,
            allocated_bytes=self._allocated[device],
            pooled_bytes=self._pooled(device),
            peak_allocated_bytes=self._peak[device],
        )

    def copy(self, source: Buffer | HostBytes, destination: Buffer | bytearray | memoryview) -> None:
        """As the contract says, by torch, then waited for."""
        if isinstance(source, Buffer) and isinstance(destination, Buffer):
            self._check_same_form(source, destination)
        read, write = self._bytes_tensor(source), self._bytes_tensor(destination)
        if read.numel() != write.numel():
            raise InvalidArgument(
                f"a copy of {read.numel()} bytes does not fit a destination of {write.numel()}",
                field="destination",
            )
        write.copy_(read)
        for place in (source, destination):
            if isinstance(place, Buffer) and place.device is not None:
                self._runtime.synchronize(place.device)

    def upload(self, value: HostTensor, device: int) -> Any:
        """A tensor of its own memory."""
        check_device(self._runtime, device)
        tensor = torch.empty(value.shape, dtype=TORCH_DTYPES[value.dtype])
        if value.data:
            tensor.view(-1).view(torch.uint8).copy_(_host_bytes(value.data))
        return tensor.to(self._runtime.torch_device(device))

    def download(self, tensor: Any) -> HostTensor:
        """From any tensor that torch can bring to the host."""
        held: Tensor = tensor.detach().cpu().contiguous()
        dtype = _DTYPE_NAMES.get(held.dtype)
        if dtype is None:
            raise InvalidArgument(f"{held.dtype} is not on the contract", field="dtype")
        data = held.reshape(-1).view(torch.uint8).numpy().tobytes() if held.numel() else b""
        return HostTensor(dtype, tuple(held.shape), data)

    def relayout_weight(self, weight: Any, *, operator: str) -> Any:
        """Contiguous; the kernels want no other order."""
        return weight.contiguous() if isinstance(weight, Tensor) else weight

    def _reserve(self, nbytes: int, device: int | None) -> Any:
        if device is None:
            return torch.from_numpy(np.zeros(nbytes, dtype=np.uint8))
        check_device(self._runtime, device)
        try:
            return self._runtime.zeros(nbytes, device)
        except torch.OutOfMemoryError as error:
            raise MemoryError(str(error)) from error

    def _view(self, memory: Any, shape: tuple[int, ...], dtype: str) -> Any:
        count = torch.Size(shape).numel() * DTYPE_BYTES[dtype]
        return memory[:count].view(TORCH_DTYPES[dtype]).view(shape)

    def _bytes_of(self, memory: Any) -> memoryview:
        """Of host memory only: `copy` above reaches a device's by torch."""
        return memoryview(memory.numpy())

    def _bytes_tensor(self, place: Buffer | HostBytes) -> Tensor:
        """uint8 [bytes] over the bytes of a buffer or of the caller."""
        if not isinstance(place, Buffer):
            return _host_bytes(place)
        entry = self._live.get(place.buffer_id)
        if entry is None:
            raise NotFound(f"buffer {place.buffer_id} is not live", field="buffer_id")
        memory: Tensor = entry[1]
        return memory[: place.nbytes]


def _host_bytes(data: HostBytes) -> Tensor:
    """Over the caller's memory; over a copy where that cannot be written, which torch insists on."""
    view = memoryview(data).cast("B")
    if not view.nbytes:
        return torch.empty(0, dtype=torch.uint8)
    return torch.frombuffer(bytearray(view) if view.readonly else view, dtype=torch.uint8)
