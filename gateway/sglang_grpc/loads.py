"""The load of a model's replicas as a router reads it: the mesh is one engine with one rank."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timezone

from chipmesh.scheduler.v1alpha1 import admin_pb2
from chipmesh.sglang_grpc import sglang_scheduler_pb2 as sgl

_SERVING = frozenset({admin_pb2.ReplicaStatus.STATE_READY, admin_pb2.ReplicaStatus.STATE_DRAINING})


def serving_replicas(mesh: admin_pb2.Mesh, model: str) -> list[admin_pb2.ReplicaStatus]:
    """Those that run requests of `model`."""
    return [
        replica
        for group in mesh.groups
        if group.model == model
        for replica in group.replicas
        if replica.state in _SERVING
    ]


def loads_of(mesh: admin_pb2.Mesh, model: str, *, version: str) -> sgl.GetLoadsResponse:
    """The sum over the replicas. Requests that wait for a replica count, whatever their model is."""
    load = _sum(serving_replicas(mesh, model), waiting=mesh.scheduler.waiting)
    return sgl.GetLoadsResponse(
        timestamp=datetime.now(timezone.utc).isoformat(),
        version=version,
        dp_rank_count=1,
        loads=[load],
        aggregate=sgl.AggregateMetrics(
            total_running_reqs=load.num_running_reqs,
            total_waiting_reqs=load.num_waiting_reqs,
            total_reqs=load.num_total_reqs,
            avg_token_usage=load.token_usage,
            avg_utilization=load.utilization,
        ),
    )


def _sum(replicas: Sequence[admin_pb2.ReplicaStatus], *, waiting: int) -> sgl.SchedulerLoad:
    """Cached pages count as free: they are given up as soon as a request needs them."""
    running = sum(each.running for each in replicas)
    waiting += sum(each.waiting for each in replicas)
    used = sum(each.pages.held * each.page_size_tokens for each in replicas)
    total = sum(each.pages.total * each.page_size_tokens for each in replicas)
    most = sum(each.max_running_requests for each in replicas)
    return sgl.SchedulerLoad(
        num_running_reqs=running,
        num_waiting_reqs=waiting,
        num_total_reqs=running + waiting,
        num_used_tokens=used,
        max_total_num_tokens=total,
        token_usage=used / total if total else 0.0,
        utilization=running / most if most else 0.0,
        max_running_requests=most,
        queues=sgl.QueueMetrics(
            waiting=waiting, retracted=min(sum(each.retracted_count for each in replicas), 2**31 - 1)
        ),
    )
