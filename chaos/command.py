"""Behind `chipmesh chaos`: chooses scenarios, shows progress, prints the reports."""

from __future__ import annotations

import asyncio
import os
import platform
import secrets
import signal
import sys
import tempfile
from collections.abc import Coroutine
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

import chaos.scenarios  # noqa: F401 - defines the scenarios
from chaos.runner import Plan, run_scenario
from chaos.scenario import SCENARIOS, Scenario, all_scenarios
from meshkit.cli.terminal import EXIT_FAILED, EXIT_OK, print_json
from meshkit.errors import InvalidArgument

ALL = "all"
DEFAULT_RUNS = 10
DEFAULT_STREAMS = 32
T = TypeVar("T")


def main(
    *,
    scenario: str | None,
    runs: int | None,
    streams: int | None,
    full: bool,
    seed: int | None,
    logs: Path | None,
    as_json: bool,
) -> int:
    """Run a scenario, all of them, or list them where no name is given; the exit code.

    runs, streams: None: a few, or as the scoreboard wants where `full`. seed: of prompts, victims and phases;
    None: drawn, and told. logs: keep the services' files there.

    Raises:
        InvalidArgument: (SCENARIO) there is no such scenario.
    """
    if scenario is None:
        _list_scenarios(as_json=as_json)
        return EXIT_OK
    chosen = _choose(scenario)
    drawn = secrets.randbits(32) if seed is None else seed
    reports = []
    for each in chosen:
        plan = Plan(
            runs=runs or (each.full_runs if full else DEFAULT_RUNS),
            streams=streams or (each.full_streams if full else DEFAULT_STREAMS),
            seed=drawn,
        )
        report = _run_one(each, plan, logs=logs, quiet=as_json)
        reports.append(report)
        if not as_json:
            _show(report)
    passed = all(report["passed"] for report in reports)
    if as_json:
        print_json(reports[0] if scenario != ALL else {"passed": passed, "scenarios": reports})
    return EXIT_OK if passed else EXIT_FAILED


def _choose(name: str) -> list[Scenario]:
    if name == ALL:
        return all_scenarios()
    if name not in SCENARIOS:
        known = ", ".join(each.id for each in all_scenarios())
        raise InvalidArgument(f"there is no scenario {name!r}; there is: {known}, {ALL}", field="--scenario")
    return [SCENARIOS[name]]


def _run_one(scenario: Scenario, plan: Plan, *, logs: Path | None, quiet: bool) -> dict[str, Any]:
    with (
        tempfile.TemporaryDirectory(prefix="chipmesh-chaos-") as temporary,
        Progress(console=Console(stderr=True), transient=True, disable=quiet) as progress,
    ):
        task = progress.add_task(f"{scenario.id} {scenario.title}", total=plan.runs)
        shown = replace(plan, on_run=lambda number: progress.update(task, completed=number))
        root = Path(temporary) if logs is None else logs / scenario.id
        try:
            report = asyncio.run(_until_asked_to_stop(run_scenario(scenario, shown, root=root)))
        except asyncio.CancelledError as error:
            raise KeyboardInterrupt from error  # SIGTERM ends the command as Ctrl-C does.
    return {**report, "machine": describe_machine()}


async def _until_asked_to_stop(work: Coroutine[Any, Any, T]) -> T:
    """As `work`; SIGTERM cancels it as Ctrl-C does, so that no process is left behind."""
    task = asyncio.ensure_future(work)
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, task.cancel)
    try:
        return await task
    finally:
        loop.remove_signal_handler(signal.SIGTERM)


def describe_machine() -> dict[str, Any]:
    """What the figures were measured on; load: average of the last minute, neighbours included."""
    return {
        "cores": len(os.sched_getaffinity(0)),
        "system": platform.platform(),
        "python": platform.python_version(),
        "load": round(os.getloadavg()[0], 2),
    }


def _list_scenarios(*, as_json: bool) -> None:
    if as_json:
        rows = [
            {
                "id": each.id,
                "title": each.title,
                "variants": list(each.variants),
                "target": each.target.describe(),
                "full_runs": each.full_runs,
                "full_streams": each.full_streams,
            }
            for each in all_scenarios()
        ]
        print_json({"scenarios": rows})
        return
    table = Table("id", "what happens under running streams", "target")
    for each in all_scenarios():
        table.add_row(each.id, each.title, _bounds(each.target.describe()))
    Console().print(table)


def _bounds(target: dict[str, float]) -> str:
    return ", ".join(["0 lost", *(f"{name} <= {bound:g}" for name, bound in target.items())])


def _show(report: dict[str, Any]) -> None:
    """A report for people: what must be zero, the times beside their bounds, and what was wrong."""
    zeros = ("lost", "repeated", "wrong", "failed", "disordered", "miscounted", "leaked_pages")
    verdict = "passed" if report["passed"] else "FAILED"
    counts = f"{report['runs']} runs of {report['streams']} streams, {report['faults_injected']} faults"
    lines = [
        f"{report['scenario']} {verdict}: {report['title']}",
        f"  {counts}, seed {report['seed']}",
        "  " + ", ".join(f"{report[name]} {name}" for name in zeros),
    ]
    measured = {"detection_ms": report["detection_ms"], "gap_ms": report["gap_ms"], **report["figures"]}
    for name, values in measured.items():
        if values is not None:
            bound = report["target"].get(name)
            beside = "" if bound is None else f" (target {bound:g})"
            lines.append(
                f"  {name}: " + ", ".join(f"{key} {value:g}" for key, value in values.items()) + beside
            )
    lines += [f"  problem: {problem}" for problem in report["problems"]]
    sys.stdout.write("\n".join(lines) + "\n")
