"""How late an event loop wakes up, and how many tasks it has: that a process exists does not show it."""

from __future__ import annotations

import asyncio
import itertools

from meshkit.telemetry.metrics import Metrics

INTERVAL_S = 0.25
"""More often costs more than it tells: each look is a wake-up of its own in three services of a mesh."""
TASKS_INTERVAL = 4
"""Counting tasks looks at each of them: only every so many intervals."""
# Seconds. 50 ms is what reliability.md allows under attack.
LAG_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0)


class LoopLag:
    """Measures its loop at every `INTERVAL_S` seconds. seconds: how late the last wake-up was.

    Exports chipmesh_loop_lag_seconds, a histogram, and chipmesh_asyncio_tasks: those that had not ended.
    """

    def __init__(self, metrics: Metrics) -> None:
        self.seconds = 0.0
        self._lags = metrics.histogram(
            "loop_lag_seconds", "How much later than asked the event loop wakes up", buckets=LAG_BUCKETS
        )
        self._tasks = metrics.gauge("asyncio_tasks", "Tasks of the event loop that have not ended")

    async def measure(self) -> None:
        """Measure for ever; run it as a background task."""
        loop = asyncio.get_running_loop()
        for number in itertools.count():
            before = loop.time()
            await asyncio.sleep(INTERVAL_S)
            self.seconds = max(0.0, loop.time() - before - INTERVAL_S)
            self._lags.observe(self.seconds)
            if number % TASKS_INTERVAL == 0:
                self._tasks.set(len(asyncio.all_tasks()))
