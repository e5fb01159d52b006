"""Orders of waiting requests: by a rank that each has, or by its response ratio, which grows while it waits.

In all of them a request of higher priority comes first, and one that was retracted before others of its own.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Callable, Iterable

import numpy as np

from scheduler_svc.core.seat import Ticket
from scheduler_svc.core.structures import Request


class WaitingOrder(ABC):
    """The waiting requests that may be admitted. What is cached of each is told by `ticket.cached_tokens`."""

    @abstractmethod
    def add(self, ticket: Ticket) -> None:
        """One more."""

    @abstractmethod
    def discard(self, ticket: Ticket) -> None:
        """One less; without effect where it is not here."""

    @abstractmethod
    def in_order(self, now: int) -> Iterable[Ticket]:
        """All, the next one first; a later change does not change it. now: number of the step."""


def class_of(ticket: Ticket) -> tuple[int, bool]:
    """What comes before any policy: the priority, and whether it had to give up its slot."""
    return (-ticket.request.priority, not ticket.was_retracted)


class ClassSort:
    """Brings an order into classes; free of charge while all are of one, as they mostly are."""

    def __init__(self) -> None:
        self._counts: Counter[tuple[int, bool]] = Counter()

    def add(self, ticket: Ticket) -> None:
        """One more of its class."""
        self._counts[class_of(ticket)] += 1

    def discard(self, ticket: Ticket) -> None:
        """One less of its class."""
        kind = class_of(ticket)
        self._counts[kind] -= 1
        if not self._counts[kind]:
            del self._counts[kind]

    def sort(self, tickets: list[Ticket]) -> None:
        """Classes one after the other, each in the order given."""
        if len(self._counts) > 1:
            tickets.sort(key=class_of)


class RankedOrder(WaitingOrder):
    """Sorted by a number that stays until the request is added again.

    rank: of a request and the tokens of it that are cached; lower goes first.
    """

    def __init__(self, rank: Callable[[Request, int], float]) -> None:
        self._rank = rank
        self._tickets: list[Ticket] = []

    def add(self, ticket: Ticket) -> None:
        """Found its place by bisection."""
        ticket.rank = self._rank(ticket.request, ticket.cached_tokens)
        insort(self._tickets, ticket, key=_place)

    def discard(self, ticket: Ticket) -> None:
        """Found where its rank says that it is."""
        if self._tickets and self._tickets[0] is ticket:  # Whoever is admitted is the first, mostly.
            del self._tickets[0]
            return
        index = bisect_left(self._tickets, _place(ticket), key=_place)
        if index < len(self._tickets) and self._tickets[index] is ticket:
            del self._tickets[index]

    def in_order(self, now: int) -> Iterable[Ticket]:
        """As they are sorted."""
        return list(self._tickets)


def _place(ticket: Ticket) -> tuple[int, bool, float, int]:
    return (*class_of(ticket), ticket.rank, ticket.request.id)


_FIRST_ROWS = 64


class ResponseRatioOrder(WaitingOrder):
    """Sorted by steps waited per token to compute: in the order of the response ratio, 1 + waited / service.

    All ratios change with every step, each at its own speed, so nothing can be kept sorted: the columns are
    arrays, and an ordering is one pass over them. The row of one that leaves is filled by the last one.
    """

    def __init__(self) -> None:
        self._tickets: list[Ticket] = []
        self._rows: dict[Ticket, int] = {}
        self._since = np.zeros(_FIRST_ROWS)
        self._service = np.ones(_FIRST_ROWS)
        self._ids = np.zeros(_FIRST_ROWS, np.int64)
        self._classes = ClassSort()

    def add(self, ticket: Ticket) -> None:
        """A row more."""
        row = len(self._tickets)
        if row == len(self._since):
            self._since, self._service = np.tile(self._since, 2), np.tile(self._service, 2)
            self._ids = np.tile(self._ids, 2)
        self._since[row] = ticket.waits_since
        self._service[row] = max(1, ticket.request.length - ticket.cached_tokens)
        self._ids[row] = ticket.request.id
        self._rows[ticket] = row
        self._tickets.append(ticket)
        self._classes.add(ticket)

    def discard(self, ticket: Ticket) -> None:
        """A row less."""
        row = self._rows.pop(ticket, None)
        if row is None:
            return
        self._classes.discard(ticket)
        last = self._tickets.pop()
        if last is not ticket:
            self._tickets[row] = last
            self._rows[last] = row
            end = len(self._tickets)
            for column in (self._since, self._service, self._ids):
                column[row] = column[end]

    def in_order(self, now: int) -> Iterable[Ticket]:
        """Highest ratio first; those of equal ratio (as at once after they came) in order of arrival."""
        count = len(self._tickets)
        ratios = (self._since[:count] - now) / self._service[:count]
        tickets = [self._tickets[row] for row in np.lexsort((self._ids[:count], ratios)).tolist()]
        self._classes.sort(tickets)
        return tickets
