"""Swaps that were begun by the page: they run on when it is closed, and every viewer sees their progress."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import grpc.aio

from chipmesh.scheduler.v1alpha1 import admin_pb2
from gateway.web_page.admin import AdminStub
from gateway.web_page.feed import Feed
from meshkit.errors import MeshError, Unavailable, from_rpc_error
from meshkit.telemetry.logging import get_logger

log = get_logger(__name__)

KEPT_S = 600.0
"""How long one that has ended is shown."""


@dataclass
class _Swap:
    request: admin_pb2.SwapChipRequest
    begun_s: float
    stage: str = ""
    fraction: float = 0.0
    error: str = ""
    ended_s: float | None = None
    heard: asyncio.Event = field(default_factory=asyncio.Event)
    failure: MeshError | None = None


class SwapBoard:
    """The last swap of each worker. clock: monotonic seconds."""

    def __init__(self, *, feed: Feed | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self.feed = feed or Feed()
        self._clock = clock
        self._swaps: dict[str, _Swap] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    async def begin(self, admin: AdminStub, request: admin_pb2.SwapChipRequest) -> None:
        """Order a swap; returns when the scheduler has taken it.

        Raises:
            MeshError: it was refused; the board stays as it was.
        """
        swap = _Swap(request, self._clock())
        task = asyncio.create_task(self._follow(admin, swap), name=f"swap {request.worker}")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        await swap.heard.wait()
        if swap.failure is not None:
            raise swap.failure

    def describe(self) -> list[dict[str, Any]]:
        """Each with "worker", "backend", "stage", "fraction" in [0, 1], "error", "seconds", "over"."""
        now = self._clock()
        self._swaps = {
            worker: swap
            for worker, swap in self._swaps.items()
            if swap.ended_s is None or now - swap.ended_s < KEPT_S
        }
        return [
            {
                "worker": worker,
                "backend": swap.request.backend,
                "stage": swap.stage,
                "fraction": swap.fraction,
                "error": swap.error,
                "seconds": (now if swap.ended_s is None else swap.ended_s) - swap.begun_s,
                "over": swap.ended_s is not None,
            }
            for worker, swap in self._swaps.items()
        ]

    async def close(self) -> None:
        """Follow none any more; the scheduler and the worker go on with them."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _follow(self, admin: AdminStub, swap: _Swap) -> None:
        call = admin.SwapChip(swap.request)
        try:
            async for progress in call:
                self._took(swap, progress)
            if swap.stage != "done":
                raise Unavailable(
                    f"the scheduler ended the swap after stage {swap.stage or 'none'!r}; see what the worker "
                    "runs now"
                )
            self._end(swap, None)
        except grpc.aio.AioRpcError as error:
            self._end(swap, from_rpc_error(error))
        except MeshError as error:
            self._end(swap, error)
        finally:
            call.cancel()
            swap.heard.set()

    def _took(self, swap: _Swap, progress: admin_pb2.SwapChipResponse) -> None:
        # Only now: one that is refused must not hide the one that is running.
        self._swaps[swap.request.worker] = swap
        swap.stage, swap.fraction = progress.stage, progress.fraction
        swap.heard.set()
        self.feed.bump()

    def _end(self, swap: _Swap, error: MeshError | None) -> None:
        swap.ended_s = self._clock()
        if error is not None and not swap.heard.is_set():
            swap.failure = error
        swap.error = "" if error is None else error.message
        log.info("swap ended", worker=swap.request.worker, stage=swap.stage, error=swap.error)
        self.feed.bump()
