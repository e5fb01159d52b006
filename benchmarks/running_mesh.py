"""A mesh of its own for a benchmark: `chipmesh up` on loopback, and down again; what its processes use."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

_CLI = (sys.executable, "-m", "meshkit.cli")


@contextlib.contextmanager
def running_mesh(*flags: str, environment: Mapping[str, str] | None = None) -> Iterator[dict[str, Any]]:
    """`chipmesh up FLAGS`, as it describes itself once it is ready; stopped in the end.

    environment: set over this process' own.

    Raises:
        SystemExit: it does not start; with what `chipmesh up` says.
    """
    with tempfile.TemporaryDirectory() as folder:
        variables = {**os.environ, **(environment or {}), "CHIPMESH_STATE_DIR": folder}
        up = [*_CLI, "up", "--detach", "--json", *flags]
        started = subprocess.run(up, env=variables, capture_output=True, text=True, check=False)
        try:
            if started.returncode:
                raise SystemExit(started.stderr)
            yield json.loads(started.stdout)
        finally:
            subprocess.run([*_CLI, "down"], env=variables, capture_output=True, check=False)


def service_pids(mesh: Mapping[str, Any]) -> dict[str, int]:
    """Of every process of a mesh, by the name of its service."""
    pids = {name: int(mesh[name]["pid"]) for name in ("launcher", "scheduler", "gateway")}
    for worker in mesh["workers"]:
        pids[worker["name"]] = int(worker["pid"])
        pids[f"{worker['name']}-executor"] = int(worker["executor_pid"])
    return pids


def thread_times(process: int) -> dict[int, float]:
    """Processor seconds of each thread of a process so far."""
    seconds = {}
    for entry in Path(f"/proc/{process}/task").iterdir():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # It has ended meanwhile.
            seconds[int(entry.name)] = int((entry / "schedstat").read_text().split()[0]) / 1e9
    return seconds
