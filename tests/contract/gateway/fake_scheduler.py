"""A scheduler that speaks OpenSession faithfully and does only what a test tells it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any

import grpc

from chipmesh.scheduler.v1alpha1 import session_pb2 as pb
from chipmesh.scheduler.v1alpha1 import session_pb2_grpc
from meshkit.rpc.server import RpcServer

SERVICE = "chipmesh.scheduler.v1alpha1.SessionService"
WAIT_S = 10.0


@dataclass(frozen=True)
class Submitted:
    """One request as the scheduler got it, and ways to answer."""

    session: FakeSession
    number: int
    submit: pb.SubmitRequest

    def queued(self) -> None:
        self.session.send(pb.RequestEvent(request_number=self.number, queued=pb.RequestQueued()))

    def placed(self, *, cached_tokens: int = 0, worker: str = "worker-0", chip: str = "hash") -> None:
        placed = pb.RequestPlaced(
            group="default", worker=worker, chip=chip, numeric_class="exact", cached_tokens=cached_tokens
        )
        self.session.send(pb.RequestEvent(request_number=self.number, placed=placed))

    def tokens(self, first_index: int, token_ids: Sequence[int], logprobs: Sequence[float] = ()) -> None:
        self.session.send(self.tokens_event(first_index, token_ids, logprobs))

    def tokens_event(
        self, first_index: int, token_ids: Sequence[int], logprobs: Sequence[float] = ()
    ) -> pb.RequestEvent:
        tokens = pb.RequestTokens(first_index=first_index, token_ids=token_ids, logprobs=logprobs)
        return pb.RequestEvent(request_number=self.number, tokens=tokens)

    def finished(
        self, reason: pb.RequestFinished.Reason.ValueType = pb.RequestFinished.REASON_LENGTH
    ) -> None:
        finished = pb.RequestFinished(reason=reason)
        self.session.send(pb.RequestEvent(request_number=self.number, finished=finished))

    def failed(self, code: grpc.StatusCode, reason: str, message: str, field: str = "") -> None:
        number: int = code.value[0]
        failed = pb.RequestFailed(code=number, reason=reason, message=message, field=field)
        self.session.send(pb.RequestEvent(request_number=self.number, failed=failed))

    def failed_event(self, **failed: Any) -> pb.RequestEvent:
        """A failure with any of its fields."""
        return pb.RequestEvent(request_number=self.number, failed=pb.RequestFailed(**failed))

    async def ended_by_gateway(self) -> str:
        """Waits for the gateway to end this request: "cancel" or "stop"."""
        while True:
            command = await self.session.next_command()
            if command.request_number == self.number:
                kind = command.WhichOneof("command")
                assert kind in ("cancel", "stop"), kind
                return str(kind)


class FakeSession:
    """One OpenSession call."""

    def __init__(self, gateway_id: str) -> None:
        self.gateway_id = gateway_id
        self.batches: list[int] = []
        self._commands: asyncio.Queue[pb.RequestCommand] = asyncio.Queue()
        self._outgoing: asyncio.Queue[pb.OpenSessionResponse | grpc.StatusCode | None] = asyncio.Queue()

    def send(self, *events: pb.RequestEvent) -> None:
        """Send events in one message."""
        self._outgoing.put_nowait(pb.OpenSessionResponse(events=events))

    def break_with(self, code: grpc.StatusCode | None) -> None:
        """End the stream with a status; None ends it well."""
        self._outgoing.put_nowait(code)

    async def next_command(self) -> pb.RequestCommand:
        return await asyncio.wait_for(self._commands.get(), WAIT_S)

    async def submitted(self) -> Submitted:
        """The next command, which has to be a submission."""
        command = await self.next_command()
        assert command.WhichOneof("command") == "submit", command
        return Submitted(self, command.request_number, command.submit)

    async def accepts(self) -> Submitted:
        """The next submission, queued and placed."""
        submitted = await self.submitted()
        submitted.queued()
        submitted.placed()
        return submitted

    @property
    def has_commands(self) -> bool:
        return not self._commands.empty()

    async def serve(self, requests: AsyncIterator[pb.OpenSessionRequest], context: Any) -> None:
        reading = asyncio.create_task(self._read(requests))
        try:
            while True:
                message = await self._outgoing.get()
                if message is None:
                    return
                if isinstance(message, grpc.StatusCode):
                    await context.abort(message, "the test broke the session")
                await context.write(message)
        finally:
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)

    async def _read(self, requests: AsyncIterator[pb.OpenSessionRequest]) -> None:
        async for request in requests:
            assert not request.HasField("hello"), "hello comes first and once"
            self.batches.append(len(request.commands))
            for command in request.commands:
                self._commands.put_nowait(command)


class FakeScheduler(session_pb2_grpc.SessionServiceServicer):
    """Serves sessions on a real port; can be stopped and started again there, as another process would."""

    def __init__(self) -> None:
        self.address = "127.0.0.1:0"
        self.scheduler_id = "scheduler-1"
        self._sessions: asyncio.Queue[FakeSession] = asyncio.Queue()
        self._server: RpcServer | None = None

    async def start(self) -> str:
        self._server = RpcServer(listen=self.address, max_message_bytes=64 * 1024 * 1024)
        self._server.add(session_pb2_grpc.add_SessionServiceServicer_to_server, self, SERVICE)
        self.address = await self._server.start()
        return self.address

    async def stop(self) -> None:
        if self._server is not None:
            await self._server.stop(0)
            self._server = None

    async def session(self) -> FakeSession:
        """The next session that a gateway opens."""
        return await asyncio.wait_for(self._sessions.get(), WAIT_S)

    async def OpenSession(  # type: ignore[override]  # the stubs type both styles of handler at once
        self, request_iterator: AsyncIterator[pb.OpenSessionRequest], context: Any
    ) -> None:
        first = await request_iterator.__anext__()
        assert first.HasField("hello"), "the first message carries hello"
        session = FakeSession(first.hello.gateway_id)
        await context.write(pb.OpenSessionResponse(welcome=pb.SessionWelcome(scheduler_id=self.scheduler_id)))
        self._sessions.put_nowait(session)
        await session.serve(request_iterator, context)
