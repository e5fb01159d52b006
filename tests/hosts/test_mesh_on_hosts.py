"""Services on hosts of their own, under mutual TLS: the mesh serves, and outlives a host's absence."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

import pytest

from chaos.mesh import ChaosMesh
from chaos.processes import FaultDidNotHappen
from chaos.report import Target
from chaos.runner import Plan, run_on
from chaos.scenario import Inject, Run, Scenario
from tests.hosts.conftest import SHAPE
from tests.support.chaos_meshes import NO_HARM, harms

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(180)]

STREAMS = 16
TOKENS = 600
AWAY_S = 3.0
"""Longer than a lease and than a ping may take."""
PROBE_S = 0.5


async def is_reached(address: str) -> bool:
    """Whether a connection to `address` can be made from here."""
    host, _, port = address.rpartition(":")
    try:
        _, writer = await asyncio.wait_for(asyncio.open_connection(host, int(port)), PROBE_S)
    except (OSError, asyncio.TimeoutError):
        return False
    writer.close()
    return True


def pull_cable(choose: Callable[[Run], Awaitable[str]]) -> Inject:
    """A host is away for a while, and comes back with all that ran on it."""

    async def inject(run: Run) -> None:
        name = await choose(run)
        victims = [each for each in await run.mesh.view.replicas() if each.worker == name]

        async def strike() -> float:
            at = time.monotonic()
            await run.mesh.network.cut(name)
            if await is_reached(run.mesh.address(name)):
                raise FaultDidNotHappen(f"{name} still answers")
            return at

        try:
            at = await run.strike(strike, loses=victims)
            await asyncio.sleep(max(0.0, at + AWAY_S - time.monotonic()))
        finally:
            await run.mesh.network.join(name)
        await run.until_serving(*run.mesh.worker_names)
        for now in await run.mesh.view.replicas():
            for before in victims:
                is_over = now.instance_id == before.instance_id and now.epoch == before.epoch
                run.expect(now.worker != name or not is_over, f"{name} is back in an epoch that was over")

    return inject


async def busy_worker(run: Run) -> str:
    """A worker that runs streams."""
    return (await run.victim()).worker


async def scheduler(run: Run) -> str:
    """All depends on it."""
    return "scheduler"


async def first_gateway(run: Run) -> str:
    """All clients are at it."""
    return run.mesh.gateway_names[0]


HOSTS = {"worker": busy_worker, "scheduler": scheduler, "gateway": first_gateway}


async def test_each_service_listens_on_its_own_host_only(mesh: ChaosMesh) -> None:
    for name in ("scheduler", *mesh.gateway_names, *mesh.worker_names):
        host = mesh.network[name].address
        assert mesh.address(name).rpartition(":")[0] == host
        assert mesh.http_address(name).rpartition(":")[0] == host
    for worker in mesh.worker_names:
        assert mesh.executor_address(worker).rpartition(":")[0] == mesh.network[worker].address


@pytest.mark.parametrize(
    "host", ["scheduler", *(pytest.param(each, marks=pytest.mark.nightly) for each in ("worker", "gateway"))]
)
async def test_streams_outlive_the_absence_of_the_host_of_a(host: str, mesh: ChaosMesh) -> None:
    variants = {host: pull_cable(HOSTS[host])}
    away = Scenario("hosts", "A host is away and returns", Target(), SHAPE, TOKENS, variants=variants)
    report = await run_on(mesh, away, Plan(runs=2, streams=STREAMS, seed=1))
    assert report["problems"] == []
    assert harms(report) == NO_HARM
    assert report["faults_injected"] == report["runs"] == 2
