"""R5, R6 and R16: a service is killed, or asked to end, and started again."""

from __future__ import annotations

import time
from functools import partial

from chaos.client import Clients
from chaos.mesh import Shape
from chaos.report import Target
from chaos.scenario import Run, scenario
from chaos.view import requests_in

scheduler_dies = scenario(
    "R5",
    "SIGKILL of the scheduler, started again on its address",
    target=Target(gap_ms=10_000),
    full_runs=100,
)
gateway_dies = scenario(
    "R6",
    "SIGKILL of a gateway; its clients go on at another one, or have gone",
    target=Target(figures={"freed_ms": 5000}),
    shape=Shape(gateways=2),
    full_runs=50,
)
rolling = scenario(
    "R16",
    "SIGTERM of each worker in turn, or of the scheduler, each started again",
    target=Target(),
    tokens=800,
)


@scheduler_dies.variant("scheduler")
async def kill_scheduler(run: Run) -> None:
    """Gateways bring their requests again, workers register again."""
    await run.kill(run.mesh.process("scheduler"))
    await run.mesh.start_service("scheduler")
    await run.until_serving(*run.mesh.worker_names)


@scheduler_dies.variant("twice")
async def kill_scheduler_twice(run: Run) -> None:
    """The second one dies while it is being told what there is."""
    for _ in range(2):
        await run.kill(run.mesh.process("scheduler"))
        await run.mesh.start_service("scheduler")
    await run.until_serving(*run.mesh.worker_names)


@scheduler_dies.variant("with a worker")
async def kill_scheduler_and_worker(run: Run) -> None:
    """The new scheduler never hears of that worker, before it is started again, too."""
    victim = await run.victim()
    await run.kill(run.mesh.process("scheduler"), victim.supervisor, victim.executor)
    await run.mesh.start_service("scheduler")
    await run.mesh.start_service(victim.worker)
    await run.until_serving(*run.mesh.worker_names)


@gateway_dies.variant("gateway")
async def kill_gateway(run: Run) -> None:
    """As many clients again never come back: what they held is free soon."""
    first = run.mesh.gateway_names[0]
    leavers = Clients([run.mesh.address(first)])
    try:
        for _ in run.clients.all:
            leavers.start(run.prompt(), tokens=run.tokens)
        await leavers.until_all_count(1, timeout_s=30.0)
        at = await run.kill(run.mesh.process(first))
        freed_at = await run.mesh.view.first_time(
            lambda mesh: requests_in(mesh) <= len(run.clients.all), timeout_s=30.0
        )
        run.measure("freed_ms", (freed_at - at) * 1e3)
        await run.mesh.start_service(first)
        await run.clients.end(timeout_s=60.0)
    finally:
        await leavers.close()
    stayed = sum(len(client.history.attempts) < 2 for client in run.clients.all)
    run.expect(not stayed, f"{stayed} clients never had to go on at another gateway")


@rolling.variant("workers")
async def restart_workers(run: Run) -> None:
    """Each ends what it has or hands it on, and exits with 0."""
    for worker in run.mesh.worker_names:
        await run.strike(partial(_end, run, worker))
        await run.mesh.start_service(worker)
        await run.until_serving(*run.mesh.worker_names)


@rolling.variant("scheduler")
async def restart_scheduler(run: Run) -> None:
    """What it cannot end goes on at the next one, which new requests wait for, too."""
    at = await run.strike(partial(_end, run, "scheduler"))
    latecomer = run.clients.start(run.prompt(), tokens=run.tokens)
    await run.mesh.start_service("scheduler")
    await run.until_serving(*run.mesh.worker_names)
    await latecomer.until_count(1)
    run.measure("restart_ms", (time.monotonic() - at) * 1e3)


async def _end(run: Run, name: str) -> float:
    at = time.monotonic()
    code = await run.mesh.terminate(name)
    run.measure("drain_ms", (time.monotonic() - at) * 1e3)
    run.expect(code == 0, f"{name} ended with {code} at SIGTERM")
    return at
