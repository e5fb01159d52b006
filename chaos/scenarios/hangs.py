"""R4 and R12: a chip that hangs, or has no memory left, in a step."""

from __future__ import annotations

from chaos.mesh import Shape
from chaos.report import Target
from chaos.scenario import Run, scenario

STEP_DEADLINE_S = 1.0
"""The bound is configuration: real models need more, the hash model's steps take 10 ms."""

hangs = scenario(
    "R4",
    f"A step or the event loop of an executor hangs (step deadline {STEP_DEADLINE_S:g} s)",
    target=Target(detection_ms=2e3 * STEP_DEADLINE_S),
    shape=Shape(
        scheduler={"step_deadline_floor_s": STEP_DEADLINE_S},
        executor={
            "hung_after_s": 1.0,
            "unresponsive_after_s": 1.0,
            "probe_interval_s": 0.2,
            "stop_timeout_s": 0.5,
        },
    ),
    full_runs=50,
)
runs_out = scenario(
    "R12", "A device has no memory left in a step; its process lives", target=Target(), full_runs=100
)


@hangs.variant("step")
async def hang_step(run: Run) -> None:
    """The process answers everything but the step."""
    victim = await run.victim()
    await run.chip_fault(victim, "hang_step", loses=[victim])


@hangs.variant("loop")
async def hang_loop(run: Run) -> None:
    """gRPC's own threads answer pings; nobody answers calls."""
    victim = await run.victim()
    await run.chip_fault(victim, "hang_loop", loses=[victim])


@runs_out.variant("step")
async def run_out_of_memory(run: Run) -> None:
    """The step is lost; the executor is attached again, in a new epoch."""
    victim = await run.victim()
    await run.chip_fault(victim, "out_of_memory", loses=[victim])
    await run.until_serving(*run.mesh.worker_names)
    after = {replica.worker: replica for replica in await run.mesh.view.replicas()}[victim.worker]
    run.expect(after.executor == victim.executor, f"{victim.worker} has another executor: the old one died")
