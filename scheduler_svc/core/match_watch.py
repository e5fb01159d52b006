"""Who must look its prefix up again: told by the changes of the tree, not by asking everybody at every step.

A match ends at a place: a depth inside a node's run, or its end together with the page that would have to
follow. It stays right until the tree changes at that very place, so watchers are filed by place.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Generic, TypeVar

from scheduler_svc.core.radix_node import Node
from scheduler_svc.core.token_key import Namespace

W = TypeVar("W", bound=Hashable)

_Where = bytes | int
"""The page that would follow, for a match that ends with its node; its depth, for one that ends inside."""
_Place = Node | Namespace
"""The node in which a match ends; its namespace where nothing was found."""


class MatchWatch(Generic[W]):
    """Watchers by the place at which their match ends. Sets are dicts here: they keep their order."""

    def __init__(self) -> None:
        self._places: dict[_Place, dict[_Where, dict[W, None]]] = {}
        self._filed: dict[W, tuple[_Place, _Where]] = {}
        self._stale: dict[W, None] = {}

    def __len__(self) -> int:
        return len(self._filed) + len(self._stale)

    def add(self, watcher: W, place: _Place, where: _Where) -> None:
        """Tell when a match that ends there no longer holds. A watcher has one place: the last one."""
        self.discard(watcher)
        self._places.setdefault(place, {}).setdefault(where, {})[watcher] = None
        self._filed[watcher] = (place, where)

    def discard(self, watcher: W) -> None:
        """Forget a watcher. Idempotent."""
        self._stale.pop(watcher, None)
        filed = self._filed.pop(watcher, None)
        if filed is None:
            return
        place, where = filed
        here = self._places[place]
        del here[where][watcher]
        if not here[where]:
            del here[where]
            if not here:
                del self._places[place]

    def take_stale(self) -> list[W]:
        """Those whose match may no longer hold, once each."""
        stale = list(self._stale)
        self._stale.clear()
        return stale

    # ------------------------------------------------------------ what the tree tells

    def appended(self, place: _Place, first_page: bytes) -> None:
        """A node that begins with `first_page` follows `place` now."""
        here = self._places.get(place)
        if here and first_page in here:
            self._spoil(place, here, [first_page])

    def split(self, node: Node, depth: int) -> None:
        """`node` begins at `depth` now; what ends before belongs to another."""
        here = self._places.get(node)
        if here:
            self._spoil(node, here, [at for at in here if isinstance(at, int) and at <= depth])

    def shortened(self, node: Node) -> None:
        """`node` has lost its tail, or is gone."""
        here = self._places.get(node)
        if here:
            end = node.end if node.attached else 0
            self._spoil(node, here, [at for at in here if not isinstance(at, int) or at >= end])

    def _spoil(self, place: _Place, here: dict[_Where, dict[W, None]], wheres: list[_Where]) -> None:
        for where in wheres:
            for watcher in here.pop(where):
                del self._filed[watcher]
                self._stale[watcher] = None
        if not here:
            del self._places[place]
