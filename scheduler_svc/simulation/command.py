"""Behind `chipmesh simulate`: reads fleet and trace, shows progress, prints the figures."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterable
from pathlib import Path

from rich.console import Console
from rich.progress import Progress

from meshkit.cli.terminal import EXIT_OK, print_json
from meshkit.config import load_config
from meshkit.errors import InvalidArgument
from scheduler_svc.simulation.fleet import Fleet
from scheduler_svc.simulation.report import print_report, summarise
from scheduler_svc.simulation.simulator import Outcome, Simulation
from scheduler_svc.simulation.trace import SyntheticTrace, TracedRequest, read_trace

_REPORT_EVERY = 256


def main(
    *,
    fleet: Path,
    trace: Path | None,
    requests: int | None,
    rate: float,
    speed: float,
    ttft_bound_ms: float,
    tpot_bound_ms: float,
    as_json: bool,
) -> int:
    """Simulate, print, and return the exit code.

    trace: replayed at `speed` times its pace, its first `requests` lines only where given. None: a synthetic
    one of `requests` (1,000) at `rate` per second.

    Raises:
        InvalidArgument: (--fleet, --trace, ...) with the place that is wrong.
    """
    described = _read_fleet(fleet)
    replayed = _requests(trace, requests=requests, rate=rate, speed=speed)
    start = time.monotonic()
    outcome = _run(described, replayed)
    summary = summarise(
        outcome, described, ttft_bound_s=ttft_bound_ms / 1e3, tpot_bound_s=tpot_bound_ms / 1e3
    )
    summary["wall_s"] = round(time.monotonic() - start, 2)
    if as_json:
        print_json(summary)
    else:
        print_report(summary)
    return EXIT_OK


def _read_fleet(file: Path) -> Fleet:
    try:
        return load_config(Fleet, file)
    except InvalidArgument as error:
        raise InvalidArgument(f"--fleet: {error.message}", field="--fleet") from error


def _requests(trace: Path | None, *, requests: int | None, rate: float, speed: float) -> list[TracedRequest]:
    synthetic = SyntheticTrace(requests=requests or 1000, rate=rate)
    made: Iterable[TracedRequest] = synthetic.generate() if trace is None else read_trace(trace)
    return [
        TracedRequest(each.at_s / speed, each.input_tokens, each.output_tokens, each.block_ids)
        for each in itertools.islice(made, requests)
    ]


def _run(fleet: Fleet, requests: list[TracedRequest]) -> Outcome:
    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("requests", total=len(requests))

        def show(ended: int) -> None:
            if ended % _REPORT_EVERY == 0:
                progress.update(task, completed=ended)

        return Simulation(fleet, on_progress=show).run(requests)
