"""R1: a worker dies under its streams."""

from __future__ import annotations

from functools import partial

from chaos.processes import kill, state_of, until
from chaos.report import Target
from chaos.scenario import Run, scenario

worker_dies = scenario(
    "R1",
    "SIGKILL of a worker: its executor, its supervisor, or both",
    target=Target(500, 2000),
    full_runs=200,
)


@worker_dies.variant("executor")
async def kill_executor(run: Run) -> None:
    """The supervisor starts another one."""
    victim = await run.victim()
    await run.kill(victim.executor, loses=[victim])


@worker_dies.variant("worker")
async def kill_worker(run: Run) -> None:
    """Nobody is left; the worker is started again from outside."""
    victim = await run.victim()
    await run.kill(victim.supervisor, victim.executor, loses=[victim])
    await run.mesh.start_service(victim.worker)


@worker_dies.variant("supervisor")
async def kill_supervisor(run: Run) -> None:
    """Its executor serves on until it notices, and ends by itself: no orphan holds a chip. No detection is
    measured, since nothing is lost meanwhile.
    """
    victim = await run.victim()
    at = await run.strike(partial(kill, [victim.supervisor]))
    gone_at = await run.mesh.view.first_time(lambda mesh: not victim.is_served_in(mesh), timeout_s=30.0)
    run.measure("orphan_lost_ms", (gone_at - at) * 1e3)
    await run.mesh.start_service(victim.worker)
    await until(lambda: state_of(victim.executor) == "", timeout_s=10.0, what="the orphaned executor ends")
