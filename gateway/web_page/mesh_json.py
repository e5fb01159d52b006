"""A Mesh message as the page reads it."""

from __future__ import annotations

from typing import Any

from chipmesh.scheduler.v1alpha1 import admin_pb2

_REPLICA_FIELDS = (
    "worker", "chip", "emulated", "instance_id", "running", "waiting", "page_size_tokens", "numeric_class",
    "epoch", "step_seq", "max_running_requests", "chunk_tokens", "retracted_count", "executor_pid",
    "supervisor_pid", "message",
)  # fmt: skip
_SHADOW_FIELDS = (
    "shadow_group", "share", "mirrored", "compared", "identical", "tokens", "equal_tokens",
    "max_logprob_gap", "failed",
)  # fmt: skip


def describe_mesh(mesh: admin_pb2.Mesh) -> dict[str, Any]:
    """{"scheduler": {...}, "groups": [{"name", "model", "weight", "replicas": [...], ...}]}."""
    scheduler = mesh.scheduler
    return {
        "scheduler": {
            "id": scheduler.scheduler_id,
            "pid": scheduler.pid,
            "version": scheduler.version,
            "uptime_s": scheduler.uptime.ToNanoseconds() / 1e9,
            "waiting": scheduler.waiting,
            "gateways": scheduler.gateways,
        },
        "groups": [_describe_group(group) for group in mesh.groups],
    }


def _describe_group(group: admin_pb2.GroupStatus) -> dict[str, Any]:
    shadow = {name: getattr(group.shadow, name) for name in _SHADOW_FIELDS}
    return {
        "name": group.name,
        "model": group.model,
        "weight": group.weight,
        "rolled_back": group.rolled_back,
        "shadow": shadow if group.HasField("shadow") else None,
        "replicas": [_describe_replica(replica) for replica in group.replicas],
    }


def _describe_replica(replica: admin_pb2.ReplicaStatus) -> dict[str, Any]:
    pages = replica.pages
    state = admin_pb2.ReplicaStatus.State.Name(replica.state).removeprefix("STATE_").lower()
    return {
        **{name: getattr(replica, name) for name in _REPLICA_FIELDS},
        "state": state,
        "pages": {"total": pages.total, "free": pages.free, "cached": pages.cached, "held": pages.held},
    }
