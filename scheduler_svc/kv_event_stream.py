"""A worker's prefix cache as a stream: all that it holds, then what changes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

from chipmesh.scheduler.v1alpha1 import admin_pb2
from meshkit.errors import Unavailable
from scheduler_svc.core.batcher import Batcher
from scheduler_svc.core.errors import FellBehind
from scheduler_svc.core.kv_events import AllBlocksCleared, BlocksRemoved, BlocksStored, KvEvent

POLL_S = 0.05
"""Pause between two looks: many steps' events leave as one message, and a step pays nothing for readers."""
MOST_EVENTS = 1000
"""Events of one message."""

Response = admin_pb2.SubscribeKvEventsResponse


async def stream_kv_events(
    batcher: Batcher, *, after_seq: int | None, is_current: Callable[[], bool]
) -> AsyncIterator[Response]:
    """Messages for one reader; recording begins with the first one and goes on. is_current: whether `batcher`
    is still the worker's.

    Raises:
        Unavailable: the executor was replaced, and its cache with it.
    """
    log = batcher.record_kv_events()
    seen = after_seq
    while is_current():
        try:
            if seen is None:
                raise FellBehind(after_seq=0, first_seq=log.first_seq, last_seq=log.last_seq)
            events = log.read(after_seq=seen, limit=MOST_EVENTS)
        except FellBehind:
            snapshot = batcher.kv_snapshot()
            assert snapshot is not None, "events are recorded since the stream began"
            seen = snapshot.seq
            yield Response(snapshot=True, seq=seen, events=[_message(each) for each in snapshot.stored])
            continue
        if events:
            seen = events[-1].seq
            yield Response(seq=seen, events=[_message(each) for each in events])
        else:
            await asyncio.sleep(POLL_S)
    raise Unavailable("the worker's executor was replaced, and its cache is gone; subscribe again")


def _message(event: KvEvent) -> admin_pb2.KvEvent:
    if isinstance(event, BlocksStored):
        stored = admin_pb2.KvBlocksStored(
            block_hashes=event.block_hashes,
            token_ids=event.token_ids,
            block_size=event.block_size,
            cache_salt=event.space.salt,
            adapter=event.space.adapter,
        )
        if event.parent_block_hash is not None:
            stored.parent_block_hash = event.parent_block_hash
        return admin_pb2.KvEvent(stored=stored)
    if isinstance(event, BlocksRemoved):
        return admin_pb2.KvEvent(removed=admin_pb2.KvBlocksRemoved(block_hashes=event.block_hashes))
    assert isinstance(event, AllBlocksCleared)
    return admin_pb2.KvEvent(cleared=admin_pb2.KvBlocksCleared())
