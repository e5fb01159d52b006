"""Who computes a prefix that others wait for: several requests with one new prefix compute it once.

A request that shares a long prefix with one that is being prefilled is admitted when that prefix is in the
tree. What a seat computes next is filed under the node at which its cached part ends and the page that comes
then, which is where the search for a waiting request's prefix ends too.
"""

from __future__ import annotations

from scheduler_svc.core.radix_tree import Node, PrefixMatch
from scheduler_svc.core.seat import Seat
from scheduler_svc.core.token_key import TOKEN_BYTES, common_bytes

WORTHWHILE_TOKENS = 32
"""Shared tokens from which on it pays to wait a step or two for them."""

_Place = tuple[Node | str, bytes]


class Neighbours:
    """The prefixes that are being computed on one replica."""

    def __init__(self, *, page_size: int) -> None:
        self._page_bytes = page_size * TOKEN_BYTES
        self._computing: dict[_Place, Seat] = {}

    def file(self, seat: Seat) -> None:
        """A seat is about to compute what follows its shared pages."""
        self.forget(seat)
        page = self._page_at(seat.key, seat.shared)
        if len(page) == self._page_bytes:
            place = (seat.node or seat.request.salt, page)
            if place not in self._computing:
                self._computing[place] = seat
                seat.computing = place

    def forget(self, seat: Seat) -> None:
        """A seat computes nothing that others could wait for."""
        if seat.computing is not None:
            del self._computing[seat.computing]
            seat.computing = None

    def are_worth_waiting_for(self, key: bytes, match: PrefixMatch) -> bool:
        """Whether somebody is computing enough of what follows `match` in `key`."""
        if not self._computing:
            return False
        seat = self._computing.get((match.node or match.salt, self._page_at(key, match.depth)))
        if seat is None:
            return False
        start = match.depth * self._page_bytes
        shared = common_bytes(key, seat.key, a_start=start, b_start=start)
        return shared >= WORTHWHILE_TOKENS * TOKEN_BYTES

    def _page_at(self, key: bytes, index: int) -> bytes:
        return key[index * self._page_bytes : (index + 1) * self._page_bytes]
