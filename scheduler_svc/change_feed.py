"""A growing revision that watchers can wait on; a change costs nothing while nobody watches."""

from __future__ import annotations

import asyncio


class ChangeFeed:
    """`bump` at every change; a watcher asks for anything beyond the revision that it has seen."""

    def __init__(self) -> None:
        self.revision = 1
        self._changed = asyncio.Event()

    def bump(self) -> None:
        """Something changed."""
        self.revision += 1
        self._changed.set()

    async def wait_beyond(self, revision: int) -> int:
        """The present revision, as soon as it is greater than `revision`."""
        while self.revision <= revision:
            self._changed.clear()
            await self._changed.wait()
        return self.revision
