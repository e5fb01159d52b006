"""The waiting requests of one replica in the order in which they are to be admitted; nobody is last for ever.

**Ageing.** Any order but that of arrival can be used to keep a request waiting: a policy by better ranks, a
priority by higher ones. So there is a bound: whoever has been passed over so often that `patience` requests
have left beyond its turn in the order of arrival is overdue, and goes before all that are not, of whatever
priority. Overdue ones go in order of arrival, so that the bound holds for each of them: as one
admission makes at most one request overdue, and an overdue one is always next, nobody is admitted more than
`patience` + 1 places after its turn. (Who is cancelled leaves too, and so makes others overdue sooner.)

**Fair share.** Where requests of several owners wait, the policy orders those of each; of the owners whose
next request has the highest priority, the one that was served least (fair_share.py) has the next turn. An
overdue request counts as of the highest priority that waits, and goes first among its owner's own: the bound
holds for each owner's share of the admissions, so nobody's backlog, however old, goes before all others.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from heapq import merge

from scheduler_svc.core.fair_share import FairShare
from scheduler_svc.core.page_pool import PagePool
from scheduler_svc.core.policy import SchedulePolicy
from scheduler_svc.core.queue_bounds import QueueTally
from scheduler_svc.core.request_state import State
from scheduler_svc.core.seat import Ticket
from scheduler_svc.core.waiting_order import WaitingOrder, class_of

PATIENCE = 256
"""Admissions by which a policy or a priority may delay a request. A policy gains by choosing among those that
can run together, which is one batch: some 256 requests on the replicas that we know; a longer delay only
hurts. For priorities it says how long a burst of urgent requests may hold up the others."""


class _Lane:
    """The waiting requests of one owner."""

    __slots__ = ("by_turn", "first_turn", "order", "owner")

    def __init__(self, owner: str, order: WaitingOrder) -> None:
        self.owner = owner
        self.order = order
        self.by_turn: OrderedDict[Ticket, None] = OrderedDict()
        self.first_turn = 0
        """Nobody who waits here has an earlier turn."""


class _Pass:
    """One walk through a lane in its order, with the next request at hand."""

    __slots__ = ("_next", "_rest", "lane")

    def __init__(self, lane: _Lane, now: int) -> None:
        self.lane = lane
        self._rest = iter(lane.order.in_order(now))
        self._next: Ticket | None = None

    def peek(self) -> Ticket | None:
        """The next one that still waits."""
        while self._next is None or self._next.state is not State.WAITING:
            self._next = next(self._rest, None)
            if self._next is None:
                return None
        return self._next

    def drop(self, ticket: Ticket) -> None:
        """It had its turn."""
        if self._next is ticket:
            self._next = None


class WaitingQueue:
    """All that wait; `pool` knows what is cached of each.

    tally: how many they are, and of whom.
    """

    def __init__(self, policy: SchedulePolicy, *, pool: PagePool, patience: int = PATIENCE) -> None:
        self.tally = QueueTally()
        self._pool = pool
        self._policy = policy
        self._watches = policy.depends_on_cache
        self._patience = patience
        self._lanes: dict[str, _Lane] = {}
        """Of owners with requests that wait."""
        self._shares = FairShare()
        self._arrivals = 0
        self._departures = 0

    def __repr__(self) -> str:
        return f"<WaitingQueue of {len(self)}>"

    def __len__(self) -> int:
        return self.tally.requests

    def __iter__(self) -> Iterator[Ticket]:
        """All of them, in the order in which they came here."""
        return merge(*(lane.by_turn for lane in self._lanes.values()), key=_turn)

    def set_policy(self, policy: SchedulePolicy) -> None:
        """Another order for all that wait, and those that come."""
        placed = [ticket for ticket in self if not ticket.is_set_aside]
        for ticket in placed:
            self._displace(ticket)
        self._policy, self._watches = policy, policy.depends_on_cache
        for lane in self._lanes.values():
            lane.order = policy.make_order()
        for ticket in placed:
            self._place(ticket)

    def add(self, ticket: Ticket, *, now: int) -> None:
        """One more waits, since step `now`. One that comes back has a new turn."""
        ticket.turn = self._arrivals
        ticket.waits_since = now
        ticket.match = None
        ticket.is_set_aside = False
        self._arrivals += 1
        owner = ticket.request.owner
        lane = self._lanes.get(owner)
        if lane is None:
            lane = self._lanes[owner] = _Lane(owner, self._policy.make_order())
            self._shares.enter(owner)
        lane.by_turn[ticket] = None
        self.tally.add(owner, ticket.request.length)
        self._place(ticket)

    def remove(self, ticket: Ticket) -> None:
        """One waits no more."""
        owner = ticket.request.owner
        lane = self._lanes[owner]
        del lane.by_turn[ticket]
        self._departures += 1
        self.tally.remove(owner, ticket.request.length)
        self._displace(ticket)
        if not lane.by_turn:
            del self._lanes[owner]
            self._shares.leave(owner)

    def charge(self, owner: str, *, prompt_tokens: int = 0, output_tokens: int = 0) -> None:
        """So much is computed for an owner."""
        self._shares.charge(owner, prompt_tokens=prompt_tokens, output_tokens=output_tokens)

    def set_aside(self, ticket: Ticket) -> None:
        """One is not to be admitted until it is resumed, or overdue."""
        ticket.is_set_aside = True
        self._displace(ticket)

    def resume(self, tickets: Iterable[Ticket]) -> None:
        """Those of them that wait and were set aside are not any more."""
        for ticket in tickets:
            lane = self._lanes.get(ticket.request.owner)
            if ticket.is_set_aside and lane is not None and ticket in lane.by_turn:
                ticket.is_set_aside = False
                self._place(ticket)

    def in_order(self, now: int) -> Iterator[Ticket]:
        """The next one first. Each must have been removed or set aside before the one after it is asked for.

        now: number of the step that is planned.
        """
        self._place_stale()
        passes = [_Pass(lane, now) for lane in self._lanes.values()]
        while (choice := self._choose(passes)) is not None:
            walk, ticket = choice
            walk.drop(ticket)
            yield ticket

    def is_overdue(self, ticket: Ticket) -> bool:
        """Whether it counts as of the highest priority."""
        return self._departures - ticket.turn >= self._patience

    def _choose(self, passes: list[_Pass]) -> tuple[_Pass, Ticket] | None:
        """The next request of the owner whose turn it is."""
        heads = [(walk, head) for walk in passes if (head := self._head(walk)) is not None]
        if len(heads) < 2:
            return heads[0] if heads else None
        highest = min(class_of(head) for _, head in heads)

        def place(choice: tuple[_Pass, Ticket]) -> tuple[tuple[int, bool], float, int]:
            walk, head = choice
            own = highest if self.is_overdue(head) else class_of(head)
            return own, self._shares.served(walk.lane.owner), head.turn

        return min(heads, key=place)

    def _head(self, walk: _Pass) -> Ticket | None:
        """The next request of one owner: the first overdue one, else by its order.

        Turns ascend, so where the first is not overdue, none behind it is.
        """
        lane = walk.lane
        if self._departures - lane.first_turn >= self._patience:
            first = next(iter(lane.by_turn), None)
            if first is None:
                return None
            lane.first_turn = first.turn
            if self.is_overdue(first):
                return first
        return walk.peek()

    # ------------------------------------------------------------ places

    def _place(self, ticket: Ticket) -> None:
        if self._watches:
            match = self._pool.match(ticket)
            ticket.cached_tokens = match.depth * self._pool.page_size
            self._pool.tree.watch(ticket, match, ticket.key)
        self._lanes[ticket.request.owner].order.add(ticket)

    def _displace(self, ticket: Ticket) -> None:
        if self._watches:
            self._pool.tree.unwatch(ticket)
        self._lanes[ticket.request.owner].order.discard(ticket)

    def _place_stale(self) -> None:
        """Look up anew what changed in the cache, and only that."""
        for ticket in self._pool.tree.take_stale():
            self._lanes[ticket.request.owner].order.discard(ticket)
            self._place(ticket)


def _turn(ticket: Ticket) -> int:
    return ticket.turn
