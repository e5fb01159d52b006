"""`chipmesh group set`: a group's ceilings and its order of admission, changed while it runs."""

from __future__ import annotations

import asyncio
from pathlib import Path

from rich.console import Console

from chipmesh.scheduler.v1alpha1 import admin_pb2, admin_pb2_grpc
from meshkit.cli.mesh_status import STATUS_TIMEOUT_S
from meshkit.cli.scheduler_channel import open_scheduler
from meshkit.cli.state import require_endpoint, state_dir_from_environment
from meshkit.cli.terminal import print_json
from meshkit.errors import InvalidArgument


def set_group(
    group: str,
    *,
    chunked_prefill_size: int | None,
    max_running_requests: int | None,
    schedule_policy: str | None,
    endpoint: str | None,
    as_json: bool,
    tls: Path | None = None,
) -> None:
    """Change what is given, leave the rest, and print what holds for each replica then. 0: no ceiling.
    tls: as for `open_scheduler`.

    Raises:
        InvalidArgument: nothing is given, or what the scheduler refuses.
        MeshError: no mesh is up, there is no such group, or the scheduler does not answer.
    """
    request = admin_pb2.SetGroupRequest(
        group=group,
        chunk_tokens=chunked_prefill_size,
        max_running_requests=max_running_requests,
        schedule_policy=schedule_policy,
    )
    if len(request.ListFields()) < 2:
        raise InvalidArgument(
            "nothing to set; give --chunked-prefill-size, --max-running-requests or --schedule-policy",
            field="--schedule-policy",
        )
    address = require_endpoint(state_dir_from_environment(), kind="scheduler", given=endpoint)
    replicas = asyncio.run(_change(address, request, tls))
    effective = [
        {
            "worker": replica.worker,
            "chunk_tokens": replica.chunk_tokens,
            "max_running_requests": replica.max_running_requests,
        }
        for replica in replicas
    ]
    if as_json:
        print_json({"group": group, "replicas": effective})
        return
    for each in effective:
        Console(highlight=False).print(
            f"{each['worker']}: {each['chunk_tokens']} prompt tokens a step, "
            f"{each['max_running_requests']} requests at once"
        )


async def _change(
    address: str, request: admin_pb2.SetGroupRequest, tls: Path | None
) -> list[admin_pb2.ReplicaStatus]:
    """The group's attached replicas after the change."""
    async with open_scheduler(address, tls=tls) as channel:
        stub = admin_pb2_grpc.AdminServiceStub(channel)
        await stub.SetGroup(request, timeout=STATUS_TIMEOUT_S)
        response = await stub.GetMesh(admin_pb2.GetMeshRequest(), timeout=STATUS_TIMEOUT_S)
    (group,) = (each for each in response.mesh.groups if each.name == request.group)
    return [replica for replica in group.replicas if replica.max_running_requests]
