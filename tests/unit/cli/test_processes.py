"""Processes are known by pid and start time; services are stopped in order, and the stubborn are killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from meshkit.cli.events import LaunchEvent
from meshkit.cli.processes import (
    ProcessRecord,
    is_alive,
    record_process,
    send_signal,
    start_ticks,
    wait_until_gone,
)
from meshkit.cli.state import ServiceKind, ServiceRecord
from meshkit.cli.stopping import stop_services

OBEDIENT = "print('up', flush=True); import time; time.sleep(600)"
STUBBORN = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); " + OBEDIENT

Start = Callable[[str], "subprocess.Popen[str]"]


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts Python programs that print a line when they are up; ends what is left of them."""
    running: list[subprocess.Popen[str]] = []

    def run(program: str) -> subprocess.Popen[str]:
        process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
        running.append(process)
        assert process.stdout is not None
        assert process.stdout.readline() == "up\n"
        return process

    yield run
    for process in running:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


def recorded(process: subprocess.Popen[str]) -> ProcessRecord:
    """The identity of a process that runs."""
    record = record_process(process.pid)
    assert record is not None
    return record


def service(name: str, kind: ServiceKind, process: subprocess.Popen[str]) -> ServiceRecord:
    """The record of a service that is that process."""
    return ServiceRecord(name=name, kind=kind, process=recorded(process), log=Path("/dev/null"))


def test_a_process_is_alive_until_it_ends_even_while_nobody_reaped_it(start: Start) -> None:
    process = start(OBEDIENT)
    record = recorded(process)
    assert is_alive(record)
    process.kill()
    assert wait_until_gone([record], timeout_s=10) == []
    assert process.returncode is None, "it is a zombie here, not reaped"
    assert start_ticks(process.pid) is None


def test_a_reused_pid_is_never_signalled(start: Start) -> None:
    process = start(OBEDIENT)
    former = ProcessRecord(pid=process.pid, start_ticks=recorded(process).start_ticks - 1)
    assert not is_alive(former)
    send_signal(former, signal.SIGKILL)
    assert is_alive(recorded(process))
    assert process.poll() is None


def test_the_own_process_has_a_record() -> None:
    assert record_process(os.getpid()) is not None


def test_services_stop_with_the_gateway_first_and_the_scheduler_last(start: Start) -> None:
    services = [
        service("scheduler", "scheduler", start(OBEDIENT)),
        service("gateway", "gateway", start(OBEDIENT)),
        service("worker-0", "worker", start(OBEDIENT)),
    ]
    events: list[LaunchEvent] = []
    stop_services(services, report=events.append)
    assert [(event.kind, event.service) for event in events] == [
        ("stopping", "gateway"),
        ("stopped", "gateway"),
        ("stopping", "worker-0"),
        ("stopped", "worker-0"),
        ("stopping", "scheduler"),
        ("stopped", "scheduler"),
    ]
    assert not any(is_alive(stopped.process) for stopped in services)
    assert all(event.message == "" for event in events), "none had to be killed"


def test_a_service_that_ignores_the_signal_is_killed_and_the_report_says_so(start: Start) -> None:
    stubborn = service("worker-0", "worker", start(STUBBORN))
    events: list[LaunchEvent] = []
    stop_services([stubborn], report=events.append, hurry=lambda: True)
    assert not is_alive(stubborn.process)
    assert "killed" in events[-1].message
