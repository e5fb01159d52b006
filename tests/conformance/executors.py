"""Real executors, in a child process or in this one, for tests that check one by its address."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import threading
from collections.abc import Coroutine, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

from plugins.hash.options import HashOptions
from plugins.hash.runner import HashRunner
from plugins.sdk.backend import Backend
from worker_svc.executor.app import Executor
from worker_svc.executor.settings import ExecutorSettings
from worker_svc.plugin_loader import LoadedPlugin

T = TypeVar("T")

_END_S = 20.0


@contextmanager
def running_executor(
    backend: str, options: Mapping[str, str] | None = None, *, environment: Mapping[str, str] | None = None
) -> Iterator[str]:
    """An executor of a back end; its address. It ends with the block, as it does with its parent."""
    process = subprocess.Popen(
        [sys.executable, "-m", "worker_svc.executor"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=environment,
    )
    settings = {"backend": backend, "instance_id": "conformance", "backend_options": dict(options or {})}
    if process.stdin is None or process.stdout is None:
        raise RuntimeError("the executor has no pipes")
    try:
        process.stdin.write(json.dumps({**settings, "log_level": "warning"}).encode() + b"\n")
        process.stdin.flush()
        yield json.loads(process.stdout.readline())["address"]
    finally:
        process.stdin.close()
        try:
            process.wait(_END_S)
        finally:
            process.kill()
            process.wait()
            process.stdout.close()


@contextmanager
def serving(backend: Backend) -> Iterator[str]:
    """An executor of a back end that was made here, served by a thread of this process; its address. The
    runner is any: no check runs a model.
    """
    settings = ExecutorSettings(backend=backend.info().name, instance_id="conformance")

    async def make() -> Executor:
        return Executor(settings, load=lambda: LoadedPlugin(backend, HashRunner(HashOptions())))

    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="executor")
    thread.start()

    def run(work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, loop).result(_END_S)

    try:
        executor = run(make())
        yield run(executor.start())
        run(executor.stop(1.0))
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()
