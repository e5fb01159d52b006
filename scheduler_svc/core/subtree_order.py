"""`dfs-weight`: requests in the order of a walk through the prefix tree, heaviest subtrees first."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from scheduler_svc.core.radix_node import Node
from scheduler_svc.core.seat import Ticket
from scheduler_svc.core.token_key import Namespace
from scheduler_svc.core.waiting_order import ClassSort, WaitingOrder

_FRESH_SHARE = 8
"""One in so many may have come since the last walk: an ordering costs what came, not what waits. Those go
last, in order of arrival, until the next walk takes them up. In a short queue every ordering walks."""

_Place = Node | Namespace


class SubtreeWeightOrder(WaitingOrder):
    """The weight of a node is the number of requests whose cached prefix ends in it or below."""

    def __init__(self) -> None:
        self._walked: dict[Ticket, None] = {}
        self._fresh: dict[Ticket, None] = {}
        self._classes = ClassSort()

    def add(self, ticket: Ticket) -> None:
        """To be placed by the next walk."""
        self._fresh[ticket] = None
        self._classes.add(ticket)

    def discard(self, ticket: Ticket) -> None:
        """The weights of the last walk stay: who leaves does not make its siblings lighter than others."""
        for tickets in (self._walked, self._fresh):
            if ticket in tickets:
                del tickets[ticket]
                self._classes.discard(ticket)

    def in_order(self, now: int) -> Iterable[Ticket]:
        """Children before their parents, since they share more; in a node in order of arrival."""
        if len(self._fresh) * _FRESH_SHARE > len(self._walked):
            self._walked = dict.fromkeys(_walk([*self._walked, *self._fresh]))
            self._fresh.clear()
        tickets = [*self._walked, *self._fresh]
        self._classes.sort(tickets)
        return tickets


def _walk(tickets: list[Ticket]) -> Iterator[Ticket]:
    tickets.sort(key=lambda ticket: ticket.request.id)
    own: dict[_Place, list[Ticket]] = {}
    for ticket in tickets:
        assert ticket.match is not None
        own.setdefault(ticket.match.node or ticket.match.space, []).append(ticket)
    weights, below, tops = _weigh(own)
    todo: list[tuple[_Place, bool]] = [(top, False) for top in _lightest_first(tops, weights)]
    while todo:
        place, children_done = todo.pop()
        if children_done:
            yield from own.get(place, ())
        else:
            todo.append((place, True))
            todo.extend((child, False) for child in _lightest_first(below.get(place, ()), weights))


def _weigh(
    own: dict[_Place, list[Ticket]],
) -> tuple[dict[_Place, int], dict[_Place, dict[_Place, None]], dict[_Place, None]]:
    """Weights of all places with requests in them or below, their children among those, the namespaces."""
    weights: dict[_Place, int] = {}
    below: dict[_Place, dict[_Place, None]] = {}
    tops: dict[_Place, None] = {}
    for end, tickets in own.items():
        place = end
        while True:
            is_known = place in weights
            weights[place] = weights.get(place, 0) + len(tickets)
            above = _above(place)
            if above is None:
                tops[place] = None
                break
            if not is_known:
                below.setdefault(above, {})[place] = None
            place = above
    return weights, below, tops


def _above(place: _Place) -> _Place | None:
    """The parent; a root is known by its namespace, as it may not exist."""
    if not isinstance(place, Node):
        return None
    parent = place.parent
    assert parent is not None
    return parent if parent.parent is not None else parent.space


def _lightest_first(places: Iterable[_Place], weights: dict[_Place, int]) -> list[_Place]:
    """As a stack wants them: last in, first out. Of equal weights the one found first has its turn first."""
    return sorted(places, key=weights.__getitem__, reverse=True)[::-1]
