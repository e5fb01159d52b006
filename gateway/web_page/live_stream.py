"""One stream of events to each viewer: whole states, the latest only, so a slow reader is behind by one."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from gateway.openai_http.call import Call
from gateway.web_page.feed import Feed

LEAST_GAP_S = 0.2
"""Between two rounds of events: counts of the mesh change with every step, and eyes are slower."""


@dataclass(frozen=True)
class LivePart:
    """Something that is shown. describe: given the revision that the viewer has, what it lacks."""

    kind: str
    feed: Feed
    describe: Callable[[int], dict[str, Any]]


class LiveStream:
    """Sends `parts` to viewers, each whenever it has changed. whole: the feed that theirs belong to."""

    def __init__(self, whole: Feed, parts: Sequence[LivePart]) -> None:
        self._whole = whole
        self._parts = parts
        self._closed = False

    async def serve(self, call: Call) -> None:
        """Everything now, then what changes, until the viewer goes or the gateway stops."""
        await call.begin_events()
        await call.while_connected(self._send(call))

    def close(self) -> None:
        """End all streams."""
        self._closed = True
        self._whole.bump()

    async def _send(self, call: Call) -> None:
        sent = dict.fromkeys((part.kind for part in self._parts), 0)
        seen = 0
        while not self._closed:
            seen = await self._whole.wait_beyond(seen)
            for part in self._parts:
                revision = part.feed.revision
                if revision > sent[part.kind]:
                    event = part.describe(sent[part.kind])
                    sent[part.kind] = revision
                    await call.send_event({"kind": part.kind, **event})
            await asyncio.sleep(LEAST_GAP_S)
        await call.end_events()
