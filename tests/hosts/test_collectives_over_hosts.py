"""Two ranks on two hosts, by the `cpu` plugin's collectives."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from typing import Any

import pytest

from chaos.hosts import Host, Network

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(120)]

RENDEZVOUS_PORT = 29500
RANK = """
GROUP = "tensor parallel"
import json, sys
import torch
from meshkit.errors import MeshError
from plugins.sdk.registry import load_backend
rank, rendezvous, timeout_s = int(sys.argv[1]), sys.argv[2], float(sys.argv[3])
collectives = load_backend("cpu", {}).collectives
try:
    collectives.init_group(GROUP, rank=rank, world_size=2, rendezvous=rendezvous, timeout_s=timeout_s)
except MeshError as error:
    print(json.dumps({"reason": error.reason, "message": error.message}))
    sys.exit(0)
part = torch.arange(65536, dtype=torch.float32) * (rank + 1)
total = collectives.all_reduce(GROUP, part)
whole = torch.arange(65536, dtype=torch.float32) * 3
print(json.dumps({"library": collectives.library, "right": bool(torch.equal(total, whole))}))
collectives.destroy_group(GROUP)
"""


async def start_rank(host: Host, rank: int, rendezvous: str, *, timeout_s: float) -> Any:
    """gloo binds to the host's name by default, which namespaces share: the interface is said here."""
    return await asyncio.create_subprocess_exec(
        *host.enter, sys.executable, "-c", RANK, str(rank), rendezvous, str(timeout_s),
        stdout=asyncio.subprocess.PIPE, env={**os.environ, "GLOO_SOCKET_IFNAME": "eth0"},
    )  # fmt: skip


async def answer_of(process: Any) -> dict[str, Any]:
    output, _ = await process.communicate()
    assert process.returncode == 0
    answer: dict[str, Any] = json.loads(output.decode().splitlines()[-1])
    return answer


async def test_two_ranks_on_two_hosts_sum_their_parts(two_hosts: Network) -> None:
    rendezvous = f"tcp://{two_hosts['left'].address}:{RENDEZVOUS_PORT}"
    ranks = [
        await start_rank(two_hosts[name], rank, rendezvous, timeout_s=60)
        for rank, name in enumerate(("left", "right"))
    ]
    answers = await asyncio.gather(*map(answer_of, ranks))
    assert [answer["right"] for answer in answers] == [True, True]
    assert all(answer["library"].startswith("gloo") for answer in answers)


@pytest.mark.nightly
async def test_a_rank_whose_host_is_cut_off_is_named(two_hosts: Network) -> None:
    await two_hosts.cut("right")
    rendezvous = f"tcp://{two_hosts['left'].address}:{RENDEZVOUS_PORT}"
    left = await start_rank(two_hosts["left"], 0, rendezvous, timeout_s=5)
    right = await start_rank(two_hosts["right"], 1, rendezvous, timeout_s=5)
    waits, cut_off = await asyncio.gather(answer_of(left), answer_of(right))
    assert "rank 1 did not come" in waits["message"]
    assert "rank 0 did not come" in cut_off["message"]
