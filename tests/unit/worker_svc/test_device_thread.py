"""The device thread runs jobs in order, outlives failed ones, and skips those that nobody waits for."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from functools import partial

import pytest

from meshkit.errors import Unavailable
from worker_svc.device_thread import DeviceThread


@pytest.fixture
def device() -> Iterator[DeviceThread]:
    thread = DeviceThread()
    thread.start()
    yield thread
    assert thread.stop(timeout_s=5)


async def test_jobs_run_in_order_on_one_thread_that_is_not_the_loops(device: DeviceThread) -> None:
    seen: list[tuple[int, int]] = []

    def note(number: int) -> None:
        seen.append((number, threading.get_ident()))

    jobs = [device.submit(partial(note, number)) for number in range(20)]
    await asyncio.gather(*jobs)
    assert [n for n, _ in seen] == list(range(20))
    assert len({ident for _, ident in seen}) == 1
    assert seen[0][1] != threading.get_ident()


async def test_a_failed_job_fails_its_future_only(device: DeviceThread) -> None:
    def fail() -> int:
        raise ZeroDivisionError("no")

    with pytest.raises(ZeroDivisionError):
        await device.submit(fail)
    assert await device.submit(lambda: 7) == 7


async def test_even_a_system_exit_does_not_end_the_thread(device: DeviceThread) -> None:
    def leave() -> None:
        raise KeyboardInterrupt

    future = device.submit(leave)
    await asyncio.wait({future})
    assert isinstance(future.exception(), KeyboardInterrupt)
    assert await device.submit(lambda: 1) == 1


async def test_a_job_cancelled_before_its_turn_is_skipped(device: DeviceThread) -> None:
    gate, ran = threading.Event(), []
    first = device.submit(gate.wait)
    second = device.submit(lambda: ran.append("second"))
    second.cancel()
    gate.set()
    await first
    await device.submit(lambda: ran.append("third"))
    assert ran == ["third"]


async def test_it_says_whether_it_works_and_when_it_last_did(device: DeviceThread) -> None:
    assert device.since_last_job() is None
    gate, begun = threading.Event(), threading.Event()

    def work() -> None:
        begun.set()
        gate.wait()

    job = device.submit(work)
    await asyncio.to_thread(begun.wait)
    assert device.busy_for() is not None
    gate.set()
    await job
    assert device.busy_for() is None
    since = device.since_last_job()
    assert since is not None
    assert 0 <= since < 5


async def test_a_stopped_thread_takes_nothing_and_a_hung_one_is_reported() -> None:
    thread, gate = DeviceThread(), threading.Event()
    thread.start()
    job = thread.submit(gate.wait)
    assert not await asyncio.to_thread(thread.stop, timeout_s=0.05)
    with pytest.raises(Unavailable):
        thread.submit(lambda: None)
    gate.set()
    await job
