"""What headers say of when a request runs: for clients and proxies that cannot write into its body.

`x-priority`: as the body's `priority`, which goes before it. `x-request-timeout`: seconds that the caller
waits. `x-envoy-expected-rq-timeout-ms`: the same from an Envoy in between, in milliseconds; the shorter one
counts.
"""

from __future__ import annotations

import math

from starlette.datastructures import Headers

from gateway.validation import MAX_PRIORITY
from meshkit.errors import InvalidArgument

PRIORITY = "x-priority"
TIMEOUT = "x-request-timeout"
ENVOY_TIMEOUT = "x-envoy-expected-rq-timeout-ms"
MAX_TIMEOUT_S = 7 * 24 * 3600.0


def priority_of(headers: Headers, own: int | None) -> int:
    """The priority of a request. own: the body's; None where it has none.

    Raises:
        InvalidArgument: the header holds no priority.
    """
    given = headers.get(PRIORITY)
    if own is not None or given is None:
        return own or 0
    digits = given.strip().removeprefix("-")
    if not (digits.isascii() and digits.isdigit() and len(digits) <= 4 and int(digits) <= MAX_PRIORITY):
        raise InvalidArgument(
            f"{PRIORITY} is {given[:40]!r}; an integer from -{MAX_PRIORITY} to {MAX_PRIORITY} is allowed",
            field=PRIORITY,
        )
    return int(given)


def time_left_s(headers: Headers) -> float | None:
    """Seconds that the caller waits from now on; None: it does not say.

    Raises:
        InvalidArgument: a header holds no such time.
    """
    times = (_seconds(headers, TIMEOUT, unit_s=1.0), _seconds(headers, ENVOY_TIMEOUT, unit_s=0.001))
    return min((each for each in times if each is not None), default=None)


def _seconds(headers: Headers, name: str, *, unit_s: float) -> float | None:
    given = headers.get(name)
    if given is None:
        return None
    try:
        seconds = float(given) * unit_s
    except ValueError:
        seconds = math.nan
    if not 0.0 < seconds <= MAX_TIMEOUT_S:
        raise InvalidArgument(
            f"{name} is {given[:40]!r}; a number above 0 and up to {MAX_TIMEOUT_S / unit_s:.0f} is allowed",
            field=name,
        )
    return seconds
