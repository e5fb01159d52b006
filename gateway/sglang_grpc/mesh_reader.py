"""What a router asks beyond generations, asked of the scheduler: the mesh, its caches, and to empty them."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator
from contextlib import contextmanager

import grpc
import grpc.aio

from chipmesh.scheduler.v1alpha1 import admin_pb2
from gateway.web_page.admin import NO_CERTIFICATE, AdminStub
from meshkit.errors import FailedPrecondition, from_rpc_error

ANSWER_S = 3.0
"""For one answer; routers ask again by themselves."""


class MeshReader:
    """A scheduler's AdminService, as far as a router is concerned. All raise MeshError as it says.

    channel: None where the scheduler would refuse this gateway; all raise FailedPrecondition then.
    """

    def __init__(self, channel: grpc.aio.Channel | None) -> None:
        self._known_stub = None if channel is None else AdminStub(channel)

    @property
    def may_ask(self) -> bool:
        """Whether the scheduler answers this gateway."""
        return self._known_stub is not None

    @property
    def _stub(self) -> AdminStub:
        if self._known_stub is None:
            raise FailedPrecondition(NO_CERTIFICATE, reason="NO_OPERATOR_CERTIFICATE")
        return self._known_stub

    async def mesh(self) -> admin_pb2.Mesh:
        """All groups and replicas, now."""
        with _mesh_errors():
            answer = await self._stub.GetMesh(admin_pb2.GetMeshRequest(), timeout=ANSWER_S)
        return answer.mesh

    async def flush_caches(self) -> int:
        """Empty all prefix caches of what no request uses; pages that are free by that."""
        with _mesh_errors():
            answer = await self._stub.FlushCache(admin_pb2.FlushCacheRequest(), timeout=ANSWER_S)
        return answer.flushed_pages

    async def cache_changes(self, worker: str) -> AsyncGenerator[admin_pb2.SubscribeKvEventsResponse, None]:
        """All that a worker's cache holds, then its changes, until its executor is replaced."""
        call = self._stub.SubscribeKvEvents(admin_pb2.SubscribeKvEventsRequest(worker=worker))
        try:
            with _mesh_errors():
                async for message in call:
                    yield message
        finally:
            call.cancel()


@contextmanager
def _mesh_errors() -> Iterator[None]:
    try:
        yield
    except grpc.aio.AioRpcError as error:
        raise from_rpc_error(error) from error
