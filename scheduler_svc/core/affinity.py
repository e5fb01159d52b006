"""Where requests with a prefix went before: so that placement asks a few replicas for their cache, not all.

What a replica has cached came from requests that were placed there, so this knows at least as much as all the
caches together, but for what was evicted since; the caches themselves have the last word.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator

from scheduler_svc.core.structures import ReplicaId
from scheduler_svc.core.token_key import TOKEN_BYTES

DEPTHS = (2048, 512, 128, 16)
"""Prefix lengths in tokens by which requests are remembered: the deeper, the fewer replicas share it."""
CAPACITY = 1 << 17
"""Prefixes remembered. One that falls out costs its next request a cache hit on a busy mesh, no more."""


class Affinity:
    """Replicas by prefix, least recently used prefixes forgotten."""

    def __init__(self, capacity: int = CAPACITY) -> None:
        self._capacity = capacity
        self._replicas: OrderedDict[tuple[str, bytes | int], dict[ReplicaId, None]] = OrderedDict()

    def __repr__(self) -> str:
        return f"<Affinity {len(self._replicas)} prefixes>"

    def remember(self, key: bytes, *, salt: str, replica: ReplicaId) -> None:
        """A request with `key` (a `token_key`) went to a replica."""
        for prefix in _prefixes(key):
            place = (salt, prefix)
            known = self._replicas.setdefault(place, {})
            # Last in the order of insertion: the newest is looked at first.
            known.pop(replica, None)
            known[replica] = None
            self._replicas.move_to_end(place)
        while len(self._replicas) > self._capacity:
            self._replicas.popitem(last=False)

    def candidates(self, key: bytes, *, salt: str) -> Iterator[ReplicaId]:
        """Replicas that may have a prefix of `key`: longest prefixes first, newest first, each once."""
        seen: set[ReplicaId] = set()
        for prefix in _prefixes(key):
            for replica in reversed(self._replicas.get((salt, prefix), {})):
                if replica not in seen:
                    seen.add(replica)
                    yield replica

    def forget(self, replica: ReplicaId) -> None:
        """A replica is gone. Its entries are dropped."""
        for known in self._replicas.values():
            known.pop(replica, None)


def _prefixes(key: bytes) -> Iterator[bytes | int]:
    """Long prefixes by their hash, which keeps them small: a clash costs one look into a cache."""
    for depth in DEPTHS:
        end = depth * TOKEN_BYTES
        if len(key) >= end:
            yield key[:end] if depth == DEPTHS[-1] else hash(key[:end])
