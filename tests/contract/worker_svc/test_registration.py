"""The registrar against a registry over gRPC: backoff, refusals, lost leases, leaving."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from chipmesh.scheduler.v1alpha1 import registry_pb2
from chipmesh.scheduler.v1alpha1.registry_pb2_grpc import (
    WorkerRegistryServiceServicer,
    add_WorkerRegistryServiceServicer_to_server,
)
from meshkit.errors import AlreadyExists, InvalidArgument, MeshError, NotFound, Unavailable
from meshkit.rpc.channel import open_channel
from meshkit.rpc.server import RpcServer
from worker_svc.registration import ExecutorState, Registrar, RegistrationTimes

QUICK = RegistrationTimes(backoff_s=0.01, backoff_max_s=0.05, call_timeout_s=1.0, patience_s=0.3)


class Registry(WorkerRegistryServiceServicer):
    """Answers with the errors that it was given, then with leases."""

    def __init__(self) -> None:
        self.refusals: list[MeshError] = []
        self.always: MeshError | None = None
        self.calls: list[Any] = []
        self.lease = ""
        self._called = asyncio.Event()

    async def Register(self, request: Any, context: Any) -> registry_pb2.RegisterResponse:
        self._note(request)
        if self.always is not None:
            raise self.always
        if self.refusals:
            raise self.refusals.pop(0)
        self.lease = f"lease-{len(self.calls)}"
        response = registry_pb2.RegisterResponse(lease_id=self.lease)
        response.heartbeat_interval.FromMilliseconds(20)
        return response

    async def Heartbeat(self, request: Any, context: Any) -> registry_pb2.HeartbeatResponse:
        self._note(request)
        if request.lease_id != self.lease:
            raise NotFound("no such lease")
        return registry_pb2.HeartbeatResponse()

    async def Deregister(self, request: Any, context: Any) -> registry_pb2.DeregisterResponse:
        self._note(request)
        return registry_pb2.DeregisterResponse()

    def count(self, kind: type) -> int:
        """Calls of one kind so far."""
        return sum(isinstance(call, kind) for call in self.calls)

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait until calls have made `condition` true."""

        async def wait() -> None:
            while not condition():
                self._called.clear()
                await self._called.wait()

        await asyncio.wait_for(wait(), 5)

    def _note(self, request: Any) -> None:
        self.calls.append(request)
        self._called.set()


@pytest.fixture
async def registry() -> Registry:
    return Registry()


@pytest.fixture
async def registrar(registry: Registry) -> AsyncIterator[Registrar]:
    server = RpcServer(listen="127.0.0.1:0")
    name = "chipmesh.scheduler.v1alpha1.WorkerRegistryService"
    server.add(add_WorkerRegistryServiceServicer_to_server, registry, name)
    channel = open_channel(await server.start(), traced=False)
    yield Registrar(channel, times=QUICK)
    await channel.close()
    await server.stop(0)


@pytest.fixture
async def running(registrar: Registrar) -> AsyncIterator[asyncio.Task[None]]:
    task = asyncio.create_task(registrar.run())
    yield task
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


def executor(instance: str = "i-1") -> registry_pb2.RegisterRequest:
    return registry_pb2.RegisterRequest(worker_id="w", instance_id=instance)


REGISTER, BEAT = registry_pb2.RegisterRequest, registry_pb2.HeartbeatRequest


@pytest.mark.usefixtures("running")
async def test_a_scheduler_that_is_not_there_yet_is_tried_again(
    registry: Registry, registrar: Registrar
) -> None:
    registry.refusals = [Unavailable("not yet"), Unavailable("not yet")]
    registrar.announce(executor())
    await asyncio.wait_for(registrar.registered.wait(), 5)
    assert registry.count(REGISTER) == 3
    await registry.until(lambda: registry.count(BEAT) >= 2)


async def test_a_refusal_for_good_ends_the_run(
    registry: Registry, registrar: Registrar, running: asyncio.Task[None]
) -> None:
    registry.always = InvalidArgument("group serves another model", field="model")
    registrar.announce(executor())
    with pytest.raises(InvalidArgument, match="another model"):
        await asyncio.wait_for(running, 5)
    assert registry.count(REGISTER) == 1


@pytest.mark.usefixtures("running")
async def test_another_holder_is_waited_for_as_long_as_its_lease_may_last(
    registry: Registry, registrar: Registrar
) -> None:
    registry.refusals = [AlreadyExists("a live worker has this id")]
    registrar.announce(executor())
    await asyncio.wait_for(registrar.registered.wait(), 5)


async def test_another_holder_that_stays_ends_the_run(
    registry: Registry, registrar: Registrar, running: asyncio.Task[None]
) -> None:
    registry.always = AlreadyExists("a live worker has this id")
    registrar.announce(executor())
    with pytest.raises(AlreadyExists):
        await asyncio.wait_for(running, 5)
    assert registry.count(REGISTER) > 1


@pytest.mark.usefixtures("running")
async def test_a_lost_lease_is_replaced(registry: Registry, registrar: Registrar) -> None:
    registrar.announce(executor())
    await asyncio.wait_for(registrar.registered.wait(), 5)
    registry.lease = "another"
    await registry.until(lambda: registry.count(REGISTER) == 2)


@pytest.mark.usefixtures("running")
async def test_a_dead_executor_is_told_at_once_and_registered_only_when_replaced(
    registry: Registry, registrar: Registrar
) -> None:
    registrar.announce(executor())
    await asyncio.wait_for(registrar.registered.wait(), 5)
    registrar.set_state(ExecutorState.EXECUTOR_STATE_DEAD, instance_id="i-1")
    await registry.until(
        lambda: (
            registry.calls[-1].executor_state == ExecutorState.EXECUTOR_STATE_DEAD
            if isinstance(registry.calls[-1], BEAT)
            else False
        )
    )
    assert registry.count(REGISTER) == 1
    registrar.announce(executor("i-2"))
    await registry.until(lambda: registry.count(REGISTER) == 2)
    await registry.until(lambda: isinstance(registry.calls[-1], BEAT))
    assert registry.calls[-1].instance_id == "i-2"


async def test_leaving_names_the_lease(
    registry: Registry, registrar: Registrar, running: asyncio.Task[None]
) -> None:
    registrar.announce(executor())
    await asyncio.wait_for(registrar.registered.wait(), 5)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    await registrar.deregister()
    await registrar.deregister()
    assert [call.lease_id for call in registry.calls if isinstance(call, registry_pb2.DeregisterRequest)] == [
        registry.lease
    ]


async def test_leaving_a_mesh_that_was_never_joined_calls_nobody(
    registry: Registry, registrar: Registrar
) -> None:
    await registrar.deregister()
    assert registry.calls == []
