"""Devices, streams and events by torch.cuda, with what NVML adds."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from meshkit.errors import NotFound
from plugins.cuda.nvml import Nvml
from plugins.cuda.runtime import Runtime
from plugins.sdk.device import PHYSICAL_COUNT, DeviceManager, DeviceProperties


class CudaDevices(DeviceManager):
    """Visible devices, from 0. Streams and events are CUDA's own."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._ids = itertools.count()
        self._streams: dict[str, Any] = {}
        self._events: dict[str, tuple[str, Any]] = {}

    @property
    def shares_host_memory(self) -> bool:
        """No: integrated GPUs, which do, are not looked for."""
        return False

    def list_devices(self) -> Sequence[DeviceProperties]:
        """All visible ones."""
        self._runtime.visibility.warn_if_changed()
        return tuple(self.properties(index) for index in range(self._runtime.device_count))

    def properties(self, device: int) -> DeviceProperties:
        """As the driver reports them now; compute units are streaming multiprocessors. The attribute
        `memory_source` says whose numbers the sizes are.
        """
        check_device(self._runtime, device)
        seen = self._runtime.ask(device, self._runtime.cuda.get_device_properties)
        memory = self._runtime.read_memory(device)
        return DeviceProperties(
            index=device,
            name=seen.name,
            memory_total_bytes=memory.total_bytes,
            memory_free_bytes=memory.free_bytes,
            compute_units=seen.multi_processor_count,
            attributes={
                "compute_capability": f"{seen.major}.{seen.minor}",
                "uuid": str(seen.uuid),
                "memory_source": memory.source,
                "visible_devices": self._runtime.visibility.in_effect or "all",
                **self._driver_attributes(),
                **self._runtime.choices,
            },
        )

    def create_stream(self, device: int) -> str:
        """A stream of its own beside the default one."""
        check_device(self._runtime, device)
        stream_id = f"stream-{next(self._ids)}"
        self._streams[stream_id] = self._runtime.ask(device, self._runtime.cuda.Stream)
        return stream_id

    def destroy_stream(self, stream_id: str) -> None:
        """Wait for the stream, then forget it and its events."""
        stream = self._streams.pop(stream_id, None)
        if stream is None:
            return
        self._events = {event: kept for event, kept in self._events.items() if kept[0] != stream_id}
        stream.synchronize()

    def record_event(self, stream_id: str) -> str:
        """An event of CUDA."""
        event_id = f"event-{next(self._ids)}"
        self._events[event_id] = (stream_id, self._stream(stream_id).record_event())
        return event_id

    def wait_event(self, stream_id: str, event_id: str) -> None:
        """On the device: the host does not wait."""
        stream = self._stream(stream_id)
        if event_id not in self._events:
            raise NotFound(f"event {event_id!r} does not exist", field="event_id")
        stream.wait_event(self._events[event_id][1])

    def synchronize(self, device: int, stream_id: str | None = None) -> None:
        """The stream, or the device."""
        check_device(self._runtime, device)
        if stream_id is None:
            self._runtime.synchronize(device)
        else:
            stream = self._stream(stream_id)
            self._runtime.ask(device, lambda _: stream.synchronize())

    def _driver_attributes(self) -> dict[str, str]:
        """The same on every device."""
        physical, nvml = self._runtime.physical_device_count, self._runtime.nvml
        told = {} if physical is None else {PHYSICAL_COUNT: str(physical)}
        if isinstance(nvml, Nvml):
            return {**told, "driver_version": nvml.driver_version}
        return {**told, "nvml": nvml.reason}

    def _stream(self, stream_id: str) -> Any:
        if stream_id not in self._streams:
            raise NotFound(f"stream {stream_id!r} does not exist", field="stream_id")
        return self._streams[stream_id]


def check_device(runtime: Runtime, device: int) -> None:
    """Raise NotFound unless `device` is visible."""
    count = runtime.device_count
    if not 0 <= device < count:
        raise NotFound(f"device {device} does not exist; there are {count}, from 0", field="device")
