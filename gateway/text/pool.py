"""A bounded pool of threads for tokenising and rendering, so that a long prompt never stalls the event
loop.
"""

from __future__ import annotations

import asyncio
import contextvars
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

from typing_extensions import ParamSpec

from meshkit.drain_rate import DrainRate
from meshkit.errors import ResourceExhausted

P = ParamSpec("P")
T = TypeVar("T")


class TextPool:
    """Runs functions in `threads` threads; at most `max_waiting` more calls wait for one."""

    def __init__(self, *, threads: int, max_waiting: int) -> None:
        if threads < 1 or max_waiting < 0:
            raise ValueError(
                f"threads has to be at least 1 and max_waiting 0, not {threads} and {max_waiting}"
            )
        self._executor = ThreadPoolExecutor(threads, thread_name_prefix="text")
        self._limit = threads + max_waiting
        self._running = 0
        self._drain = DrainRate(now=time.monotonic())
        # A deque's append and pop are atomic: places are given back from the pool's threads, without a lock
        # that the event loop might wait for.
        self._places: deque[None] = deque([None] * self._limit)

    def __repr__(self) -> str:
        return f"<TextPool free={len(self._places)} of {self._limit}>"

    async def run(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Call `function` in a thread, in the caller's context (traces), and return what it returns or
        raises.

        When the caller is cancelled, a call that waits is dropped; one that runs goes on to its end and keeps
        its thread until then, since a thread cannot be stopped.

        Raises:
            ResourceExhausted: all threads are busy and the queue is full.
        """
        self._take()
        if not self._running:
            self._drain.begin(time.monotonic())
        self._running += 1
        try:
            return await self._submit(partial(function, *args, **kwargs))
        finally:
            self._running -= 1
            self._drain.left(1, time.monotonic())

    def retry_after_s(self) -> float:
        """When to come back to a pool that is full, by the pace at which texts leave it."""
        return self._drain.refuse(1, time.monotonic())

    async def _submit(self, call: Callable[[], T]) -> T:
        context = contextvars.copy_context()
        try:
            future = self._executor.submit(context.run, call)
        except BaseException:
            self._give_back()
            raise
        future.add_done_callback(self._give_back)
        return await asyncio.wrap_future(future)

    async def close(self) -> None:
        """Drop the calls that wait, take no more, and wait for those that run."""
        await asyncio.to_thread(self._executor.shutdown, wait=True, cancel_futures=True)

    def _take(self) -> None:
        try:
            self._places.pop()
        except IndexError:
            wait_s = self.retry_after_s()
            raise ResourceExhausted(
                f"{self._limit} texts are being processed or wait already, which is the limit; "
                f"try again in {wait_s:.3g} s",
                reason="TEXT_POOL_FULL",
                retry_after_s=wait_s,
            ) from None

    def _give_back(self, future: Future[Any] | None = None) -> None:
        del future
        self._places.append(None)
