"""The free pages of one replica, as a stack: who holds the others is not its business."""

from __future__ import annotations

from array import array
from collections.abc import Iterable


class PageLedger:
    """Pages 0 to `page_count` − 1, all free at first."""

    def __init__(self, page_count: int) -> None:
        self.total = page_count
        # Lowest ids on top: they are handed out first, which keeps small runs readable.
        self._stack = array("i", range(page_count - 1, -1, -1))

    def __repr__(self) -> str:
        return f"<PageLedger {self.free_count} of {self.total} free>"

    @property
    def free_count(self) -> int:
        """Pages that nobody has."""
        return len(self._stack)

    def allocate(self, count: int) -> array[int] | None:
        """`count` pages, or None (and nothing taken) where fewer are free."""
        left = len(self._stack) - count
        if left < 0:
            return None
        taken = self._stack[left:]
        del self._stack[left:]
        taken.reverse()
        return taken

    def free(self, pages: Iterable[int]) -> None:
        """Take back pages. The caller gives each page once; `check_identity` of the batcher proves it."""
        given = array("i", pages)  # A copy, of array to array without a conversion of each.
        if len(self._stack) + len(given) > self.total:
            out = self.total - len(self._stack)
            raise ValueError(f"{len(given)} pages come back, but only {out} are out")
        given.reverse()
        self._stack += given

    def free_pages(self) -> array[int]:
        """A copy of the free page ids, in no promised order."""
        return self._stack[:]
