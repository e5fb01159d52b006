"""Devices of an accelerator that torch knows: its streams and events, and its failures as the contract has
them. No torch: a plugin imports this before its runtime has an environment.
"""

from __future__ import annotations

import abc
import itertools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from meshkit.errors import NotFound, Unavailable
from plugins.sdk.device import PHYSICAL_COUNT, DeviceManager, DeviceProperties
from plugins.sdk.visibility import Visibility

T = TypeVar("T")


class TorchDevices(DeviceManager):
    """Visible devices, from 0. A plugin brings `properties`, and overrides `_synchronize`, `_physical_count`
    or `shares_host_memory` where its runtime has an answer of its own.

    accelerator: what answers as torch.cuda does, such as torch.npu: `device_count`, `synchronize`, and
        `Stream` with `record_event`, `wait_event` and `synchronize`.
    visibility: the devices that the process was started with.
    """

    def __init__(self, accelerator: Any, visibility: Visibility) -> None:
        self._accelerator = accelerator
        self._visibility = visibility
        self._ids = itertools.count()
        self._streams: dict[str, tuple[int, Any]] = {}
        self._events: dict[str, tuple[str, Any]] = {}

    @abc.abstractmethod
    def properties(self, device: int) -> DeviceProperties:
        """As the contract says. `_check` and `ask_device` raise its errors; `_host_attributes` belong in."""

    @property
    def shares_host_memory(self) -> bool:
        """No."""
        return False

    def _synchronize(self, device: int) -> None:
        """Return when all work of a device has ended. Raises Unavailable where it failed."""
        ask_device(device, self._accelerator.synchronize)

    def _physical_count(self) -> int | None:
        """Devices that the driver has for this process, counted by another way than torch's; None: there is
        none.
        """
        return None

    def list_devices(self) -> Sequence[DeviceProperties]:
        """All visible ones."""
        self._visibility.warn_if_changed()
        return tuple(self.properties(index) for index in range(self._accelerator.device_count()))

    def create_stream(self, device: int) -> str:
        """A stream of the accelerator beside the default one."""
        self._check(device)
        stream_id = f"stream-{next(self._ids)}"
        self._streams[stream_id] = (device, ask_device(device, self._accelerator.Stream))
        return stream_id

    def destroy_stream(self, stream_id: str) -> None:
        """Forget the stream and its events, then wait for it: one that failed is gone too."""
        if stream_id not in self._streams:
            return
        device, stream = self._streams.pop(stream_id)
        self._events = {event: kept for event, kept in self._events.items() if kept[0] != stream_id}
        ask_device(device, lambda _: stream.synchronize())

    def record_event(self, stream_id: str) -> str:
        """An event of the accelerator."""
        device, stream = self._stream(stream_id)
        event_id = f"event-{next(self._ids)}"
        self._events[event_id] = (stream_id, ask_device(device, lambda _: stream.record_event()))
        return event_id

    def wait_event(self, stream_id: str, event_id: str) -> None:
        """On the device: the host does not wait."""
        device, stream = self._stream(stream_id)
        if event_id not in self._events:
            raise NotFound(f"event {event_id!r} does not exist", field="event_id")
        event = self._events[event_id][1]
        ask_device(device, lambda _: stream.wait_event(event))

    def synchronize(self, device: int, stream_id: str | None = None) -> None:
        """The stream, or the device."""
        self._check(device)
        if stream_id is None:
            self._synchronize(device)
        else:
            owner, stream = self._stream(stream_id)
            ask_device(owner, lambda _: stream.synchronize())

    def _check(self, device: int) -> None:
        check_device(device, self._accelerator.device_count())

    def _stream(self, stream_id: str) -> tuple[int, Any]:
        """Its device, and the stream itself."""
        if stream_id not in self._streams:
            raise NotFound(f"stream {stream_id!r} does not exist", field="stream_id")
        return self._streams[stream_id]

    def _host_attributes(self) -> dict[str, str]:
        """What is the same on every device: which were asked for, and how many the driver has."""
        physical = self._physical_count()
        return {
            "visible_devices": self._visibility.in_effect or "all",
            **({} if physical is None else {PHYSICAL_COUNT: str(physical)}),
        }


def check_device(device: int, count: int) -> None:
    """Raise NotFound unless `device` is one of `count`."""
    if not 0 <= device < count:
        raise NotFound(f"device {device} does not exist; there are {count}, from 0", field="device")


def ask_device(device: int, function: Callable[[int], T]) -> T:
    """What a function of the accelerator says about a device. Raises Unavailable where the device failed,
    which torch says by RuntimeError.
    """
    try:
        return function(device)
    except RuntimeError as error:
        raise Unavailable(f"device {device} does not answer: {error}", reason="DEVICE_FAILED") from error
