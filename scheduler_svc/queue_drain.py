"""How fast requests leave the queues for a slot: what a refused one is told to wait."""

from __future__ import annotations

from collections.abc import Callable

from meshkit.drain_rate import DrainRate


class QueueDrain:
    """Counts what waits for its first slot. clock: monotonic seconds."""

    def __init__(self, *, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._waiting = 0
        self._requests = DrainRate(now=clock())
        self._tokens = DrainRate(now=clock())

    def __repr__(self) -> str:
        return f"<QueueDrain {self._waiting} wait, {self._requests!r}>"

    def entered(self, tokens: int) -> None:
        """A request of so many tokens waits."""
        if not self._waiting and tokens:
            self._requests.begin(self._clock())
            self._tokens.begin(self._clock())
        self._waiting += 1

    def left(self, tokens: int) -> None:
        """One waits no more: it has a slot, or has ended."""
        self._waiting -= 1
        now = self._clock()
        self._requests.left(1, now)
        self._tokens.left(tokens, now)

    def refuse(self, what: str, tokens: int) -> float:
        """Seconds until there is room for a request of so many tokens. what: requests or tokens is full."""
        if what == "tokens":
            return self._tokens.refuse(tokens, self._clock())
        return self._requests.refuse(1, self._clock())
