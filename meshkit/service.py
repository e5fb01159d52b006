"""A service's life: one uvloop, stop signals, exit codes, the ready file, supervised background work."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import signal
import sys
import tempfile
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from pathlib import Path
from typing import Any, TypeVar

import uvloop

from meshkit.errors import Internal, InvalidArgument, MeshError
from meshkit.telemetry.logging import get_logger

log = get_logger(__name__)

EXIT_OK = 0
EXIT_FAILED = 1
EXIT_BAD_INPUT = 2

T = TypeVar("T")


class StopSignal:
    """The wish to stop, set once; whoever waits on it then drains and returns."""

    def __init__(self) -> None:
        self._event = asyncio.Event()
        self.reason: str | None = None

    def set(self, reason: str) -> None:
        """Ask to stop; the first reason stays."""
        if self.reason is None:
            self.reason = reason
        self._event.set()

    def is_set(self) -> bool:
        """True once somebody asked."""
        return self._event.is_set()

    async def wait(self) -> None:
        """Return when somebody asks."""
        await self._event.wait()


def run_service(main: Callable[[StopSignal], Awaitable[None]], *, name: str) -> int:
    """Run `main` to its end on a fresh uvloop and return the process' exit code.

    SIGTERM and SIGINT set the StopSignal; the second one ends the process at once, as the signal would have.
    0: `main` returned. 2: it raised InvalidArgument (bad configuration or arguments). 1: any other error. A
    MeshError becomes one line on stderr; other exceptions go to the log with their traceback.
    """

    async def run() -> None:
        stop = StopSignal()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, _on_signal, number, stop, name)
        await main(stop)

    spare_the_collector()
    try:
        uvloop.run(run())
    except MeshError as error:
        print(f"{name}: {error.message}", file=sys.stderr, flush=True)
        return EXIT_BAD_INPUT if isinstance(error, InvalidArgument) else EXIT_FAILED
    except Exception:
        log.exception("service failed", service=name)
        return EXIT_FAILED
    return EXIT_OK


def spare_the_collector() -> None:
    """What is here now stays to the process' end: Python's cyclic collector need not look at it ever again.

    A full collection looks at every object: of what a gateway has imported, some 70,000 in 27 ms, in which
    its loop serves nobody; of an executor's libraries several times as many. After this it looks at what came
    since. None goes before: imports leave some 20 objects of rubbish, and to find them among an executor's
    200,000 took 100 ms of its start.
    """
    gc.freeze()
    gc.enable()


def _on_signal(number: signal.Signals, stop: StopSignal, name: str) -> None:
    if stop.is_set():
        print(f"{name}: second {number.name}, ending at once", file=sys.stderr, flush=True)
        os._exit(128 + number)
    log.info("asked to stop", signal=number.name)
    stop.set(number.name)


def write_ready(path: Path, payload: Mapping[str, object]) -> None:
    """Write `payload` as JSON to `path` in one piece: a reader sees nothing or all of it.

    payload: {"service", "pid", "address", "http_address", ...}; the launcher waits for this file.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            json.dump(payload, file)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


async def supervise(body: Coroutine[Any, Any, T], **background: Coroutine[Any, Any, None]) -> T:
    """Run `body` with `background` work beside it that cannot die unseen; returns body's result.

    When `body` ends, the background tasks are cancelled and awaited. When one of them fails, `body` is
    cancelled and that error is raised. A background task may not end before `body`: that too is an error,
    naming it. Put the draining of a service into `body`, so the background work still runs while it drains.

    Raises:
        Internal: a background task returned early. Otherwise what `body` or a background task raised.
    """
    main = asyncio.ensure_future(body)
    tasks = [asyncio.create_task(work, name=name) for name, work in background.items()]
    try:
        await asyncio.wait({main, *tasks}, return_when=asyncio.FIRST_COMPLETED)
        for task in tasks:
            _raise_if_dead(task, early=not main.done())
        return await main
    finally:
        await _cancel_all(main, *tasks)


def _raise_if_dead(task: asyncio.Task[None], *, early: bool) -> None:
    """Raise the error of an ended background task; `early`: the service still runs, so any end is one."""
    if not task.done():
        return
    if task.cancelled():
        raise Internal(f"background task {task.get_name()} was cancelled while the service runs")
    error = task.exception()
    if error is not None:
        raise error
    if early:
        raise Internal(f"background task {task.get_name()} ended while the service runs")


async def _cancel_all(*tasks: asyncio.Task[Any]) -> None:
    for task in tasks:
        task.cancel()
    for task, outcome in zip(tasks, await asyncio.gather(*tasks, return_exceptions=True), strict=True):
        # What made the service stop is raised by `supervise`; this is what went wrong on the way out.
        if isinstance(outcome, Exception):
            log.warning("error while stopping", task=task.get_name(), exc_info=outcome)
