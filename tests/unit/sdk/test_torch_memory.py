"""Memory as torch tensors: of a device behind torch, and of the host."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from meshkit.errors import InvalidArgument, NotFound, ResourceExhausted
from plugins.sdk.memory import MemoryStats, PooledMemory
from plugins.sdk.tensors import DTYPE_BYTES, HostTensor
from plugins.sdk.torch_memory import TorchHostMemory, TorchMemory


class DeviceMemory(TorchMemory):
    """Two devices, whose tensors torch keeps on the host; says for which one it waited."""

    def __init__(self) -> None:
        super().__init__()
        self._waited: list[int] = []

    def stats(self, device: int) -> MemoryStats:
        self._place(device)
        return MemoryStats(
            1 << 20, 1 << 19, self._allocated[device], self._pooled(device), self._peak[device]
        )

    def _place(self, device: int) -> torch.device:
        if device not in (0, 1):
            raise NotFound(f"device {device} does not exist", field="device")
        return torch.device("cpu")

    def _synchronize(self, device: int) -> None:
        self._waited.append(device)


class FullDevice(DeviceMemory):
    """Its runtime has nothing left."""

    def _reserve_device(self, nbytes: int, device: int) -> Any:
        raise torch.OutOfMemoryError("0 bytes free")


@pytest.fixture(params=[DeviceMemory, TorchHostMemory])
def memory(request: pytest.FixtureRequest) -> PooledMemory:
    made: PooledMemory = request.param()
    return made


def test_copies_are_bit_exact_in_every_direction_and_dtype(memory: PooledMemory) -> None:
    for dtype, size in DTYPE_BYTES.items():
        sent = bytes([0, 1] * 3 * size)
        on_host, on_device = memory.allocate((2, 3), dtype), memory.allocate((2, 3), dtype, 0)
        received = bytearray(len(sent))
        memory.copy(sent, on_host)
        memory.copy(on_host, on_device)
        memory.copy(on_device, received)
        assert bytes(received) == sent, dtype
        assert memory.download(on_device.tensor).data == sent


def test_a_buffers_tensor_is_its_memory(memory: PooledMemory) -> None:
    buffer = memory.allocate((3,), "float32", 0)
    memory.copy(b"\0" * 12, buffer)
    buffer.tensor[1] = 1.0
    seen = bytearray(12)
    memory.copy(buffer, seen)
    assert torch.frombuffer(seen, dtype=torch.float32).tolist() == [0.0, 1.0, 0.0]


def test_values_come_back_as_they_went(memory: PooledMemory) -> None:
    for shape in ((2, 3), (), (0, 4)):
        value = HostTensor("bfloat16", shape, b"\x80\x3f" * torch.Size(shape).numel())
        assert memory.download(memory.upload(value, 0)) == value


def test_what_does_not_fit_is_refused(memory: PooledMemory) -> None:
    small, large = memory.allocate((2,), "float32", 0), memory.allocate((4,), "float32")
    with pytest.raises(InvalidArgument, match="destination"):
        memory.copy(small, large)
    with pytest.raises(InvalidArgument, match="3 bytes"):
        memory.copy(b"abc", small)
    with pytest.raises(InvalidArgument, match="complex64"):
        memory.download(torch.zeros(1, dtype=torch.complex64))
    with pytest.raises(NotFound):
        memory.allocate((1,), "uint8", 1 << 20)
    with pytest.raises(NotFound):
        memory.upload(HostTensor("uint8", (1,), b"a"), 1 << 20)
    memory.free(small)
    with pytest.raises(NotFound, match="not live"):
        memory.copy(small, bytearray(8))


def test_host_memory_beyond_the_limit_is_refused(memory: PooledMemory) -> None:
    with pytest.raises(ResourceExhausted, match="bytes are free"):
        memory.allocate((1 << 50,), "uint8")


def test_a_full_device_is_told_with_the_runtimes_words() -> None:
    with pytest.raises(ResourceExhausted, match="512 bytes cannot be allocated on device 1: 0 bytes free"):
        FullDevice().allocate((1,), "uint8", 1)


def test_a_copy_waits_for_the_devices_that_it_touched() -> None:
    memory = DeviceMemory()
    host, first, second = (memory.allocate((4,), "uint8", device) for device in (None, 0, 1))
    memory.copy(b"abcd", host)
    assert memory._waited == []
    memory.copy(host, first)
    memory.copy(first, second)
    assert memory._waited == [0, 0, 1]
