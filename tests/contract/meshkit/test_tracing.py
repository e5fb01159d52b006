"""Spans over real calls: one trace, right parents, and an end with the right status for each of them."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from opentelemetry.trace import SpanKind, StatusCode, get_current_span

from meshkit.errors import NotFound
from meshkit.rpc.channel import open_channel
from meshkit.telemetry.tracing import context_from_traceparent, inject_traceparent, tracer

# One loop for all of them: grpc.aio keeps one poller per process, and its late events hit closed loops.
pytestmark = pytest.mark.asyncio(loop_scope="session")

STYLES = ["unary_unary", "unary_stream", "unary_write", "stream_unary", "stream_stream", "stream_write"]
STATUS = "rpc.grpc.status_code"


async def nothing(context: Any) -> None:
    """An act that does nothing."""


def by_kind(spans: Any) -> tuple[Any, Any]:
    """The client's and the server's span of one call."""
    (client,) = [span for span in spans if span.kind is SpanKind.CLIENT]
    (server,) = [span for span in spans if span.kind is SpanKind.SERVER]
    return client, server


@pytest.mark.parametrize("style", STYLES)
async def test_a_call_is_one_trace_from_the_callers_span_to_the_handlers(
    echo_mesh: Any, spans: Any, style: str
) -> None:
    async def work(context: Any) -> None:
        tracer().start_span("work").end()

    async with echo_mesh(work) as mesh:
        with tracer().start_as_current_span("caller"):
            await mesh.replies(style)
        finished = await spans.wait_for(4)
    client, server = by_kind(finished)
    (caller,) = [span for span in finished if span.name == "caller"]
    (inner,) = [span for span in finished if span.name == "work"]
    assert client.parent.span_id == caller.context.span_id
    assert server.parent.span_id == client.context.span_id
    assert inner.parent.span_id == server.context.span_id
    assert {span.context.trace_id for span in finished} == {caller.context.trace_id}
    assert client.name == server.name == f"meshkit.test.Echo/{style}"
    assert client.attributes[STATUS] == server.attributes[STATUS] == 0


@pytest.mark.parametrize("style", STYLES)
async def test_a_failed_call_ends_both_spans_with_its_status(echo_mesh: Any, spans: Any, style: str) -> None:
    async def refuse(context: Any) -> None:
        raise NotFound("no such model")

    async with echo_mesh(refuse) as mesh:
        with pytest.raises(grpc.aio.AioRpcError):
            await mesh.replies(style)
        finished = await spans.wait_for(2)
    for span in by_kind(finished):
        assert span.attributes[STATUS] == grpc.StatusCode.NOT_FOUND.value[0]
        assert span.status.status_code is StatusCode.ERROR


@pytest.mark.parametrize("style", STYLES)
async def test_an_unknown_exception_ends_both_spans_as_internal(
    echo_mesh: Any, spans: Any, style: str
) -> None:
    async def break_down(context: Any) -> None:
        raise KeyError("hunter2")

    async with echo_mesh(break_down) as mesh:
        with pytest.raises(grpc.aio.AioRpcError):
            await mesh.replies(style)
        finished = await spans.wait_for(2)
    assert [span.attributes[STATUS] for span in by_kind(finished)] == [grpc.StatusCode.INTERNAL.value[0]] * 2


@pytest.mark.parametrize("style", STYLES)
async def test_a_cancelled_call_ends_both_spans_as_cancelled(echo_mesh: Any, spans: Any, style: str) -> None:
    acting = asyncio.Event()

    async def wait_for_ever(context: Any) -> None:
        acting.set()
        await asyncio.Event().wait()

    async with echo_mesh(wait_for_ever) as mesh:
        call = mesh.start(style)
        await asyncio.wait_for(acting.wait(), timeout=5)
        assert spans.now() == ()
        call.cancel()
        finished = await spans.wait_for(2)
    assert [span.attributes[STATUS] for span in by_kind(finished)] == [grpc.StatusCode.CANCELLED.value[0]] * 2


async def test_a_client_that_leaves_in_the_middle_of_a_write_ends_both_spans(
    echo_mesh: Any, spans: Any
) -> None:
    async with echo_mesh(nothing) as mesh:
        call = mesh.start("unary_flood")
        async for _ in call:
            call.cancel()
            break
        finished = await spans.wait_for(2)
    assert {span.attributes[STATUS] for span in by_kind(finished)} == {grpc.StatusCode.CANCELLED.value[0]}


async def test_a_stream_span_ends_with_the_last_message_not_before(echo_mesh: Any, spans: Any) -> None:
    release = asyncio.Event()

    async def wait(context: Any) -> None:
        await release.wait()

    async with echo_mesh(wait) as mesh:
        call = mesh.start("unary_write")
        assert (await call.read()).value == "one"
        assert spans.now() == ()
        release.set()
        assert (await call.read()).value == "two"
        assert await call.read() is grpc.aio.EOF
        await spans.wait_for(2)


async def test_a_handler_that_aborts_by_itself_gives_its_status_to_the_span(
    echo_mesh: Any, spans: Any
) -> None:
    async def abort(context: Any) -> None:
        await context.abort(grpc.StatusCode.DATA_LOSS, "gone")

    async with echo_mesh(abort) as mesh:
        with pytest.raises(grpc.aio.AioRpcError):
            await mesh.replies("unary_stream")
        finished = await spans.wait_for(2)
    assert {span.attributes[STATUS] for span in finished} == {grpc.StatusCode.DATA_LOSS.value[0]}


async def test_a_peer_that_is_not_there_ends_the_client_span_as_unavailable(
    spans: Any, unused_tcp_port: int
) -> None:
    async with open_channel(f"127.0.0.1:{unused_tcp_port}") as channel:
        call: Any = channel.unary_unary("/any.Service/Method")
        with pytest.raises(grpc.aio.AioRpcError):
            await call(b"")
        (span,) = await spans.wait_for(1)
    assert span.attributes[STATUS] == grpc.StatusCode.UNAVAILABLE.value[0]


async def test_health_checks_make_no_spans(echo_mesh: Any, spans: Any) -> None:
    async with echo_mesh(nothing) as mesh:
        await health_pb2_grpc.HealthStub(mesh.channel).Check(health_pb2.HealthCheckRequest())
        await mesh.replies("unary_unary")
        finished = await spans.wait_for(2)
    assert {span.name for span in finished} == {"meshkit.test.Echo/unary_unary"}


async def test_an_excluded_stream_makes_no_spans_and_its_messages_can_carry_the_context(
    echo_mesh: Any, spans: Any
) -> None:
    method = "/meshkit.test.Echo/stream_write"
    sent: list[str] = []

    async def work(context: Any) -> None:
        assert not get_current_span().get_span_context().is_valid
        tracer().start_span("work", context=context_from_traceparent(sent[0])).end()

    async with echo_mesh(work, untraced_methods=[method]) as mesh:
        channel = open_channel(mesh.address, untraced_methods=[method])
        mesh.channel, first = channel, mesh.channel
        with tracer().start_as_current_span("request") as request:
            sent.append(inject_traceparent())
            await mesh.replies("stream_write")
        await channel.close()
        mesh.channel = first
        finished = await spans.wait_for(2)
    assert [span.name for span in finished] == ["work", "request"]
    assert finished[0].parent.span_id == request.get_span_context().span_id


async def test_calls_from_an_untraced_channel_start_a_new_trace_at_the_server(
    echo_mesh: Any, spans: Any
) -> None:
    async with echo_mesh(nothing, traced=False) as mesh:
        with tracer().start_as_current_span("caller"):
            await mesh.replies("stream_stream")
        finished = await spans.wait_for(2)
    (server,) = [span for span in finished if span.kind is SpanKind.SERVER]
    assert server.parent is None


async def test_the_log_line_of_a_failed_handler_is_written_inside_its_span(
    echo_mesh: Any, spans: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from meshkit.rpc import interceptors

    seen: list[int] = []
    monkeypatch.setattr(
        interceptors.log,
        "exception",
        lambda *_, **__: seen.append(get_current_span().get_span_context().trace_id),
    )

    async def break_down(context: Any) -> None:
        raise KeyError("hunter2")

    async with echo_mesh(break_down) as mesh:
        with pytest.raises(grpc.aio.AioRpcError):
            await mesh.replies("unary_unary")
        finished = await spans.wait_for(2)
    assert seen == [finished[0].context.trace_id]
