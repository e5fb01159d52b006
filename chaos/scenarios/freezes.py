"""R2 and R3: a worker stops without dying, and comes back when its requests are elsewhere."""

from __future__ import annotations

from chaos.report import Target
from chaos.scenario import Run, scenario
from chaos.view import Replica
from meshkit.cli.processes import ProcessRecord

freezes = scenario(
    "R2", "SIGSTOP of a worker, until its streams have ended", target=Target(3000, 5000), full_runs=100
)
wakes = scenario(
    "R3",
    "SIGSTOP of a worker, its requests move, SIGCONT under the same streams",
    target=Target(3000, 5000),
    tokens=400,
    full_runs=100,
)


@freezes.variant("executor")
async def freeze_executor(run: Run) -> None:
    """The supervisor lives and sends heartbeats for it."""
    victim = await run.victim()
    await _until_streams_end(run, victim, victim.executor)


@freezes.variant("worker")
async def freeze_worker(run: Run) -> None:
    """Nobody of it says anything."""
    victim = await run.victim()
    await _until_streams_end(run, victim, victim.supervisor, victim.executor)


async def _until_streams_end(run: Run, victim: Replica, *processes: ProcessRecord) -> None:
    try:
        await run.freeze(*processes, loses=[victim])
        await run.clients.end(timeout_s=60.0)
    finally:
        await run.thaw(*processes)


@wakes.variant("executor")
async def wake_executor(run: Run) -> None:
    """Results that it makes when it wakes belong to an epoch that is over."""
    victim = await run.victim()
    await _wake(run, victim, victim.executor)


@wakes.variant("worker")
async def wake_worker(run: Run) -> None:
    """The supervisor, too, believes at first that it holds the lease."""
    victim = await run.victim()
    await _wake(run, victim, victim.supervisor, victim.executor)


async def _wake(run: Run, victim: Replica, *processes: ProcessRecord) -> None:
    before = await run.stale_results()
    try:
        await run.freeze(*processes, loses=[victim])
        await run.until_moving()
    finally:
        await run.thaw(*processes)
    run.expect(not all(client.ended for client in run.clients.all), "all streams had ended before SIGCONT")
    await run.until_serving(victim.worker)
    for replica in await run.mesh.view.replicas():
        came_back = replica.worker == victim.worker
        run.expect(
            not came_back or replica.instance_id != victim.instance_id or replica.epoch > victim.epoch,
            f"{victim.worker} is back in epoch {replica.epoch}, which was over",
        )
    run.measure("stale_results_ignored", await run.stale_results() - before)
