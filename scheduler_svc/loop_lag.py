"""How late the event loop wakes up: the part of health that a process' existence does not show."""

from __future__ import annotations

import asyncio

INTERVAL_S = 0.5


class LoopLag:
    """`seconds`: how much later than asked the last wake-up was."""

    def __init__(self) -> None:
        self.seconds = 0.0

    async def measure(self) -> None:
        """Measure for ever; run it as a background task."""
        loop = asyncio.get_running_loop()
        while True:
            before = loop.time()
            await asyncio.sleep(INTERVAL_S)
            self.seconds = max(0.0, loop.time() - before - INTERVAL_S)
