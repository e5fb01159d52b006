"""What the prefix caches of all replicas hold together, as changes for one reader: pure, no clock, no I/O.

A block is cached while any replica has it. Hashes are chained, so one hash is one prefix everywhere.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice

from chipmesh.scheduler.v1alpha1 import admin_pb2
from chipmesh.sglang_grpc import smg_common_pb2 as common

MOST_BLOCKS = 1024
"""Of one event: some 16,000 tokens, far below the 4 MiB that a client takes by default."""
_SIGN = 1 << 63


class CacheUnion:
    """Blocks by the number of replicas that have them.

    salt: whose prefixes these are. Those of other salts, or of an adapter, are nothing that the reader's
    requests could find, and none of its business.
    """

    def __init__(self, *, salt: str) -> None:
        self._salt = salt
        self._copies: Counter[int] = Counter()
        self._held: dict[str, set[int]] = {}

    def __repr__(self) -> str:
        return f"<CacheUnion {len(self._copies)} blocks of {len(self._held)} replicas>"

    def apply(
        self, replica: str, message: admin_pb2.SubscribeKvEventsResponse
    ) -> Iterator[common.KvCacheEvent]:
        """Take in a message of `replica`; what changes by it."""
        if message.snapshot:
            yield from self._replace(replica, message.events)
            return
        held = self._held.setdefault(replica, set())
        for event in message.events:
            kind = event.WhichOneof("event")
            if kind == "stored":
                yield from self._store(held, event.stored)
            elif kind == "removed":
                yield from self._remove(held, event.removed.block_hashes)
            elif kind == "cleared":
                yield from self._remove(held, list(held))

    def drop(self, replica: str) -> Iterator[common.KvCacheEvent]:
        """A replica is gone, and its cache with it."""
        held = self._held.pop(replica, set())
        yield from self._remove(held, list(held))

    def _replace(self, replica: str, events: Sequence[admin_pb2.KvEvent]) -> Iterator[common.KvCacheEvent]:
        """The events are all that the replica has. What it had before goes last: so no block that it keeps is
        reported as gone in between.
        """
        before, now = self._held.get(replica, set()), set[int]()
        self._held[replica] = now
        for event in events:
            yield from self._store(now, event.stored)
        yield from self._remove(before, list(before))

    def _store(self, held: set[int], stored: admin_pb2.KvBlocksStored) -> Iterator[common.KvCacheEvent]:
        """Runs of blocks that no replica had; a block that one had already ends a run, and is the parent of
        the next.
        """
        if stored.cache_salt != self._salt or stored.adapter:
            return
        parent = stored.parent_block_hash if stored.HasField("parent_block_hash") else None
        event = _run_after(parent)
        for index, block_hash in enumerate(stored.block_hashes):
            is_news = self._add(held, block_hash)
            if event.stored.blocks and (not is_news or len(event.stored.blocks) == MOST_BLOCKS):
                yield event
                event = _run_after(parent)
            if is_news:
                start = index * stored.block_size
                event.stored.blocks.add(
                    block_hash=_signed(block_hash),
                    token_ids=stored.token_ids[start : start + stored.block_size],
                    block_size=stored.block_size,
                )
            else:
                event = _run_after(block_hash)
            parent = block_hash
        if event.stored.blocks:
            yield event

    def _add(self, held: set[int], block_hash: int) -> bool:
        """A replica has it from now on; whether none had it before."""
        if block_hash in held:
            return False
        held.add(block_hash)
        self._copies[block_hash] += 1
        return self._copies[block_hash] == 1

    def _remove(self, held: set[int], hashes: Iterable[int]) -> Iterator[common.KvCacheEvent]:
        """Of the blocks that a replica has no more, those that none has."""
        gone = (each for each in hashes if self._take(held, each))
        while piece := list(islice(gone, MOST_BLOCKS)):
            yield common.KvCacheEvent(
                removed=common.KvBlocksRemoved(block_hashes=[_signed(each) for each in piece])
            )

    def _take(self, held: set[int], block_hash: int) -> bool:
        """A replica has it no more; whether none has it now. One of another salt was never counted."""
        if block_hash not in held:
            return False
        held.remove(block_hash)
        self._copies[block_hash] -= 1
        if self._copies[block_hash]:
            return False
        del self._copies[block_hash]
        return True


def _run_after(parent: int | None) -> common.KvCacheEvent:
    event = common.KvCacheEvent()
    event.stored.SetInParent()
    if parent is not None:
        event.stored.parent_block_hash = _signed(parent)
    return event


def _signed(block_hash: int) -> int:
    """The same 64 bits as the contract carries them."""
    return block_hash - 2 * _SIGN if block_hash >= _SIGN else block_hash
