"""CollectiveService: the plugin's fourth duty, one primitive at a time."""

from __future__ import annotations

import time
from functools import partial
from typing import Any

from google.protobuf.duration_pb2 import Duration

from chipmesh.device.v1alpha1 import collective_pb2
from chipmesh.device.v1alpha1.collective_pb2_grpc import CollectiveServiceServicer
from meshkit.errors import InvalidArgument, Unimplemented
from meshkit.rpc.handlers import Context
from plugins.sdk.backend import Backend
from plugins.sdk.collectives import Collectives
from worker_svc.device_thread import DeviceThread
from worker_svc.executor.tensor_values import read_value, write_value

Primitive = collective_pb2.RunCollectiveRequest.Primitive

DEFAULT_TIMEOUT_S = 30.0


class CollectiveService(CollectiveServiceServicer):
    """Groups of one backend; `index` is the device that inputs are put on."""

    def __init__(self, backend: Backend, device: DeviceThread, *, index: int) -> None:
        self._backend = backend
        self._device = device
        self._index = index

    async def InitGroup(
        self, request: collective_pb2.InitGroupRequest, context: Context
    ) -> collective_pb2.InitGroupResponse:
        """Join a group; returns when all ranks have."""
        del context
        collectives = self._collectives()
        if not request.group_name:
            raise InvalidArgument("group_name is empty", field="group_name")
        if not 0 <= request.rank < request.world_size:
            raise InvalidArgument(
                f"rank is {request.rank}; with world_size {request.world_size} it must be below that",
                field="rank",
            )
        join = partial(
            collectives.init_group,
            request.group_name,
            rank=request.rank,
            world_size=request.world_size,
            rendezvous=request.rendezvous,
            timeout_s=_seconds(request.timeout) if request.HasField("timeout") else DEFAULT_TIMEOUT_S,
        )
        await self._device.submit(join)
        return collective_pb2.InitGroupResponse(library=collectives.library)

    async def RunCollective(
        self, request: collective_pb2.RunCollectiveRequest, context: Context
    ) -> collective_pb2.RunCollectiveResponse:
        """Run one primitive with this rank's input."""
        del context
        collectives = self._collectives()
        return await self._device.submit(partial(self._run, collectives, request))

    async def GetTopology(
        self, request: collective_pb2.GetTopologyRequest, context: Context
    ) -> collective_pb2.GetTopologyResponse:
        """Links of this executor's device; none where the plugin has no collectives."""
        del request, context
        collectives = self._backend.collectives
        if collectives is None:
            return collective_pb2.GetTopologyResponse()
        links = await self._device.submit(collectives.topology)
        return collective_pb2.GetTopologyResponse(
            links=[
                collective_pb2.DeviceLink(
                    source_device=self._index,
                    destination_device=link.peer_device,
                    bandwidth_bytes_per_second=link.bandwidth_bytes_per_second,
                )
                for link in links
            ]
        )

    async def DestroyGroup(
        self, request: collective_pb2.DestroyGroupRequest, context: Context
    ) -> collective_pb2.DestroyGroupResponse:
        """Leave a group; one that is not there is fine."""
        del context
        collectives = self._backend.collectives
        if collectives is not None:
            await self._device.submit(partial(collectives.destroy_group, request.group_name))
        return collective_pb2.DestroyGroupResponse()

    def _collectives(self) -> Collectives:
        collectives = self._backend.collectives
        if collectives is None:
            raise Unimplemented(
                f"back end {self._backend.info().name!r} has no collectives: its chip works alone",
                reason="NO_COLLECTIVES",
            )
        return collectives

    def _run(
        self, collectives: Collectives, request: collective_pb2.RunCollectiveRequest
    ) -> collective_pb2.RunCollectiveResponse:
        memory = self._backend.memory
        timeout_s = _seconds(request.timeout) if request.HasField("timeout") else None
        value: Any = None
        if request.primitive != Primitive.PRIMITIVE_BARRIER:
            value = memory.upload(read_value(request.input, field="input"), self._index)
        start = time.monotonic()
        output = _call(collectives, request, value, timeout_s)
        response = collective_pb2.RunCollectiveResponse(device_time=_duration(time.monotonic() - start))
        if output is not None:
            response.output.CopyFrom(write_value(memory.download(output), field="output"))
        return response


def _call(
    collectives: Collectives,
    request: collective_pb2.RunCollectiveRequest,
    value: Any,
    timeout_s: float | None,
) -> Any:
    """The result tensor; None for a barrier."""
    name = request.group_name
    if request.primitive == Primitive.PRIMITIVE_BARRIER:
        return collectives.barrier(name, timeout_s=timeout_s)
    if request.primitive == Primitive.PRIMITIVE_BROADCAST:
        return collectives.broadcast(name, value, root=request.root, timeout_s=timeout_s)
    simple = {
        Primitive.PRIMITIVE_ALL_REDUCE: collectives.all_reduce,
        Primitive.PRIMITIVE_ALL_GATHER: collectives.all_gather,
        Primitive.PRIMITIVE_REDUCE_SCATTER: collectives.reduce_scatter,
    }.get(request.primitive)
    if simple is None:
        raise InvalidArgument(f"primitive is {request.primitive}; say which one is to run", field="primitive")
    return simple(name, value, timeout_s=timeout_s)


def _seconds(duration: Duration) -> float:
    return duration.seconds + duration.nanos / 1e9


def _duration(seconds: float) -> Duration:
    result = Duration()
    result.FromNanoseconds(int(seconds * 1e9))
    return result
