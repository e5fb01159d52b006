"""Binding, health, reflection, limits and stopping of the RPC server; keepalive as clients set it."""

from __future__ import annotations

import asyncio
import signal
import socket
import sys
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from meshkit.errors import FailedPrecondition, InvalidArgument
from meshkit.rpc.channel import open_channel
from meshkit.rpc.server import RpcServer

# One loop for all of them: grpc.aio keeps one poller per process, and its late events hit closed loops.
pytestmark = pytest.mark.asyncio(loop_scope="session")

ROOT = Path(__file__).resolve().parents[3]
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


async def nothing(context: Any) -> None:
    """An act that does nothing."""


async def health(channel: grpc.aio.Channel, service: str = "") -> Any:
    stub = health_pb2_grpc.HealthStub(channel)
    return (await stub.Check(health_pb2.HealthCheckRequest(service=service))).status


async def test_port_zero_gives_the_port_that_was_bound(echo_mesh: Any) -> None:
    async with echo_mesh(nothing) as mesh:
        host, _, port = mesh.address.rpartition(":")
        assert host == "127.0.0.1"
        assert int(port) > 0


async def test_a_port_in_use_is_a_failed_precondition_that_names_field_and_address(echo_mesh: Any) -> None:
    async with echo_mesh(nothing) as mesh:
        second = RpcServer(listen=mesh.address)
        with pytest.raises(FailedPrecondition, match=mesh.address) as caught:
            await second.start()
        assert (caught.value.field, caught.value.reason) == ("listen", "ADDRESS_IN_USE")
        assert await mesh.replies("unary_unary") == ["one"]


@pytest.mark.parametrize("listen", ["", "8080", "localhost", "localhost:http", "127.0.0.1:65536", "unix:"])
async def test_a_listen_address_of_no_known_form_is_refused(listen: str) -> None:
    with pytest.raises(InvalidArgument, match="HOST:PORT") as caught:
        RpcServer(listen=listen)
    assert caught.value.field == "listen"


async def test_a_unix_socket_serves(echo_mesh: Any, tmp_path: Path) -> None:
    async with echo_mesh(nothing, listen=f"unix:{tmp_path}/s") as mesh:
        assert mesh.address == f"unix:{tmp_path}/s"
        assert await mesh.replies("stream_stream") == ["one", "two"]


async def test_a_unix_socket_of_a_live_server_is_not_taken_over_but_a_dead_ones_is(
    echo_mesh: Any, tmp_path: Path
) -> None:
    async with echo_mesh(nothing, listen=f"unix:{tmp_path}/s") as mesh:
        with pytest.raises(FailedPrecondition, match="cannot be bound"):
            await RpcServer(listen=mesh.address).start()
        assert await mesh.replies("unary_unary") == ["one"]
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(f"{tmp_path}/t")
    async with echo_mesh(nothing, listen=f"unix:{tmp_path}/t") as mesh:
        assert await mesh.replies("unary_unary") == ["one"]


async def test_health_follows_set_serving_for_each_service_and_the_whole(echo_mesh: Any) -> None:
    async with echo_mesh(nothing) as mesh:
        for service in ("", "meshkit.test.Echo"):
            await mesh.server.set_serving(True)
            assert await health(mesh.channel, service) == SERVING
            await mesh.server.set_serving(False)
            assert await health(mesh.channel, service) == NOT_SERVING


async def test_health_says_not_serving_until_it_is_told_otherwise() -> None:
    server = RpcServer(listen="127.0.0.1:0")
    async with open_channel(await server.start()) as channel:
        assert await health(channel) == NOT_SERVING
    await server.stop(0)


async def test_an_unknown_service_has_no_health(echo_mesh: Any) -> None:
    async with echo_mesh(nothing) as mesh:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await health(mesh.channel, "no.Such")
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND


@pytest.mark.parametrize("offered", [True, False])
async def test_reflection_is_there_only_when_asked_for(echo_mesh: Any, offered: bool) -> None:
    async with echo_mesh(nothing, reflection=offered) as mesh:
        stub = reflection_pb2_grpc.ServerReflectionStub(mesh.channel)
        request = reflection_pb2.ServerReflectionRequest(list_services="")
        call = stub.ServerReflectionInfo(iter([request]))
        if not offered:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call.read()
            assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
            return
        answer = await call.read()
        names = {service.name for service in answer.list_services_response.service}
        assert {"meshkit.test.Echo", "grpc.health.v1.Health"} <= names


async def test_a_message_over_the_limit_is_refused_and_the_next_call_works(echo_mesh: Any) -> None:
    async with echo_mesh(nothing, max_message_bytes=1000) as mesh:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await mesh.start("unary_flood").read()
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert await mesh.replies("unary_unary") == ["one"]


async def test_stop_lets_a_running_call_end_within_its_grace(echo_mesh: Any) -> None:
    acting, release = asyncio.Event(), asyncio.Event()

    async def wait(context: Any) -> None:
        acting.set()
        await release.wait()

    async with echo_mesh(wait) as mesh:
        replies = asyncio.ensure_future(mesh.replies("unary_stream"))
        await acting.wait()
        stopping = asyncio.ensure_future(mesh.server.stop(10))
        release.set()
        assert await replies == ["one", "two"]
        await asyncio.wait_for(stopping, timeout=5)


async def test_an_idle_stream_outlives_many_keepalive_pings(echo_mesh: Any) -> None:
    """Where server and client disagree, `too_many_pings` ends the stream after about three seconds."""
    release = asyncio.Event()

    async def wait(context: Any) -> None:
        await release.wait()

    async with echo_mesh(wait) as mesh:
        call = mesh.start("unary_write")
        assert (await call.read()).value == "one"
        # The time itself is what is under test here: the pings of four seconds must all be tolerated.
        done, _ = await asyncio.wait({asyncio.ensure_future(call.code())}, timeout=4)
        assert not done
        release.set()
        assert (await call.read()).value == "two"


SLEEPY_SERVER = """
import asyncio
import grpc
from meshkit.rpc.policy import Access, Role
from meshkit.rpc.server import RpcServer

async def wait(request, context):
    await context.write(b"ready")
    await asyncio.Event().wait()

def add(_, server):
    handler = grpc.unary_stream_rpc_method_handler(wait)
    server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler("test.Sleepy", {"Wait": handler})])

async def main():
    access = Access(policy={"/test.Sleepy/Wait": frozenset({Role.WORKER})})
    server = RpcServer(listen="127.0.0.1:0", access=access)
    server.add(add, None, "test.Sleepy")
    print(await server.start(), flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""


async def test_a_frozen_peer_ends_an_idle_stream_within_three_seconds() -> None:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", SLEEPY_SERVER, stdout=asyncio.subprocess.PIPE, cwd=ROOT
    )
    try:
        assert process.stdout is not None
        address = (await asyncio.wait_for(process.stdout.readline(), timeout=20)).decode().strip()
        async with open_channel(address, traced=False) as channel:
            wait: Any = channel.unary_stream("/test.Sleepy/Wait")
            call = wait(b"")
            assert await call.read() == b"ready"
            process.send_signal(signal.SIGSTOP)
            assert await asyncio.wait_for(call.code(), timeout=3) is grpc.StatusCode.UNAVAILABLE
    finally:
        process.kill()
        await process.wait()
