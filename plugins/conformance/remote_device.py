"""Devices, streams and events of an executor by its address."""

from __future__ import annotations

from collections.abc import Sequence

from chipmesh.device.v1alpha1 import device_pb2
from chipmesh.device.v1alpha1.device_pb2_grpc import DeviceServiceStub
from plugins.conformance.remote_calls import Calls
from plugins.conformance.remote_report import properties_from_proto
from plugins.sdk.device import DeviceManager, DeviceProperties


class RemoteDevices(DeviceManager):
    """DeviceService, call by call."""

    def __init__(self, calls: Calls) -> None:
        self._calls = calls
        self._stub = DeviceServiceStub(calls.channel)

    @property
    def shares_host_memory(self) -> bool:
        """As the executor marks its devices."""
        return any(each.attributes.get("memory") == "host" for each in self.list_devices())

    def list_devices(self) -> Sequence[DeviceProperties]:
        """ListDevices."""
        response = self._calls.call(self._stub.ListDevices, device_pb2.ListDevicesRequest())
        return tuple(properties_from_proto(each) for each in response.devices)

    def properties(self, device: int) -> DeviceProperties:
        """GetDevice."""
        response = self._calls.call(self._stub.GetDevice, device_pb2.GetDeviceRequest(device=device))
        return properties_from_proto(response.device)

    def create_stream(self, device: int) -> str:
        """CreateStream."""
        request = device_pb2.CreateStreamRequest(device=device)
        stream_id: str = self._calls.call(self._stub.CreateStream, request).stream_id
        return stream_id

    def destroy_stream(self, stream_id: str) -> None:
        """DestroyStream."""
        self._calls.call(self._stub.DestroyStream, device_pb2.DestroyStreamRequest(stream_id=stream_id))

    def record_event(self, stream_id: str) -> str:
        """RecordEvent."""
        request = device_pb2.RecordEventRequest(stream_id=stream_id)
        event_id: str = self._calls.call(self._stub.RecordEvent, request).event_id
        return event_id

    def wait_event(self, stream_id: str, event_id: str) -> None:
        """WaitEvent."""
        request = device_pb2.WaitEventRequest(stream_id=stream_id, event_id=event_id)
        self._calls.call(self._stub.WaitEvent, request)

    def synchronize(self, device: int, stream_id: str | None = None) -> None:
        """Synchronize."""
        request = device_pb2.SynchronizeRequest(device=device, stream_id=stream_id)
        self._calls.call(self._stub.Synchronize, request)
