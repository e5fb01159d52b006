"""The seats that decode, and what each will need at which step, without looking at them step by step.

All of them make one token in every decode step, so the number of the decode step (the tick) says how long
each is: `origin + tick`. What a seat needs next is filed under the tick at which it needs it.
"""

from __future__ import annotations

from array import array
from collections import defaultdict
from dataclasses import dataclass

from scheduler_svc.core.seat import Seat
from scheduler_svc.core.structures import Slot

ROOM_TOKENS = 2
"""A decoding seat has pages for the token of this step and for the next one: a lack shows a step ahead."""


@dataclass(frozen=True, slots=True)
class Roster:
    """Who decodes in a step: slots ascending, and their seats. Shared by steps, never changed."""

    slots: list[Slot]
    seats: list[Seat]


class DecodeSet:
    """All decoding seats of a replica. `page_size` is in tokens."""

    def __init__(self, *, page_size: int, slot_count: int) -> None:
        self._page_size = page_size
        self._by_slot: list[Seat | None] = [None] * slot_count
        self._count = 0
        self._roster: Roster | None = None
        self._spent: defaultdict[int, list[Seat]] = defaultdict(list)
        self._needy: defaultdict[int, list[Seat]] = defaultdict(list)
        self._starving: list[Seat] = []
        self.tick = 0
        """Decode steps planned so far."""

    def __repr__(self) -> str:
        return f"<DecodeSet {self._count} seats at tick {self.tick}>"

    def __len__(self) -> int:
        return self._count

    def make_room(self, slot_count: int) -> None:
        """There are at least so many slots from now on."""
        self._by_slot += [None] * (slot_count - len(self._by_slot))

    def join(self, seat: Seat) -> None:
        """A seat whose known tokens are all planned; the step with the last of them makes one token."""
        self._by_slot[seat.slot] = seat
        self._count += 1
        self._roster = None
        seat.origin = seat.known + 1 - self.tick
        self._spent[seat.ticket.final_tokens + 1 - seat.origin].append(seat)
        self._file_page(seat)

    def discard(self, seat: Seat) -> None:
        """A seat decodes no more. What was filed for it is skipped when its tick comes."""
        if self._is_here(seat):
            self._by_slot[seat.slot] = None
            self._count -= 1
            self._roster = None

    def roster(self) -> Roster:
        """Who decodes now."""
        if self._roster is None:
            seats = [seat for seat in self._by_slot if seat is not None]
            self._roster = Roster([seat.slot for seat in seats], seats)
        return self._roster

    def advance(self) -> None:
        """A decode step was planned."""
        self.tick += 1

    # ------------------------------------------------------------ what comes due

    def take_spent(self) -> list[Seat]:
        """Seats of which every token is planned: they would decode in vain."""
        return [seat for seat in self._spent.pop(self.tick, ()) if self._is_here(seat)]

    @property
    def has_spent(self) -> bool:
        """Whether the last token of a seat has just been planned."""
        return any(self._is_here(seat) for seat in self._spent.get(self.tick, ()))

    def take_needy(self) -> list[Seat]:
        """Seats that want a page now, those that went without one first."""
        due = self._starving + self._needy.pop(self.tick, [])
        self._starving = []
        return [seat for seat in due if self._is_here(seat) and self._wants_page(seat)]

    def pages_ahead(self, seat: Seat, most: int) -> int:
        """Pages that a seat which wants one may still fill, at least 1 and at most `most`."""
        lacking = seat.ticket.final_tokens - self._room(seat)
        return max(1, min(most, -(-lacking // self._page_size)))

    def give_pages(self, seat: Seat, pages: array[int]) -> bool:
        """Append pages to a seat; whether it wants yet another one now."""
        seat.page_ids += pages
        if self._wants_page(seat):
            return True
        self._file_page(seat)
        return False

    def leave_starving(self, seats: list[Seat]) -> None:
        """Seats that got no page; they come first next time."""
        self._starving = seats

    @property
    def can_decode(self) -> bool:
        """Whether there is a seat, and each has a page for the token that it writes in this step."""
        return self._count > 0 and all(
            self._room(seat) >= seat.origin + self.tick for seat in self._starving if self._is_here(seat)
        )

    def _is_here(self, seat: Seat) -> bool:
        return self._by_slot[seat.slot] is seat

    def _room(self, seat: Seat) -> int:
        return len(seat.page_ids) * self._page_size

    def _wants_page(self, seat: Seat) -> bool:
        wanted = min(seat.origin + self.tick + ROOM_TOKENS - 1, seat.ticket.final_tokens)
        return self._room(seat) < wanted

    def _file_page(self, seat: Seat) -> None:
        room = self._room(seat)
        if room < seat.ticket.final_tokens:
            self._needy[room - seat.origin - ROOM_TOKENS + 2].append(seat)
