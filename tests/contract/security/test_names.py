"""A certificate speaks for its own name only: a worker for its id, a gateway for its sessions."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import grpc.aio
import pytest

from chipmesh.scheduler.v1alpha1 import registry_pb2, session_pb2
from chipmesh.scheduler.v1alpha1.registry_pb2_grpc import WorkerRegistryServiceStub
from chipmesh.scheduler.v1alpha1.session_pb2_grpc import SessionServiceStub
from meshkit.errors import MeshError, PermissionDenied, from_rpc_error
from meshkit.rpc.channel import open_channel
from meshkit.rpc.policy import Role
from scheduler_svc.app import SchedulerService
from scheduler_svc.config import SchedulerConfig
from tests.support.certificates import Pki
from worker_svc.registration import Registrar


@pytest.fixture
async def scheduler(pki: Pki) -> AsyncIterator[str]:
    tls = await asyncio.to_thread(pki.good, Role.SCHEDULER, "scheduler")
    service = SchedulerService(SchedulerConfig(tls=tls))
    yield (await service.start()).address
    await service.stop(0)


async def open_as(pki: Pki, address: str, role: Role, name: str) -> grpc.aio.Channel:
    tls = await asyncio.to_thread(pki.good, role, name)
    return open_channel(address, traced=False, tls=tls, role=Role.SCHEDULER)


@pytest.mark.parametrize("request_type", ["Register", "Heartbeat", "Deregister"])
async def test_a_worker_speaks_for_its_own_id_only(pki: Pki, scheduler: str, request_type: str) -> None:
    async with await open_as(pki, scheduler, Role.WORKER, "worker-b") as channel:
        method: Any = getattr(WorkerRegistryServiceStub(channel), request_type)
        request = getattr(registry_pb2, f"{request_type}Request")
        with pytest.raises(grpc.aio.AioRpcError) as other:
            await method(request(worker_id="worker-a"), timeout=5)
        error = from_rpc_error(other.value)
        assert (error.code, error.field) == (grpc.StatusCode.PERMISSION_DENIED, "worker_id")
        assert "worker-a" in error.message
        assert "worker-b" in error.message
        own = await method(request(worker_id="worker-b"), timeout=5).code()
        assert own is not grpc.StatusCode.PERMISSION_DENIED


async def test_a_worker_that_is_refused_for_its_name_gives_up_with_the_cause(
    pki: Pki, scheduler: str
) -> None:
    async with await open_as(pki, scheduler, Role.WORKER, "worker-b") as channel:
        registrar = Registrar(channel)
        registrar.announce(registry_pb2.RegisterRequest(worker_id="worker-a", instance_id="i"))
        with pytest.raises(PermissionDenied, match="worker-a"):
            await asyncio.wait_for(registrar.run(), 5)


async def open_session(channel: grpc.aio.Channel, gateway_id: str) -> Any:
    """An open session; raises what the scheduler refused."""
    call: Any = SessionServiceStub(channel).OpenSession(timeout=10)
    await call.write(session_pb2.OpenSessionRequest(hello=session_pb2.SessionHello(gateway_id=gateway_id)))
    try:
        assert (await call.read()).HasField("welcome")
    except grpc.aio.AioRpcError as error:
        raise from_rpc_error(error) from None
    return call


@pytest.mark.parametrize("gateway_id", ["one/1", "one", "", "two-1/x", "twofold/1"])
async def test_a_gateway_can_not_end_the_session_of_another_one(
    pki: Pki, scheduler: str, gateway_id: str
) -> None:
    async with (
        await open_as(pki, scheduler, Role.GATEWAY, "one") as one,
        await open_as(pki, scheduler, Role.GATEWAY, "two") as two,
    ):
        session = await open_session(one, "one/1")
        with pytest.raises(MeshError) as caught:
            await open_session(two, gateway_id)
        assert (caught.value.code, caught.value.field) == (
            grpc.StatusCode.PERMISSION_DENIED, "hello.gateway_id",
        )  # fmt: skip
        assert not session.done()
        (await open_session(two, "two/1")).cancel()
        session.cancel()
