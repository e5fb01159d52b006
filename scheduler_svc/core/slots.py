"""The slots of one replica: who is in which, who has left, and when a slot can be given away again.

A slot is free once the executor knows that it was released, and no step in flight touches its last seat.
"""

from __future__ import annotations

from scheduler_svc.core.errors import IdentityViolated
from scheduler_svc.core.seat import Seat
from scheduler_svc.core.structures import Slot


class SlotTable:
    """Slots 0 to `count` − 1, all free at first, lowest first. `count` is also their ceiling at first."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._ceiling = count
        self._free = [Slot(slot) for slot in reversed(range(count))]
        self._to_release: list[Seat] = []
        self.seats: dict[Slot, Seat] = {}
        """Those in their slots: prefilling and decoding."""
        self.leaving: list[Seat] = []
        """Those out of their slots whose pages a step in flight still touches."""

    def __repr__(self) -> str:
        return f"<SlotTable {len(self.seats)} taken, {len(self._free)} of {self._count} free>"

    @property
    def free_count(self) -> int:
        """Slots that can be taken now."""
        free = len(self._free)
        return max(0, free + self._ceiling - self._count) if self._ceiling < self._count else free

    @property
    def has_vacancy(self) -> bool:
        """Whether there is a slot that nobody is in, though perhaps it cannot be taken yet."""
        return len(self.seats) < self._ceiling

    def set_ceiling(self, count: int) -> None:
        """No more than `count` slots are taken from now on; those in theirs stay."""
        if count > self._count:
            self._free = [Slot(slot) for slot in reversed(range(self._count, count))] + self._free
            self._count = count
        self._ceiling = count

    def holders(self) -> list[Seat]:
        """All that have pages."""
        return [*self.seats.values(), *self.leaving]

    def take(self) -> Slot:
        """A free slot; there must be one."""
        return self._free.pop()

    def enter(self, seat: Seat) -> None:
        """A seat is in the slot that was taken for it."""
        self.seats[seat.slot] = seat

    def leave(self, seat: Seat) -> None:
        """A seat is in its slot no more."""
        del self.seats[seat.slot]
        self._to_release.append(seat)
        self.leaving.append(seat)

    def take_releases(self) -> list[Slot]:
        """The slots that the executor is to be told of as released."""
        released = []
        for seat in self._to_release:
            released.append(seat.slot)
            seat.release_planned = True
            if seat.is_settled:
                self._free.append(seat.slot)
        self._to_release.clear()
        return released

    def settle(self, *, applied_seq: int | None) -> list[Seat]:
        """Those leaving that no step after `applied_seq` touches; None: no step will come any more."""
        settled: list[Seat] = []
        touched: list[Seat] = []
        for seat in self.leaving:
            is_touched = applied_seq is not None and seat.last_step > applied_seq
            (touched if is_touched else settled).append(seat)
        self.leaving = touched
        for seat in settled:
            seat.is_settled = True
            if seat.release_planned:
                self._free.append(seat.slot)
        return settled

    def check(self) -> None:
        """Every slot is in one place.

        Raises:
            IdentityViolated: says which are not.
        """
        out = {seat.slot for seat in (*self.holders(), *self._to_release)}
        if sorted([*self._free, *out]) != list(range(self._count)):
            raise IdentityViolated(f"slots {sorted(self._free)} are free, slots {sorted(out)} are out")
