"""An echo service in all four call kinds and both styles of streaming, for the contract of meshkit.rpc."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from typing import Any

import grpc
import grpc.aio
import pytest
from google.protobuf.wrappers_pb2 import StringValue
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from meshkit.config import TracingConfig
from meshkit.rpc.channel import open_channel
from meshkit.rpc.policy import POLICY, Access, Role
from meshkit.rpc.server import RpcServer
from meshkit.telemetry.tracing import configure_tracing

SERVICE = "meshkit.test.Echo"

STYLES = (
    "unary_unary", "unary_stream", "unary_write", "unary_flood", "stream_unary", "stream_stream",
    "stream_write",
)  # fmt: skip
ECHO_POLICY = {**POLICY, **{f"/{SERVICE}/{style}": frozenset({Role.WORKER}) for style in STYLES}}
"""With the echo service's methods."""

Act = Callable[[Any], Awaitable[None]]


class Echo:
    """Answers "one", then acts (the test's own step: raise, wait, look), then streams answer "two"."""

    def __init__(self, act: Act) -> None:
        self._act = act
        self.flood_closed = asyncio.Event()

    async def unary_flood(self, request: StringValue, context: Any) -> AsyncIterator[StringValue]:
        """Yields until someone stops it, more than flow control lets through."""
        try:
            while True:
                yield StringValue(value="x" * 60_000)
        finally:
            self.flood_closed.set()

    async def unary_unary(self, request: StringValue, context: Any) -> StringValue:
        await self._act(context)
        return StringValue(value="one")

    async def unary_stream(self, request: StringValue, context: Any) -> AsyncIterator[StringValue]:
        yield StringValue(value="one")
        await self._act(context)
        yield StringValue(value="two")

    async def unary_write(self, request: StringValue, context: Any) -> None:
        await context.write(StringValue(value="one"))
        await self._act(context)
        await context.write(StringValue(value="two"))

    async def stream_unary(self, requests: AsyncIterator[StringValue], context: Any) -> StringValue:
        async for _ in requests:
            pass
        await self._act(context)
        return StringValue(value="one")

    async def stream_stream(
        self, requests: AsyncIterator[StringValue], context: Any
    ) -> AsyncIterator[StringValue]:
        async for _ in requests:
            yield StringValue(value="one")
            await self._act(context)
            yield StringValue(value="two")

    async def stream_write(self, requests: AsyncIterator[StringValue], context: Any) -> None:
        async for _ in requests:
            await context.write(StringValue(value="one"))
            await self._act(context)
            await context.write(StringValue(value="two"))


_MAKERS = {
    "unary_unary": grpc.unary_unary_rpc_method_handler,
    "unary_stream": grpc.unary_stream_rpc_method_handler,
    "unary_write": grpc.unary_stream_rpc_method_handler,
    "unary_flood": grpc.unary_stream_rpc_method_handler,
    "stream_unary": grpc.stream_unary_rpc_method_handler,
    "stream_stream": grpc.stream_stream_rpc_method_handler,
    "stream_write": grpc.stream_stream_rpc_method_handler,
}


def add_echo_to_server(servicer: Echo, server: grpc.aio.Server) -> None:
    """What generated code would do."""
    handlers = {
        style: make(
            getattr(servicer, style),
            request_deserializer=StringValue.FromString,
            response_serializer=StringValue.SerializeToString,
        )
        for style, make in _MAKERS.items()
    }
    server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler(SERVICE, handlers)])


@dataclass
class EchoMesh:
    """One server, one channel to it, and calls by style."""

    echo: Echo
    server: RpcServer
    address: str
    channel: grpc.aio.Channel

    def start(self, style: str, **options: Any) -> Any:
        """Begin a call; returns grpc's call object."""
        kind = style.replace("write", "stream").replace("flood", "stream")
        call = getattr(self.channel, kind)(
            f"/{SERVICE}/{style}",
            request_serializer=StringValue.SerializeToString,
            response_deserializer=StringValue.FromString,
        )
        if style.startswith("stream"):
            return call(_one_message(), **options)
        return call(StringValue(value="hi"), **options)

    async def replies(self, style: str, into: list[str] | None = None, **options: Any) -> list[str]:
        """Make a call to its end; replies received before an error are left in `into`."""
        received = into if into is not None else []
        call = self.start(style, **options)
        if style in ("unary_unary", "stream_unary"):
            received.append((await call).value)
        else:
            async for message in call:
                received.append(message.value)
        return received


async def _one_message() -> AsyncIterator[StringValue]:
    yield StringValue(value="hi")


@pytest.fixture
def echo_mesh() -> Callable[..., AbstractAsyncContextManager[EchoMesh]]:
    """`async with echo_mesh(act, **server_options) as mesh:`"""

    @asynccontextmanager
    async def run(act: Act, *, traced: bool = True, **options: Any) -> AsyncIterator[EchoMesh]:
        options = {"listen": "127.0.0.1:0", "access": Access(policy=ECHO_POLICY), **options}
        server = RpcServer(**options)
        echo = Echo(act)
        server.add(add_echo_to_server, echo, SERVICE)
        address = await server.start()
        await server.set_serving(True)
        channel = open_channel(address, traced=traced)
        try:
            yield EchoMesh(echo, server, address, channel)
        finally:
            await channel.close()
            await server.stop(0)

    return run


class Spans:
    """What the in-memory exporter got."""

    def __init__(self, exporter: InMemorySpanExporter) -> None:
        self._exporter = exporter

    async def wait_for(self, count: int) -> tuple[ReadableSpan, ...]:
        """All spans, once there are `count`; a span ends a loop turn or two after its call."""
        deadline = asyncio.get_running_loop().time() + 5
        while len(self._exporter.get_finished_spans()) < count:
            assert asyncio.get_running_loop().time() < deadline, self._exporter.get_finished_spans()
            await asyncio.sleep(0.002)
        return self._exporter.get_finished_spans()

    def now(self) -> tuple[ReadableSpan, ...]:
        return self._exporter.get_finished_spans()


@pytest.fixture
def spans() -> Any:
    """Tracing on, into memory."""
    exporter = InMemorySpanExporter()
    handle = configure_tracing("test", TracingConfig(), exporter=exporter)
    yield Spans(exporter)
    handle.shutdown()
