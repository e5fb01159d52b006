"""Client interceptors for traces: four classes, as grpc.aio files an interceptor under one kind only."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection
from typing import Any

import grpc
import grpc.aio
from opentelemetry import propagate, trace
from opentelemetry.trace import Span, SpanKind

from meshkit.rpc.interceptors import set_span_status
from meshkit.telemetry.tracing import is_traced_method, tracer

Continuation = Callable[[grpc.aio.ClientCallDetails, Any], Awaitable[Any]]


class CallTracer:
    """Starts a CLIENT span per call, sends its context along, and ends it when the call's status is known.

    excluded: full method names ("/package.Service/Method") that get no span.
    """

    def __init__(self, *, excluded: Collection[str] = ()) -> None:
        self._excluded = frozenset(excluded)
        self._endings: set[asyncio.Task[None]] = set()

    async def call(
        self, continuation: Continuation, details: grpc.aio.ClientCallDetails, request: Any
    ) -> Any:
        """Run the call under its span. grpc's call object is returned: both styles of streaming work."""
        method = _text(details.method)
        if method in self._excluded or not is_traced_method(method):
            return await continuation(details, request)
        span = tracer().start_span(method.lstrip("/"), kind=SpanKind.CLIENT)
        try:
            call = await continuation(_with_context(details, span), request)
        except BaseException:
            span.end()
            raise
        call.add_done_callback(lambda _: self._end_later(span, call))
        return call

    def _end_later(self, span: Span, call: Any) -> None:
        # A done callback is no coroutine, but the code of a finished call is only to be had by awaiting.
        task = asyncio.get_running_loop().create_task(_end(span, call), name="end client span")
        self._endings.add(task)
        task.add_done_callback(self._endings.discard)


async def _end(span: Span, call: Any) -> None:
    try:
        set_span_status(span, await call.code())
    finally:
        span.end()


def _with_context(details: grpc.aio.ClientCallDetails, span: Span) -> grpc.aio.ClientCallDetails:
    carrier: dict[str, str] = {}
    propagate.inject(carrier, trace.set_span_in_context(span))
    metadata = grpc.aio.Metadata(*(details.metadata or ()), *carrier.items())
    return grpc.aio.ClientCallDetails(
        details.method, details.timeout, metadata, details.credentials, details.wait_for_ready
    )


def _text(method: str | bytes) -> str:
    return method.decode() if isinstance(method, bytes) else method


class _UnaryUnary(grpc.aio.UnaryUnaryClientInterceptor):
    def __init__(self, calls: CallTracer) -> None:
        self._calls = calls

    async def intercept_unary_unary(
        self, continuation: Any, client_call_details: grpc.aio.ClientCallDetails, request: Any
    ) -> Any:
        return await self._calls.call(continuation, client_call_details, request)


class _UnaryStream(grpc.aio.UnaryStreamClientInterceptor):
    def __init__(self, calls: CallTracer) -> None:
        self._calls = calls

    async def intercept_unary_stream(
        self, continuation: Any, client_call_details: grpc.aio.ClientCallDetails, request: Any
    ) -> Any:
        return await self._calls.call(continuation, client_call_details, request)


class _StreamUnary(grpc.aio.StreamUnaryClientInterceptor):
    def __init__(self, calls: CallTracer) -> None:
        self._calls = calls

    async def intercept_stream_unary(
        self, continuation: Any, client_call_details: grpc.aio.ClientCallDetails, request_iterator: Any
    ) -> Any:
        return await self._calls.call(continuation, client_call_details, request_iterator)


class _StreamStream(grpc.aio.StreamStreamClientInterceptor):
    def __init__(self, calls: CallTracer) -> None:
        self._calls = calls

    async def intercept_stream_stream(
        self, continuation: Any, client_call_details: grpc.aio.ClientCallDetails, request_iterator: Any
    ) -> Any:
        return await self._calls.call(continuation, client_call_details, request_iterator)


def client_tracing_interceptors(*, excluded: Collection[str] = ()) -> list[grpc.aio.ClientInterceptor]:
    """The four interceptors that trace a channel's calls."""
    calls = CallTracer(excluded=excluded)
    return [_UnaryUnary(calls), _UnaryStream(calls), _StreamUnary(calls), _StreamStream(calls)]
