"""The mesh as its scheduler sees it: as JSON for programs, as a table for people."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from chipmesh.scheduler.v1alpha1 import admin_pb2, admin_pb2_grpc
from meshkit.cli.scheduler_channel import open_scheduler
from meshkit.cli.state import require_endpoint, state_dir_from_environment
from meshkit.cli.terminal import print_json

STATUS_TIMEOUT_S = 5.0
TABLE_WIDTH = 110
COUNTS = ("run", "wait", "free", "cached", "held", "pages")


async def fetch_mesh(endpoint: str, *, tls: Path | None = None) -> admin_pb2.Mesh:
    """Asks the scheduler at `endpoint`. tls: as for `open_scheduler`.

    Raises:
        MeshError: Unavailable where none answers, DeadlineExceeded after STATUS_TIMEOUT_S seconds.
    """
    async with open_scheduler(endpoint, tls=tls) as channel:
        stub = admin_pb2_grpc.AdminServiceStub(channel)
        response = await stub.GetMesh(admin_pb2.GetMeshRequest(), timeout=STATUS_TIMEOUT_S)
    mesh: admin_pb2.Mesh = response.mesh
    return mesh


def show_status(*, endpoint: str | None, as_json: bool, tls: Path | None = None) -> None:
    """Prints the status of the mesh whose scheduler is at `endpoint`, by default of `up`'s.

    Raises:
        MeshError: no mesh is up, or its scheduler does not answer.
    """
    address = require_endpoint(state_dir_from_environment(), kind="scheduler", given=endpoint)
    status = describe_status(asyncio.run(fetch_mesh(address, tls=tls)), endpoint=address)
    if as_json:
        print_json(status)
    else:
        print_table(status)


def describe_status(mesh: admin_pb2.Mesh, *, endpoint: str) -> dict[str, Any]:
    """{"scheduler": {"pid", ...}, "groups": [{"name", "model", "weight", "replicas": [...]}]}."""
    scheduler = mesh.scheduler
    return {
        "scheduler": {
            "pid": scheduler.pid,
            "scheduler_id": scheduler.scheduler_id,
            "version": scheduler.version,
            "uptime_s": scheduler.uptime.ToTimedelta().total_seconds(),
            "waiting": scheduler.waiting,
            "gateways": scheduler.gateways,
            "address": endpoint,
        },
        "groups": [
            {
                "name": group.name,
                "model": group.model,
                "weight": group.weight,
                "rolled_back": group.rolled_back,
                "replicas": [_describe_replica(replica) for replica in group.replicas],
            }
            for group in mesh.groups
        ],
    }


def _describe_replica(replica: admin_pb2.ReplicaStatus) -> dict[str, Any]:
    pages = replica.pages
    plain = (
        "worker", "chip", "emulated", "instance_id", "running", "waiting", "page_size_tokens",
        "numeric_class", "epoch", "step_seq", "max_running_requests", "chunk_tokens", "retracted_count",
        "executor_pid", "supervisor_pid", "tensor_parallel_size", "pipeline_parallel_size",
    )  # fmt: skip
    return {
        **{name: getattr(replica, name) for name in plain},
        "state": _state_name(replica.state),
        "message": replica.message,
        "ranks": [
            {"rank": each.rank, "device": each.device, "pid": each.pid, "address": each.address}
            for each in replica.ranks
        ],
        "pages": {"total": pages.total, "free": pages.free, "cached": pages.cached, "held": pages.held},
    }


def _state_name(state: admin_pb2.ReplicaStatus.State.ValueType) -> str:
    """STATE_READY as "ready"."""
    return admin_pb2.ReplicaStatus.State.Name(state).removeprefix("STATE_").lower()


def print_table(status: dict[str, Any]) -> None:
    """The same for people, on stdout."""
    # A narrow terminal wraps whole lines; columns squeezed to two letters would help nobody.
    console = Console(highlight=False, width=max(Console().width, TABLE_WIDTH))
    scheduler = status["scheduler"]
    console.print(
        f"scheduler at {scheduler['address']}  pid {scheduler['pid']}  up {scheduler['uptime_s']:.0f} s  "
        f"{scheduler['gateways']} gateway(s)  {scheduler['waiting']} waiting",
        soft_wrap=True,
    )
    table = Table(box=None, padding=(0, 2, 0, 0))
    for column in ("group", "model", "weight", "worker", "chip", "state", *COUNTS):
        table.add_column(column, no_wrap=True, justify="right" if column in COUNTS else "left")
    for group in status["groups"]:
        for replica in group["replicas"] or [None]:
            table.add_row(group["name"], group["model"], f"{group['weight']:g}", *_replica_cells(replica))
    console.print(table)
    for line in _words(status):
        console.print(line, markup=False, soft_wrap=True)


def _words(status: dict[str, Any]) -> list[str]:
    """What numbers do not say: why a group or a replica has no traffic, and who the ranks of a set are."""
    lines: list[str] = []
    for group in status["groups"]:
        if group["rolled_back"]:
            lines.append(f"group {group['name']} was rolled back: {group['rolled_back']}")
        lines += [
            f"worker {replica['worker']} ({replica['state']}): {replica['message']}"
            for replica in group["replicas"]
            if replica["message"]
        ]
        lines += [_ranks_line(replica) for replica in group["replicas"] if len(replica["ranks"]) > 1]
    return lines


def _ranks_line(replica: dict[str, Any]) -> str:
    ranks = ", ".join(
        f"{each['rank']}: device {each['device']}, pid {each['pid']}" for each in replica["ranks"]
    )
    layout = f"tensor parallel {replica['tensor_parallel_size']}"
    layout += f", pipeline parallel {replica['pipeline_parallel_size']}"
    return f"worker {replica['worker']} is a set of {len(replica['ranks'])} ranks ({layout}): {ranks}"


def _replica_cells(replica: dict[str, Any] | None) -> list[str]:
    if replica is None:
        return ["none"]
    pages = replica["pages"]
    counts = [
        replica["running"],
        replica["waiting"],
        *(pages[name] for name in ("free", "cached", "held", "total")),
    ]
    chip = f"{replica['chip']} (emulated)" if replica["emulated"] else replica["chip"]
    return [replica["worker"], chip, replica["state"], *map(str, counts)]
