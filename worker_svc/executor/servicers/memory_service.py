"""MemoryService: the plugin's second duty, buffer by buffer."""

from __future__ import annotations

from functools import partial

from chipmesh.device.v1alpha1 import memory_pb2
from chipmesh.device.v1alpha1.memory_pb2_grpc import MemoryServiceServicer
from chipmesh.device.v1alpha1.tensor_pb2 import TensorValue
from meshkit.errors import InvalidArgument, NotFound, ResourceExhausted
from meshkit.rpc.handlers import Context
from plugins.sdk.backend import Backend
from plugins.sdk.memory import Buffer
from plugins.sdk.tensors import HostTensor, tensor_bytes
from worker_svc.device_thread import DeviceThread
from worker_svc.executor.tensor_values import check_size, read_spec, read_value, write_value


class MemoryService(MemoryServiceServicer):
    """Buffers by id. They belong to the executor and end with it."""

    def __init__(self, backend: Backend, device: DeviceThread) -> None:
        self._memory = backend.memory
        self._device = device
        self._buffers: dict[str, Buffer] = {}

    async def Allocate(
        self, request: memory_pb2.AllocateRequest, context: Context
    ) -> memory_pb2.AllocateResponse:
        """Reserve a buffer."""
        del context
        shape, dtype = read_spec(request.spec, field="spec")
        index = request.device if request.HasField("device") else None
        buffer = await self._device.submit(partial(self._allocate, shape, dtype, index))
        self._buffers[buffer.buffer_id] = buffer
        return memory_pb2.AllocateResponse(buffer_id=buffer.buffer_id)

    async def Free(self, request: memory_pb2.FreeRequest, context: Context) -> memory_pb2.FreeResponse:
        """Give a buffer back; one that is not there is fine."""
        del context
        buffer = self._buffers.pop(request.buffer_id, None)
        if buffer is not None:
            await self._device.submit(partial(self._memory.free, buffer))
        return memory_pb2.FreeResponse()

    async def Copy(self, request: memory_pb2.CopyRequest, context: Context) -> memory_pb2.CopyResponse:
        """Copy between buffers, or between a buffer and a value."""
        del context
        source = self._source(request)
        destination = self._destination(request)
        if destination is not None:
            await self._device.submit(partial(self._write, source, destination))
            return memory_pb2.CopyResponse()
        if isinstance(source, HostTensor):
            return memory_pb2.CopyResponse(value=write_value(source, field="source_value"))
        check_size(source.nbytes, field="destination_value")
        return memory_pb2.CopyResponse(value=await self._device.submit(partial(self._read, source)))

    async def GetStats(
        self, request: memory_pb2.GetStatsRequest, context: Context
    ) -> memory_pb2.GetStatsResponse:
        """Use of a device's memory."""
        del context
        return (await self._device.submit(partial(self._memory.stats, request.device))).to_proto()

    def _allocate(self, shape: tuple[int, ...], dtype: str, index: int | None) -> Buffer:
        """Refuse what cannot fit: a host would promise the memory and be killed for it later."""
        wanted = tensor_bytes(shape, dtype)
        free = self._memory.stats(index or 0).free_bytes
        if wanted > free:
            raise ResourceExhausted(
                f"spec takes {wanted} bytes; {free} are free",
                field="spec",
                wanted_bytes=wanted,
                free_bytes=free,
            )
        return self._memory.allocate(shape, dtype, index)

    def _source(self, request: memory_pb2.CopyRequest) -> Buffer | HostTensor:
        which = request.WhichOneof("source")
        if which is None:
            raise InvalidArgument("source is missing: a buffer id or a value", field="source")
        if which == "source_value":
            return read_value(request.source_value, field="source_value")
        return self._buffer(request.source_buffer_id, field="source_buffer_id")

    def _destination(self, request: memory_pb2.CopyRequest) -> Buffer | None:
        """The buffer to write; None where the value is to be returned."""
        if request.WhichOneof("destination") == "destination_buffer_id":
            return self._buffer(request.destination_buffer_id, field="destination_buffer_id")
        if not request.destination_value:
            raise InvalidArgument(
                "destination is missing: a buffer id, or destination_value", field="destination"
            )
        return None

    def _buffer(self, buffer_id: str, *, field: str) -> Buffer:
        buffer = self._buffers.get(buffer_id)
        if buffer is None:
            raise NotFound(f"{field} is {buffer_id!r}; there is no such buffer", field=field)
        return buffer

    def _write(self, source: Buffer | HostTensor, destination: Buffer) -> None:
        if isinstance(source, HostTensor):
            if (source.shape, source.dtype) != (destination.shape, destination.dtype):
                raise InvalidArgument(
                    f"source_value is {source.dtype} {list(source.shape)}, the destination is "
                    f"{destination.dtype} {list(destination.shape)}",
                    field="source_value",
                )
            self._memory.copy(source.data, destination)
        else:
            self._memory.copy(source, destination)

    def _read(self, source: Buffer) -> TensorValue:
        data = bytearray(source.nbytes)
        self._memory.copy(source, data)
        value = HostTensor(dtype=source.dtype, shape=source.shape, data=bytes(data))
        return write_value(value, field="destination_value")
