"""A growing revision that viewers wait on; a change costs nothing while nobody views."""

from __future__ import annotations

import asyncio


class Feed:
    """`bump` at every change; a viewer waits for anything beyond the revision that it has seen.

    whole: what this is a part of; its revision grows, too.
    """

    def __init__(self, whole: Feed | None = None) -> None:
        self.revision = 1
        self._whole = whole
        self._changed = asyncio.Event()

    def bump(self) -> None:
        """Something changed."""
        self.revision += 1
        self._changed.set()
        if self._whole is not None:
            self._whole.bump()

    async def wait_beyond(self, revision: int) -> int:
        """The present revision, as soon as it is greater than `revision`."""
        while self.revision <= revision:
            self._changed.clear()
            await self._changed.wait()
        return self.revision
