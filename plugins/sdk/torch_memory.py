"""Memory as torch tensors: of a device that torch knows, or of the host."""

from __future__ import annotations

import abc
from typing import Any

import torch
from torch import Tensor

from meshkit.errors import InvalidArgument
from plugins.sdk.host import HostMemory, reserve_host
from plugins.sdk.memory import Buffer, HostBytes, PooledMemory, check_copy
from plugins.sdk.tensors import DTYPE_BYTES, HostTensor

TORCH_DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in DTYPE_BYTES}
"""The contract's dtypes."""
_DTYPE_NAMES = {dtype: name for name, dtype in TORCH_DTYPES.items()}


class TorchMemory(PooledMemory):
    """A device's memory, and the host's beside it. A plugin brings `_place` and the verb `stats`, and
    overrides `_synchronize`, `_reserve_device` or `_reserve_host` where its runtime has a way of its own.
    """

    @abc.abstractmethod
    def _place(self, device: int) -> torch.device:
        """Where torch keeps tensors of a device. Raises NotFound for an unknown one."""

    def _synchronize(self, device: int) -> None:
        """Return when copies to and from the device have ended. Default: they have when torch returns."""

    def _reserve_device(self, nbytes: int, device: int) -> Tensor:
        """New zeros, uint8 [nbytes]. Raises torch.OutOfMemoryError or MemoryError."""
        return torch.zeros(nbytes, dtype=torch.uint8, device=self._place(device))

    def _reserve_host(self, nbytes: int) -> Tensor:
        """New zeros on the host, uint8 [nbytes]. Raises MemoryError."""
        return torch.from_numpy(reserve_host(nbytes))

    def copy(self, source: Buffer | HostBytes, destination: Buffer | bytearray | memoryview) -> None:
        """As the contract says: by torch, then waited for."""
        check_copy(source, destination)
        self._bytes_tensor(destination).copy_(self._bytes_tensor(source))
        for place in (source, destination):
            if isinstance(place, Buffer) and place.device is not None:
                self._synchronize(place.device)

    def upload(self, value: HostTensor, device: int) -> Any:
        """A tensor of its own memory."""
        place = self._place(device)
        return to_tensor(value).to(place)

    def download(self, tensor: Any) -> HostTensor:
        """From any tensor that torch can bring to the host."""
        return to_host(tensor)

    def _reserve(self, nbytes: int, device: int | None) -> Any:
        if device is None:
            return self._reserve_host(nbytes)
        self._place(device)
        try:
            return self._reserve_device(nbytes, device)
        except torch.OutOfMemoryError as error:
            raise MemoryError(str(error)) from error

    def _view(self, memory: Any, shape: tuple[int, ...], dtype: str) -> Any:
        return view_bytes(memory, shape, dtype)

    def _bytes_tensor(self, place: Buffer | HostBytes) -> Tensor:
        """uint8 [bytes] over the bytes of a buffer or of the caller."""
        if not isinstance(place, Buffer):
            return _over(place)
        memory: Tensor = self._memory_of(place)
        return memory[: place.nbytes]


class TorchHostMemory(HostMemory):
    """The host's memory as torch tensors, for plugins whose devices are the host."""

    def upload(self, value: HostTensor, device: int) -> Any:
        """A tensor of its own memory."""
        self._check_device(device)
        return to_tensor(value)

    def download(self, tensor: Any) -> HostTensor:
        """From any tensor that torch can bring to the host."""
        return to_host(tensor)

    def _view(self, memory: Any, shape: tuple[int, ...], dtype: str) -> Any:
        return view_bytes(torch.from_numpy(memory), shape, dtype)


def to_tensor(value: HostTensor) -> Tensor:
    """A torch tensor on the host, of its own memory."""
    tensor = torch.empty(value.shape, dtype=TORCH_DTYPES[value.dtype])
    if value.data:
        tensor.view(-1).view(torch.uint8).copy_(_over(value.data))
    return tensor


def to_host(tensor: Tensor) -> HostTensor:
    """The elements of a torch tensor. Raises InvalidArgument for a dtype that is not on the contract."""
    held = tensor.detach().cpu().contiguous()
    dtype = _DTYPE_NAMES.get(held.dtype)
    if dtype is None:
        raise InvalidArgument(f"{held.dtype} is not on the contract", field="dtype")
    data = held.reshape(-1).view(torch.uint8).numpy().tobytes() if held.numel() else b""
    return HostTensor(dtype, tuple(held.shape), data)


def view_bytes(memory: Tensor, shape: tuple[int, ...], dtype: str) -> Tensor:
    """A tensor over the first bytes of `memory`, uint8 [bytes]."""
    count = torch.Size(shape).numel() * DTYPE_BYTES[dtype]
    return memory[:count].view(TORCH_DTYPES[dtype]).view(shape)


def _over(data: HostBytes) -> Tensor:
    """uint8 over the caller's bytes; over a copy where they cannot be written, which torch insists on."""
    view = memoryview(data).cast("B")
    if not view.nbytes:
        return torch.empty(0, dtype=torch.uint8)
    return torch.frombuffer(bytearray(view) if view.readonly else view, dtype=torch.uint8)
