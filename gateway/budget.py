"""A budget per minute as a token bucket: pure, its time is given with each call."""

from __future__ import annotations

SECONDS_OF_A_MINUTE = 60.0
ROUNDING = 1e-6


class TokenBucket:
    """Fills with `per_minute` in a minute, evenly, and holds that much at most; it begins full.

    What is spent may be more than it holds: its level is then below zero, and whoever comes next waits for
    that to fill up. So no window of t seconds spends more than per_minute × (1 + t / 60), plus what the last
    one went below zero.

    now: monotonic seconds; a time before the last one counts as the last one.
    """

    __slots__ = ("_at", "_level", "per_minute")

    def __init__(self, per_minute: int, *, now: float) -> None:
        self.per_minute = per_minute
        self._level = float(per_minute)
        self._at = now

    def __repr__(self) -> str:
        return f"<TokenBucket {self._level:g} of {self.per_minute} per minute>"

    def level(self, now: float) -> float:
        """What may be spent; below zero: what has to be waited out."""
        waited_s = max(0.0, now - self._at)
        return min(float(self.per_minute), self._level + waited_s * self.per_minute / SECONDS_OF_A_MINUTE)

    def wait_s(self, now: float) -> float:
        """Seconds until at least 1 may be spent; 0 where it may be now."""
        missing = 1.0 - self.level(now)
        # Who waited exactly so long may be short of 1 by a rounding error.
        return missing * SECONDS_OF_A_MINUTE / self.per_minute if missing > ROUNDING else 0.0

    def spend(self, amount: int, now: float) -> None:
        """Take `amount` out, whether or not it is there; a negative one gives back what was not used."""
        self._level = self.level(now) - amount
        self._at = max(self._at, now)

    def change_limit(self, per_minute: int, now: float) -> None:
        """Another limit from now on: what was spent stays spent."""
        spent = self.per_minute - self.level(now)
        self.per_minute = per_minute
        self._level = per_minute - spent
        self._at = max(self._at, now)
