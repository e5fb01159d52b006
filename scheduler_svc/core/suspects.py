"""Requests that ran on a replica as it died: which of them did it?

Mostly none: a machine went. But one bad request that kills whatever runs it must not take those beside it
along, which ran on two dead replicas too if all of them are replayed together. So suspects go in small
groups, mostly of one: the next group enters the queue when each of the one before has made a token that it
never made before, and so has passed the place where the replica died. Then it is no suspect any more.
"""

from __future__ import annotations

from collections import OrderedDict
from itertools import islice

from scheduler_svc.core.seat import Ticket

MOST_GROUPS = 32
"""Groups that a crowd of suspects is parted into: a group takes some five steps beside its prefill, and
nobody is to wait for much longer than the replay itself takes."""


class SuspectLine:
    """The suspects of one replica."""

    def __init__(self) -> None:
        self._held: OrderedDict[Ticket, None] = OrderedDict()
        self._tested: set[Ticket] = set()

    def __repr__(self) -> str:
        return f"<SuspectLine {len(self._held)} held, {len(self._tested)} tested>"

    def __len__(self) -> int:
        """Those that are held back."""
        return len(self._held)

    @property
    def is_busy(self) -> bool:
        """Whether there are any: then `next_group` has to be asked when tokens came or a request ended."""
        return bool(self._tested or self._held)

    def held(self) -> list[Ticket]:
        """Those that are held back, in the order in which they came."""
        return list(self._held)

    def lets_through(self, ticket: Ticket) -> bool:
        """Whether a request may enter the queue now; a suspect may have to wait for `next_group`."""
        if not ticket.request.is_suspect or ticket in self._tested:
            return True
        if self._tested:
            self._held[ticket] = None
            return False
        self._tested.add(ticket)
        return True

    def discard(self, ticket: Ticket) -> bool:
        """A request has its last event; whether it was held back. Idempotent."""
        self._tested.discard(ticket)
        return ticket in self._held and self._held.pop(ticket) is None

    def next_group(self) -> list[Ticket]:
        """Clear those that are no suspects any more. Returns who may enter the queue: nobody while one of
        those before is tested.
        """
        for ticket in [each for each in self._tested if not each.request.is_suspect]:
            self._tested.remove(ticket)
            ticket.request.clear()
        if self._tested:
            return []
        group = list(islice(self._held, -(-len(self._held) // MOST_GROUPS)))
        for ticket in group:
            del self._held[ticket]
        self._tested.update(group)
        return group
