"""Room that owners share: nobody who uses up all of it keeps the others out."""

from __future__ import annotations

from collections import Counter

_SLACK = 2


class SharedRoom:
    """`limit` units (requests, tokens).

    Below the limit everybody gets in. At the limit only those who hold less than an even share of it, until
    twice the limit is used. One that is larger than the limit gets in where nothing else is.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.used = 0
        self._held: Counter[str] = Counter()

    def __repr__(self) -> str:
        return f"<SharedRoom {self.used} of {self.limit} used by {len(self._held)}>"

    def held_by(self, owner: str) -> int:
        """What one owner uses."""
        return self._held[owner]

    def has_room(self, owner: str, amount: int) -> bool:
        """Whether `owner` may take `amount` units more."""
        if not self.used or self.used + amount <= self.limit:
            return True
        owners = len(self._held) + (owner not in self._held)
        fits_share = self._held[owner] + amount <= self.limit // owners
        return fits_share and self.used + amount <= _SLACK * self.limit

    def take(self, owner: str, amount: int) -> None:
        """Use `amount` units, whether or not they are there."""
        if amount:
            self.used += amount
            self._held[owner] += amount

    def give_back(self, owner: str, amount: int) -> None:
        """Use them no more."""
        if amount:
            self.used -= amount
            self._held[owner] -= amount
            if not self._held[owner]:
                del self._held[owner]
