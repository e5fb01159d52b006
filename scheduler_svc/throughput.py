"""Tokens a second over the last seconds, from a sum that only grows: looked at when somebody scrapes."""

from __future__ import annotations

from collections import deque

WINDOW_S = 10.0
SPACING_S = 1.0


class Throughput:
    """Remembers the sum at some moments of the last `WINDOW_S` seconds: several scrapers see the same.

    now: of a clock that only goes forward, in seconds; the sum is 0 then.
    """

    def __init__(self, now: float) -> None:
        self._moments: deque[tuple[float, int]] = deque([(now, 0)])

    def rate(self, total: int, *, now: float) -> float:
        """How much a second `total` has grown: over the last window, or since the scrape before, if that is
        longer ago.
        """
        moments = self._moments
        while len(moments) > 1 and now - moments[1][0] >= WINDOW_S:
            moments.popleft()
        since, before = moments[0]
        if now - moments[-1][0] >= SPACING_S:
            moments.append((now, total))
        return (total - before) / (now - since) if now > since else 0.0
