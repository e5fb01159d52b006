"""Device and memory management of a host, for plugins whose chip is the host itself. No torch."""

from __future__ import annotations

import itertools
import platform
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from meshkit.errors import InvalidArgument, NotFound
from plugins.sdk.device import PHYSICAL_COUNT, DeviceManager, DeviceProperties
from plugins.sdk.host_limits import processor_name, read_memory_limit, usable_cpus
from plugins.sdk.memory import Buffer, HostBytes, MemoryStats, PooledMemory, check_copy
from plugins.sdk.tensors import HostTensor


class HostDevices(DeviceManager):
    """A host as devices: places for one executor each, which share its processors and memory.

    Work ends before a call returns, so streams and events are ids that are checked.

    count: number of devices; None: one for each processor that this process may use. Devices of a number that
        was chosen are places to run, none of them physical, and say no physical count.
    threads: compute threads; None: the processors that this process may use.
    """

    def __init__(
        self,
        *,
        count: int | None = None,
        threads: int | None = None,
        attributes: Mapping[str, str] | None = None,
    ) -> None:
        self._count = count or usable_cpus()
        self._physical = {} if count else {PHYSICAL_COUNT: str(usable_cpus())}
        self._threads = threads or usable_cpus()
        self._attributes = dict(attributes or {})
        self._ids = itertools.count()
        self._streams: set[str] = set()
        self._events: dict[str, str] = {}

    @property
    def shares_host_memory(self) -> bool:
        """True: the device is the host."""
        return True

    def list_devices(self) -> Sequence[DeviceProperties]:
        """All of them; they differ in their index only."""
        return tuple(self.properties(index) for index in range(self._count))

    def properties(self, device: int) -> DeviceProperties:
        """Memory as the control group allows, threads as configured."""
        _check_device(device, self._count)
        memory = read_memory_limit()
        return DeviceProperties(
            index=device,
            name=processor_name(),
            memory_total_bytes=memory.total_bytes,
            memory_free_bytes=memory.free_bytes,
            compute_units=self._threads,
            attributes={
                "architecture": platform.machine(),
                "usable_cpus": str(usable_cpus()),
                **self._physical,
                "memory_limit_source": memory.source,
                **self._attributes,
            },
        )

    def create_stream(self, device: int) -> str:
        """A checked id."""
        _check_device(device, self._count)
        stream_id = f"stream-{next(self._ids)}"
        self._streams.add(stream_id)
        return stream_id

    def destroy_stream(self, stream_id: str) -> None:
        """Forget the stream and its events."""
        self._streams.discard(stream_id)
        self._events = {event: owner for event, owner in self._events.items() if owner != stream_id}

    def record_event(self, stream_id: str) -> str:
        """A checked id; all work before it has ended."""
        self._check_stream(stream_id)
        event_id = f"event-{next(self._ids)}"
        self._events[event_id] = stream_id
        return event_id

    def wait_event(self, stream_id: str, event_id: str) -> None:
        """Nothing to wait for."""
        self._check_stream(stream_id)
        if event_id not in self._events:
            raise NotFound(f"event {event_id!r} does not exist", field="event_id")

    def synchronize(self, device: int, stream_id: str | None = None) -> None:
        """Nothing to wait for."""
        _check_device(device, self._count)
        if stream_id is not None:
            self._check_stream(stream_id)

    def _check_stream(self, stream_id: str) -> None:
        if stream_id not in self._streams:
            raise NotFound(f"stream {stream_id!r} does not exist", field="stream_id")


class HostMemory(PooledMemory):
    """Host memory without a tensor framework: tensors are numpy arrays (bfloat16 as its bits).

    count: number of devices, as for HostDevices.
    """

    def __init__(self, *, count: int | None = None) -> None:
        super().__init__()
        self._count = count or usable_cpus()

    def copy(self, source: Buffer | HostBytes, destination: Buffer | bytearray | memoryview) -> None:
        """As the contract says; all memory is the host's."""
        check_copy(source, destination)
        read, write = self._bytes_at(source), self._bytes_at(destination)
        write[:] = read

    def stats(self, device: int) -> MemoryStats:
        """The control group's limit, and what this process has allocated here."""
        self._check_device(device)
        limit = read_memory_limit()
        return MemoryStats(
            total_bytes=limit.total_bytes,
            free_bytes=limit.free_bytes,
            allocated_bytes=sum(self._allocated.values()),
            pooled_bytes=sum(self._pooled(each) for each in (None, *range(self._count))),
            peak_allocated_bytes=sum(self._peak.values()),
        )

    def upload(self, value: HostTensor, device: int) -> Any:
        """A numpy array; bfloat16 comes as uint16."""
        self._check_device(device)
        return np.frombuffer(value.data, dtype=_NUMPY_DTYPES[value.dtype]).reshape(value.shape).copy()

    def download(self, tensor: Any) -> HostTensor:
        """From a numpy array; uint16 goes as bfloat16."""
        array = np.asarray(tensor, order="C")
        dtype = _CONTRACT_DTYPES.get(array.dtype)
        if dtype is None:
            raise InvalidArgument(f"numpy dtype {array.dtype} is not on the contract", field="dtype")
        return HostTensor(dtype, array.shape, array.tobytes())

    def _check_device(self, device: int) -> None:
        _check_device(device, self._count)

    def _reserve(self, nbytes: int, device: int | None) -> Any:
        self._check_device(device or 0)
        return reserve_host(nbytes)

    def _view(self, memory: Any, shape: tuple[int, ...], dtype: str) -> Any:
        count = int(np.prod(shape, dtype=np.int64))
        return np.frombuffer(memory, dtype=_NUMPY_DTYPES[dtype], count=count).reshape(shape)

    def _bytes_of(self, memory: Any) -> memoryview:
        return memoryview(memory)

    def _bytes_at(self, place: Buffer | HostBytes) -> memoryview:
        if not isinstance(place, Buffer):
            return memoryview(place).cast("B")
        return self._bytes_of(self._memory_of(place))[: place.nbytes]


def reserve_host(nbytes: int) -> Any:
    """A numpy array of `nbytes` zeros on a cache line's boundary: what vector loads like best. Its pages are
    taken when they are first written.

    Raises:
        MemoryError: more than is free: the host would promise it all the same, and end the process later.
    """
    free = read_memory_limit().free_bytes
    if nbytes > free:
        raise MemoryError(f"{free} bytes are free")
    raw = np.zeros(nbytes + _ALIGNMENT, dtype=np.uint8)
    offset = -raw.ctypes.data % _ALIGNMENT
    return raw[offset : offset + nbytes]


_ALIGNMENT = 64
_NUMPY_DTYPES = {
    name: np.dtype(np.uint16 if name == "bfloat16" else name)
    for name in ("float64", "float32", "float16", "bfloat16", "int64", "int32", "int8", "uint8", "bool")
}
_CONTRACT_DTYPES = {dtype: name for name, dtype in _NUMPY_DTYPES.items()}


def _check_device(device: int, count: int) -> None:
    """Raise NotFound unless `device` is below `count`."""
    if not 0 <= device < count:
        raise NotFound(f"device {device} does not exist; there are {count}, from 0", field="device")
