"""Collectives of an executor by its address: this rank's input and result travel by value. Imports torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from google.protobuf.duration_pb2 import Duration

from chipmesh.device.v1alpha1 import collective_pb2
from chipmesh.device.v1alpha1.collective_pb2_grpc import CollectiveServiceStub
from plugins.conformance.host_values import from_host_tensor, to_host_tensor
from plugins.conformance.remote_calls import Calls, read_value, write_value
from plugins.sdk.capabilities import LinkCapability
from plugins.sdk.collectives import Collectives

Primitive = collective_pb2.RunCollectiveRequest.Primitive


class RemoteCollectives(Collectives):
    """CollectiveService: the executor is one rank. library: as the executor's plugin reports it."""

    def __init__(self, calls: Calls, library: str) -> None:
        self._calls = calls
        self._stub = CollectiveServiceStub(calls.channel)
        self._library = library

    @property
    def library(self) -> str:
        """As GetPluginInfo has it."""
        return self._library

    def init_group(self, name: str, *, rank: int, world_size: int, rendezvous: str, timeout_s: float) -> None:
        """InitGroup."""
        request = collective_pb2.InitGroupRequest(
            group_name=name,
            rank=rank,
            world_size=world_size,
            rendezvous=rendezvous,
            timeout=_duration(timeout_s),
        )
        self._calls.call(self._stub.InitGroup, request)

    def all_reduce(self, name: str, tensor: Any, *, timeout_s: float | None = None) -> Any:
        """RunCollective."""
        return self._run(Primitive.PRIMITIVE_ALL_REDUCE, name, tensor, timeout_s)

    def all_gather(self, name: str, tensor: Any, *, timeout_s: float | None = None) -> Any:
        """RunCollective."""
        return self._run(Primitive.PRIMITIVE_ALL_GATHER, name, tensor, timeout_s)

    def reduce_scatter(self, name: str, tensor: Any, *, timeout_s: float | None = None) -> Any:
        """RunCollective."""
        return self._run(Primitive.PRIMITIVE_REDUCE_SCATTER, name, tensor, timeout_s)

    def broadcast(self, name: str, tensor: Any, *, root: int, timeout_s: float | None = None) -> Any:
        """RunCollective."""
        return self._run(Primitive.PRIMITIVE_BROADCAST, name, tensor, timeout_s, root=root)

    def barrier(self, name: str, *, timeout_s: float | None = None) -> None:
        """RunCollective."""
        self._run(Primitive.PRIMITIVE_BARRIER, name, None, timeout_s)

    def destroy_group(self, name: str) -> None:
        """DestroyGroup."""
        self._calls.call(self._stub.DestroyGroup, collective_pb2.DestroyGroupRequest(group_name=name))

    def topology(self) -> Sequence[LinkCapability]:
        """GetTopology."""
        response = self._calls.call(self._stub.GetTopology, collective_pb2.GetTopologyRequest())
        return tuple(
            LinkCapability(link.destination_device, link.bandwidth_bytes_per_second)
            for link in response.links
        )

    def _run(
        self,
        primitive: Primitive.ValueType,
        name: str,
        tensor: Any,
        timeout_s: float | None,
        *,
        root: int = 0,
    ) -> Any:
        request = collective_pb2.RunCollectiveRequest(group_name=name, primitive=primitive, root=root)
        if tensor is not None:
            request.input.CopyFrom(write_value(to_host_tensor(tensor)))
        if timeout_s is not None:
            request.timeout.CopyFrom(_duration(timeout_s))
        response = self._calls.call(self._stub.RunCollective, request)
        return from_host_tensor(read_value(response.output)) if response.HasField("output") else None


def _duration(seconds: float) -> Duration:
    result = Duration()
    result.FromNanoseconds(int(seconds * 1e9))
    return result
