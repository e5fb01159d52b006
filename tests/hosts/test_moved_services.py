"""A service that comes back under its name at another address, as containers and pods do."""

from __future__ import annotations

import asyncio
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from meshkit.rpc.channel import open_channel
from meshkit.rpc.server import RpcServer

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(60)]

NAME = "moved.test"
FIRST, SECOND = "127.0.0.2", "127.0.0.3"
FOUND_WITHIN_S = 10.0
"""gRPC by itself asks for a name's address once in 30 s at most."""


@pytest.fixture
def point_name_at(tmp_path: Path) -> Iterator[Callable[[str], None]]:
    """Changes where NAME leads, for this process: its mounts are its own."""
    hosts = tmp_path / "hosts"
    hosts.write_text(f"{FIRST} {NAME}\n", encoding="ascii")
    subprocess.run(["mount", "--bind", str(hosts), "/etc/hosts"], check=True)

    def point_at(address: str) -> None:
        hosts.write_text(f"{address} {NAME}\n", encoding="ascii")

    yield point_at
    subprocess.run(["umount", "/etc/hosts"], check=True)


async def test_a_peer_is_found_at_its_new_address_soon(point_name_at: Callable[[str], None]) -> None:
    first = RpcServer(listen=f"{FIRST}:0")
    port = (await first.start()).rpartition(":")[2]
    async with open_channel(f"{NAME}:{port}", traced=False) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        await stub.Check(health_pb2.HealthCheckRequest(), timeout=FOUND_WITHIN_S, wait_for_ready=True)
        await first.stop(0)
        second = RpcServer(listen=f"{SECOND}:{port}")
        await second.start()
        await asyncio.to_thread(point_name_at, SECOND)
        await stub.Check(health_pb2.HealthCheckRequest(), timeout=FOUND_WITHIN_S, wait_for_ready=True)
        await second.stop(0)
