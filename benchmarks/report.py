"""What every benchmark's report begins with: the machine, the versions and the commit."""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import statistics
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.plots import check_path, require_matplotlib

BUSY_LOAD = 0.5
"""Load average over one minute, per core, above which figures would say more about the neighbours."""


def refuse_busy_machine() -> None:
    """Exit with the load in the message where the machine is busy."""
    load, cores = os.getloadavg()[0], os.cpu_count() or 1
    if load > BUSY_LOAD * cores:
        raise SystemExit(
            f"load {load:.2f} on {cores} cores: figures would mean little; wait, or pass --even-if-busy"
        )


def run_command(
    parser: argparse.ArgumentParser,
    run: Callable[[argparse.Namespace], dict[str, Any]],
    print_table: Callable[[dict[str, Any]], None],
    words: Sequence[str] | None = None,
    *,
    plot: Callable[[Path, dict[str, Any]], None] | None = None,
) -> None:
    """Parse `words` (None: of the process) with the flags that all benchmarks have, run, print.

    plot: draws the report into a file; a benchmark that has one gets the flag `--plot FILE`.
    """
    parser.add_argument("--json", action="store_true", help="one JSON document instead of a table")
    parser.add_argument("--even-if-busy", action="store_true", help="measure although the machine is busy")
    if plot is not None:
        parser.add_argument("--plot", type=_plot_file, metavar="FILE", help="draw the report: .svg or .png")
    arguments = parser.parse_args(words)
    file: Path | None = arguments.plot if plot is not None else None
    if file is not None:
        require_matplotlib()
    if not arguments.even_if_busy:
        refuse_busy_machine()
    report = run(arguments)
    if arguments.json:
        print(json.dumps(report, indent=2))
    else:
        print_table(report)
    if plot is not None and file is not None:
        plot(file, report)  # Last: what took minutes to measure is printed whatever becomes of the picture.


def _plot_file(text: str) -> Path:
    try:
        return check_path(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def describe_run() -> dict[str, Any]:
    """Machine, versions and commit, for the head of a report."""
    return {
        "machine": {"cpu": _cpu_name(), "cores": os.cpu_count(), "system": platform.platform()},
        "versions": {
            name: importlib.metadata.version(name) for name in ("chipmesh", "grpcio", "protobuf", "torch")
        },
        "python": platform.python_version(),
        "commit": _commit(),
    }


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least `share` of `values` do not exceed; `values` must not be empty."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def summarise(values: Sequence[float]) -> dict[str, float]:
    """Median and 99th percentile, rounded for people."""
    return {"p50": round(statistics.median(values), 3), "p99": round(percentile(values, 0.99), 3)}


def _cpu_name() -> str:
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.machine()


def _commit() -> str:
    done = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
    )
    return done.stdout.strip() or "unknown"
