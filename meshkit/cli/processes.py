"""Processes by identity: a pid and its start time, so that a reused pid is never taken for the old one."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from meshkit.config import FrozenConfig

POLL_S = 0.05


class ProcessRecord(FrozenConfig):
    """pid, and the process' start in clock ticks since boot (field 22 of /proc/PID/stat)."""

    pid: int
    start_ticks: int


def start_ticks(pid: int) -> int | None:
    """When the process started, in clock ticks since boot; None where it does not live (a zombie)."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return None
    # The second field is the command in parentheses and may itself hold spaces and parentheses.
    fields = text.rpartition(")")[2].split()
    state, started = fields[0], int(fields[19])
    return None if state in ("Z", "X") else started


def record_process(pid: int) -> ProcessRecord | None:
    """The identity of a running process; None where it has ended already."""
    started = start_ticks(pid)
    return None if started is None else ProcessRecord(pid=pid, start_ticks=started)


def is_alive(process: ProcessRecord) -> bool:
    """True while that very process runs."""
    return start_ticks(process.pid) == process.start_ticks


def send_signal(process: ProcessRecord, number: signal.Signals) -> None:
    """Signals that very process; nothing happens when it is gone."""
    if not is_alive(process):
        return
    try:
        os.kill(process.pid, number)
    except ProcessLookupError:
        return  # It ended between the look and the signal: what was wanted.


def wait_until_gone(
    processes: Iterable[ProcessRecord], *, timeout_s: float, hurry: Callable[[], bool] = lambda: False
) -> list[ProcessRecord]:
    """Waits until all have ended, `timeout_s` seconds passed, or `hurry()`; returns those that still run."""
    deadline = time.monotonic() + timeout_s
    remaining = [process for process in processes if is_alive(process)]
    while remaining and time.monotonic() < deadline and not hurry():
        time.sleep(POLL_S)
        remaining = [process for process in remaining if is_alive(process)]
    return remaining
