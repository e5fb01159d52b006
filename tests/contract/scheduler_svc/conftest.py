"""A scheduler in-process with as many fake executors, supervisors and gateways as a test asks for."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

import grpc.aio
import pytest
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from chipmesh.scheduler.v1alpha1 import admin_pb2
from chipmesh.scheduler.v1alpha1.admin_pb2_grpc import AdminServiceStub
from meshkit.config import TracingConfig
from meshkit.errors import from_rpc_error
from meshkit.rpc.channel import open_channel
from meshkit.telemetry.tracing import configure_tracing
from scheduler_svc.app import SchedulerService
from scheduler_svc.config import SchedulerConfig
from tests.contract.scheduler_svc.fake_executor import FakeExecutor
from tests.contract.scheduler_svc.fake_peers import FakeGateway, FakeSupervisor, registration, until

READY = admin_pb2.ReplicaStatus.STATE_READY


class Mesh:
    """One scheduler and its fakes, stopped in order at the end of the test."""

    def __init__(self, service: SchedulerService, address: str, http_address: str) -> None:
        self.service = service
        self.address = address
        self.http_address = http_address
        self.channel = open_channel(address)
        self.admin = AdminServiceStub(self.channel)
        self.executors: list[FakeExecutor] = []
        self.supervisors: dict[str, FakeSupervisor] = {}
        self.gateways: list[FakeGateway] = []
        self._instances = itertools.count(1)

    async def executor(self, **options: Any) -> FakeExecutor:
        executor = FakeExecutor(f"i{next(self._instances)}", **options)
        await executor.start()
        self.executors.append(executor)
        return executor

    async def supervisor(self, worker: str) -> FakeSupervisor:
        return self.supervisors.setdefault(worker, FakeSupervisor(self.address))

    async def worker(self, worker: str = "w0", **options: Any) -> FakeExecutor:
        """A registered worker whose executor is attached."""
        changes = {key: options.pop(key) for key in ("group", "model", "chunk_tokens") if key in options}
        executor = await self.executor(**options)
        supervisor = await self.supervisor(worker)
        await supervisor.register(registration(executor, worker, **changes))
        await self.until_ready(worker, executor.instance_id)
        return executor

    async def until_ready(self, worker: str, instance_id: str) -> None:
        def ready() -> bool:
            member = self.service.pool.member(worker)
            return member.registration.instance_id == instance_id and member.state.name == "READY"

        await until(ready, f"{worker} is ready with {instance_id}")

    async def gateway(self, gateway_id: str = "gw") -> FakeGateway:
        gateway = FakeGateway(self.address, gateway_id)
        self.gateways.append(gateway)
        return await gateway.open()

    async def replicas(self) -> dict[str, admin_pb2.ReplicaStatus]:
        mesh = (await self.admin.GetMesh(admin_pb2.GetMeshRequest())).mesh
        return {replica.worker: replica for group in mesh.groups for replica in group.replicas}

    async def call(self, method: Any, request: Any) -> Any:
        try:
            return await method(request)
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error) from None

    async def close(self) -> None:
        for executor in self.executors:
            executor.release()
        for gateway in self.gateways:
            await gateway.close()
        await self.channel.close()
        try:
            await self.service.stop(5)
        finally:
            for supervisor in self.supervisors.values():
                await supervisor.close()
            for executor in self.executors:
                await executor.stop()


@pytest.fixture
def mesh() -> Callable[..., AbstractAsyncContextManager[Mesh]]:
    """`async with mesh(**scheduler_config) as m:`; pages that do not add up when idle fail the test."""

    @asynccontextmanager
    async def run(**config: Any) -> AsyncIterator[Mesh]:
        config.setdefault("identity_check_delay_s", 0.0)
        service = SchedulerService(SchedulerConfig(**config), strict_identity=True)
        addresses = await service.start()
        mesh = Mesh(service, addresses.address, addresses.http_address)
        try:
            yield mesh
        finally:
            await mesh.close()

    return run


@pytest.fixture
def spans() -> Any:
    """Tracing on, into memory."""
    exporter = InMemorySpanExporter()
    handle = configure_tracing("test", TracingConfig(), exporter=exporter)
    yield exporter
    handle.shutdown()
