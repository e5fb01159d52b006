"""The mesh as its scheduler sees it: asked for, or followed with the instant of every change."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass

import grpc
import grpc.aio

from chaos.processes import identify, until
from chipmesh.scheduler.v1alpha1 import admin_pb2, admin_pb2_grpc
from meshkit.cli.processes import ProcessRecord
from meshkit.config import TlsConfig
from meshkit.rpc.channel import open_channel
from meshkit.rpc.policy import Role

ReplicaState = admin_pb2.ReplicaStatus
CALL_TIMEOUT_S = 2.0
Holds = Callable[[admin_pb2.Mesh], bool]


@dataclass(frozen=True)
class Replica:
    """A replica that was ready: who it was then."""

    worker: str
    instance_id: str
    epoch: int
    executor: ProcessRecord
    supervisor: ProcessRecord
    running: int
    ranks: tuple[ProcessRecord, ...]
    """The executors of its set, in order; alone it is the one."""

    def is_served_in(self, mesh: admin_pb2.Mesh) -> bool:
        """Whether that very attachment still takes part: same executor, same epoch."""
        return any(
            each.instance_id == self.instance_id
            and each.epoch == self.epoch
            and each.state in (ReplicaState.STATE_READY, ReplicaState.STATE_DRAINING)
            for each in replicas_of(mesh)
        )


class MeshView:
    """Asks the scheduler at `address()`, which may die and come back. tls: an operator's, if any."""

    def __init__(self, address: Callable[[], str], *, tls: TlsConfig | None = None) -> None:
        self._address = address
        self._tls = tls
        self._channels: dict[str, grpc.aio.Channel] = {}

    async def close(self) -> None:
        """Close the connections."""
        for channel in self._channels.values():
            await channel.close()
        self._channels.clear()

    def _stub(self) -> admin_pb2_grpc.AdminServiceAsyncStub:
        address = self._address()
        if address not in self._channels:
            self._channels[address] = open_channel(address, traced=False, tls=self._tls, role=Role.SCHEDULER)
        return admin_pb2_grpc.AdminServiceStub(self._channels[address])

    async def mesh(self) -> admin_pb2.Mesh:
        """The mesh now; waits for a scheduler that is being started."""
        response = await self._stub().GetMesh(
            admin_pb2.GetMeshRequest(), timeout=CALL_TIMEOUT_S, wait_for_ready=True
        )
        return response.mesh

    async def replicas(self) -> list[Replica]:
        """Those that are ready, with their processes. Raises FaultDidNotHappen where one is gone already."""
        return [
            Replica(
                each.worker, each.instance_id, each.epoch, identify(each.executor_pid),
                identify(each.supervisor_pid), each.running,
                tuple(identify(rank.pid) for rank in each.ranks),
            )
            for each in replicas_of(await self.mesh())
            if each.state == ReplicaState.STATE_READY
        ]  # fmt: skip

    async def until_settled(self, workers: Collection[str], *, timeout_s: float) -> admin_pb2.Mesh:
        """The mesh once these workers, and no others, are ready, and nothing runs, waits or holds a page.

        Raises:
            TimeoutError: says what was in the way.
        """
        mesh = admin_pb2.Mesh()

        async def is_settled() -> bool:
            nonlocal mesh
            try:
                mesh = await self.mesh()
            except grpc.aio.AioRpcError:
                return False
            return not _unsettled(mesh, workers)

        try:
            await until(is_settled, timeout_s=timeout_s, what="settled", poll_s=0.03)
        except TimeoutError as error:
            raise TimeoutError(
                f"the mesh has not settled within {timeout_s:g} s: {'; '.join(_unsettled(mesh, workers))}"
            ) from error
        return mesh

    async def first_time(self, holds: Holds, *, timeout_s: float) -> float:
        """Follow the mesh; monotonic seconds of the first view in which `holds`. Raises TimeoutError."""

        async def follow() -> float:
            async for response in self._stub().WatchMesh(admin_pb2.WatchMeshRequest(), wait_for_ready=True):
                if holds(response.mesh):
                    return time.monotonic()
            raise TimeoutError("the scheduler ended the watch")

        try:
            return await asyncio.wait_for(follow(), timeout_s)
        except asyncio.TimeoutError as error:
            raise TimeoutError(f"not in the scheduler's view within {timeout_s:g} s") from error


def replicas_of(mesh: admin_pb2.Mesh) -> list[admin_pb2.ReplicaStatus]:
    """All replicas of all groups."""
    return [replica for group in mesh.groups for replica in group.replicas]


def ready_workers(mesh: admin_pb2.Mesh) -> set[str]:
    """Workers that take requests."""
    return {each.worker for each in replicas_of(mesh) if each.state == ReplicaState.STATE_READY}


def requests_in(mesh: admin_pb2.Mesh) -> int:
    """Requests that run or wait, wherever."""
    return mesh.scheduler.waiting + sum(each.running + each.waiting for each in replicas_of(mesh))


def leaked_pages(mesh: admin_pb2.Mesh) -> int:
    """Of a mesh where nothing runs: pages that are held, or that are neither free nor cached nor held."""
    return sum(
        each.pages.held + abs(each.pages.total - each.pages.free - each.pages.cached - each.pages.held)
        for each in replicas_of(mesh)
    )


def _unsettled(mesh: admin_pb2.Mesh, workers: Collection[str]) -> list[str]:
    ready = ready_workers(mesh)
    found = [f"{worker} is not ready" for worker in workers if worker not in ready]
    for each in replicas_of(mesh):
        if each.running or each.waiting or each.pages.held:
            load = f"{each.running} running, {each.waiting} waiting, {each.pages.held} pages held"
            found.append(f"{each.worker} has {load}")
    if mesh.scheduler.waiting:
        found.append(f"{mesh.scheduler.waiting} requests wait for a replica")
    return found
