"""The mesh as operators see it: groups, replicas, pages, states."""

from __future__ import annotations

import asyncio
import dataclasses
import os
from importlib.metadata import version

from google.protobuf.duration_pb2 import Duration

from chipmesh.scheduler.v1alpha1 import admin_pb2
from scheduler_svc.engine import Engine
from scheduler_svc.guards import GroupGuards
from scheduler_svc.mirror import Mirror, Shadow
from scheduler_svc.worker_pool import Member, WorkerPool, WorkerState

_VERSION = version("chipmesh")
_STATES = {
    WorkerState.ATTACHING: admin_pb2.ReplicaStatus.STATE_ATTACHING,
    WorkerState.READY: admin_pb2.ReplicaStatus.STATE_READY,
    WorkerState.ON_TRIAL: admin_pb2.ReplicaStatus.STATE_ON_TRIAL,
    WorkerState.KEPT_OUT: admin_pb2.ReplicaStatus.STATE_KEPT_OUT,
    WorkerState.DRAINING: admin_pb2.ReplicaStatus.STATE_DRAINING,
    WorkerState.LOST: admin_pb2.ReplicaStatus.STATE_LOST,
}


class MeshView:
    """Makes a Mesh message of what engine and pool know now."""

    def __init__(
        self, engine: Engine, pool: WorkerPool, guards: GroupGuards, mirror: Mirror, *, scheduler_id: str
    ) -> None:
        self._engine = engine
        self._pool = pool
        self._guards = guards
        self._mirror = mirror
        self._scheduler_id = scheduler_id
        self._loop = asyncio.get_running_loop()
        self._started_at = self._loop.time()

    def mesh(self, *, gateways: int) -> admin_pb2.Mesh:
        """The whole mesh; `gateways`: how many have a session."""
        snapshot = self._engine.core.snapshot()
        mesh = admin_pb2.Mesh()
        scheduler = mesh.scheduler
        scheduler.scheduler_id = self._scheduler_id
        scheduler.pid = os.getpid()
        scheduler.version = _VERSION
        scheduler.uptime.CopyFrom(self._uptime())
        scheduler.waiting = snapshot.waiting
        scheduler.gateways = gateways
        for group in snapshot.groups:
            status = mesh.groups.add(name=group.name, model=group.model, weight=group.weight)
            status.rolled_back = self._guards.reasons.get(group.name, "")
            if (shadow := self._mirror.shadows.get(group.name)) is not None:
                status.shadow.CopyFrom(_shadow_status(shadow))
            for member in self._pool.members:
                if member.registration.group == group.name:
                    self._add_replica(status, member)
        return mesh

    def _uptime(self) -> Duration:
        uptime = Duration()
        uptime.FromNanoseconds(int((self._loop.time() - self._started_at) * 1e9))
        return uptime

    def _add_replica(self, group: admin_pb2.GroupStatus, member: Member) -> None:
        registration = member.registration
        status = group.replicas.add(
            worker=member.worker,
            chip=registration.capabilities.chip,
            emulated=registration.capabilities.emulated,
            instance_id=registration.instance_id,
            state=_STATES[member.state],
            page_size_tokens=registration.page_size_tokens,
            numeric_class=registration.loaded_model.numeric_class,
            executor_pid=registration.executor_pid,
            supervisor_pid=registration.supervisor_pid,
            message=member.kept_out or member.lost or member.executor_trouble,
            ranks=registration.ranks,
            tensor_parallel_size=registration.tensor_parallel_size,
            pipeline_parallel_size=registration.pipeline_parallel_size,
        )
        status.pages.SetInParent()
        if member.link is not None and member.link.attached:
            status.epoch = member.link.epoch or 0
            status.step_seq = member.link.last_step_seq
            self._add_load(status, member)

    def _add_load(self, status: admin_pb2.ReplicaStatus, member: Member) -> None:
        """Counts of an attached replica; one that is not attached holds nothing, and has no pages here."""
        limits = self._engine.limits(member.replica)
        if limits is None:
            return
        batcher = self._engine.core.batcher(member.replica)
        status.running = batcher.running
        status.waiting = batcher.waiting
        status.retracted_count = batcher.retracted_count
        status.page_size_tokens = limits.page_size
        status.max_running_requests = limits.max_running_requests
        status.chunk_tokens = limits.chunk_tokens
        pages = batcher.pages
        status.pages.total, status.pages.free = pages.total, pages.free
        status.pages.cached, status.pages.held = pages.cached, pages.held


def _shadow_status(shadow: Shadow) -> admin_pb2.ShadowStatus:
    return admin_pb2.ShadowStatus(
        shadow_group=shadow.group, share=shadow.share, **dataclasses.asdict(shadow.count)
    )
