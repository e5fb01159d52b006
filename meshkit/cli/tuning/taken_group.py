"""A group of a running mesh whose ceilings are changed for a time, and put back."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from chipmesh.scheduler.v1alpha1 import admin_pb2, admin_pb2_grpc
from meshkit.cli.mesh_status import STATUS_TIMEOUT_S, fetch_mesh
from meshkit.cli.scheduler_channel import open_scheduler
from meshkit.cli.tuning.space import Setting
from meshkit.errors import FailedPrecondition, NotFound


@dataclass(frozen=True)
class Ceilings:
    """chunk_tokens: prompt tokens of a step. max_running_requests: per replica. 0: none."""

    chunk_tokens: int = 0
    max_running_requests: int = 0

    def changed(self, setting: Setting) -> Ceilings:
        """These, but for what `setting` says."""
        return Ceilings(
            setting.chunked_prefill_size or self.chunk_tokens,
            setting.max_running_requests or self.max_running_requests,
        )


class TakenGroup:
    """Take it with `take`; `put_back` makes it what it was. tls: as for `open_scheduler`.

    effective: what held for its largest replica when it was taken. capacity: the same without ceilings.
    uniform: whether its replicas were all alike.
    """

    def __init__(self, scheduler: str, name: str, *, tls: Path | None = None) -> None:
        self.name = name
        self.model = ""
        self.effective = Ceilings()
        self.capacity = Ceilings()
        self.uniform = True
        self._scheduler = scheduler
        self._tls = tls
        self._before = Ceilings()
        self._workers: list[str] = []

    def take(self) -> None:
        """Finds out what holds with its ceilings and without; leaves them as they were.

        Raises:
            NotFound: there is no such group.
            FailedPrecondition: it serves with no replica, or shares its model's requests with another group.
            MeshError: the scheduler does not answer.
        """
        mesh = self._mesh()
        group = _find(mesh, self.name)
        _check_alone(mesh, group)
        self.model = group.model
        replicas = _serving(group)
        self._workers = [replica.worker for replica in replicas]
        self._before = self.effective = _largest(replicas)
        self.uniform = len({_of(replica) for replica in replicas}) == 1
        try:
            # The scheduler says what holds, not which ceiling makes it: that shows by taking it away.
            self._set(Ceilings())
            self.capacity = _largest(_serving(_find(self._mesh(), self.name)))
            self._before = Ceilings(
                _binding(self.effective.chunk_tokens, self.capacity.chunk_tokens),
                _binding(self.effective.max_running_requests, self.capacity.max_running_requests),
            )
        finally:
            self.put_back()

    def put_back(self) -> None:
        """Its ceilings as they were; signals wait until that is done."""
        with uninterrupted():
            self._set(self._before)

    def apply(self, setting: Setting) -> None:
        """Its ceilings as `setting` says, from the next step on."""
        self._set(self._before.changed(setting))

    def keep(self, ceilings: Ceilings) -> None:
        """From now on these are what it was."""
        self._before = ceilings

    def flush(self) -> None:
        """Drops what its replicas keep of earlier prompts."""
        asyncio.run(self._flush())

    def _mesh(self) -> admin_pb2.Mesh:
        return asyncio.run(fetch_mesh(self._scheduler, tls=self._tls))

    def _set(self, ceilings: Ceilings) -> None:
        asyncio.run(self._set_group(ceilings))

    async def _set_group(self, ceilings: Ceilings) -> None:
        request = admin_pb2.SetGroupRequest(
            group=self.name,
            chunk_tokens=ceilings.chunk_tokens,
            max_running_requests=ceilings.max_running_requests,
        )
        async with open_scheduler(self._scheduler, tls=self._tls) as channel:
            await admin_pb2_grpc.AdminServiceStub(channel).SetGroup(request, timeout=STATUS_TIMEOUT_S)

    async def _flush(self) -> None:
        async with open_scheduler(self._scheduler, tls=self._tls) as channel:
            stub = admin_pb2_grpc.AdminServiceStub(channel)
            for worker in self._workers:
                request = admin_pb2.FlushCacheRequest(worker=worker)
                await stub.FlushCache(request, timeout=STATUS_TIMEOUT_S)


@contextlib.contextmanager
def uninterrupted() -> Iterator[None]:
    """Ctrl-C and SIGTERM have no effect within: the end of something that must not stay half done."""
    before = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _find(mesh: admin_pb2.Mesh, name: str) -> admin_pb2.GroupStatus:
    found = next((group for group in mesh.groups if group.name == name), None)
    if found is None:
        names = ", ".join(group.name for group in mesh.groups) or "none"
        raise NotFound(f"group {name!r} is not in the mesh; there is: {names}", field="--group")
    return found


def _check_alone(mesh: admin_pb2.Mesh, group: admin_pb2.GroupStatus) -> None:
    others = [
        each.name
        for each in mesh.groups
        if each.model == group.model and each.name != group.name and each.weight > 0
    ]
    if others or not group.weight:
        shared = f"shares the requests of {group.model!r} with {', '.join(others)}" if others else "gets none"
        raise FailedPrecondition(
            f"group {group.name!r} {shared}, so its own figures cannot be measured; give it all for the "
            f"time: chipmesh traffic set {group.name}=1",
            field="--group",
        )


def _serving(group: admin_pb2.GroupStatus) -> list[admin_pb2.ReplicaStatus]:
    ready = [replica for replica in group.replicas if replica.state == replica.STATE_READY]
    if not ready:
        raise FailedPrecondition(f"group {group.name!r} has no replica that takes requests", field="--group")
    return ready


def _of(replica: admin_pb2.ReplicaStatus) -> Ceilings:
    return Ceilings(replica.chunk_tokens, replica.max_running_requests)


def _largest(replicas: list[admin_pb2.ReplicaStatus]) -> Ceilings:
    return Ceilings(
        max(replica.chunk_tokens for replica in replicas),
        max(replica.max_running_requests for replica in replicas),
    )


def _binding(effective: int, capacity: int) -> int:
    """The ceiling, where it made a difference."""
    return effective if effective < capacity else 0
