"""Who gives up its slot, to go on later from the tokens it has: for want of pages, or for a priority."""

from __future__ import annotations

from collections.abc import Callable, Collection

from scheduler_svc.core.seat import Seat, Ticket

_Order = tuple[bool, int, int, int]


def _first_to_go(seat: Seat) -> _Order:
    """Lowest priority, shortest output, longest input; those admitted as overdue after all others."""
    request = seat.request
    return (seat.ticket.was_overdue, request.priority, len(request.output), -len(request.prompt))


def least_progressed(seats: Collection[Seat]) -> Seat | None:
    """The seat to retract when pages run out; None for the last one: one always goes on."""
    return min(seats, key=_first_to_go) if len(seats) > 1 else None


def give_way(
    ticket: Ticket, seats: Collection[Seat], *, threshold: int, missing: int, pages_of: Callable[[Seat], int]
) -> list[Seat]:
    """The fewest seats that must go, lowest priority first, so that a waiting request finds room.

    Only those go whose priority is lower by at least `threshold`, and none that was admitted as overdue: else
    it might never end. missing: pages wanted; at 0 a slot is wanted. pages_of: what one would bring.
    Returns [] where all that may go would not be enough.
    """
    below = ticket.request.priority - threshold
    able = [seat for seat in seats if seat.request.priority <= below and not seat.ticket.was_overdue]
    victims: list[Seat] = []
    for seat in sorted(able, key=_first_to_go):
        victims.append(seat)
        missing -= pages_of(seat)
        if missing <= 0:
            return victims
    return []
