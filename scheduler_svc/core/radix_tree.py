"""The prefix cache of one replica: a radix tree over pages of tokens, with reference counts and LRU eviction.

A node holds a run of whole pages. Its edge is the run's tokens as bytes (`token_key`); children are found by
their first page. Depths count pages from the root. Every salt has its own root, so tenants never share.

    depth        0 ............ start ............... end
    node                        [start, end)             its own run
    ancestors    [0, start)                              their runs, root first

A lock on a node pins [0, end): the node and all above it. Unlocked leaves can be evicted, from their tails.
Leaves wait for eviction in a heap that is allowed to be stale: a node has at most one entry, and one that was
used since, locked, or given children is put right when it comes to the top. So a small eviction looks at a
few entries, never at all leaves.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from scheduler_svc.core.errors import IdentityViolated
from scheduler_svc.core.page_ledger import PageArray
from scheduler_svc.core.token_key import TOKEN_BYTES, common_bytes

_NO_PAGES: PageArray = np.empty(0, dtype=np.int32)


class Node:
    """A run of pages. `key` and `pages` are those of [start, end)."""

    __slots__ = (
        "attached", "children", "in_heap", "key", "last_used", "lock_count", "pages", "parent", "salt",
        "start",
    )  # fmt: skip

    def __init__(self, *, parent: Node | None, salt: str, start: int, key: bytes, pages: PageArray) -> None:
        self.parent = parent
        self.salt = salt
        self.start = start
        self.key = key
        self.pages = pages
        self.children: dict[bytes, Node] = {}
        self.lock_count = 0
        self.last_used = 0
        self.in_heap = False
        self.attached = True

    def __repr__(self) -> str:
        return f"<Node [{self.start}, {self.end}) locks={self.lock_count} children={len(self.children)}>"

    @property
    def end(self) -> int:
        """Depth after its run, in pages."""
        return self.start + len(self.pages)


@dataclass(frozen=True, slots=True)
class PrefixMatch:
    """The longest prefix found: `depth` pages, the last of them in `node` (None: nothing was found)."""

    salt: str
    node: Node | None
    depth: int


class RadixTree:
    """All cached prefixes of one replica. Keys are `token_key`s; `page_size` is in tokens."""

    def __init__(self, *, page_size: int) -> None:
        self._page_bytes = page_size * TOKEN_BYTES
        self._roots: dict[str, Node] = {}
        self._heap: list[tuple[int, int, Node]] = []
        self._clock = 0
        self._pushes = 0
        self.page_count = 0
        """Pages in the tree."""
        self.evictable_count = 0
        """Pages in the tree that no lock pins."""

    def __repr__(self) -> str:
        return f"<RadixTree {self.page_count} pages, {self.evictable_count} evictable>"

    # ------------------------------------------------------------ finding

    def match(
        self, key: bytes, *, salt: str = "", limit: int | None = None, touch: bool = True
    ) -> PrefixMatch:
        """The longest cached prefix of whole pages, at most `limit` pages.

        touch: the prefix counts as used now (LRU). The tree's shape does not change.
        """
        pages = len(key) // self._page_bytes
        pages = pages if limit is None else min(pages, limit)
        end_bytes = pages * self._page_bytes
        self._clock += touch
        found, depth_bytes = None, 0
        node = self._roots.get(salt)
        while node is not None and depth_bytes < end_bytes:
            node = node.children.get(key[depth_bytes : depth_bytes + self._page_bytes])
            if node is None:
                break
            found = node
            if touch:
                node.last_used = self._clock
            agreed = self._agreement(node, key, depth_bytes, end_bytes)
            depth_bytes += agreed
            if agreed < len(node.key):
                break
        return PrefixMatch(salt, found, depth_bytes // self._page_bytes)

    def _agreement(self, node: Node, key: bytes, start: int, end: int) -> int:
        """Bytes, in whole pages, of the node's run that `key[start:end]` has too."""
        if start + len(node.key) <= end and key.startswith(node.key, start):
            return len(node.key)
        agreed = min(common_bytes(key, node.key, a_start=start), end - start)
        return agreed - agreed % self._page_bytes

    def still_holds(self, match: PrefixMatch, key: bytes) -> bool:
        """Whether matching `key` again would find the same; looks at the end of the match only."""
        node, depth = match.node, match.depth
        if node is None:
            node = self._roots.get(match.salt)
            if node is None:
                return True
        elif not node.attached or node.start >= depth or depth > node.end:
            return False
        if depth < node.end:
            return True
        next_page = key[depth * self._page_bytes : (depth + 1) * self._page_bytes]
        return next_page not in node.children

    def pages_to(self, node: Node) -> PageArray:
        """Page ids of [0, end) of a node, in order of position, shape [end]."""
        runs: list[PageArray] = []
        above: Node | None = node
        while above is not None:
            runs.append(above.pages)
            above = above.parent
        runs.reverse()
        return np.concatenate(runs)

    # ------------------------------------------------------------ adding

    def insert(self, key: bytes, pages: npt.ArrayLike, *, salt: str = "") -> tuple[int, Node]:
        """Give the tree the pages of `key`, which is as long as `pages` and has at least one.

        Returns (known, node): pages[:known] were cached already under other ids or the same, and stay the
        caller's where the ids differ; pages[known:] are the tree's now. `node` ends where the key ends.
        """
        given = np.asarray(pages, dtype=np.int32)
        if len(key) != given.size * self._page_bytes or not given.size:
            raise ValueError(f"{len(key)} bytes of key for {given.size} pages of {self._page_bytes} bytes")
        match = self.match(key, salt=salt)
        node = self._cut(match)
        if match.depth < given.size:
            node = self._append(node or self._root(salt), key, given, match.depth)
        assert node is not None
        return match.depth, node

    def _root(self, salt: str) -> Node:
        root = self._roots.get(salt)
        if root is None:
            root = self._roots[salt] = Node(parent=None, salt=salt, start=0, key=b"", pages=_NO_PAGES)
        return root

    def _append(self, parent: Node, key: bytes, pages: PageArray, depth: int) -> Node:
        rest = key[depth * self._page_bytes :]
        node = Node(parent=parent, salt=parent.salt, start=depth, key=rest, pages=pages[depth:].copy())
        node.last_used = self._clock
        parent.children[rest[: self._page_bytes]] = node
        self.page_count += len(node.pages)
        self.evictable_count += len(node.pages)
        self._offer(node)
        return node

    def _cut(self, match: PrefixMatch) -> Node | None:
        """The node that ends exactly where the match ends, splitting one where needed."""
        node = match.node
        if node is None or node.end == match.depth:
            return node
        return self._split(node, match.depth)

    def _split(self, node: Node, depth: int) -> Node:
        """A new node takes over [start, depth); `node` keeps [depth, end), so locks on it stay right."""
        parent = node.parent
        assert parent is not None
        count = depth - node.start
        cut = count * self._page_bytes
        upper = Node(
            parent=parent, salt=node.salt, start=node.start, key=node.key[:cut], pages=node.pages[:count]
        )
        upper.lock_count = node.lock_count
        upper.last_used = node.last_used
        parent.children[node.key[: self._page_bytes]] = upper
        node.parent, node.start = upper, depth
        node.key, node.pages = node.key[cut:], node.pages[count:]
        upper.children[node.key[: self._page_bytes]] = node
        return upper

    # ------------------------------------------------------------ pinning

    def lock(self, match: PrefixMatch) -> Node | None:
        """Pin the pages of a match that still holds; the node to unlock, or None for an empty match."""
        node = self._cut(match)
        if node is not None:
            self.lock_node(node)
        return node

    def lock_node(self, node: Node) -> None:
        """Pin [0, end) of a node."""
        above: Node | None = node
        while above is not None:
            if above.lock_count == 0:
                self.evictable_count -= len(above.pages)
            above.lock_count += 1
            above = above.parent

    def unlock(self, node: Node) -> None:
        """Undo one lock."""
        above: Node | None = node
        while above is not None:
            above.lock_count -= 1
            if above.lock_count == 0:
                self.evictable_count += len(above.pages)
                self._offer(above)
            above = above.parent

    def pinned_only_by(self, node: Node) -> int:
        """Pages that one unlock of a locked node would make evictable."""
        pages = 0
        above: Node | None = node
        while above is not None and above.lock_count == 1:
            pages += len(above.pages)
            above = above.parent
        return pages

    # ------------------------------------------------------------ eviction

    def evict(self, count: int) -> PageArray:
        """Take out `count` pages, or as many as no lock pins: least recently used leaves, tails first."""
        taken: list[PageArray] = []
        missing = min(count, self.evictable_count)
        while missing > 0:
            leaf = self._oldest_leaf()
            run = min(missing, len(leaf.pages))
            taken.append(leaf.pages[len(leaf.pages) - run :])
            self._shorten(leaf, run)
            missing -= run
        return np.concatenate(taken) if taken else _NO_PAGES

    def clear(self) -> PageArray:
        """Take out all that no lock pins."""
        return self.evict(self.evictable_count)

    def _offer(self, node: Node) -> None:
        """Put a node on the heap if it can be evicted and is not there yet."""
        if not node.in_heap and not node.lock_count and not node.children and node.parent is not None:
            node.in_heap = True
            self._push(node)

    def _push(self, node: Node) -> None:
        self._pushes += 1  # Breaks ties, so that nodes themselves are never compared.
        heapq.heappush(self._heap, (node.last_used, self._pushes, node))

    def _oldest_leaf(self) -> Node:
        """The evictable leaf used longest ago; it stays on top of the heap. There must be one."""
        while True:
            used, _, node = self._heap[0]
            if not node.attached or node.lock_count or node.children:
                heapq.heappop(self._heap)
                node.in_heap = False
            elif used != node.last_used:
                self._pushes += 1
                heapq.heapreplace(self._heap, (node.last_used, self._pushes, node))
            else:
                return node

    def _shorten(self, leaf: Node, count: int) -> None:
        """Take the last `count` pages off a leaf; without pages it leaves the tree."""
        self.page_count -= count
        self.evictable_count -= count
        left = len(leaf.pages) - count
        if left:
            leaf.pages = leaf.pages[:left]
            leaf.key = leaf.key[: left * self._page_bytes]
            return
        parent = leaf.parent
        assert parent is not None
        del parent.children[leaf.key[: self._page_bytes]]
        leaf.attached = False
        if parent.parent is not None:
            self._offer(parent)
        elif not parent.children:
            parent.attached = False
            del self._roots[parent.salt]

    # ------------------------------------------------------------ checking

    def nodes(self) -> Iterator[Node]:
        """Every node but the roots."""
        todo = list(self._roots.values())
        while todo:
            node = todo.pop()
            todo.extend(node.children.values())
            if node.parent is not None:
                yield node

    def check(self, locked: Iterable[Node]) -> None:
        """Compare shape and counters with what they must be, given the nodes that are locked, once per lock.

        Raises:
            IdentityViolated: says what does not add up.
        """
        wanted: dict[int, int] = {}
        for node in locked:
            above: Node | None = node
            while above is not None:
                wanted[id(above)] = wanted.get(id(above), 0) + 1
                above = above.parent
        pages = evictable = 0
        for node in self.nodes():
            self._check_node(node, wanted.get(id(node), 0))
            pages += len(node.pages)
            evictable += 0 if node.lock_count else len(node.pages)
        if (pages, evictable) != (self.page_count, self.evictable_count):
            raise IdentityViolated(
                f"the tree holds {pages} pages, {evictable} of them evictable; "
                f"it counts {self.page_count} and {self.evictable_count}"
            )

    def _check_node(self, node: Node, lock_count: int) -> None:
        parent = node.parent
        assert parent is not None
        if node.lock_count != lock_count:
            raise IdentityViolated(f"{node!r} should have {lock_count} locks")
        if parent.children.get(node.key[: self._page_bytes]) is not node or parent.end != node.start:
            raise IdentityViolated(f"{node!r} is not where its parent {parent!r} looks for it")
        if not len(node.pages) or len(node.key) != len(node.pages) * self._page_bytes:
            raise IdentityViolated(f"{node!r} has {len(node.key)} bytes of key")
        if not node.lock_count and not node.children and not node.in_heap:
            raise IdentityViolated(f"{node!r} could be evicted, but does not wait for it")
