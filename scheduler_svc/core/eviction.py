"""Which cached prefix is given up first: the eviction policies, and the queue of leaves that they rank.

Every rank only ever grows while a node lives: it is used later, more often, by a higher priority. So a leaf's
entry in the heap may be stale, but never too high: when it comes to the top it is put right, and a small
eviction looks at a few entries, never at all leaves.
"""

from __future__ import annotations

import heapq
from abc import ABC, abstractmethod

from scheduler_svc.core.errors import UnknownEvictionPolicy
from scheduler_svc.core.radix_node import Node

PROTECTED_HITS = 2
"""Uses from which on `slru` protects a node: its maker's, and one that shows that it is shared."""

Rank = tuple[int, int]


class EvictionPolicy(ABC):
    """Ranks unlocked leaves: the lowest goes first. A node's rank must never fall."""

    @abstractmethod
    def rank(self, node: Node) -> Rank:
        """The rank of one node, from how it was used."""


class LeastRecentlyUsed(EvictionPolicy):
    """`lru`: what was used longest ago."""

    def rank(self, node: Node) -> Rank:
        """The last use."""
        return (0, node.last_used)


class LeastFrequentlyUsed(EvictionPolicy):
    """`lfu`: what the fewest requests used; of those, what was used longest ago."""

    def rank(self, node: Node) -> Rank:
        """How many requests used it."""
        return (node.hits, node.last_used)


class SegmentedLeastRecentlyUsed(EvictionPolicy):
    """`slru`: what only its maker used, before all that was used again; in both segments as `lru`."""

    def rank(self, node: Node) -> Rank:
        """The segment, then the last use."""
        return (int(node.hits >= PROTECTED_HITS), node.last_used)


class LowestPriority(EvictionPolicy):
    """`priority`: what only requests of low priority used; of those, what was used longest ago."""

    def rank(self, node: Node) -> Rank:
        """The highest priority that used it."""
        return (node.priority, node.last_used)


EVICTION_POLICIES: dict[str, type[EvictionPolicy]] = {
    "lru": LeastRecentlyUsed,
    "lfu": LeastFrequentlyUsed,
    "slru": SegmentedLeastRecentlyUsed,
    "priority": LowestPriority,
}


def make_eviction_policy(name: str) -> EvictionPolicy:
    """An eviction policy by the name that the field knows it by.

    Raises:
        UnknownEvictionPolicy: lists those known.
    """
    policy = EVICTION_POLICIES.get(name)
    if policy is None:
        raise UnknownEvictionPolicy(name, EVICTION_POLICIES)
    return policy()


class LeafQueue:
    """The leaves that can be evicted, lowest rank first. A node has at most one entry, which may be stale."""

    def __init__(self, policy: EvictionPolicy) -> None:
        self._policy = policy
        self._heap: list[tuple[Rank, int, Node]] = []
        self.pushes = 0
        """Entries made so far: what maintenance cost."""

    def offer(self, node: Node) -> None:
        """File a node if it can be evicted and is not filed yet. Roots cannot."""
        if not node.in_heap and not node.lock_count and not node.children and node.parent is not None:
            node.in_heap = True
            self.pushes += 1  # Breaks ties, so that nodes themselves are never compared.
            heapq.heappush(self._heap, (self._policy.rank(node), self.pushes, node))

    def first(self) -> Node:
        """The evictable leaf to give up first; it stays on top. There must be one."""
        while True:
            filed, _, node = self._heap[0]
            if not node.attached or node.lock_count or node.children:
                heapq.heappop(self._heap)
                node.in_heap = False
                continue
            rank = self._policy.rank(node)
            if rank == filed:
                return node
            self.pushes += 1
            heapq.heapreplace(self._heap, (rank, self.pushes, node))
