"""What a replica's prefix cache holds, as events for routers and indexers: stored, removed, cleared.

A block is a page. Its hash is chained: of its parent's hash and its own tokens, beginning with salt and
adapter, so that equal hashes mean equal prefixes, on every replica. The log is bounded: a reader that fell
behind is told so, takes a snapshot, and goes on from the number that it carries.
"""

from __future__ import annotations

import hashlib
import struct
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from scheduler_svc.core.errors import FellBehind
from scheduler_svc.core.radix_node import Node
from scheduler_svc.core.token_key import Namespace

DEFAULT_CAPACITY = 1_000_000
"""Tokens and hashes that a log keeps: some 12 MB, and minutes of a busy replica."""

_HASH_BYTES = 8


@dataclass(frozen=True, slots=True)
class BlocksStored:
    """A run of blocks was cached. Each is the parent of the next one.

    block_hashes: one for each block, unsigned 64 bits. parent_block_hash: of the block before the first one;
    None for the beginning of a sequence. token_bytes: the blocks' tokens as a `token_key`. block_size: tokens
    of a block.
    """

    seq: int
    block_hashes: tuple[int, ...]
    parent_block_hash: int | None
    token_bytes: bytes
    block_size: int
    space: Namespace

    @property
    def token_ids(self) -> list[int]:
        """The tokens of all blocks, `block_size` for each."""
        tokens: list[int] = np.frombuffer(self.token_bytes, np.uint32).tolist()
        return tokens


@dataclass(frozen=True, slots=True)
class BlocksRemoved:
    """Blocks are cached no more. Those that followed one of them are gone already, or in this event."""

    seq: int
    block_hashes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class AllBlocksCleared:
    """Nothing is cached any more."""

    seq: int


KvEvent = BlocksStored | BlocksRemoved | AllBlocksCleared


@dataclass(frozen=True, slots=True)
class KvSnapshot:
    """All that is cached after event `seq`, as events of that number; parents before what follows them."""

    seq: int
    stored: tuple[BlocksStored, ...]


def chain_hashes(node: Node, *, page_bytes: int) -> list[int]:
    """The hashes of a node's pages; its parent must have its own."""
    above = node.parent
    if above is not None and above.block_hashes:
        last = above.block_hashes[-1].to_bytes(_HASH_BYTES, "little")
    else:
        last = _seed(node.space)
    hashes = []
    for start in range(node.offset, node.offset + node.size, page_bytes):
        last = _digest(last + node.base[start : start + page_bytes])
        hashes.append(int.from_bytes(last, "little"))
    return hashes


def _seed(space: Namespace) -> bytes:
    """The length keeps salt and adapter apart."""
    salt, adapter = space.salt.encode(), space.adapter.encode()
    return _digest(struct.pack("<q", len(salt)) + salt + adapter)


def _digest(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=_HASH_BYTES).digest()


class KvEventLog:
    """The last events of one replica's cache, numbered from 1. `capacity`: tokens and hashes kept at most."""

    def __init__(self, *, page_size: int, capacity: int = DEFAULT_CAPACITY) -> None:
        self._page_size = page_size
        self._capacity = capacity
        self._events: deque[KvEvent] = deque()
        self._size = 0
        self.last_seq = 0
        """Number of the newest event; 0 before the first."""

    def __repr__(self) -> str:
        return f"<KvEventLog {self.first_seq} to {self.last_seq}>"

    @property
    def first_seq(self) -> int:
        """Number of the oldest event kept; of the next one where none is."""
        return self.last_seq + 1 - len(self._events)

    def read(self, *, after_seq: int, limit: int | None = None) -> list[KvEvent]:
        """The events after `after_seq`, oldest first, `limit` at most; [] where the reader has them all.

        Raises:
            FellBehind: some of them are no longer kept, or the number was never given: take a snapshot.
        """
        if not self.first_seq - 1 <= after_seq <= self.last_seq:
            raise FellBehind(after_seq=after_seq, first_seq=self.first_seq, last_seq=self.last_seq)
        wanted = self.last_seq - after_seq
        newest_first = [event for event, _ in zip(reversed(self._events), range(wanted), strict=False)]
        newest_first.reverse()
        return newest_first if limit is None else newest_first[:limit]

    # ------------------------------------------------------------ what the tree tells

    def stored(self, node: Node, *, page_bytes: int) -> None:
        """A node was added; its parent has its hashes."""
        node.block_hashes = chain_hashes(node, page_bytes=page_bytes)
        self._add(self._stored_event(self.last_seq + 1, node))

    def removed(self, node: Node, count: int) -> None:
        """A node loses its last `count` pages."""
        gone = tuple(node.block_hashes[-count:])
        del node.block_hashes[-count:]
        self._add(BlocksRemoved(self.last_seq + 1, gone))

    def cleared(self) -> None:
        """The tree is empty."""
        self._add(AllBlocksCleared(self.last_seq + 1))

    def snapshot(self, nodes: Iterable[Node]) -> KvSnapshot:
        """All that is cached now; `nodes` are the tree's, parents first."""
        return KvSnapshot(self.last_seq, tuple(self._stored_event(self.last_seq, node) for node in nodes))

    def _stored_event(self, seq: int, node: Node) -> BlocksStored:
        above = node.parent
        parent = above.block_hashes[-1] if above is not None and above.block_hashes else None
        return BlocksStored(seq, tuple(node.block_hashes), parent, node.key, self._page_size, node.space)

    def _add(self, event: KvEvent) -> None:
        self.last_seq = event.seq
        self._events.append(event)
        self._size += self._size_of(event)
        while self._size > self._capacity and len(self._events) > 1:
            self._size -= self._size_of(self._events.popleft())

    def _size_of(self, event: KvEvent) -> int:
        if isinstance(event, BlocksStored):
            return len(event.block_hashes) * (1 + self._page_size)
        return len(event.block_hashes) if isinstance(event, BlocksRemoved) else 1
