"""Buffers of an executor by its address; values travel as bytes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from chipmesh.device.v1alpha1 import memory_pb2
from chipmesh.device.v1alpha1.memory_pb2_grpc import MemoryServiceStub
from chipmesh.device.v1alpha1.tensor_pb2 import TensorSpec
from meshkit.errors import InvalidArgument, Unimplemented
from plugins.conformance.remote_calls import Calls, write_value
from plugins.conformance.remote_report import stats_from_proto
from plugins.sdk.memory import Buffer, HostBytes, MemoryManager, MemoryStats
from plugins.sdk.tensors import HostTensor, tensor_bytes


class RemoteMemory(MemoryManager):
    """MemoryService, call by call. Tensors of `upload` stay in this process: they are what operators are
    sent.
    """

    def __init__(self, calls: Calls) -> None:
        self._calls = calls
        self._stub = MemoryServiceStub(calls.channel)

    def allocate(
        self, shape: Sequence[int], dtype: str, device: int | None = None, *, zeroed: bool = False
    ) -> Buffer:
        """Allocate. Raises Unimplemented for zeroed memory, which the wire does not have."""
        if zeroed:
            raise Unimplemented("Allocate has no zeroed memory", field="zeroed")
        spec = TensorSpec(dtype=dtype, shape=shape)
        response = self._calls.call(self._stub.Allocate, memory_pb2.AllocateRequest(device=device, spec=spec))
        return Buffer(response.buffer_id, tuple(shape), dtype, device, tensor_bytes(shape, dtype), None)

    def free(self, buffer: Buffer) -> None:
        """Free."""
        self._calls.call(self._stub.Free, memory_pb2.FreeRequest(buffer_id=buffer.buffer_id))

    def copy(self, source: Buffer | HostBytes, destination: Buffer | bytearray | memoryview) -> None:
        """Copy."""
        request = memory_pb2.CopyRequest()
        if isinstance(source, Buffer):
            request.source_buffer_id = source.buffer_id
        else:
            request.source_value.CopyFrom(write_value(_as_value(bytes(source), destination)))
        if isinstance(destination, Buffer):
            request.destination_buffer_id = destination.buffer_id
            self._calls.call(self._stub.Copy, request)
            return
        request.destination_value = True
        data = self._calls.call(self._stub.Copy, request).value.data
        place = memoryview(destination).cast("B")
        if len(data) != len(place):
            raise InvalidArgument(f"{len(data)} bytes do not fit {len(place)}", field="destination")
        place[:] = data

    def stats(self, device: int) -> MemoryStats:
        """GetStats."""
        return stats_from_proto(
            self._calls.call(self._stub.GetStats, memory_pb2.GetStatsRequest(device=device))
        )

    def upload(self, value: HostTensor, device: int) -> Any:
        """A tensor of this process, to be sent with a call."""
        # Only here, since it imports the tensor framework.
        from plugins.conformance.host_values import from_host_tensor  # noqa: PLC0415

        return from_host_tensor(value)

    def download(self, tensor: Any) -> HostTensor:
        """The value of such a tensor, or of one that a call returned."""
        from plugins.conformance.host_values import to_host_tensor  # noqa: PLC0415

        return to_host_tensor(tensor)


def _as_value(data: bytes, destination: Buffer | bytearray | memoryview) -> HostTensor:
    """Bytes in the form of their destination where they fit it; else in their own, which is then refused."""
    if isinstance(destination, Buffer) and len(data) == destination.nbytes:
        return HostTensor(destination.dtype, destination.shape, data)
    return HostTensor("uint8", (len(data),), data)
