"""A gateway with a fake scheduler that has an AdminService, too; its client speaks as a router does."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import grpc
import grpc.aio

from chipmesh.scheduler.v1alpha1 import admin_pb2, admin_pb2_grpc, session_pb2_grpc
from chipmesh.sglang_grpc import sglang_scheduler_pb2 as sgl
from chipmesh.sglang_grpc import sglang_scheduler_pb2_grpc
from chipmesh.sglang_grpc import smg_common_pb2 as common
from gateway.app import GatewayService
from meshkit.errors import MeshError, Unavailable, from_rpc_error
from meshkit.rpc.channel import open_channel
from meshkit.rpc.server import RpcServer
from tests.contract.gateway.fake_scheduler import SERVICE, FakeScheduler, FakeSession, Submitted
from tests.contract.gateway.running_gateway import running_gateway

ADMIN_SERVICE = "chipmesh.scheduler.v1alpha1.AdminService"
WAIT_S = 10.0


class FakeAdmin(admin_pb2_grpc.AdminServiceServicer):
    """A mesh that a test sets, and caches that say what a test gives them."""

    def __init__(self) -> None:
        self.mesh = admin_pb2.Mesh()
        self.flushed = 0
        self.subscribed: asyncio.Queue[str] = asyncio.Queue()
        self.messages: dict[str, asyncio.Queue[admin_pb2.SubscribeKvEventsResponse | None]] = {}

    def add_replica(self, worker: str, *, model: str = "tiny", instance: str = "1") -> None:
        """A replica that serves, in a group of its own."""
        status = admin_pb2.ReplicaStatus(
            worker=worker, instance_id=f"{worker}-{instance}", state=admin_pb2.ReplicaStatus.STATE_READY,
            running=1, max_running_requests=4, page_size_tokens=16,
            pages=admin_pb2.PageStatus(total=8, free=6, held=2),
        )  # fmt: skip
        self.mesh.groups.add(name=worker, model=model, replicas=[status])
        self.messages[worker] = asyncio.Queue()

    async def GetMesh(self, request: admin_pb2.GetMeshRequest, context: Any) -> admin_pb2.GetMeshResponse:
        return admin_pb2.GetMeshResponse(mesh=self.mesh)

    async def FlushCache(self, request: Any, context: Any) -> admin_pb2.FlushCacheResponse:
        self.flushed += 1
        return admin_pb2.FlushCacheResponse(flushed_pages=5)

    async def SubscribeKvEvents(
        self, request: admin_pb2.SubscribeKvEventsRequest, context: Any
    ) -> AsyncIterator[admin_pb2.SubscribeKvEventsResponse]:
        self.subscribed.put_nowait(request.worker)
        while (message := await self.messages[request.worker].get()) is not None:
            yield message
        raise Unavailable("the worker's executor was replaced")


class RouterScheduler(FakeScheduler):
    """Both services on one port."""

    def __init__(self) -> None:
        super().__init__()
        self.known_session: FakeSession | None = None
        self.admin = FakeAdmin()  # type: ignore[abstract]  # what a router never calls stays unimplemented

    async def start(self) -> str:
        self._server = RpcServer(listen=self.address)
        self._server.add(session_pb2_grpc.add_SessionServiceServicer_to_server, self, SERVICE)
        self._server.add(admin_pb2_grpc.add_AdminServiceServicer_to_server, self.admin, ADMIN_SERVICE)
        self.address = await self._server.start()
        return self.address


class Answers:
    """What comes of one Generate call."""

    def __init__(self, call: Any) -> None:
        self.call = call

    async def next(self) -> sgl.GenerateResponse | None:
        """The next message; None at the end."""
        message = await asyncio.wait_for(self.call.read(), WAIT_S)
        return None if message is grpc.aio.EOF else message

    async def chunk(self) -> sgl.GenerateStreamChunk:
        """The next message, which has to be a chunk."""
        message = await self.next()
        assert message is not None
        assert message.WhichOneof("response") == "chunk", message
        return message.chunk

    async def rest(self) -> list[sgl.GenerateResponse]:
        """All that is left."""
        messages = []
        while (message := await self.next()) is not None:
            messages.append(message)
        return messages

    async def complete(self) -> sgl.GenerateComplete:
        """What is left, which has to be one end."""
        (message,) = await self.rest()
        assert message.WhichOneof("response") == "complete", message
        return message.complete

    async def error(self) -> MeshError:
        """What it ends with."""
        try:
            messages = await self.rest()
        except grpc.aio.AioRpcError as error:
            return from_rpc_error(error)
        raise AssertionError(f"no error, but {messages}")


@dataclass
class RouterMesh:
    """A gateway, its scheduler, and a router's client. key: what the client sends, None for none."""

    scheduler: RouterScheduler
    gateway: GatewayService
    channel: grpc.aio.Channel
    key: str | None = None
    stub: Any = field(init=False)

    def __post_init__(self) -> None:
        self.stub = sglang_scheduler_pb2_grpc.SglangSchedulerStub(self.channel)

    @property
    def admin(self) -> FakeAdmin:
        return self.scheduler.admin

    @property
    def metadata(self) -> list[tuple[str, str]]:
        return [] if self.key is None else [("authorization", f"Bearer {self.key}")]

    def with_key(self, key: str | None) -> RouterMesh:
        """The same with a client of that key."""
        return replace(self, key=key)

    async def session(self) -> FakeSession:
        """The gateway's session, once the gateway serves; the same each time."""
        if self.scheduler.known_session is None:
            self.scheduler.known_session = await self.scheduler.session()
        await self.gateway.wait_serving()
        return self.scheduler.known_session

    async def settle(self) -> None:
        """Return when nothing lives, and all commands about what lived have been taken."""
        session = await self.session()
        while self.gateway.live_count:
            await self.call("HealthCheck", sgl.HealthCheckRequest())
        last = self.generate(params={"max_new_tokens": 1})
        while (command := await session.next_command()).WhichOneof("command") != "submit":
            pass
        request = Submitted(session, command.request_number, command.submit)
        request.queued()
        request.finished()
        await last.rest()

    def generate(
        self,
        prompt: Sequence[int] = (1, 2, 3),
        /,
        *,
        timeout: float | None = 20.0,
        params: dict[str, Any] | None = None,
        **fields: Any,
    ) -> Answers:
        """Start a generation; params: of its sampling_params."""
        request = sgl.GenerateRequest(tokenized=sgl.TokenizedInput(input_ids=prompt), **fields)
        if params is not None:
            request.sampling_params.CopyFrom(sgl.SamplingParams(**params))
        return Answers(self.stub.Generate(request, timeout=timeout, metadata=self.metadata))

    async def call(self, method: str, request: Any) -> Any:
        """The answer of a unary call.

        Raises:
            MeshError: as it was told.
        """
        try:
            return await getattr(self.stub, method)(request, timeout=WAIT_S, metadata=self.metadata)
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error) from error

    async def abort(self, request_id: str) -> sgl.AbortResponse:
        request = sgl.AbortRequest(request_id=request_id, reason="Stream dropped")
        answer: sgl.AbortResponse = await self.call("Abort", request)
        return answer

    def follow_caches(self, *, after: int = 0) -> CacheReader:
        """Subscribe to KV events."""
        request = common.SubscribeKvEventsRequest(start_sequence_number=after)
        return CacheReader(self.stub.SubscribeKvEvents(request, metadata=self.metadata))


class CacheReader:
    """Applies batches as a router does; a gap in their numbers fails."""

    def __init__(self, call: Any) -> None:
        self.call = call
        self.sequence: int | None = None
        self.blocks: set[int] = set()

    async def batch(self) -> common.KvEventBatch:
        """The next batch, applied."""
        batch: common.KvEventBatch = await asyncio.wait_for(self.call.read(), WAIT_S)
        assert self.sequence is None or batch.sequence_number == self.sequence + 1
        self.sequence = batch.sequence_number
        for event in batch.events:
            kind = event.WhichOneof("data")
            if kind == "stored":
                self.blocks |= {block.block_hash for block in event.stored.blocks}
            elif kind == "removed":
                self.blocks -= set(event.removed.block_hashes)
            else:
                self.blocks.clear()
        return batch

    async def until(self, blocks: set[int]) -> None:
        """Read until it has these blocks."""
        while self.blocks != blocks:
            await self.batch()


@asynccontextmanager
async def router_mesh(
    model: Path, scratch: Path, /, *, replicas: Sequence[str] = (), **config: Any
) -> AsyncIterator[RouterMesh]:
    """Serving `model`, with a scheduler that has `replicas`; config goes over the defaults."""
    scheduler = RouterScheduler()
    for worker in replicas:
        scheduler.admin.add_replica(worker)
    async with running_gateway(model, scratch, scheduler=scheduler, **config) as running:
        channel = open_channel(running.addresses.address)
        try:
            yield RouterMesh(scheduler, running.gateway, channel)
        finally:
            await channel.close()


MeshFactory = Callable[..., Any]
