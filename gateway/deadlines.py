"""When the clients of live requests stop waiting: whoever made none till then has failed, wherever it is."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from gateway.live_request import LiveRequest
from meshkit.errors import DeadlineExceeded


class Deadlines:
    """One timer for each live request that has a deadline.

    expire: ends a request with an error, here and at the scheduler. clock: monotonic seconds, as deadlines
    are.
    """

    def __init__(
        self, expire: Callable[[LiveRequest, DeadlineExceeded], None], *, clock: Callable[[], float]
    ) -> None:
        self._expire = expire
        self._clock = clock
        self._timers: dict[LiveRequest, asyncio.TimerHandle] = {}

    def __len__(self) -> int:
        return len(self._timers)

    def check(self, deadline: float | None) -> None:
        """Raise DeadlineExceeded where it has passed already: nothing is begun for nobody."""
        if deadline is not None and self._clock() >= deadline:
            raise DeadlineExceeded("the deadline passed before the request was sent on; allow more time")

    def watch(self, live: LiveRequest) -> None:
        """End it when its deadline passes, unless it is dropped before."""
        if live.deadline is not None and not live.has_ended:
            loop = asyncio.get_running_loop()
            left_s = max(0.0, live.deadline - self._clock())
            self._timers[live] = loop.call_later(left_s, self._pass, live, left_s)

    def drop(self, live: LiveRequest) -> None:
        """It has ended. Idempotent."""
        timer = self._timers.pop(live, None)
        if timer is not None:
            timer.cancel()

    def _pass(self, live: LiveRequest, allowed_s: float) -> None:
        made = len(live.token_ids)
        error = DeadlineExceeded(
            f"the deadline passed {allowed_s:.3g} s after the request was sent on, with {made} output "
            "tokens; allow more time or ask for less",
            output_tokens=made,
        )
        self._expire(live, error)
