"""What a handler raises and what the client then sees, over a real in-process server."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from meshkit.errors import InvalidArgument, ResourceExhausted, from_rpc_error

# One loop for all of them: grpc.aio keeps one poller per process, and its late events hit closed loops.
pytestmark = pytest.mark.asyncio(loop_scope="session")

STYLES = ["unary_unary", "unary_stream", "unary_write", "stream_unary", "stream_stream", "stream_write"]
STREAMED = [style for style in STYLES if style not in ("unary_unary", "stream_unary")]


async def nothing(context: Any) -> None:
    """An act that does nothing."""


@pytest.mark.parametrize("style", STYLES)
async def test_replies_pass_unchanged_in_every_kind_of_call(echo_mesh: Any, style: str) -> None:
    async with echo_mesh(nothing) as mesh:
        expected = ["one", "two"] if style in STREAMED else ["one"]
        assert await mesh.replies(style) == expected


@pytest.mark.parametrize("style", STYLES)
async def test_a_mesh_error_arrives_with_code_reason_field_and_metadata(echo_mesh: Any, style: str) -> None:
    async def refuse(context: Any) -> None:
        raise InvalidArgument(
            "max_tokens is 0; give 1 or more \u2713", field="max_tokens", reason="TOO_SMALL", minimum=1
        )

    received: list[str] = []
    async with echo_mesh(refuse) as mesh:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await mesh.replies(style, received)
    assert received == (["one"] if style in STREAMED else [])
    error = from_rpc_error(caught.value)
    assert isinstance(error, InvalidArgument)
    assert (error.message, error.field) == ("max_tokens is 0; give 1 or more \u2713", "max_tokens")
    assert (error.reason, error.metadata) == ("TOO_SMALL", {"minimum": "1"})


@pytest.mark.parametrize("style", STYLES)
async def test_the_text_of_an_unknown_exception_goes_to_the_log_and_never_to_the_client(
    echo_mesh: Any, style: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def break_down(context: Any) -> None:
        raise KeyError("hunter2")

    with caplog.at_level(logging.ERROR):
        async with echo_mesh(break_down) as mesh:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await mesh.replies(style)
    error = from_rpc_error(caught.value)
    assert error.code is grpc.StatusCode.INTERNAL
    assert error.message == f"internal error (id {error.metadata['error_id']})"
    everything = f"{caught.value!r} {caught.value.trailing_metadata()!r}"
    assert "hunter2" not in everything
    assert "KeyError" not in everything
    assert "hunter2" in caplog.text
    assert error.metadata["error_id"] in caplog.text


@pytest.mark.parametrize("style", STYLES)
async def test_a_handler_that_aborts_by_itself_has_the_last_word(echo_mesh: Any, style: str) -> None:
    async def abort(context: Any) -> None:
        await context.abort(grpc.StatusCode.DATA_LOSS, "as the handler said")

    async with echo_mesh(abort) as mesh:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await mesh.replies(style)
    assert (caught.value.code(), caught.value.details()) == (grpc.StatusCode.DATA_LOSS, "as the handler said")


@pytest.mark.parametrize("style", STYLES)
async def test_a_handler_cancelled_from_inside_is_answered_at_once(echo_mesh: Any, style: str) -> None:
    async def give_up(context: Any) -> None:
        raise asyncio.CancelledError

    async with echo_mesh(give_up) as mesh:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await asyncio.wait_for(mesh.replies(style), timeout=5)
    assert caught.value.code() is grpc.StatusCode.CANCELLED


@pytest.mark.parametrize("style", STYLES)
async def test_a_client_that_cancels_reaches_the_handler_as_cancelled_error(
    echo_mesh: Any, style: str
) -> None:
    acting, cancelled = asyncio.Event(), asyncio.Event()

    async def wait_for_ever(context: Any) -> None:
        acting.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.set()
            raise

    async with echo_mesh(wait_for_ever) as mesh:
        call = mesh.start(style)
        await asyncio.wait_for(acting.wait(), timeout=5)
        call.cancel()
        await asyncio.wait_for(cancelled.wait(), timeout=5)
        assert await call.code() is grpc.StatusCode.CANCELLED


async def test_a_deadline_that_passes_in_the_handler_is_the_clients_deadline_exceeded(echo_mesh: Any) -> None:
    async def wait_for_ever(context: Any) -> None:
        await asyncio.Event().wait()

    async with echo_mesh(wait_for_ever) as mesh:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await mesh.replies("unary_stream", timeout=0.1)
    assert from_rpc_error(caught.value).code is grpc.StatusCode.DEADLINE_EXCEEDED


async def test_a_client_that_cancels_during_a_write_closes_the_generator_and_logs_no_error(
    echo_mesh: Any, caplog: pytest.LogCaptureFixture
) -> None:
    async with echo_mesh(nothing) as mesh:
        call = mesh.start("unary_flood")
        await call.read()
        call.cancel()
        await asyncio.wait_for(mesh.echo.flood_closed.wait(), timeout=5)
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []


async def test_retry_after_travels_as_retry_info(echo_mesh: Any) -> None:
    async def refuse(context: Any) -> None:
        raise ResourceExhausted("the queue is full (1024 waiting)", retry_after_s=1.5)

    async with echo_mesh(refuse) as mesh:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await mesh.replies("unary_unary")
    error = from_rpc_error(caught.value)
    assert isinstance(error, ResourceExhausted)
    assert error.retry_after_s == 1.5


async def test_an_error_text_of_a_megabyte_still_arrives_as_that_error(echo_mesh: Any) -> None:
    async def refuse(context: Any) -> None:
        raise InvalidArgument("\u4e2d" * 500_000, field="f" * 100_000, value="v" * 100_000)

    async with echo_mesh(refuse) as mesh:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await mesh.replies("unary_unary")
    error = from_rpc_error(caught.value)
    assert isinstance(error, InvalidArgument)
    assert error.reason == "INVALID_ARGUMENT"
    assert error.field is not None
    assert error.field.startswith("ff")


async def test_a_peer_that_is_not_there_is_unavailable(unused_tcp_port: int) -> None:
    async with grpc.aio.insecure_channel(f"127.0.0.1:{unused_tcp_port}") as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
    error = from_rpc_error(caught.value)
    assert error.code is grpc.StatusCode.UNAVAILABLE
    assert error.reason == "UNAVAILABLE"


@pytest.mark.parametrize("style", STYLES)
async def test_a_request_that_does_not_parse_is_invalid_and_nothing_of_the_parser_is_told(
    echo_mesh: Any, style: str
) -> None:
    async def two_thirds_of_a_tag() -> Any:
        yield b"\xff\xff\xff"

    async with echo_mesh(nothing) as mesh:
        # Without serializers: the bytes go out as they are.
        method = getattr(mesh.channel, style.replace("write", "stream"))(f"/meshkit.test.Echo/{style}")
        call = method(two_thirds_of_a_tag() if style.startswith("stream") else b"\xff\xff\xff", timeout=5)
        answer = call if style.endswith("unary") else call.read()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await answer
        error = from_rpc_error(caught.value)
        assert (error.code, error.reason) == (grpc.StatusCode.INVALID_ARGUMENT, "MALFORMED_MESSAGE")
        assert "DecodeError" not in error.message
        assert "StringValue" not in error.message
        assert await mesh.replies(style)
