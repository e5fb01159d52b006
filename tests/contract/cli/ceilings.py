"""A scheduler whose groups have ceilings, and replicas that take less than those only by their own report."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import Any

import grpc

from chipmesh.scheduler.v1alpha1 import admin_pb2, admin_pb2_grpc

READY = admin_pb2.ReplicaStatus.STATE_READY


@dataclass
class Group:
    """reports: (chunk tokens, requests at once) that each replica takes. ceilings: 0: none."""

    reports: list[tuple[int, int]]
    ceilings: tuple[int, int] = (0, 0)
    weight: float = 1.0
    history: list[tuple[int, int]] = field(default_factory=list)


class CeilingScheduler(admin_pb2_grpc.AdminServiceServicer):
    """changed: set as soon as a group's ceilings are `awaited`."""

    def __init__(self, **groups: Group) -> None:
        self.groups = groups
        self.flushed: list[str] = []
        self.awaited: tuple[int, int] | None = None
        self.changed = threading.Event()

    def GetMesh(self, request: admin_pb2.GetMeshRequest, context: Any) -> admin_pb2.GetMeshResponse:
        mesh = admin_pb2.Mesh()
        for name, group in self.groups.items():
            shown = mesh.groups.add(name=name, model="scripted", weight=group.weight)
            for index, report in enumerate(group.reports):
                chunk, batch = (
                    min(own, most or own) for own, most in zip(report, group.ceilings, strict=True)
                )
                shown.replicas.add(
                    worker=f"{name}-{index}", state=READY, chunk_tokens=chunk, max_running_requests=batch
                )
        return admin_pb2.GetMeshResponse(mesh=mesh)

    def SetGroup(self, request: admin_pb2.SetGroupRequest, context: Any) -> admin_pb2.SetGroupResponse:
        if request.group not in self.groups:
            context.abort(grpc.StatusCode.NOT_FOUND, "no such group")
        group = self.groups[request.group]
        assert request.HasField("chunk_tokens")
        assert request.HasField("max_running_requests")
        group.ceilings = (request.chunk_tokens, request.max_running_requests)
        group.history.append(group.ceilings)
        if group.ceilings == self.awaited:
            self.changed.set()
        return admin_pb2.SetGroupResponse()

    def FlushCache(self, request: admin_pb2.FlushCacheRequest, context: Any) -> admin_pb2.FlushCacheResponse:
        self.flushed.append(request.worker)
        return admin_pb2.FlushCacheResponse()

    def unused(self, request: Any, context: Any) -> Any:
        """RPCs that `tune` never calls."""
        raise NotImplementedError

    WatchMesh = SwapChip = DrainWorker = SetTraffic = SetShadow = SubscribeKvEvents = Profile = unused
