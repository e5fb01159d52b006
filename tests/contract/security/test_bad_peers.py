"""S1: whoever has no certificate, another authority's, an expired one, that of another role or of another
name is refused at each hop, both as caller and as listener. Listeners and channels are the services' own.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import grpc
import grpc.aio
import pytest

from chipmesh.device.v1alpha1 import execution_pb2
from chipmesh.device.v1alpha1.execution_pb2_grpc import ExecutionServiceStub
from chipmesh.inference.v1alpha1.inference_pb2_grpc import InferenceServiceStub
from chipmesh.scheduler.v1alpha1 import admin_pb2, registry_pb2, session_pb2
from chipmesh.scheduler.v1alpha1.admin_pb2_grpc import AdminServiceStub
from chipmesh.scheduler.v1alpha1.registry_pb2_grpc import WorkerRegistryServiceStub
from chipmesh.scheduler.v1alpha1.session_pb2_grpc import SessionServiceStub
from gateway.app import GatewayService
from gateway.config import GatewayConfig
from meshkit.cli.mesh_status import fetch_mesh
from meshkit.config import TlsConfig
from meshkit.errors import MeshError, Unavailable, from_rpc_error
from meshkit.rpc.channel import open_channel
from meshkit.rpc.peers import server_name
from meshkit.rpc.policy import Role
from meshkit.rpc.server import RpcServer
from meshkit.rpc.tls import service_credentials
from scheduler_svc.app import SchedulerService
from scheduler_svc.config import SchedulerConfig
from scheduler_svc.core.structures import ReplicaId
from scheduler_svc.executor_link import ExecutorLink, LinkSettings
from scheduler_svc.step_time import StepDeadline
from tests.support.certificates import Bad, Pki
from tests.support.mesh import token_request
from worker_svc.app import WorkerService
from worker_svc.config import WorkerConfig
from worker_svc.executor.app import Executor
from worker_svc.executor.settings import ExecutorSettings

TIMEOUT_S = 5.0
SCHEDULER, WORKER, GATEWAY, OPERATOR = "scheduler", "worker-a", "gateway", "admin"
INSTANCE = "worker-a-1"


# ---------------------------------------------------------------- who is called


@asynccontextmanager
async def scheduler(pki: Pki) -> AsyncIterator[str]:
    tls = await asyncio.to_thread(pki.good, Role.SCHEDULER, SCHEDULER)
    service = SchedulerService(SchedulerConfig(tls=tls))
    yield (await service.start()).address
    await service.stop(0)


@asynccontextmanager
async def executor(pki: Pki) -> AsyncIterator[str]:
    """That of worker-a, which takes plans from the scheduler of that name only."""
    tls = await asyncio.to_thread(pki.good, Role.WORKER, WORKER)
    settings = ExecutorSettings(
        backend="hash", instance_id=INSTANCE, tls=tls.model_copy(update={"scheduler": SCHEDULER}),
        worker=WORKER,
    )  # fmt: skip
    service = Executor(settings)
    yield await service.start()
    assert await service.stop(0.2)


# ---------------------------------------------------------------- what the caller says


async def open_session(channel: grpc.aio.Channel) -> object:
    call: Any = SessionServiceStub(channel).OpenSession(timeout=TIMEOUT_S)
    hello = session_pb2.SessionHello(gateway_id=f"{GATEWAY}/1-ab")
    await call.write(session_pb2.OpenSessionRequest(hello=hello))
    answer = await call.read()
    call.cancel()
    return answer


async def register(channel: grpc.aio.Channel) -> object:
    registry = WorkerRegistryServiceStub(channel)
    request = registry_pb2.DeregisterRequest(worker_id=WORKER, lease_id="none")
    return await registry.Deregister(request, timeout=TIMEOUT_S)


async def ask_for_mesh(channel: grpc.aio.Channel) -> object:
    return await AdminServiceStub(channel).GetMesh(admin_pb2.GetMeshRequest(), timeout=TIMEOUT_S)


async def run_steps(channel: grpc.aio.Channel) -> object:
    """Attach: without a model the executor refuses it, as it does for nobody who may not call."""
    request = execution_pb2.AttachRequest(scheduler_id="s", instance_id=INSTANCE)
    try:
        return await ExecutionServiceStub(channel).Attach(request, timeout=TIMEOUT_S)
    except grpc.aio.AioRpcError as error:
        if error.code() is grpc.StatusCode.FAILED_PRECONDITION:
            return error
        raise


async def load_model(channel: grpc.aio.Channel) -> object:
    request = execution_pb2.LoadModelRequest()
    return [event async for event in ExecutionServiceStub(channel).LoadModel(request, timeout=TIMEOUT_S)]


@dataclass(frozen=True)
class Hop:
    """From one service to another."""

    dialler: tuple[Role, str]
    listener: tuple[Role, str]
    listen: Callable[[Pki], Any]
    speak: Callable[[grpc.aio.Channel], Awaitable[object]]
    wrong_role: Role


HOPS = {
    "gateway->scheduler": Hop(
        (Role.GATEWAY, GATEWAY), (Role.SCHEDULER, SCHEDULER), scheduler, open_session, Role.WORKER
    ),
    "worker->scheduler": Hop(
        (Role.WORKER, WORKER), (Role.SCHEDULER, SCHEDULER), scheduler, register, Role.GATEWAY
    ),
    "operator->scheduler": Hop(
        (Role.OPERATOR, OPERATOR), (Role.SCHEDULER, SCHEDULER), scheduler, ask_for_mesh, Role.GATEWAY
    ),
    "scheduler->executor": Hop(
        (Role.SCHEDULER, SCHEDULER), (Role.WORKER, WORKER), executor, run_steps, Role.OPERATOR
    ),
    "worker->executor": Hop(
        (Role.WORKER, WORKER), (Role.WORKER, WORKER), executor, load_model, Role.SCHEDULER
    ),
}
# Any operator may operate: nothing is bound to the name.
UNBOUND = {("operator->scheduler", Bad.OTHER_NAME)}
CASES = [
    pytest.param(hop, kind, id=f"{name}: {kind.value}")
    for name, hop in HOPS.items()
    for kind in Bad
    if (name, kind) not in UNBOUND
]


@asynccontextmanager
async def dial(hop: Hop, address: str, tls: TlsConfig | None, pki: Pki) -> AsyncIterator[grpc.aio.Channel]:
    """tls: None for one who brings no certificate, but speaks TLS."""
    role, name = hop.listener
    if tls is not None:
        channel = open_channel(address, traced=False, tls=tls, role=role, name=name)
    else:
        authority = await asyncio.to_thread((pki.root / "authority.pem").read_bytes)
        options = [("grpc.ssl_target_name_override", server_name(role))]
        channel = grpc.aio.secure_channel(address, grpc.ssl_channel_credentials(authority), options)
    try:
        yield channel
    finally:
        await channel.close()


@pytest.mark.parametrize("name", HOPS)
async def test_the_right_peer_is_heard_at_each_hop(pki: Pki, name: str) -> None:
    hop = HOPS[name]
    tls = await asyncio.to_thread(pki.good, *hop.dialler)
    async with hop.listen(pki) as address, dial(hop, address, tls, pki) as channel:
        assert await hop.speak(channel) is not grpc.aio.EOF


@pytest.mark.parametrize(("hop", "kind"), CASES)
async def test_a_bad_caller_is_refused(pki: Pki, hop: Hop, kind: Bad) -> None:
    async with hop.listen(pki) as address:
        tls = None
        if kind is not Bad.NO_CERTIFICATE:
            tls = await asyncio.to_thread(pki.bad, kind, *hop.dialler, wrong=hop.wrong_role)
        async with dial(hop, address, tls, pki) as channel:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await hop.speak(channel)
    known = kind in (Bad.WRONG_ROLE, Bad.OTHER_NAME)
    wanted = grpc.StatusCode.PERMISSION_DENIED if known else grpc.StatusCode.UNAVAILABLE
    assert caught.value.code() is wanted, caught.value.details()


@pytest.mark.parametrize("name", HOPS)
async def test_a_caller_in_plain_text_is_refused(pki: Pki, name: str) -> None:
    async with HOPS[name].listen(pki) as address, open_channel(address, traced=False) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await HOPS[name].speak(channel)
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE


# ---------------------------------------------------------------- callers that meet a bad listener


class Heard:
    """A listener that counts the calls that reach it; it has the certificate of somebody else."""

    def __init__(self, tls: TlsConfig | None) -> None:
        self.calls = 0
        self._server = RpcServer(
            listen="127.0.0.1:0", credentials=service_credentials(tls), interceptors=[_Counter(self)]
        )

    async def __aenter__(self) -> Heard:
        self.address = await self._server.start()
        return self

    async def __aexit__(self, *raised: object) -> None:
        await self._server.stop(0)


class _Counter(grpc.aio.ServerInterceptor):
    def __init__(self, heard: Heard) -> None:
        self._heard = heard

    async def intercept_service(self, continuation: Any, handler_call_details: Any) -> Any:
        self._heard.calls += 1
        return await continuation(handler_call_details)


async def the_gateway_dials(pki: Pki, address: str) -> None:
    """A request is the proof: it is taken as soon as there is a session."""
    tls = (await asyncio.to_thread(pki.good, Role.GATEWAY, GATEWAY)).model_copy(
        update={"scheduler": SCHEDULER}
    )
    model = {"name": "m", "context_length": 64, "vocab_size": 100}
    config = GatewayConfig.model_validate(
        {"scheduler_address": address, "models": [model], "tls": tls, "accept_timeout_s": 1.0}
    )
    service = GatewayService(config)
    addresses = await service.start()
    try:
        async with open_channel(addresses.address, traced=False) as channel:
            stub = InferenceServiceStub(channel)
            try:
                async for _ in stub.Generate(token_request([1], max_tokens=1), timeout=TIMEOUT_S):
                    return
            except grpc.aio.AioRpcError as error:
                raise from_rpc_error(error) from None
    finally:
        await service.stop(0)


async def the_worker_dials(pki: Pki, address: str) -> None:
    tls = (await asyncio.to_thread(pki.good, Role.WORKER, WORKER)).model_copy(update={"scheduler": SCHEDULER})
    config = WorkerConfig(worker_id=WORKER, model="m", scheduler_address=address, backend="hash", tls=tls)
    service = WorkerService(config)
    try:
        await register(service._channel)
    except grpc.aio.AioRpcError as error:
        raise from_rpc_error(error) from None
    finally:
        await service.stop(drain=False)


async def the_scheduler_dials(pki: Pki, address: str) -> None:
    tls = await asyncio.to_thread(pki.good, Role.SCHEDULER, SCHEDULER)
    settings = LinkSettings("s", 2, None, TIMEOUT_S, StepDeadline(30.0, 10.0), 1 << 20, tls)
    link = ExecutorLink(
        ReplicaId("r"), worker=WORKER, preferred_window_s=0.0, target=address, instance_id=INSTANCE,
        source=None, settings=settings,  # type: ignore[arg-type]
        on_attached=lambda _: None, on_closed=lambda _: None,
    )  # fmt: skip
    await link.run()


async def the_supervisor_dials(pki: Pki, address: str) -> None:
    tls = await asyncio.to_thread(pki.good, Role.WORKER, WORKER)
    async with open_channel(address, traced=False, tls=tls, role=Role.WORKER, name=WORKER) as channel:
        try:
            await load_model(channel)
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error) from None


async def the_operator_dials(pki: Pki, address: str) -> None:
    tls = await asyncio.to_thread(pki.good, Role.OPERATOR, OPERATOR)
    await fetch_mesh(address, tls=tls.certificate.parent)


@dataclass(frozen=True)
class Dialling:
    """Somebody who calls, and whom it expects to find."""

    dial: Callable[[Pki, str], Awaitable[None]]
    expects: tuple[Role, str]
    wrong_role: Role


DIALLERS = {
    "gateway->scheduler": Dialling(the_gateway_dials, (Role.SCHEDULER, SCHEDULER), Role.WORKER),
    "worker->scheduler": Dialling(the_worker_dials, (Role.SCHEDULER, SCHEDULER), Role.GATEWAY),
    "operator->scheduler": Dialling(the_operator_dials, (Role.SCHEDULER, SCHEDULER), Role.WORKER),
    "scheduler->executor": Dialling(the_scheduler_dials, (Role.WORKER, WORKER), Role.GATEWAY),
    "worker->executor": Dialling(the_supervisor_dials, (Role.WORKER, WORKER), Role.SCHEDULER),
}
DIALLED = [
    pytest.param(dialling, kind, id=f"{name}: {kind.value}")
    for name, dialling in DIALLERS.items()
    for kind in Bad
    if (name, kind) not in UNBOUND
]


@pytest.mark.parametrize(("dialling", "kind"), DIALLED)
async def test_a_bad_listener_is_never_spoken_to(pki: Pki, dialling: Dialling, kind: Bad) -> None:
    tls = None
    if kind is not Bad.NO_CERTIFICATE:
        tls = await asyncio.to_thread(pki.bad, kind, *dialling.expects, wrong=dialling.wrong_role)
    async with Heard(tls) as heard:
        with pytest.raises(MeshError) as caught:
            await dialling.dial(pki, heard.address)
        assert heard.calls == 0
    assert isinstance(caught.value, Unavailable), caught.value


@pytest.mark.parametrize("name", DIALLERS)
async def test_the_right_listener_is_spoken_to(pki: Pki, name: str) -> None:
    """Without this, the refusals above would show nothing."""
    tls = await asyncio.to_thread(pki.good, *DIALLERS[name].expects)
    async with Heard(tls) as heard:
        with pytest.raises(MeshError):
            await DIALLERS[name].dial(pki, heard.address)
        assert heard.calls > 0
