"""R18: streams without end and a fault every minute: what the services hold must not grow."""

from __future__ import annotations

import asyncio
import time

import numpy as np

from chaos.metrics import resident_bytes
from chaos.report import Outcome, Target
from chaos.scenario import Run, scenario

SERVICES = ("gateway-0", "scheduler")
"""Those that live through it. Supervisors and executors are among the faults."""
RUN_S = 60.0
"""A run, with one fault."""
WARM_UP_SHARE = 0.25
"""Of the samples: caches and pools fill at first."""
FEWEST_SAMPLES = 6
_MIB = 1 << 20


def judge_growth(outcome: Outcome) -> None:
    """`SERVICE_growth_percent_per_hour` of each service, from its samples at the ends of all runs."""
    times = outcome.figures.get("at_s", [])
    for service in SERVICES:
        samples = outcome.figures.get(f"{service}_rss_mib", [])
        if len(samples) >= FEWEST_SAMPLES:
            growth = growth_percent_per_hour(times, samples)
            outcome.figures[f"{service}_growth_percent_per_hour"] = [growth]


def growth_percent_per_hour(times_s: list[float], samples: list[float]) -> float:
    """The slope of the line through all samples but the first quarter, in percent of their mean."""
    first = int(len(samples) * WARM_UP_SHARE)
    hours, kept = np.asarray(times_s[first:]) / 3600, np.asarray(samples[first:])
    slope = np.polyfit(hours - hours.mean(), kept, 1)[0]
    return float(100 * slope / kept.mean())


soak = scenario(
    "R18",
    "Streams without end, and a fault a minute",
    target=Target(figures={f"{service}_growth_percent_per_hour": 1.0 for service in SERVICES}),
    full_runs=60,
    full_streams=16,
    over_all=judge_growth,
)


@soak.variant("executor dies")
async def with_a_death(run: Run) -> None:
    """SIGKILL."""
    flow = _begin_flow(run)
    victim = await run.victim()
    await run.kill(victim.executor, loses=[victim])
    await _end(run, flow)


@soak.variant("executor freezes")
async def with_a_freeze(run: Run) -> None:
    """SIGSTOP, and SIGCONT once its streams have moved."""
    flow = _begin_flow(run)
    victim = await run.victim()
    await run.freeze(victim.executor, loses=[victim])
    await run.thaw(victim.executor)
    await _end(run, flow)


def _begin_flow(run: Run) -> asyncio.Task[None]:
    """A new stream for each one that ends, until the run has lasted long enough."""
    until = time.monotonic() + max(1.0, run.share * RUN_S)
    width = len(run.clients.all)

    async def follow_each_other() -> None:
        while time.monotonic() < until:
            client = run.clients.start(run.prompt(), tokens=run.tokens)
            assert client.task is not None
            await asyncio.wait({client.task})

    async def flow() -> None:
        await asyncio.gather(*(follow_each_other() for _ in range(width)))

    return asyncio.create_task(flow(), name="flow of streams")


async def _end(run: Run, flow: asyncio.Task[None]) -> None:
    await flow
    run.measure("at_s", time.monotonic())
    for service in SERVICES:
        run.measure(f"{service}_rss_mib", resident_bytes(run.mesh.process(service)) / _MIB)
