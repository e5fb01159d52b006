"""R8: a chip is replaced under its worker id, by the command that an operator types."""

from __future__ import annotations

import asyncio
import json
import sys
import time

from chaos.mesh import Shape
from chaos.processes import FaultDidNotHappen
from chaos.report import Target
from chaos.scenario import Run, scenario

# One worker: its streams have nowhere else to go meanwhile.
swaps = scenario(
    "R8",
    "A chip is swapped by `chipmesh swap`",
    target=Target(gap_ms=1000),
    shape=Shape(workers=1),
    tokens=400,
    full_runs=50,
    full_streams=64,
)


@swaps.variant("hash to hash")
async def swap_chip(run: Run) -> None:
    """Worker id and scheduler stay, the executor is another one."""
    before, scheduler = await run.victim(), run.mesh.process("scheduler")
    await run.strike(lambda: _swap(run, before.worker, device=run.draw.randrange(1, 64)))
    after = await run.victim()
    run.expect(after.worker == before.worker, f"the worker is {after.worker} after the swap")
    run.expect(after.instance_id != before.instance_id, "the executor is the old one: nothing was swapped")
    mesh = await run.mesh.view.mesh()
    run.expect(mesh.scheduler.pid == scheduler.pid, "the scheduler's process is another one")


async def _swap(run: Run, worker: str, *, device: int) -> float:
    at = time.monotonic()
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "meshkit.cli", "swap", worker, "--to", "hash", "--device", str(device),
        "--option", f"step_ms={run.mesh.shape.step_ms:g}",
        "--endpoint", run.mesh.address("scheduler"), "--json",
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    output, errors = await process.communicate()
    if process.returncode != 0:
        raise FaultDidNotHappen(f"chipmesh swap ended with {process.returncode}: {errors.decode()}")
    run.measure("swap_ms", 1e3 * float(json.loads(output)["seconds"]))
    return at
