"""R10: a request that does harm."""

from __future__ import annotations

import asyncio
import time
from functools import partial

from chaos.client import Clients
from chaos.mesh import DEADLY_TOKEN, LATE_DEADLY_TOKEN, LATE_POSITION
from chaos.processes import FaultDidNotHappen, state_of
from chaos.report import Target
from chaos.scenario import Run, scenario
from chaos.view import replicas_of
from chipmesh.scheduler.v1alpha1 import admin_pb2

POISON_TIMEOUT_S = 60.0

poison = scenario(
    "R10",
    "A request that kills every worker it runs on",
    target=Target(figures={"worker_deaths": 2}),
    tokens=400,
)


@poison.variant("prompt")
async def poison_prompt(run: Run) -> None:
    """It kills by its prompt: in its first step on each worker."""
    await _poison(run, DEADLY_TOKEN)


@poison.variant("output")
async def poison_output(run: Run) -> None:
    """It kills while it decodes, long after the streams beside it have taken it for one of theirs."""
    await _poison(run, LATE_DEADLY_TOKEN)


async def _poison(run: Run, first_token: int) -> None:
    """It is given up after two deaths, and the streams beside it go on."""
    seen: set[str] = set()
    census = asyncio.create_task(_note_executors(run, seen))
    try:
        await run.strike(partial(_send, run, [first_token, *run.prompt()[:50]]))
        await run.until_serving(*run.mesh.worker_names)
    finally:
        census.cancel()
        await asyncio.gather(census, return_exceptions=True)
    seen.update(replica.instance_id for replica in await run.mesh.view.replicas())
    run.measure("worker_deaths", len(seen) - len(run.mesh.worker_names))


async def _send(run: Run, prompt: list[int]) -> float:
    """The poison; returns once it has ended, as it must, with an error that names its cause."""
    at = time.monotonic()
    executors = [replica.executor for replica in await run.mesh.view.replicas()]
    clients = Clients([run.mesh.address(run.mesh.gateway_names[0])])
    try:
        client = clients.start(prompt, tokens=2 * LATE_POSITION)
        await clients.end(timeout_s=POISON_TIMEOUT_S)
    finally:
        await clients.close()
    error = client.history.error or "none"
    run.expect("not tried again" in error, f"the poison's error is {error!r}, not why it was given up")
    if all(state_of(executor) for executor in executors):
        raise FaultDidNotHappen(f"the poison killed no executor; its error is {error!r}")
    return at


async def _note_executors(run: Run, seen: set[str]) -> None:
    def note(mesh: admin_pb2.Mesh) -> bool:
        seen.update(replica.instance_id for replica in replicas_of(mesh))
        return False

    await run.mesh.view.first_time(note, timeout_s=2 * POISON_TIMEOUT_S)
