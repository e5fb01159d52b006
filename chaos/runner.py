"""Runs a scenario: one mesh for all its runs, and after each run everything that must hold."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from chaos.client import Clients
from chaos.history import check_all, longest_silence_s
from chaos.mesh import ChaosMesh
from chaos.processes import FaultDidNotHappen
from chaos.report import Outcome, summarise
from chaos.scenario import Inject, Run, Scenario
from chaos.view import leaked_pages
from meshkit.errors import MeshError

WARM_UP_SHARE = 0.08
"""Share of its tokens that each stream has before the fault."""
STREAMS_TIMEOUT_S = 90.0
SETTLE_TIMEOUT_S = 40.0


@dataclass(frozen=True)
class Plan:
    """How often, how wide, and with which seed; on_run: called after each run, with its number from 1.

    share: of what a run repeats, as a smoke does less of it.
    """

    runs: int
    streams: int
    seed: int
    on_run: Callable[[int], None] = lambda _: None
    share: float = 1.0


async def run_scenario(scenario: Scenario, plan: Plan, *, root: Path) -> dict[str, Any]:
    """All runs of one scenario on a mesh of its own; the JSON report. root: folder of the mesh's files."""
    mesh = ChaosMesh(scenario.shape, root=root)
    try:
        await mesh.start()
        report = await run_on(mesh, scenario, plan)
    finally:
        at_the_end = await mesh.stop()
    problems = [*report["problems"], *at_the_end]
    return {**report, "problems": problems, "passed": report["passed"] and not problems}


async def run_on(mesh: ChaosMesh, scenario: Scenario, plan: Plan) -> dict[str, Any]:
    """All runs, the variants in turns, on a mesh of the scenario's shape that has settled."""
    draw = random.Random(plan.seed)
    by_variant = {name: Outcome() for name in scenario.variants}
    total = Outcome()
    for number in range(plan.runs):
        name = list(scenario.variants)[number % len(scenario.variants)]
        outcome = await one_run(mesh, scenario, name, streams=plan.streams, draw=draw, share=plan.share)
        outcome.problems = [f"run {number + 1} ({name}): {problem}" for problem in outcome.problems]
        by_variant[name].add(outcome)
        total.add(outcome)
        plan.on_run(number + 1)
        if outcome.problems and not await _is_settled(mesh):
            total.problems.append(f"given up after run {number + 1}: the mesh does not recover")
            break
    scenario.over_all(total)
    return _report(scenario, plan, total, by_variant)


async def one_run(
    mesh: ChaosMesh,
    scenario: Scenario,
    variant: str,
    *,
    streams: int,
    draw: random.Random,
    share: float = 1.0,
) -> Outcome:
    """Streams, the fault, the streams' ends, the mesh's recovery, and the checks of all of it."""
    clients = Clients([mesh.address(name) for name in mesh.gateway_names])
    run = Run(mesh, clients, tokens=scenario.tokens, draw=draw, share=share)
    try:
        for _ in range(streams):
            clients.start(run.prompt(), tokens=scenario.tokens)
        await clients.until_all_count(int(WARM_UP_SHARE * scenario.tokens), timeout_s=STREAMS_TIMEOUT_S)
        await _inject(run, scenario.variants[variant])
        await clients.end(timeout_s=STREAMS_TIMEOUT_S)
        await _settle(run)
    except asyncio.TimeoutError:
        run.outcome.problems.append(f"streams did not begin within {STREAMS_TIMEOUT_S:g} s")
    finally:
        await clients.close()
    _judge_streams(run)
    return run.outcome


async def _inject(run: Run, inject: Inject) -> None:
    try:
        await inject(run)
    except FaultDidNotHappen as error:
        run.outcome.problems.append(f"fault did not happen: {error}")
    except (TimeoutError, asyncio.TimeoutError, MeshError) as error:
        run.outcome.problems.append(f"{type(error).__name__}: {error}")
    run.expect(run.outcome.faults_injected > 0, "no fault was injected: the run shows nothing")


async def _settle(run: Run) -> None:
    """The mesh is whole again, idle, and no page is in anybody's hands."""
    try:
        mesh = await run.mesh.view.until_settled(run.mesh.worker_names, timeout_s=SETTLE_TIMEOUT_S)
    except TimeoutError as error:
        run.outcome.problems.append(str(error))
        mesh = await run.mesh.view.mesh()
    run.outcome.leaked_pages = leaked_pages(mesh)


async def _is_settled(mesh: ChaosMesh) -> bool:
    try:
        await mesh.until_ready(timeout_s=SETTLE_TIMEOUT_S)
    except (TimeoutError, FaultDidNotHappen):
        return False
    return True


def _judge_streams(run: Run) -> None:
    histories = [client.history for client in run.clients.all]
    run.outcome.streams = len(histories)
    run.outcome.faults += check_all(histories)
    errors = sorted({history.error for history in histories if history.error})
    run.outcome.problems += [f"a stream failed: {error}" for error in errors]
    if run.first_fault_at is not None:
        silences = [longest_silence_s(history, since=run.first_fault_at) for history in histories]
        run.outcome.gap_ms += [silence * 1e3 for silence in silences if silence is not None]


def _report(scenario: Scenario, plan: Plan, total: Outcome, by_variant: dict[str, Outcome]) -> dict[str, Any]:
    summary = summarise(total, scenario.target)
    report = {
        "scenario": scenario.id,
        "title": scenario.title,
        **summary,
        "streams": plan.streams,
        "passed": total.clean and total.runs == plan.runs and bool(summary["within_target"]),
        "seed": plan.seed,
        **scenario.notes,
    }
    if len(by_variant) > 1:
        report["variants"] = {
            name: {
                key: value
                for key, value in summarise(outcome, scenario.target).items()
                if key in ("runs", "faults_injected", "failed", "detection_ms", "gap_ms")
            }
            for name, outcome in by_variant.items()
        }
    return report
