"""Asks an executor for a profile, on a connection of its own: the stream of steps goes on beside it."""

from __future__ import annotations

import grpc.aio
from google.protobuf.duration_pb2 import Duration

from chipmesh.device.v1alpha1 import execution_pb2
from chipmesh.device.v1alpha1.execution_pb2_grpc import ExecutionServiceStub
from meshkit.errors import from_rpc_error
from meshkit.rpc.channel import open_channel
from meshkit.rpc.policy import Role
from scheduler_svc.executor_link import LinkSettings

WRITING_S = 60.0
"""For the executor to write the trace, beside its steps."""


async def profile_executor(address: str, *, worker: str, duration: Duration, links: LinkSettings) -> bytes:
    """The trace in Chrome's JSON format.

    Raises:
        MeshError: as ExecutionService.Profile.
    """
    channel = open_channel(
        address, max_message_bytes=links.max_message_bytes, tls=links.tls, role=Role.WORKER, name=worker
    )
    async with channel:
        try:
            response = await ExecutionServiceStub(channel).Profile(
                execution_pb2.ProfileRequest(duration=duration),
                timeout=max(0, duration.seconds) + 1 + WRITING_S,
            )
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error) from error
    trace: bytes = response.chrome_trace
    return trace
