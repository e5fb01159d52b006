"""The caches of all replicas followed for one subscriber: who comes, who goes, and what changes at each."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Iterable
from contextlib import aclosing, suppress
from dataclasses import dataclass

from chipmesh.scheduler.v1alpha1 import admin_pb2
from chipmesh.sglang_grpc import smg_common_pb2 as common
from gateway.sglang_grpc.cache_union import CacheUnion
from gateway.sglang_grpc.loads import serving_replicas
from gateway.sglang_grpc.mesh_reader import MeshReader
from meshkit.errors import MeshError, Unavailable

LOOK_S = 1.0
"""Between two looks at which replicas there are."""
_WAITING = 8
"""Messages of replicas that wait for a slow subscriber; the scheduler keeps the rest."""


@dataclass(frozen=True)
class _Replica:
    worker: str
    instance_id: str


@dataclass(frozen=True)
class _News:
    """message: None where the replica's stream is over."""

    replica: _Replica
    message: admin_pb2.SubscribeKvEventsResponse | None


class CacheFeed:
    """One subscriber's view of the caches of `model`'s replicas. salt: of its requests."""

    def __init__(self, reader: MeshReader, *, model: str, salt: str, look_s: float = LOOK_S) -> None:
        self._reader = reader
        self._model = model
        self._look_s = look_s
        self._union = CacheUnion(salt=salt)
        self._news: asyncio.Queue[_News] = asyncio.Queue(_WAITING)
        self._following: dict[_Replica, asyncio.Task[None]] = {}
        self._event_id = 0
        self._ended = asyncio.Event()

    def __repr__(self) -> str:
        return f"<CacheFeed of {len(self._following)} replicas {self._union!r}>"

    def end(self) -> None:
        """The gateway shuts down: `batches` raises Unavailable soon."""
        self._ended.set()

    async def batches(self, *, after: int) -> AsyncGenerator[common.KvEventBatch, None]:
        """Batches numbered from `after` + 1 on. The first is an empty snapshot: what the subscriber has is
        not known here, so it forgets that, and gets all anew.
        """
        sequence = after + 1
        yield _first_batch(sequence)
        looking = asyncio.create_task(self._look(), name="replicas of a cache feed")
        try:
            while True:
                for event in self._take(await self._next_news(looking)):
                    self._event_id += 1
                    event.event_id = self._event_id
                    sequence += 1
                    yield common.KvEventBatch(sequence_number=sequence, timestamp=time.time(), events=[event])
        finally:
            tasks = [looking, *self._following.values()]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _next_news(self, looking: asyncio.Task[None]) -> _News:
        """Raises what ended `looking`: without it no replica would be found any more."""
        waiting = asyncio.ensure_future(self._news.get())
        try:
            await asyncio.wait({waiting, looking}, return_when=asyncio.FIRST_COMPLETED)
            if looking.done():
                looking.result()
            return await waiting
        finally:
            waiting.cancel()

    def _take(self, news: _News) -> Iterable[common.KvCacheEvent]:
        """Changes come one by one: a snapshot of a large cache is never in memory a second time."""
        if news.message is None:
            return self._union.drop(news.replica.instance_id)
        return self._union.apply(news.replica.instance_id, news.message)

    async def _look(self) -> None:
        """Follow each replica that serves; while the scheduler is away there is none."""
        while not self._ended.is_set():
            with suppress(MeshError):  # Streams of replicas end by themselves with it.
                mesh = await self._reader.mesh()
                for status in serving_replicas(mesh, self._model):
                    replica = _Replica(status.worker, status.instance_id)
                    if replica not in self._following:
                        self._following[replica] = asyncio.create_task(self._follow(replica))
            with suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._ended.wait(), self._look_s)
        raise Unavailable("this gateway shuts down; subscribe at another one", reason="DRAINING")

    async def _follow(self, replica: _Replica) -> None:
        try:
            with suppress(MeshError):  # Its executor or the scheduler is gone: so is what it had cached.
                async with aclosing(self._reader.cache_changes(replica.worker)) as messages:
                    async for message in messages:
                        await self._news.put(_News(replica, message))
            await self._news.put(_News(replica, None))
        finally:
            del self._following[replica]


def _first_batch(sequence: int) -> common.KvEventBatch:
    return common.KvEventBatch(
        sequence_number=sequence,
        timestamp=time.time(),
        events=[common.KvCacheEvent(cleared=common.KvCacheCleared())],
        snapshot=common.KvSnapshotChunk(index=0, count=1),
    )
