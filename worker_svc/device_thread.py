"""The one thread that owns the device: it runs jobs in order and hands their outcomes to the event loop."""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

from meshkit.errors import Unavailable
from meshkit.telemetry.logging import get_logger

log = get_logger(__name__)

T = TypeVar("T")
_Job = tuple[Callable[[], Any], "asyncio.Future[Any]", asyncio.AbstractEventLoop]


class DeviceThread:
    """Runs callables one after the other on its own thread.

    A job that raises fails its own future and nothing else. A job whose future was cancelled before its turn
    is skipped. The thread is a daemon: a device that hangs cannot keep the process alive.
    """

    def __init__(self, *, name: str = "device") -> None:
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._stopped = False
        self._last_end: float | None = None
        self._job_start: float | None = None

    def __repr__(self) -> str:
        state = "stopped" if self._stopped else "busy" if self._job_start is not None else "idle"
        return f"<DeviceThread {state}, {self._jobs.qsize()} queued>"

    def start(self) -> None:
        """Start the thread, once."""
        self._thread.start()

    def submit(self, job: Callable[[], T]) -> asyncio.Future[T]:
        """Queue `job`; call it from a running event loop, which gets the outcome.

        Raises:
            Unavailable: the thread was stopped.
        """
        if self._stopped:
            raise Unavailable("the device thread was stopped", reason="STOPPING")
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()
        self._jobs.put((job, future, loop))
        return future

    def since_last_job(self) -> float | None:
        """Seconds since a job ended, whatever its outcome; None before the first."""
        return None if self._last_end is None else time.monotonic() - self._last_end

    def busy_for(self) -> float | None:
        """Seconds that the present job has been running; None when the thread waits."""
        start = self._job_start
        return None if start is None else time.monotonic() - start

    def stop(self, *, timeout_s: float) -> bool:
        """Let the jobs queued so far end and join the thread; False if it still ran after `timeout_s`.

        Blocks: call it when the event loop is idle or from another thread.
        """
        self._stopped = True
        self._jobs.put(None)
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while (item := self._jobs.get()) is not None:
            job, future, loop = item
            if future.cancelled():
                continue
            self._job_start = time.monotonic()
            try:
                outcome: Any = job()
                error: BaseException | None = None
            except BaseException as raised:  # noqa: BLE001 - whatever it is, it belongs to the one who waits
                outcome, error = None, raised
            self._last_end, self._job_start = time.monotonic(), None
            _deliver(loop, future, outcome, error)
            # References held here would keep a step's arrays alive until the next one.
            del item, job, future, outcome, error


def _deliver(
    loop: asyncio.AbstractEventLoop, future: asyncio.Future[Any], outcome: Any, error: BaseException | None
) -> None:
    try:
        loop.call_soon_threadsafe(_settle, future, outcome, error)
    except RuntimeError:
        log.debug("a job ended after its event loop")


def _settle(future: asyncio.Future[Any], outcome: Any, error: BaseException | None) -> None:
    if future.cancelled():
        return
    if error is None:
        future.set_result(outcome)
    else:
        future.set_exception(error)
