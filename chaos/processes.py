"""Signals to processes, each verified: a fault that did not happen is an error, not a good run."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Awaitable, Callable, Iterable
from pathlib import Path

from meshkit.cli.processes import ProcessRecord, is_alive, record_process

POLL_S = 0.005
EFFECT_TIMEOUT_S = 5.0


class FaultDidNotHappen(Exception):
    """A fault was asked for, and its effect was not seen; the run shows nothing."""


async def until(
    holds: Callable[[], bool | Awaitable[bool]], *, timeout_s: float, what: str, poll_s: float = POLL_S
) -> None:
    """Return when `holds()` does; TimeoutError with `what` in it where it does not in time."""
    deadline = time.monotonic() + timeout_s
    while True:
        answer = holds()
        if answer if isinstance(answer, bool) else await answer:
            return
        if time.monotonic() > deadline:
            raise TimeoutError(f"{what}: not within {timeout_s:g} s")
        await asyncio.sleep(poll_s)


def identify(pid: int) -> ProcessRecord:
    """The process of that pid, to be sure later that it is still the same. Raises FaultDidNotHappen."""
    record = record_process(pid)
    if record is None:
        raise FaultDidNotHappen(f"process {pid} is gone before anything was done to it")
    return record


def state_of(process: ProcessRecord) -> str:
    """R, S, D, T (stopped) ... as /proc says; "" where that very process is gone or a zombie."""
    if not is_alive(process):
        return ""
    try:
        text = Path(f"/proc/{process.pid}/stat").read_text(encoding="utf-8", errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return ""
    return text.rpartition(")")[2].split()[0]


async def kill(processes: Iterable[ProcessRecord]) -> float:
    """SIGKILL, one right after the other; the instant of the first. Raises FaultDidNotHappen."""
    return await _send(processes, signal.SIGKILL, lambda state: state == "")


async def freeze(processes: Iterable[ProcessRecord]) -> float:
    """SIGSTOP; the instant of the first. Raises FaultDidNotHappen."""
    return await _send(processes, signal.SIGSTOP, lambda state: state == "T")


async def thaw(processes: Iterable[ProcessRecord]) -> float:
    """SIGCONT; the instant of the first. Raises FaultDidNotHappen."""
    return await _send(processes, signal.SIGCONT, lambda state: state in ("R", "S", "D"))


async def _send(
    processes: Iterable[ProcessRecord], number: signal.Signals, done: Callable[[str], bool]
) -> float:
    victims = list(processes)
    if not victims or not all(is_alive(victim) for victim in victims):
        raise FaultDidNotHappen(f"{number.name}: of {victims} not all are alive")
    at = time.monotonic()
    for victim in victims:
        os.kill(victim.pid, number)
    try:
        await until(
            lambda: all(done(state_of(victim)) for victim in victims),
            timeout_s=EFFECT_TIMEOUT_S,
            what=number.name,
        )
    except TimeoutError as error:
        states = {victim.pid: state_of(victim) for victim in victims}
        raise FaultDidNotHappen(f"{number.name} had no effect: states {states}") from error
    return at
