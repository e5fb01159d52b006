"""DeviceService: the plugin's first duty, call by call."""

from __future__ import annotations

from functools import partial

from chipmesh.device.v1alpha1 import device_pb2
from chipmesh.device.v1alpha1.device_pb2_grpc import DeviceServiceServicer
from meshkit.rpc.handlers import Context
from plugins.sdk.backend import Backend
from plugins.sdk.device import DeviceProperties
from plugins.sdk.self_test import run_self_test
from worker_svc.device_thread import DeviceThread

HOST_MEMORY_ATTRIBUTE = "memory"
HOST_MEMORY = "host"


class DeviceService(DeviceServiceServicer):
    """Devices, streams and events of one backend."""

    def __init__(self, backend: Backend, device: DeviceThread) -> None:
        self._backend = backend
        self._devices = backend.devices
        self._device = device

    async def ListDevices(
        self, request: device_pb2.ListDevicesRequest, context: Context
    ) -> device_pb2.ListDevicesResponse:
        """All visible devices."""
        del request, context
        devices = await self._device.submit(self._devices.list_devices)
        return device_pb2.ListDevicesResponse(devices=[self._properties(device) for device in devices])

    async def GetDevice(
        self, request: device_pb2.GetDeviceRequest, context: Context
    ) -> device_pb2.GetDeviceResponse:
        """Properties of one device."""
        del context
        properties = await self._device.submit(partial(self._devices.properties, request.device))
        return device_pb2.GetDeviceResponse(device=self._properties(properties))

    async def CreateStream(
        self, request: device_pb2.CreateStreamRequest, context: Context
    ) -> device_pb2.CreateStreamResponse:
        """A new queue of work."""
        del context
        stream_id = await self._device.submit(partial(self._devices.create_stream, request.device))
        return device_pb2.CreateStreamResponse(stream_id=stream_id)

    async def DestroyStream(
        self, request: device_pb2.DestroyStreamRequest, context: Context
    ) -> device_pb2.DestroyStreamResponse:
        """Free a queue of work."""
        del context
        await self._device.submit(partial(self._devices.destroy_stream, request.stream_id))
        return device_pb2.DestroyStreamResponse()

    async def RecordEvent(
        self, request: device_pb2.RecordEventRequest, context: Context
    ) -> device_pb2.RecordEventResponse:
        """Mark the end of a stream."""
        del context
        event_id = await self._device.submit(partial(self._devices.record_event, request.stream_id))
        return device_pb2.RecordEventResponse(event_id=event_id)

    async def WaitEvent(
        self, request: device_pb2.WaitEventRequest, context: Context
    ) -> device_pb2.WaitEventResponse:
        """Make a stream wait."""
        del context
        await self._device.submit(partial(self._devices.wait_event, request.stream_id, request.event_id))
        return device_pb2.WaitEventResponse()

    async def Synchronize(
        self, request: device_pb2.SynchronizeRequest, context: Context
    ) -> device_pb2.SynchronizeResponse:
        """Wait for a stream or the device."""
        del context
        stream_id = request.stream_id if request.HasField("stream_id") else None
        await self._device.submit(partial(self._devices.synchronize, request.device, stream_id))
        return device_pb2.SynchronizeResponse()

    async def SelfTest(
        self, request: device_pb2.SelfTestRequest, context: Context
    ) -> device_pb2.SelfTestResponse:
        """The minimal check of a device."""
        del context
        checks = await self._device.submit(partial(run_self_test, self._backend, request.device))
        return device_pb2.SelfTestResponse(checks=[check.to_proto() for check in checks])

    def _properties(self, device: DeviceProperties) -> device_pb2.DeviceProperties:
        """With the one fact beside the properties that sizing needs: whose memory it is."""
        message = device.to_proto()
        if self._devices.shares_host_memory:
            message.attributes[HOST_MEMORY_ATTRIBUTE] = HOST_MEMORY
        return message
