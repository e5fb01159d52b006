"""The node of the radix tree: a run of whole pages, its place, and how it was used."""

from __future__ import annotations

from array import array

from scheduler_svc.core.token_key import Namespace


class Node:
    """A run of pages, [start, end) of a sequence.

    Its tokens are `base[offset : offset + size]`, as a `token_key`: what a node is cut from is shared, not
    copied, unless that is more than twice of what it uses.
    """

    __slots__ = (
        "attached", "base", "block_hashes", "children", "end", "hits", "in_heap", "last_used", "lock_count",
        "offset", "pages", "parent", "priority", "size", "space", "start",
    )  # fmt: skip

    def __init__(
        self,
        parent: Node | None,
        space: Namespace,
        start: int,
        base: bytes,
        offset: int,
        size: int,
        pages: array[int],
    ) -> None:
        self.parent = parent
        self.space = space
        self.start = start
        self.end = start + len(pages)
        """Depth after its run, in pages."""
        self.base = base
        self.offset = offset
        self.size = size
        """Bytes of the tokens."""
        self.pages = pages
        self.children: dict[bytes, Node] = {}
        self.lock_count = 0
        self.last_used = 0
        """The tree's clock at the last use."""
        self.hits = 0
        """Requests that used it, the one that brought it included."""
        self.priority = 0
        """The highest priority of those."""
        self.block_hashes: list[int] = []
        """One for each page, where KV events are recorded; else empty."""
        self.in_heap = False
        self.attached = True
        if 2 * size < len(base):
            self._copy_own()

    def __repr__(self) -> str:
        return f"<Node [{self.start}, {self.end}) locks={self.lock_count} children={len(self.children)}>"

    @property
    def key(self) -> bytes:
        """A copy of its tokens."""
        return self.base[self.offset : self.offset + self.size]

    def first_page(self, page_bytes: int) -> bytes:
        """The tokens under which its parent knows it."""
        return self.base[self.offset : self.offset + page_bytes]

    def cut_above(self, depth: int, *, page_bytes: int) -> Node:
        """A new node takes over [start, depth); this one keeps [depth, end), so locks on it stay right.

        Both halves were used by the same requests: the new one begins with a copy of the statistics.
        """
        parent, count = self.parent, depth - self.start
        assert parent is not None
        cut = count * page_bytes
        upper = Node(parent, self.space, self.start, self.base, self.offset, cut, self.pages[:count])
        upper.lock_count = self.lock_count
        upper.last_used, upper.hits, upper.priority = self.last_used, self.hits, self.priority
        if self.block_hashes:
            upper.block_hashes, self.block_hashes = self.block_hashes[:count], self.block_hashes[count:]
        parent.children[self.first_page(page_bytes)] = upper
        self.parent, self.start = upper, depth
        self.offset, self.size, self.pages = self.offset + cut, self.size - cut, self.pages[count:]
        if 2 * self.size < len(self.base):
            self._copy_own()
        upper.children[self.first_page(page_bytes)] = self
        return upper

    def drop_tail(self, count: int, *, page_bytes: int) -> None:
        """Give up the last `count` pages, but not all."""
        self.pages = self.pages[: len(self.pages) - count]
        self.end -= count
        self.size -= count * page_bytes
        if 2 * self.size < len(self.base):
            self._copy_own()

    def _copy_own(self) -> None:
        """Let go of what it was cut from."""
        self.base, self.offset = self.key, 0
