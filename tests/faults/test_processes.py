"""Signals are verified: a fault without its effect is an error of the run."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from chaos.processes import FaultDidNotHappen, freeze, identify, kill, state_of, thaw, until
from meshkit.cli.processes import ProcessRecord

IGNORES_NOTHING = "import time\nprint(flush=True)\nwhile True: time.sleep(60)"


@pytest.fixture
def sleeper() -> Iterator[ProcessRecord]:
    with subprocess.Popen([sys.executable, "-c", IGNORES_NOTHING], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        yield identify(process.pid)
        process.send_signal(signal.SIGCONT)
        process.kill()


async def test_a_process_is_frozen_thawed_and_killed_and_each_is_seen(sleeper: ProcessRecord) -> None:
    first = await freeze([sleeper])
    assert state_of(sleeper) == "T"
    second = await thaw([sleeper])
    assert state_of(sleeper) in ("S", "R")
    third = await kill([sleeper])
    assert state_of(sleeper) == ""
    assert first < second < third


async def test_killing_what_is_dead_already_is_no_fault(sleeper: ProcessRecord) -> None:
    await kill([sleeper])
    with pytest.raises(FaultDidNotHappen, match="not all are alive"):
        await kill([sleeper])
    with pytest.raises(FaultDidNotHappen):
        await kill([])
    with pytest.raises(FaultDidNotHappen, match="gone"):
        identify(sleeper.pid)


async def test_thawing_a_process_that_another_signal_holds_is_no_fault(
    sleeper: ProcessRecord, monkeypatch: pytest.MonkeyPatch
) -> None:
    await freeze([sleeper])
    # The signal is lost on its way.
    monkeypatch.setattr("chaos.processes.os.kill", lambda pid, number: None)
    monkeypatch.setattr("chaos.processes.EFFECT_TIMEOUT_S", 0.05)
    with pytest.raises(FaultDidNotHappen, match="had no effect"):
        await thaw([sleeper])


async def test_a_wait_that_is_in_vain_says_for_what() -> None:
    with pytest.raises(TimeoutError, match="the moon is blue"):
        await until(lambda: False, timeout_s=0.02, what="the moon is blue")
    event = asyncio.Event()
    asyncio.get_running_loop().call_soon(event.set)
    await until(event.is_set, timeout_s=5, what="set")
