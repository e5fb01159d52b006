"""First duty of a plugin: devices, their properties, streams and events."""

from __future__ import annotations

import abc
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from chipmesh.device.v1alpha1 import device_pb2
from plugins.sdk.drift import ContractClass

PHYSICAL_COUNT = "physical_device_count"
"""Key in `DeviceProperties.attributes`, the same on every device: how many devices the driver has for this
process, in decimal digits, counted by another way than `list_devices`. `chipmesh verify` compares the two.
"""


@dataclass(frozen=True)
class DeviceProperties:
    """Read from the device, never assumed. Sizes in bytes; `compute_units` are threads on a host."""

    index: int
    name: str
    memory_total_bytes: int
    memory_free_bytes: int
    compute_units: int
    attributes: Mapping[str, str] = field(default_factory=dict)
    """Further properties in the vendor's own terms."""

    def to_proto(self) -> device_pb2.DeviceProperties:
        """The message of the device contract."""
        return device_pb2.DeviceProperties(
            index=self.index,
            name=self.name,
            memory_total_bytes=self.memory_total_bytes,
            memory_free_bytes=self.memory_free_bytes,
            compute_units=self.compute_units,
            attributes=self.attributes,
        )


class DeviceManager(ContractClass, contract=True):
    """Devices are counted from 0, whatever the vendor's ids. Every call raises NotFound for an unknown
    device, stream or event, and Unavailable when the device failed.
    """

    @property
    @abc.abstractmethod
    def shares_host_memory(self) -> bool:
        """Whether the devices' memory is the host's, so that executors share one limit."""

    @abc.abstractmethod
    def list_devices(self) -> Sequence[DeviceProperties]:
        """All visible devices, by index, read anew at each call."""

    @abc.abstractmethod
    def properties(self, device: int) -> DeviceProperties:
        """Properties of one device, read anew at each call."""

    @abc.abstractmethod
    def create_stream(self, device: int) -> str:
        """A new queue of work; returns its id, unique in this process."""

    @abc.abstractmethod
    def destroy_stream(self, stream_id: str) -> None:
        """Wait for a stream and free it with its events. Idempotent: an unknown stream is fine."""

    @abc.abstractmethod
    def record_event(self, stream_id: str) -> str:
        """Mark the present end of a stream; returns the event's id, unique in this process."""

    @abc.abstractmethod
    def wait_event(self, stream_id: str, event_id: str) -> None:
        """Make later work of a stream wait for an event."""

    @abc.abstractmethod
    def synchronize(self, device: int, stream_id: str | None = None) -> None:
        """Return when all work of a stream, or of the whole device, has ended."""
