"""The prefix cache of one replica: a radix tree over pages of tokens, with reference counts and eviction.

A node holds a run of whole pages. Its edge is the run's tokens as bytes (`token_key`); children are found by
their first page. Depths count pages from the root. Every namespace (salt and adapter) has its own root, so
tenants never share.

    depth        0 ............ start ............... end
    node                        [start, end)             its own run
    ancestors    [0, start)                              their runs, root first

A lock on a node pins [0, end): the node and all above it. Unlocked leaves can be evicted, from their tails,
in the order of the eviction policy (eviction.py). Looking is no use: a prefix is used when a match is locked.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Generic, TypeAlias

from scheduler_svc.core.errors import IdentityViolated
from scheduler_svc.core.eviction import EvictionPolicy, LeafQueue, LeastRecentlyUsed
from scheduler_svc.core.kv_events import KvEventLog, KvSnapshot
from scheduler_svc.core.match_watch import MatchWatch, W
from scheduler_svc.core.radix_node import Node
from scheduler_svc.core.token_key import TOKEN_BYTES, Namespace, common_bytes

OPEN = Namespace()
"""The namespace of requests without salt and adapter."""

Pages: TypeAlias = "Sequence[int] | array[int]"
"""Page ids; what is no array of 32-bit numbers is converted."""


@dataclass(slots=True)
class PrefixMatch:
    """What is cached of a key: `depth` pages, the last of them in `node` (None: nothing was found)."""

    space: Namespace
    node: Node | None
    depth: int


class RadixTree(Generic[W]):
    """All cached prefixes of one replica. Keys are `token_key`s; `page_size` is in tokens."""

    def __init__(self, *, page_size: int, eviction: EvictionPolicy | None = None) -> None:
        self._page_size = page_size
        self._page_bytes = page_size * TOKEN_BYTES
        self._roots: dict[Namespace, Node] = {}
        self._leaves = LeafQueue(eviction or LeastRecentlyUsed())
        self._clock = 0
        self._log: KvEventLog | None = None
        self._watch: MatchWatch[W] = MatchWatch()
        self.page_count = 0
        """Pages in the tree."""
        self.evictable_count = 0
        """Pages in the tree that no lock pins."""

    def __repr__(self) -> str:
        return f"<RadixTree {self.page_count} pages, {self.evictable_count} evictable>"

    # ------------------------------------------------------------ finding

    def match(self, key: bytes, *, space: Namespace = OPEN, limit: int | None = None) -> PrefixMatch:
        """The longest cached prefix of whole pages, at most `limit` pages. Changes nothing."""
        page_bytes = self._page_bytes
        pages = len(key) // page_bytes
        end_bytes = (pages if limit is None else min(pages, limit)) * page_bytes
        found, depth_bytes = None, 0
        node = self._roots.get(space)
        while node is not None and depth_bytes < end_bytes:
            node = node.children.get(key[depth_bytes : depth_bytes + page_bytes])
            if node is None:
                break
            found, size = node, min(node.size, end_bytes - depth_bytes)
            if not node.base.startswith(key[depth_bytes : depth_bytes + size], node.offset):
                depth_bytes += self._agreement(node, key, depth_bytes, size)
                break
            depth_bytes += size
        return PrefixMatch(space, found, depth_bytes // page_bytes)

    def _agreement(self, node: Node, key: bytes, start: int, size: int) -> int:
        """Bytes, in whole pages, of the node's run that `key[start : start + size]` has too."""
        agreed = common_bytes(key, node.base, a_start=start, b_start=node.offset, most=size)
        return agreed - agreed % self._page_bytes

    def still_holds(self, match: PrefixMatch, key: bytes) -> bool:
        """Whether matching `key` again would find the same; looks at the end of the match only."""
        node, depth = match.node, match.depth
        if node is None:
            node = self._roots.get(match.space)
            if node is None:
                return True
        elif not node.attached or node.start >= depth or depth > node.end:
            return False
        if depth < node.end:
            return True
        next_page = key[depth * self._page_bytes : (depth + 1) * self._page_bytes]
        return next_page not in node.children

    def pages_to(self, node: Node) -> array[int]:
        """Page ids of [0, end) of a node, in order of position."""
        runs: list[array[int]] = []
        above: Node | None = node
        while above is not None:
            runs.append(above.pages)
            above = above.parent
        runs.reverse()
        return array("i", b"".join(runs))

    # ------------------------------------------------------------ being told when a match changes

    def watch(self, watcher: W, match: PrefixMatch, key: bytes) -> None:
        """Have `take_stale` name the watcher once a match of `key`, which holds now, may hold no longer."""
        node, depth = match.node, match.depth
        if node is not None and depth < node.end:
            self._watch.add(watcher, node, depth)
        else:
            next_page = key[depth * self._page_bytes : (depth + 1) * self._page_bytes]
            self._watch.add(watcher, node or match.space, next_page)

    def unwatch(self, watcher: W) -> None:
        """Name the watcher no more. Idempotent."""
        self._watch.discard(watcher)

    def take_stale(self) -> list[W]:
        """Watchers whose match may no longer hold; they watch no more."""
        return self._watch.take_stale()

    # ------------------------------------------------------------ adding

    def insert(
        self, key: bytes, pages: Pages, *, space: Namespace = OPEN, priority: int = 0
    ) -> tuple[int, Node]:
        """Give the tree the pages of `key`, which is as long as `pages` and has at least one.

        Returns (known, node): pages[:known] were cached already under other ids or the same, and stay the
        caller's where the ids differ; pages[known:] are the tree's now, and so is an array that they came in:
        nobody may change it. `node` ends where the key ends. priority: of the request that made them.
        """
        count = len(pages)
        if len(key) != count * self._page_bytes or not count:
            raise ValueError(f"{len(key)} bytes of key for {count} pages of {self._page_bytes} bytes")
        match = self.match(key, space=space)
        node = self._cut(match)
        self._touch(node)
        if match.depth < count:
            node = self._append(node or self._root(space), key, pages, match.depth, priority)
            self.evictable_count += len(node.pages)
        assert node is not None
        self._leaves.offer(node)
        return match.depth, node

    def extend(
        self,
        node: Node | None,
        key: bytes,
        pages: Pages,
        *,
        space: Namespace,
        priority: int,
        take_lock: bool = False,
    ) -> Node | None:
        """Give the tree what follows `node` (None: a beginning): `pages`, and the key of them alone.

        None, and nothing done, where some of it is cached already. take_lock: the caller's lock on `node`
        becomes one on the new node, or is made.
        """
        parent = node or self._root(space)
        if key[: self._page_bytes] in parent.children:
            return None
        self._touch(node)
        new = self._append(parent, key, pages, 0, priority)
        if take_lock:
            new.lock_count = 1
            if node is None:
                parent.lock_count += 1
        else:
            self.evictable_count += len(new.pages)
            self._leaves.offer(new)
        return new

    def _touch(self, node: Node | None) -> None:
        """[0, end) is used now."""
        self._clock += 1
        while node is not None:
            node.last_used = self._clock
            node = node.parent

    def _root(self, space: Namespace) -> Node:
        root = self._roots.get(space)
        if root is None:
            root = self._roots[space] = Node(None, space, 0, b"", 0, 0, array("i"))
        return root

    def _append(self, parent: Node, key: bytes, pages: Pages, first: int, priority: int) -> Node:
        """A node after `parent`, of the pages from number `first` on, and their part of the key."""
        offset = first * self._page_bytes
        own = pages if isinstance(pages, array) else array("i", pages)
        if first:
            own = own[first:]
        node = Node(parent, parent.space, parent.end, key, offset, len(key) - offset, own)
        node.last_used, node.hits, node.priority = self._clock, 1, priority
        first_page = key[offset : offset + self._page_bytes]
        parent.children[first_page] = node
        self.page_count += len(node.pages)
        self._watch.appended(parent if parent.parent is not None else parent.space, first_page)
        if self._log is not None:
            self._log.stored(node, page_bytes=self._page_bytes)
        return node

    def _cut(self, match: PrefixMatch) -> Node | None:
        """The node that ends exactly where the match ends, splitting one where needed."""
        node = match.node
        if node is None or node.end == match.depth:
            return node
        upper = node.cut_above(match.depth, page_bytes=self._page_bytes)
        self._watch.split(node, match.depth)
        return upper

    # ------------------------------------------------------------ pinning

    def lock(self, match: PrefixMatch, *, priority: int = 0) -> Node | None:
        """A request of this priority uses a match that still holds: pin its pages, and count it.

        Returns the node to unlock, or None for an empty match.
        """
        node = above = self._cut(match)
        self._clock += 1
        while above is not None:
            if above.lock_count == 0:
                self.evictable_count -= len(above.pages)
            above.lock_count += 1
            above.last_used = self._clock
            above.hits += 1
            above.priority = max(above.priority, priority)
            above = above.parent
        return node

    def unlock(self, node: Node) -> None:
        """Undo one lock."""
        above: Node | None = node
        while above is not None:
            above.lock_count -= 1
            if above.lock_count == 0:
                self.evictable_count += len(above.pages)
                self._leaves.offer(above)
            above = above.parent

    def pinned_only_by(self, node: Node) -> int:
        """Pages that one unlock of a locked node would make evictable."""
        pages = 0
        above: Node | None = node
        while above is not None and above.lock_count == 1:
            pages += len(above.pages)
            above = above.parent
        return pages

    def unpinned_pages(self, match: PrefixMatch) -> int:
        """Pages of a match that no lock pins: so many fewer could be evicted once it is locked."""
        pinned: Node | None = match.node
        while pinned is not None and not pinned.lock_count:
            pinned = pinned.parent
        return match.depth - (min(pinned.end, match.depth) if pinned is not None else 0)

    # ------------------------------------------------------------ eviction

    def evict(self, count: int) -> array[int]:
        """Take out `count` pages, or as many as no lock pins: leaves in the policy's order, tails first."""
        taken = array("i")
        missing = min(count, self.evictable_count)
        while missing > 0:
            leaf = self._leaves.first()
            run = min(missing, len(leaf.pages))
            taken += leaf.pages[len(leaf.pages) - run :]
            self._shorten(leaf, run)
            missing -= run
        return taken

    def clear(self) -> array[int]:
        """Take out all that no lock pins."""
        log, is_all = self._log, self.evictable_count == self.page_count
        if is_all:
            self._log = None  # One event instead of one for each node.
        taken = self.evict(self.evictable_count)
        self._log = log
        if is_all and log is not None and taken:
            log.cleared()
        return taken

    def _shorten(self, leaf: Node, count: int) -> None:
        """Take the last `count` pages off a leaf; without pages it leaves the tree."""
        self.page_count -= count
        self.evictable_count -= count
        if self._log is not None:
            self._log.removed(leaf, count)
        if count < len(leaf.pages):
            leaf.drop_tail(count, page_bytes=self._page_bytes)
        else:
            self._take_out(leaf)
        self._watch.shortened(leaf)

    def _take_out(self, leaf: Node) -> None:
        parent = leaf.parent
        assert parent is not None
        del parent.children[leaf.first_page(self._page_bytes)]
        leaf.attached = False
        if parent.parent is not None:
            self._leaves.offer(parent)
        elif not parent.children:
            parent.attached = False
            del self._roots[parent.space]

    # ------------------------------------------------------------ events

    def record_events(self, log: KvEventLog) -> None:
        """Tell a log of every change from now on; what is here already is told as stored at once."""
        for node in self.nodes():
            log.stored(node, page_bytes=self._page_bytes)
        self._log = log

    def kv_snapshot(self) -> KvSnapshot | None:
        """All that is cached, numbered by the log's last event; None where no log was given."""
        return self._log.snapshot(self.nodes()) if self._log is not None else None

    # ------------------------------------------------------------ checking

    def nodes(self) -> Iterator[Node]:
        """Every node but the roots, parents before their children."""
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
        if parent.children.get(node.first_page(self._page_bytes)) is not node or parent.end != node.start:
            raise IdentityViolated(f"{node!r} is not where its parent {parent!r} looks for it")
        if not len(node.pages) or not len(node.key) == node.size == len(node.pages) * self._page_bytes:
            raise IdentityViolated(f"{node!r} has {len(node.key)} bytes of key, and {node.size} by its count")
        if not node.lock_count and not node.children and not node.in_heap:
            raise IdentityViolated(f"{node!r} could be evicted, but does not wait for it")
