"""The waiting requests of one replica in the order in which they are to be admitted."""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable

from scheduler_svc.core.policy import SchedulePolicy
from scheduler_svc.core.seat import Ticket


class WaitingQueue:
    """Ordered by priority (higher first), then retracted ones, then the policy's rank, then age.

    matched_tokens: the cached tokens of a waiting request, for policies that ask.
    """

    def __init__(self, policy: SchedulePolicy, *, matched_tokens: Callable[[Ticket], int]) -> None:
        self._policy = policy
        self._matched_tokens = matched_tokens
        self._tickets: list[Ticket] = []

    def __repr__(self) -> str:
        return f"<WaitingQueue of {len(self._tickets)}>"

    def __len__(self) -> int:
        return len(self._tickets)

    def add(self, ticket: Ticket) -> None:
        """One more waits."""
        ticket.match = None
        self._rank(ticket)
        insort(self._tickets, ticket, key=_place)

    def remove(self, ticket: Ticket) -> None:
        """One waits no more."""
        self._tickets.remove(ticket)

    def in_order(self) -> list[Ticket]:
        """All of them, the next one first; a new list."""
        if self._policy.depends_on_cache:
            for ticket in self._tickets:
                self._rank(ticket)
            self._tickets.sort(key=_place)
        return list(self._tickets)

    def _rank(self, ticket: Ticket) -> None:
        ticket.rank = self._policy.rank(ticket.request, lambda: self._matched_tokens(ticket))


def _place(ticket: Ticket) -> tuple[int, bool, float, int]:
    return (-ticket.request.priority, not ticket.was_retracted, ticket.rank, ticket.request.id)
