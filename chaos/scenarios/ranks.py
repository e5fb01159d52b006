"""R11: a rank of a set that runs a model together dies, or stops without dying."""

from __future__ import annotations

import asyncio
import time
from functools import partial

from chaos.mesh import Shape
from chaos.processes import state_of, until
from chaos.report import Target
from chaos.scenario import Inject, Run, scenario
from chaos.view import Replica, replicas_of
from chipmesh.scheduler.v1alpha1 import admin_pb2

NAMED_TIMEOUT_S = 10.0
ENDED_TIMEOUT_S = 15.0

rank_dies = scenario(
    "R11",
    "SIGKILL or SIGSTOP of a rank of a set, the leader or another; it is named",
    target=Target(10_000, 10_000, figures={"named_ms": 10_000}),
    shape=Shape(ranks=2),
    full_runs=30,
)


def names(mesh: admin_pb2.Mesh, worker: str, rank: int) -> bool:
    """Whether the mesh tells of the worker's loss by the rank that was at fault."""
    return any(each.worker == worker and f"rank {rank}" in each.message for each in replicas_of(mesh))


async def strike_rank(run: Run, rank: int, *, freezes: bool) -> None:
    """The supervisor ends what is left of the set, and starts all of it again."""
    victim = await run.victim()
    process = victim.ranks[rank]
    named = asyncio.create_task(
        run.mesh.view.first_time(partial(names, worker=victim.worker, rank=rank), timeout_s=NAMED_TIMEOUT_S)
    )
    strike = run.freeze if freezes else run.kill
    try:
        at = await strike(process, loses=[victim])
        run.measure("named_ms", (await named - at) * 1e3)
    finally:
        named.cancel()
        await asyncio.gather(named, return_exceptions=True)
    await _until_ended(run, victim, since=at)
    run.mesh.frozen.discard(process)


async def _until_ended(run: Run, victim: Replica, *, since: float) -> None:
    """None of the old set may be left, a frozen one neither."""

    def gone() -> bool:
        return not any(state_of(rank) for rank in victim.ranks)

    await until(gone, timeout_s=ENDED_TIMEOUT_S, what="all ranks of the old set end")
    run.measure("set_ended_ms", (time.monotonic() - since) * 1e3)


def _variant(rank: int, *, freezes: bool) -> Inject:
    async def inject(run: Run) -> None:
        await strike_rank(run, rank, freezes=freezes)

    return inject


for _word, _freezes in (("dies", False), ("freezes", True)):
    for _rank, _who in ((1, "another rank"), (0, "the leader")):
        rank_dies.variant(f"{_who} {_word}")(_variant(_rank, freezes=_freezes))
