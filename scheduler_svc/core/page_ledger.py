"""The free pages of one replica, as a stack: who holds the others is not its business."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

PageArray = npt.NDArray[np.int32]
"""Page ids, shape [n]."""


class PageLedger:
    """Pages 0 to `page_count` − 1, all free at first."""

    def __init__(self, page_count: int) -> None:
        self.total = page_count
        # Lowest ids on top: they are handed out first, which keeps small runs readable.
        self._stack: PageArray = np.arange(page_count - 1, -1, -1, dtype=np.int32)
        self._free = page_count

    def __repr__(self) -> str:
        return f"<PageLedger {self._free} of {self.total} free>"

    @property
    def free_count(self) -> int:
        """Pages that nobody has."""
        return self._free

    def allocate(self, count: int) -> PageArray | None:
        """`count` pages, shape [count], or None (and nothing taken) where fewer are free."""
        if count > self._free:
            return None
        top = self._free
        self._free = top - count
        taken: PageArray = self._stack[self._free : top][::-1].copy()
        return taken

    def free(self, pages: npt.ArrayLike) -> None:
        """Take back pages. The caller gives each page once; `check_identity` of the batcher proves it."""
        given = np.asarray(pages, dtype=np.int32)
        top = self._free + given.size
        if top > self.total:
            raise ValueError(f"{given.size} pages come back, but only {self.total - self._free} are out")
        self._stack[self._free : top] = given[::-1]
        self._free = top

    def free_pages(self) -> PageArray:
        """A copy of the free page ids, in no promised order."""
        free: PageArray = self._stack[: self._free].copy()
        return free
