"""How fast something full empties: who finds no room is told when there will be, and not all the same."""

from __future__ import annotations

LEAST_WAIT_S = 0.05
MOST_WAIT_S = 60.0
_SMOOTHING = 1 / 16
"""Weight of the newest departure in the mean time between them."""


class DrainRate:
    """Mean time between departures, per unit that departs (a request, a token).

    Nobody is told less than the time for which nothing has departed: before the first departure that is all
    that is known. Who was refused before is to come back first, so each is told a later time, until
    as much has departed as they wanted.

    now: monotonic seconds, not less than before.
    """

    __slots__ = ("_mean_s", "_owed", "_since")

    def __init__(self, *, now: float) -> None:
        self._since = now
        self._mean_s: float | None = None
        self._owed = 0.0

    def __repr__(self) -> str:
        mean = "unknown" if self._mean_s is None else f"{self._mean_s:.3g} s"
        return f"<DrainRate {mean} a unit, {self._owed:g} refused>"

    def begin(self, now: float) -> None:
        """It was empty until now: the time before tells nothing of how fast it empties."""
        self._since = now

    def left(self, amount: float, now: float) -> None:
        """So many units departed together."""
        if amount <= 0:
            return
        per_unit = max(0.0, now - self._since) / amount
        self._since = max(self._since, now)
        # As many steps towards the newest pace as units went at it.
        weight = 1.0 - (1.0 - _SMOOTHING) ** min(amount, 1000.0)
        self._mean_s = per_unit if self._mean_s is None else self._mean_s + weight * (per_unit - self._mean_s)
        self._owed = max(0.0, self._owed - amount)

    def refuse(self, amount: float, now: float) -> float:
        """Seconds after which one that wants `amount` units should come again, from 0.05 to 60."""
        self._owed += amount
        quiet_s = now - self._since
        return min(max(self._owed * (self._mean_s or 0.0), quiet_s, LEAST_WAIT_S), MOST_WAIT_S)
