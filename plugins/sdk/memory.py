"""Second duty of a plugin: buffers, copies, pooled reuse, statistics, and the layout of weights."""

from __future__ import annotations

import abc
import itertools
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from chipmesh.device.v1alpha1 import memory_pb2
from meshkit.errors import InvalidArgument, NotFound, ResourceExhausted
from plugins.sdk.drift import ContractClass
from plugins.sdk.tensors import HostTensor, tensor_bytes


@dataclass(frozen=True)
class Buffer:
    """A live allocation. `device` None: host memory. `tensor`: the framework's tensor over its memory."""

    buffer_id: str
    shape: tuple[int, ...]
    dtype: str
    device: int | None
    nbytes: int
    tensor: Any


@dataclass(frozen=True)
class MemoryStats:
    """Use of a device's memory, in bytes."""

    total_bytes: int
    free_bytes: int
    allocated_bytes: int
    pooled_bytes: int
    peak_allocated_bytes: int

    def to_proto(self) -> memory_pb2.GetStatsResponse:
        """The message of the device contract."""
        return memory_pb2.GetStatsResponse(
            total_bytes=self.total_bytes,
            free_bytes=self.free_bytes,
            allocated_bytes=self.allocated_bytes,
            pooled_bytes=self.pooled_bytes,
            peak_allocated_bytes=self.peak_allocated_bytes,
        )


HostBytes = bytes | bytearray | memoryview
"""Elements on the host: contiguous, row-major, little-endian."""


class MemoryManager(ContractClass, contract=True):
    """Buffers belong to the process. NotFound for an unknown device or buffer; ResourceExhausted names
    bytes.
    """

    @abc.abstractmethod
    def allocate(
        self, shape: Sequence[int], dtype: str, device: int | None = None, *, zeroed: bool = False
    ) -> Buffer:
        """Reserve memory for a tensor; its contents are undefined unless `zeroed`. `device` None: host
        memory.
        """

    @abc.abstractmethod
    def free(self, buffer: Buffer) -> None:
        """Give a buffer back to the pool. Idempotent."""

    @abc.abstractmethod
    def copy(self, source: Buffer | HostBytes, destination: Buffer | bytearray | memoryview) -> None:
        """Copy all bytes, complete on return. Raises InvalidArgument where the two forms differ."""

    @abc.abstractmethod
    def stats(self, device: int) -> MemoryStats:
        """Use of a device's memory now."""

    @abc.abstractmethod
    def upload(self, value: HostTensor, device: int) -> Any:
        """A framework tensor on the device with the elements of `value`."""

    @abc.abstractmethod
    def download(self, tensor: Any) -> HostTensor:
        """The elements of a framework tensor, on the host."""

    def relayout_weight(self, weight: Any, *, operator: str, parameter: str = "weight") -> Any:
        """A weight in the layout that this chip's `operator` wants, made once at load. Default: as it is.

        The result is opaque: only the same plugin's operator takes it.
        """
        return weight


class PooledMemory(MemoryManager):
    """Bookkeeping and pooled reuse. A plugin brings `_reserve` and `_view`, and the verbs `copy`, `stats`,
    `upload` and `download`: only it can move bytes between its device and the host. plugins.sdk.torch_memory
    has nearly all of it for devices that torch knows, plugins.sdk.host for memory of the host.

    Freed memory is kept by (device, rounded size) and reused by the next allocation of that size; when the
    device is full the pool is dropped and the reservation tried once more.
    """

    _GRANULE = 512
    """Sizes are rounded up to this many bytes, so that near sizes share pool entries."""
    _POOLED_AT_MOST = 64 << 20
    """Larger blocks go back to the system at once: an unloaded model's pages must not stay with us."""

    def __init__(self) -> None:
        self._ids = itertools.count()
        self._live: dict[str, tuple[Buffer, Any]] = {}
        self._pool: defaultdict[tuple[int | None, int], list[Any]] = defaultdict(list)
        self._allocated: defaultdict[int | None, int] = defaultdict(int)
        self._peak: defaultdict[int | None, int] = defaultdict(int)

    def allocate(
        self, shape: Sequence[int], dtype: str, device: int | None = None, *, zeroed: bool = False
    ) -> Buffer:
        """As the contract says; served from the pool where a block of that size is there. Zeroed memory is
        always new: a host hands it out without touching it.
        """
        nbytes = tensor_bytes(shape, dtype)
        size = self._rounded(nbytes)
        entries = [] if zeroed else self._pool[device, size]
        memory = entries.pop() if entries else self._reserve_or_trim(size, device)
        buffer = Buffer(
            buffer_id=f"buffer-{next(self._ids)}",
            shape=tuple(shape),
            dtype=dtype,
            device=device,
            nbytes=nbytes,
            tensor=self._view(memory, tuple(shape), dtype),
        )
        self._live[buffer.buffer_id] = (buffer, memory)
        self._allocated[device] += size
        self._peak[device] = max(self._peak[device], self._allocated[device])
        return buffer

    def free(self, buffer: Buffer) -> None:
        """As the contract says."""
        entry = self._live.pop(buffer.buffer_id, None)
        if entry is None:
            return
        size = self._rounded(buffer.nbytes)
        self._allocated[buffer.device] -= size
        if size <= self._POOLED_AT_MOST:
            self._pool[buffer.device, size].append(entry[1])

    @abc.abstractmethod
    def _reserve(self, nbytes: int, device: int | None) -> Any:
        """New memory of `nbytes` zeros. Raises MemoryError where there is none, NotFound for an unknown
        device.
        """

    @abc.abstractmethod
    def _view(self, memory: Any, shape: tuple[int, ...], dtype: str) -> Any:
        """The framework's tensor over the first bytes of `memory`."""

    def _pooled(self, device: int | None) -> int:
        return sum(size * len(kept) for (owner, size), kept in self._pool.items() if owner == device)

    def _rounded(self, nbytes: int) -> int:
        return -(-max(nbytes, 1) // self._GRANULE) * self._GRANULE

    def _reserve_or_trim(self, size: int, device: int | None) -> Any:
        try:
            return self._reserve(size, device)
        except MemoryError:
            self._pool.clear()
        try:
            return self._reserve(size, device)
        except MemoryError as error:
            raise ResourceExhausted(
                f"{size} bytes cannot be allocated on device {device}: {error}",
                reason="OUT_OF_MEMORY",
                wanted_bytes=size,
            ) from error

    def _memory_of(self, buffer: Buffer) -> Any:
        """What `_reserve` made for it. Raises NotFound where it is not live."""
        entry = self._live.get(buffer.buffer_id)
        if entry is None:
            raise NotFound(f"buffer {buffer.buffer_id} is not live", field="buffer_id")
        return entry[1]


def check_copy(source: Buffer | HostBytes, destination: Buffer | bytearray | memoryview) -> None:
    """Raise InvalidArgument unless the two have one form: shape and dtype of buffers, else bytes."""
    if isinstance(source, Buffer) and isinstance(destination, Buffer):
        if (source.shape, source.dtype) != (destination.shape, destination.dtype):
            raise InvalidArgument(
                f"source is {source.dtype} {list(source.shape)}, destination {destination.dtype} "
                f"{list(destination.shape)}",
                field="destination",
            )
        return
    read, write = _count_bytes(source), _count_bytes(destination)
    if read != write:
        raise InvalidArgument(
            f"a copy of {read} bytes does not fit a destination of {write}", field="destination"
        )


def _count_bytes(place: Buffer | HostBytes) -> int:
    return place.nbytes if isinstance(place, Buffer) else memoryview(place).nbytes
