"""Stops the services of a mesh in order: nothing new comes in first, who serves the others goes last."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterable

from meshkit.cli.events import LaunchEvent, Report
from meshkit.cli.processes import is_alive, send_signal, wait_until_gone
from meshkit.cli.state import ServiceKind, ServiceRecord, StateDir

# Seconds that each kind gets to end its work before it is killed. The gateway drains its live streams.
STOP_ORDER: tuple[tuple[ServiceKind, float], ...] = (("gateway", 15.0), ("worker", 15.0), ("scheduler", 5.0))
KILL_WAIT_S = 5.0
# A launcher needs at most each kind's time and its kill, and some time to open a model before it looks.
LAUNCHER_STOP_S = sum(timeout_s + KILL_WAIT_S for _, timeout_s in STOP_ORDER) + 15.0


def stop_services(
    services: Iterable[ServiceRecord], *, report: Report, hurry: Callable[[], bool] = lambda: False
) -> None:
    """SIGTERM by kind in STOP_ORDER, SIGKILL for those that do not end in time or once `hurry()` says so."""
    everything = list(services)
    for kind, timeout_s in STOP_ORDER:
        alive = [service for service in everything if service.kind == kind and is_alive(service.process)]
        for service in alive:
            report(LaunchEvent(kind="stopping", service=service.name, pid=service.process.pid))
            send_signal(service.process, signal.SIGTERM)
        stubborn = wait_until_gone([s.process for s in alive], timeout_s=timeout_s, hurry=hurry)
        for process in stubborn:
            send_signal(process, signal.SIGKILL)
        wait_until_gone(stubborn, timeout_s=KILL_WAIT_S)
        for service in alive:
            killed = f"killed: it did not end within {timeout_s:.0f} s" if service.process in stubborn else ""
            report(LaunchEvent(kind="stopped", service=service.name, message=killed))


def stop_mesh(state: StateDir, *, report: Report) -> bool:
    """Stops the mesh of this state folder, whoever is left of it; False where nothing ran.

    A launcher that lives stops its services itself; what it leaves behind, or what a killed launcher left, is
    stopped here.
    """
    record = state.read_mesh()
    if record is None or not record.is_live():
        state.forget_mesh()
        return False
    if is_alive(record.launcher):
        report(LaunchEvent(kind="stopping", service="mesh", pid=record.launcher.pid))
        send_signal(record.launcher, signal.SIGTERM)
        if wait_until_gone([record.launcher], timeout_s=LAUNCHER_STOP_S):
            send_signal(record.launcher, signal.SIGKILL)
            wait_until_gone([record.launcher], timeout_s=KILL_WAIT_S)
    # Read again: a launcher that was starting may have added services before it saw the signal.
    latest = state.read_mesh() or record
    stop_services(latest.services, report=report)
    state.forget_mesh()
    report(LaunchEvent(kind="stopped", service="mesh"))
    return True
