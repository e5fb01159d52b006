"""Which group a client's session goes to: a conversation finds its prefix where it was before."""

from __future__ import annotations

from collections import OrderedDict

from scheduler_svc.core.structures import Request

CAPACITY = 1 << 16
"""Sessions remembered, the least recently used forgotten: such a one is placed by weight again."""


class Sessions:
    """Groups by (model, session key)."""

    def __init__(self, capacity: int = CAPACITY) -> None:
        self._capacity = capacity
        self._groups: OrderedDict[tuple[str, str], str] = OrderedDict()

    def __repr__(self) -> str:
        return f"<Sessions {len(self._groups)}>"

    def group_of(self, request: Request) -> str:
        """The group of a request's session; "" where it has none, or a new one."""
        return self._groups.get((request.model, request.session), "") if request.session else ""

    def remember(self, request: Request) -> None:
        """A request was placed in its `group`."""
        if not request.session or request.is_pinned:
            return
        place = (request.model, request.session)
        self._groups[place] = request.group
        self._groups.move_to_end(place)
        if len(self._groups) > self._capacity:
            self._groups.popitem(last=False)
