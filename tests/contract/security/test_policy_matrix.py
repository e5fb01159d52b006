"""S2: every method has a policy, and over a real connection each role reaches just what the table says."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import pkgutil
from collections.abc import AsyncIterator, Iterator
from typing import Any

import grpc
import grpc.aio
import pytest
from google.protobuf.descriptor import FileDescriptor, MethodDescriptor
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2

import chipmesh
from meshkit.errors import from_rpc_error
from meshkit.rpc.channel import open_channel
from meshkit.rpc.policy import CERTIFIED, POLICY, Access, Role
from meshkit.rpc.server import RpcServer
from meshkit.rpc.tls import service_credentials
from tests.support.certificates import Pki

NAME = "one"

# Written down a second time, by role, so that nobody widens the table by one word and no reader notices.
MAY = {
    Role.CLIENT: "inference.InferenceService/* sglang.grpc.scheduler.SglangScheduler/*",
    Role.GATEWAY: "scheduler.SessionService/*",
    Role.SCHEDULER: (
        "scheduler.AdminService/* device.ExecutionService/Attach device.ExecutionService/ExecuteSteps "
        "device.ExecutionService/Profile "
        "device.PluginService/* device.DeviceService/ListDevices device.DeviceService/GetDevice"
    ),
    Role.OPERATOR: (
        "scheduler.AdminService/* device.PluginService/* device.DeviceService/ListDevices "
        "device.DeviceService/GetDevice"
    ),
    Role.WORKER: (
        "scheduler.WorkerRegistryService/* device.PluginService/* device.DeviceService/* "
        "device.MemoryService/* device.OperatorService/* device.CollectiveService/* "
        "device.ExecutionService/LoadModel device.ExecutionService/AllocateKvCache "
        "device.ExecutionService/UnloadModel device.ExecutionService/Profile device.ExecutionService/Follow"
    ),
}


def files() -> Iterator[FileDescriptor]:
    """All of ours that have services, and the two that every server may have."""
    for module in pkgutil.walk_packages(chipmesh.__path__, "chipmesh."):
        if module.name.endswith("_pb2"):
            yield importlib.import_module(module.name).DESCRIPTOR
    yield health_pb2.DESCRIPTOR
    yield reflection_pb2.DESCRIPTOR


METHODS: dict[str, MethodDescriptor] = {
    f"/{service.full_name}/{method.name}": method
    for file in files()
    for service in file.services_by_name.values()
    for method in service.methods
}
OURS = [method for method in METHODS if method.startswith(("/chipmesh.", "/sglang."))]


def may(role: Role, method: str) -> bool:
    """As MAY says."""
    service, name = method.lstrip("/").removeprefix("chipmesh.").replace(".v1alpha1", "").split("/")
    return bool({f"{service}/*", f"{service}/{name}"} & set(MAY[role].split()))


def test_every_method_of_every_service_has_a_policy() -> None:
    assert len(OURS) > 35, "the descriptors were not found, so this test has shown nothing"
    without = [method for method in METHODS if not POLICY.get(method)]
    assert not without, f"methods that nobody may call; add them to meshkit/rpc/policy.py: {without}"


def test_the_policy_names_no_method_that_is_not_there() -> None:
    # A newer health protocol has one more than some releases of the library.
    assert POLICY.keys() - METHODS.keys() <= {"/grpc.health.v1.Health/List"}


async def answer(request: Any, context: Any) -> bytes:
    return b""


async def answer_stream(request: Any, context: Any) -> None:
    await context.write(b"")


def add_all(servicer: object, server: grpc.aio.Server) -> None:
    """Every method of ours, answering with an empty message: only the way there is under test."""
    for method in OURS:
        descriptor = METHODS[method]
        service, name = method.lstrip("/").split("/")
        streams = descriptor.client_streaming, descriptor.server_streaming
        make = {
            (False, False): grpc.unary_unary_rpc_method_handler,
            (False, True): grpc.unary_stream_rpc_method_handler,
            (True, True): grpc.stream_stream_rpc_method_handler,
        }[streams]
        handler: Any = make(answer_stream if streams[1] else answer)
        server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler(service, {name: handler})])


async def ask(channel: Any, method: str) -> grpc.StatusCode:
    descriptor = METHODS[method]
    call: Any
    if descriptor.client_streaming:
        call = channel.stream_stream(method)(iter([b""]), timeout=5)
    elif descriptor.server_streaming:
        call = channel.unary_stream(method)(b"", timeout=5)
    else:
        call = channel.unary_unary(method)(b"", timeout=5)
    if descriptor.server_streaming:
        with contextlib.suppress(grpc.aio.AioRpcError):  # It is the status that is asked for.
            await call.read()
            await call.read()
    code: grpc.StatusCode = await call.code()
    return code


async def ask_once(channel: Any, method: str) -> None:
    """A unary call that raises."""
    await channel.unary_unary(method)(b"", timeout=5)


@pytest.fixture
async def server(pki: Pki) -> AsyncIterator[str]:
    tls = await asyncio.to_thread(pki.good, Role.SCHEDULER, NAME)
    server = RpcServer(listen="127.0.0.1:0", credentials=service_credentials(tls))
    server.add(add_all, None, "all")
    yield await server.start()
    await server.stop(0)


@pytest.mark.parametrize("role", CERTIFIED)
async def test_each_role_reaches_its_own_methods_and_no_other(pki: Pki, server: str, role: Role) -> None:
    tls = await asyncio.to_thread(pki.good, role, NAME)
    async with open_channel(server, traced=False, tls=tls, role=Role.SCHEDULER) as channel:
        codes = {method: await ask(channel, method) for method in OURS}
    ok, denied = grpc.StatusCode.OK, grpc.StatusCode.PERMISSION_DENIED
    assert codes == {method: ok if may(role, method) else denied for method in OURS}


async def test_a_public_listener_gives_its_peers_what_clients_may() -> None:
    server = RpcServer(listen="127.0.0.1:0", access=Access(everyone=Role.CLIENT))
    server.add(add_all, None, "all")
    async with open_channel(await server.start(), traced=False) as channel:
        codes = {method: await ask(channel, method) for method in OURS}
    await server.stop(0)
    ok, denied = grpc.StatusCode.OK, grpc.StatusCode.PERMISSION_DENIED
    assert codes == {method: ok if may(Role.CLIENT, method) else denied for method in OURS}


async def test_a_local_peer_may_do_what_any_role_may_and_no_method_without_a_policy() -> None:
    left_out = "/chipmesh.scheduler.v1alpha1.AdminService/GetMesh"
    policy = {method: roles for method, roles in POLICY.items() if method != left_out}
    server = RpcServer(listen="127.0.0.1:0", access=Access(policy=policy))
    server.add(add_all, None, "all")
    async with open_channel(await server.start(), traced=False) as channel:
        codes = {method: await ask(channel, method) for method in OURS}
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await ask_once(channel, left_out)
    await server.stop(0)
    assert {method for method, code in codes.items() if code is not grpc.StatusCode.OK} == {left_out}
    error = from_rpc_error(caught.value)
    assert (error.code, error.reason) == (grpc.StatusCode.PERMISSION_DENIED, "ROLE_NOT_ALLOWED")
    assert left_out in error.message
