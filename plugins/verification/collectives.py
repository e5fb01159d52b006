"""Behind `chipmesh collectives`: every primitive between spawned ranks, checked, timed, and reported."""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from meshkit.cli.terminal import EXIT_FAILED, EXIT_OK, print_json
from meshkit.errors import InvalidArgument
from plugins.verification.primitives import BARRIER, PRIMITIVES
from plugins.verification.rank import rounds
from plugins.verification.rank_group import GroupShape, RankGroup, RanksFailed
from plugins.verification.report import Check, Report, Status
from plugins.verification.request import BackendChoice, describe_search
from plugins.verification.sizes import parse_sizes, show_size
from plugins.verification.spawned import Message

_NAMES = (*PRIMITIVES, BARRIER)
CHECKS = ("load", "rendezvous", *_NAMES)
"""All checks, in the order in which they are run."""


@dataclass(frozen=True)
class Measurement:
    """One primitive at one size. `latency_s`: median over the calls of the slowest rank's duration.

    Sizes are counted as is usual: the input of all_reduce, reduce_scatter and broadcast, the output of
    all_gather. Bandwidths in bytes per second: size / latency, and that times the primitive's bus factor.
    algorithm: of an all_reduce; by_size: whether the plugin chose it, rather than the test.
    """

    primitive: str
    size_bytes: int
    latency_s: float
    bandwidth: float
    bus_bandwidth: float
    calls: int
    algorithm: str = ""
    by_size: bool = True

    def to_json(self) -> dict[str, Any]:
        """As the JSON report has it."""
        return {
            "primitive": self.primitive,
            "size_bytes": self.size_bytes,
            "latency_s": round(self.latency_s, 9),
            "bandwidth_bytes_per_s": round(self.bandwidth),
            "bus_bandwidth_bytes_per_s": round(self.bus_bandwidth),
            "calls": self.calls,
            "algorithm": self.algorithm,
            "by_size": self.by_size,
        }


@dataclass
class _Run:
    """What has been found so far."""

    checks: list[Check] = field(default_factory=list)
    measurements: list[Measurement] = field(default_factory=list)
    identity: dict[str, Any] = field(default_factory=dict)

    def add(self, name: str, status: Status, detail: str, since: float) -> None:
        self.checks.append(Check(name, status, detail, time.monotonic() - since))


def main(
    *,
    backend: str,
    options: Mapping[str, str],
    ranks: int,
    sizes: str,
    timeout_s: float,
    absent_rank: int | None,
    as_json: bool,
) -> int:
    """Run, print, and return the exit code: 0, or 1 where any check failed.

    Raises:
        InvalidArgument: (--backend, --option, --ranks, --sizes, --absent-rank) the command line is wrong.
    """
    if absent_rank is not None and not 0 <= absent_rank < ranks:
        raise InvalidArgument(
            f"--absent-rank is {absent_rank}; ranks run from 0 to {ranks - 1}", field="--absent-rank"
        )
    shape = GroupShape(ranks, parse_sizes(sizes), timeout_s, absent_rank)
    report, measurements = run_collectives(BackendChoice(backend, options), shape)
    if as_json:
        found = {"ranks": ranks, "measurements": [each.to_json() for each in measurements]}
        print_json({**report.to_json(), **found})
    else:
        _print(report, measurements, Console(highlight=False))
    return EXIT_FAILED if report.failed else EXIT_OK


def run_collectives(choice: BackendChoice, shape: GroupShape) -> tuple[Report, list[Measurement]]:
    """Run all primitives that the plugin declares.

    Raises:
        InvalidArgument: no such back end, an option that it does not take, or more ranks than devices.
    """
    run = _Run()
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="chipmesh-collectives-"))
        group = stack.enter_context(RankGroup(choice, shape, Path(folder)))
        declared, algorithms = _load(run, group, choice, shape)
        if declared and _join(run, group, shape):
            _measure(run, group, list(rounds(declared, algorithms, shape.sizes_bytes)), shape)
    done = {check.name: check for check in run.checks}
    checks = [done.get(name) or Check(name, Status.SKIP, _why_not_run(run)) for name in CHECKS]
    return Report("collectives", choice.name, tuple(checks), run.identity), run.measurements


def _load(
    run: _Run, group: RankGroup, choice: BackendChoice, shape: GroupShape
) -> tuple[list[str], list[str]]:
    """Primitives that the plugin declares, none where nothing can be run; its algorithms of all_reduce."""
    start = time.monotonic()
    try:
        loaded = group.gather("loaded", "loading the plugin")
    except RanksFailed as failure:
        run.add("load", Status.FAIL, f"{failure}. {describe_search(choice.name)}", start)
        return [], []
    first = next(iter(loaded.values()))
    run.identity.update(first["identity"], collective_library=first["library"] or "")
    if first["library"] is None:
        run.add("load", Status.PASS, f"{shape.world_size} processes", start)
        _skip(run, f"back end {choice.name!r} has no collectives: its chip works alone", _NAMES)
        return [], []
    if not first["shares_host_memory"] and shape.world_size > first["devices"]:
        raise InvalidArgument(
            f"--ranks is {shape.world_size}; each rank takes a device of its own, and back end "
            f"{choice.name!r} has {first['devices']}",
            field="--ranks",
        )
    run.add("load", Status.PASS, f"{len(loaded)} processes, {first['library']}", start)
    declared = [name for name in _NAMES if name in first["declared"]]
    _skip(run, "the plugin does not declare it", [name for name in _NAMES if name not in declared])
    return declared, list(first["algorithms"])


def _join(run: _Run, group: RankGroup, shape: GroupShape) -> bool:
    start = time.monotonic()
    try:
        group.gather("joined", f"the rendezvous within {shape.timeout_s:g} s")
    except RanksFailed as failure:
        run.add("rendezvous", Status.FAIL, str(failure), start)
        return False
    run.add("rendezvous", Status.PASS, f"{shape.world_size} ranks came", start)
    return True


def _measure(run: _Run, group: RankGroup, planned: Sequence[tuple[str, int, str]], shape: GroupShape) -> None:
    names = {name for name, _, _ in planned}
    wrong: dict[str, list[str]] = {name: [] for name in names}
    start = dict.fromkeys(names, 0.0)
    for name, size, algorithm in planned:
        start[name] = start[name] or time.monotonic()
        what = (f"{name} of {show_size(size)}" if size else name) + (f" by {algorithm}" if algorithm else "")
        try:
            outcomes = group.gather("outcome", what)
        except RanksFailed as failure:
            run.add(name, Status.FAIL, "; ".join([*wrong[name], str(failure)]), start[name])
            return
        wrong[name] += [f"{what}, rank {rank}: {each['wrong']}" for rank, each in outcomes.items()
                        if each["wrong"]]  # fmt: skip
        if name == BARRIER:
            wrong[name] += _early_leavers(outcomes)
        elif len(taken := {each["algorithm"] for each in outcomes.values()}) > 1:
            wrong[name].append(f"{what}: ranks took different algorithms: {', '.join(sorted(taken))}")
        run.measurements.append(_summarise(name, size, outcomes, by_size=not algorithm))
        if not algorithm and size in (0, shape.sizes_bytes[-1]):
            _conclude(run, name, wrong[name], start[name], shape)


def _conclude(run: _Run, name: str, wrong: Sequence[str], since: float, shape: GroupShape) -> None:
    if wrong:
        run.add(name, Status.FAIL, "; ".join(wrong), since)
    elif name == BARRIER:
        run.add(name, Status.PASS, "no rank left before the last one came", since)
    else:
        smallest, largest = show_size(shape.sizes_bytes[0]), show_size(shape.sizes_bytes[-1])
        detail = f"{len(shape.sizes_bytes)} sizes from {smallest} to {largest}, every element as defined"
        run.add(name, Status.PASS, detail, since)


def _early_leavers(outcomes: Mapping[int, Message]) -> list[str]:
    last_came = max(each["came_s"] for each in outcomes.values())
    return [
        f"rank {rank} left the barrier {last_came - each['left_s']:.3f} s before the last rank came"
        for rank, each in outcomes.items()
        if each["left_s"] < last_came
    ]


def _summarise(name: str, size: int, outcomes: Mapping[int, Message], *, by_size: bool) -> Measurement:
    calls = list(zip(*(each["durations_s"] for each in outcomes.values()), strict=True))
    latency_s = statistics.median(max(call) for call in calls)
    bandwidth = size / latency_s
    factor = PRIMITIVES[name].bus_factor(len(outcomes)) if size else 0.0
    algorithm = next(iter(outcomes.values())).get("algorithm", "")
    return Measurement(
        name, size, latency_s, bandwidth, bandwidth * factor, len(calls), algorithm, by_size=by_size
    )


def _skip(run: _Run, why: str, names: Sequence[str]) -> None:
    run.checks.extend(Check(name, Status.SKIP, why) for name in names)


def _why_not_run(run: _Run) -> str:
    failed = [check.name for check in run.checks if check.status is Status.FAIL]
    return f"not run, since {failed[0]} failed" if failed else "there is nothing to run"


def _print(report: Report, measurements: Sequence[Measurement], console: Console) -> None:
    if measurements:
        table = Table(title=f"latency and bandwidth, {report.identity.get('collective_library', '')}")
        table.add_column("primitive")
        for column in ("size", "latency µs", "MB/s", "bus MB/s", "calls"):
            table.add_column(column, justify="right")
        for each in measurements:
            if each.by_size:
                rates = [f"{rate / 1e6:.1f}" if each.size_bytes else "" for rate in _rates(each)]
                size = show_size(each.size_bytes) if each.size_bytes else ""
                table.add_row(each.primitive, size, f"{each.latency_s * 1e6:.0f}", *rates, str(each.calls))
        console.print(table)
        _print_algorithms(measurements, console)
    report.print_table(console)


def _print_algorithms(measurements: Sequence[Measurement], console: Console) -> None:
    """Those of all_reduce side by side, where there are several."""
    forced = {(each.size_bytes, each.algorithm): each for each in measurements if not each.by_size}
    if not forced:
        return
    algorithms = list(dict.fromkeys(algorithm for _, algorithm in forced))
    table = Table(title="all_reduce by algorithm")
    for column in ("size", *(f"{algorithm} µs" for algorithm in algorithms)):
        table.add_column(column, justify="right")
    table.add_column("taken")
    for each in measurements:
        if each.by_size and each.algorithm:
            beside = [forced[each.size_bytes, algorithm].latency_s * 1e6 for algorithm in algorithms]
            latencies = [f"{latency_us:.0f}" for latency_us in beside]
            table.add_row(show_size(each.size_bytes), *latencies, each.algorithm)
    console.print(table)


def _rates(each: Measurement) -> tuple[float, float]:
    return each.bandwidth, each.bus_bandwidth
