"""Devices, streams and events of the chip, through the functions of torch.cuda as which it appears."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from meshkit.errors import NotFound, Unavailable
from plugins.kunlun.runtime import CHIP_GENERATION, Runtime
from plugins.sdk.device import PHYSICAL_COUNT, DeviceManager, DeviceProperties


class KunlunDevices(DeviceManager):
    """Visible devices, from 0. Streams and events are the runtime's own."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._ids = itertools.count()
        self._streams: dict[str, tuple[int, Any]] = {}
        self._events: dict[str, tuple[str, Any]] = {}

    @property
    def shares_host_memory(self) -> bool:
        """Where the chip is emulated."""
        return self._runtime.emulated

    def list_devices(self) -> Sequence[DeviceProperties]:
        """All visible ones."""
        self._runtime.check_visibility()
        return tuple(self.properties(index) for index in range(self._runtime.cuda.device_count()))

    def properties(self, device: int) -> DeviceProperties:
        """As the runtime reports them now; compute units are clusters."""
        check_device(self._runtime, device)
        try:
            seen = self._runtime.cuda.get_device_properties(device)
            free, total = self._runtime.cuda.mem_get_info(device)
        except RuntimeError as error:
            raise Unavailable(f"device {device} does not answer: {error}", reason="DEVICE_FAILED") from error
        physical = self._runtime.physical_device_count
        return DeviceProperties(
            index=device,
            name=seen.name,
            memory_total_bytes=total,
            memory_free_bytes=free,
            compute_units=seen.multi_processor_count,
            attributes={
                "generation": CHIP_GENERATION,
                "compute_capability": f"{seen.major}.{seen.minor}",
                "visible_devices": self._runtime.visible or "all",
                **({} if physical is None else {PHYSICAL_COUNT: str(physical)}),
                **{f"{package}_version": version for package, version in self._runtime.versions.items()},
            },
        )

    def create_stream(self, device: int) -> str:
        """A stream of the runtime."""
        check_device(self._runtime, device)
        stream_id = f"stream-{next(self._ids)}"
        self._streams[stream_id] = (device, self._runtime.cuda.Stream(device))
        return stream_id

    def destroy_stream(self, stream_id: str) -> None:
        """Wait for the stream, then forget it and its events."""
        entry = self._streams.pop(stream_id, None)
        if entry is None:
            return
        entry[1].synchronize()
        self._events = {event: kept for event, kept in self._events.items() if kept[0] != stream_id}

    def record_event(self, stream_id: str) -> str:
        """An event of the runtime."""
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
            self._stream(stream_id).synchronize()

    def _stream(self, stream_id: str) -> Any:
        if stream_id not in self._streams:
            raise NotFound(f"stream {stream_id!r} does not exist", field="stream_id")
        return self._streams[stream_id][1]


def check_device(runtime: Runtime, device: int) -> None:
    """Raise NotFound unless `device` is visible."""
    count = runtime.cuda.device_count()
    if not 0 <= device < count:
        raise NotFound(f"device {device} does not exist; there are {count}, from 0", field="device")
