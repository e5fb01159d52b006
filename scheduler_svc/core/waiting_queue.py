"""The waiting requests of one replica in the order in which they are to be admitted; nobody is last for ever.

**Ageing.** Any order but that of arrival can be used to keep a request waiting: a policy by better ranks, a
priority by higher ones. So there is a bound: whoever has been passed over so often that `patience` requests
have left beyond its turn in the order of arrival is overdue, and goes before all that are not, of whatever
priority. Overdue ones go in order of arrival, so that the bound holds for each of them: as one
admission makes at most one request overdue, and an overdue one is always next, nobody is admitted more than
`patience` + 1 places after its turn. (Who is cancelled leaves too, and so makes others overdue sooner.)
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator

from scheduler_svc.core.page_pool import PagePool
from scheduler_svc.core.policy import SchedulePolicy
from scheduler_svc.core.request_state import State
from scheduler_svc.core.seat import Ticket

PATIENCE = 256
"""Admissions by which a policy or a priority may delay a request. A policy gains by choosing among those that
can run together, which is one batch: some 256 requests on the replicas that we know; a longer delay only
hurts. For priorities it says how long a burst of urgent requests may hold up the others."""


class WaitingQueue:
    """All that wait; `pool` knows what is cached of each."""

    def __init__(self, policy: SchedulePolicy, *, pool: PagePool, patience: int = PATIENCE) -> None:
        self._pool = pool
        self._watches = policy.depends_on_cache
        self._order = policy.make_order()
        self._patience = patience
        self._by_turn: OrderedDict[Ticket, None] = OrderedDict()
        self._arrivals = 0
        self._departures = 0
        self._first_turn = 0
        """Nobody who waits has an earlier turn."""

    def __repr__(self) -> str:
        return f"<WaitingQueue of {len(self)}>"

    def __len__(self) -> int:
        return len(self._by_turn)

    def __iter__(self) -> Iterator[Ticket]:
        """All of them, in the order in which they came here."""
        return iter(self._by_turn)

    def set_policy(self, policy: SchedulePolicy) -> None:
        """Another order for all that wait, and those that come."""
        placed = [ticket for ticket in self if not ticket.is_set_aside]
        for ticket in placed:
            self._displace(ticket)
        self._watches = policy.depends_on_cache
        self._order = policy.make_order()
        for ticket in placed:
            self._place(ticket)

    def add(self, ticket: Ticket, *, now: int) -> None:
        """One more waits, since step `now`. One that comes back has a new turn."""
        ticket.turn = self._arrivals
        ticket.waits_since = now
        ticket.match = None
        ticket.is_set_aside = False
        self._arrivals += 1
        self._by_turn[ticket] = None
        self._place(ticket)

    def remove(self, ticket: Ticket) -> None:
        """One waits no more."""
        del self._by_turn[ticket]
        self._departures += 1
        self._displace(ticket)

    def set_aside(self, ticket: Ticket) -> None:
        """One is not to be admitted until it is resumed, or overdue."""
        ticket.is_set_aside = True
        self._displace(ticket)

    def resume(self, tickets: Iterable[Ticket]) -> None:
        """Those of them that wait and were set aside are not any more."""
        for ticket in tickets:
            if ticket.is_set_aside and ticket in self._by_turn:
                ticket.is_set_aside = False
                self._place(ticket)

    def in_order(self, now: int) -> Iterator[Ticket]:
        """The next one first. Each must have been removed or set aside before the one after it is asked for.

        now: number of the step that is planned.
        """
        self._place_stale()
        for ticket in self._order.in_order(now):
            yield from self._overdue()
            if ticket.state is State.WAITING:
                yield ticket
        yield from self._overdue()

    def is_overdue(self, ticket: Ticket) -> bool:
        """Whether it goes before all that are not."""
        return self._departures - ticket.turn >= self._patience

    def _overdue(self) -> Iterator[Ticket]:
        """Those overdue now, first turn first. Turns ascend, so where one is not, none behind it is."""
        while self._departures - self._first_turn >= self._patience:
            first = next(iter(self._by_turn), None)
            if first is None:
                return
            self._first_turn = first.turn
            if self.is_overdue(first):
                yield first

    # ------------------------------------------------------------ places

    def _place(self, ticket: Ticket) -> None:
        if self._watches:
            match = self._pool.match(ticket)
            ticket.cached_tokens = match.depth * self._pool.page_size
            self._pool.tree.watch(ticket, match, ticket.key)
        self._order.add(ticket)

    def _displace(self, ticket: Ticket) -> None:
        if self._watches:
            self._pool.tree.unwatch(ticket)
        self._order.discard(ticket)

    def _place_stale(self) -> None:
        """Look up anew what changed in the cache, and only that."""
        for ticket in self._pool.tree.take_stale():
            self._order.discard(ticket)
            self._place(ticket)
