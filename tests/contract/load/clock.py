"""A clock that only its server moves, so that what a client measures is known to the last digit."""

from __future__ import annotations

import asyncio
import heapq

from meshkit.load import Clock


class ServedTime:
    """Virtual seconds. A server moves them on, and only once the client has stamped what it sent before."""

    def __init__(self) -> None:
        self.now_s = 1000.0
        self._stamps = 0
        self._due_s: list[float] = []

    @property
    def clock(self) -> Clock:
        """For the driver. Sleeping moves the time."""
        return Clock(now=self._stamp, cpu=lambda: 0.0, sleep=self._sleep)

    def _stamp(self) -> float:
        self._stamps += 1
        return self.now_s

    async def _sleep(self, seconds: float) -> None:
        """Of all that sleep, the one due first moves the time on, once all others had their turn."""
        due_s = self.now_s + seconds
        heapq.heappush(self._due_s, due_s)
        await asyncio.sleep(0)
        while self._due_s[0] < due_s:  # noqa: ASYNC110 - whoever moves the time knows no waiters
            await asyncio.sleep(0)
        self.now_s = due_s
        heapq.heappop(self._due_s)

    @property
    def stamps(self) -> int:
        """How often the client has looked at the clock."""
        return self._stamps

    async def pass_by(self, seconds: float, *, after_stamp: int) -> None:
        """Moves on once the client has looked `after_stamp` times."""
        while self._stamps < after_stamp:  # noqa: ASYNC110 - a stamp is a plain call, made often
            await asyncio.sleep(0)
        self.now_s += seconds
