"""Which gateway a generation is asked of next when one is lost, how soon, and when to give up."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import grpc

from meshkit.errors import InvalidArgument, MeshError

# An accepted generation is asked for again so often at most, over all gateways in turn, with pauses that
# double up to the longest: about 15 s in all, time for a gateway to be started again.
MOST_TRIES = 10
FIRST_PAUSE_S = 0.1
LONGEST_PAUSE_S = 2.0

# A gateway that is gone or shuts down, or has no room for a request that another one had accepted.
_LOST = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.RESOURCE_EXHAUSTED)


def read_gateways(text: str) -> list[str]:
    """Addresses with commas between them.

    Raises:
        InvalidArgument: one of them is empty.
    """
    gateways = [address.strip() for address in text.split(",")]
    if not all(gateways):
        raise InvalidArgument(
            f"gateway is {text!r}; ADDRESS or ADDRESS,ADDRESS,... is allowed, none of them empty",
            field="gateway",
        )
    return gateways


class GatewayTries:
    """The gateways in turn. Until one has accepted each is asked once; then MOST_TRIES times more in all."""

    def __init__(
        self,
        gateways: Sequence[str],
        *,
        timeout_s: float | None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._gateways = gateways
        self._clock = clock
        self._deadline = None if timeout_s is None else clock() + timeout_s
        self._lost = 0
        self._tries = 0

    def __repr__(self) -> str:
        return f"<GatewayTries {self.gateway} {self._tries} of {MOST_TRIES}>"

    @property
    def gateway(self) -> str:
        """The one to ask now."""
        return self._gateways[self._lost % len(self._gateways)]

    @property
    def time_left_s(self) -> float | None:
        """Until the answer must be whole; None for as long as it takes."""
        return None if self._deadline is None else max(0.0, self._deadline - self._clock())

    def pause_after(self, error: MeshError, *, accepted: bool) -> float | None:
        """Seconds until `gateway`, by then the next one, is asked; None where the error stands.

        accepted: a gateway had taken the generation, now or before.
        """
        self._lost += 1
        if not accepted:
            others = error.code is grpc.StatusCode.UNAVAILABLE and self._lost < len(self._gateways)
            return 0.0 if others else None
        self._tries += 1
        if error.code not in _LOST or self._tries > MOST_TRIES:
            return None
        longer_s: float = FIRST_PAUSE_S * 2 ** (self._tries - 1)
        return min(longer_s, LONGEST_PAUSE_S)

    def describe(self, error: MeshError, *, token_count: int) -> str:
        """What happened and what comes next, after `pause_after`."""
        if not self._tries:
            return f"{error.message}; asking {self.gateway}"
        return (
            f"{error.message}; going on after {token_count} tokens at {self.gateway} "
            f"(try {self._tries} of at most {MOST_TRIES})"
        )
