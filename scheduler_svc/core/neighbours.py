"""Who computes a prefix that others wait for: several requests with one new prefix compute it once.

A request that shares a long prefix with one that is being prefilled is admitted when that prefix is in the
tree. What a seat computes next is filed under the node at which its cached part ends and the page that comes
then, which is where the search for a waiting request's prefix ends too. Those that wait for a seat are kept
with it, by how much they share, so that a thousand of them cost nothing while it computes.
"""

from __future__ import annotations

import heapq
import itertools

from scheduler_svc.core.radix_node import Node
from scheduler_svc.core.radix_tree import PrefixMatch
from scheduler_svc.core.seat import Seat, Ticket
from scheduler_svc.core.token_key import TOKEN_BYTES, Namespace, common_bytes

WORTHWHILE_TOKENS = 32
"""Shared tokens from which on it pays to wait a step or two for them."""

_WORTHWHILE_BYTES = WORTHWHILE_TOKENS * TOKEN_BYTES
_Place = tuple[Node | Namespace, bytes]


class Neighbours:
    """The prefixes that are being computed on one replica, and who waits for each."""

    def __init__(self, *, page_size: int) -> None:
        self._page_bytes = page_size * TOKEN_BYTES
        self._computing: dict[_Place, Seat] = {}
        self._waiting: dict[Seat, list[tuple[int, int, Ticket]]] = {}
        self._resumed: list[Ticket] = []
        self._numbers = itertools.count()  # Break ties, so that tickets themselves are never compared.

    def file(self, seat: Seat) -> None:
        """A seat is about to compute what follows its shared pages."""
        self._clear_place(seat)
        page = self._page_at(seat.key, seat.shared)
        is_enough = len(seat.key) - seat.shared * self._page_bytes >= _WORTHWHILE_BYTES
        if is_enough and len(page) == self._page_bytes:
            place = (seat.node or seat.ticket.space, page)
            if place not in self._computing:
                self._computing[place] = seat
                seat.computing = place
        self._resume(seat)

    def forget(self, seat: Seat) -> None:
        """A seat computes nothing that others could wait for. Idempotent."""
        if seat.computing is not None:
            self._clear_place(seat)
            self._resume(seat)

    def keeps_waiting(self, ticket: Ticket, match: PrefixMatch) -> bool:
        """Whether somebody computes enough of what follows `match`; then the ticket waits for that one."""
        if not self._computing:
            return False
        key = ticket.key
        seat = self._computing.get((match.node or match.space, self._page_at(key, match.depth)))
        if seat is None:
            return False
        start = match.depth * self._page_bytes
        shared = common_bytes(key, seat.key, a_start=start, b_start=start)
        if shared < _WORTHWHILE_BYTES:
            return False
        heapq.heappush(self._waiting.setdefault(seat, []), (start + shared, next(self._numbers), ticket))
        return True

    def take_resumed(self) -> list[Ticket]:
        """Those for whom nobody computes enough any more. Some may wait no longer."""
        resumed, self._resumed = self._resumed, []
        return resumed

    def _clear_place(self, seat: Seat) -> None:
        if seat.computing is not None:
            del self._computing[seat.computing]
            seat.computing = None

    def _resume(self, seat: Seat) -> None:
        """Let go those that share too little of what the seat computes from now on."""
        waiting = self._waiting.get(seat)
        if waiting is None:
            return
        enough = seat.shared * self._page_bytes + _WORTHWHILE_BYTES
        while waiting and (seat.computing is None or waiting[0][0] < enough):
            self._resumed.append(heapq.heappop(waiting)[2])
        if not waiting:
            del self._waiting[seat]

    def _page_at(self, key: bytes, index: int) -> bytes:
        return key[index * self._page_bytes : (index + 1) * self._page_bytes]
