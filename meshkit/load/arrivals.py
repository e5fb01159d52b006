"""When an open loop sends: gaps drawn from a gamma distribution, Poisson's process at burstiness 1."""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Sequence

from meshkit.errors import InvalidArgument
from meshkit.load.request import LoadRequest


def spread_arrivals(
    requests: Sequence[LoadRequest], *, request_rate: float, burstiness: float = 1.0, seed: int = 0
) -> list[LoadRequest]:
    """The requests with `at_s` set, in their order; of a session only its first request is drawn a gap.

    request_rate: requests per second in the mean, above 0; infinite: all at 0 s.
    burstiness: shape of the gamma distribution, above 0. Below 1 they come in bursts, above 1 more evenly.

    Raises:
        InvalidArgument: a rate or burstiness that is none.
    """
    _require_positive("request_rate", request_rate, finite=False)
    _require_positive("burstiness", burstiness, finite=True)
    draw = random.Random(seed)
    now = 0.0
    begun: set[str] = set()
    spread = []
    for request in requests:
        if request.session not in begun and math.isfinite(request_rate):
            now += draw.gammavariate(burstiness, 1 / (request_rate * burstiness))
        if request.session is not None:
            begun.add(request.session)
        spread.append(dataclasses.replace(request, at_s=now))
    return spread


def _require_positive(field: str, value: float, *, finite: bool) -> None:
    if not value > 0 or (finite and not math.isfinite(value)):
        allowed = "a finite number above 0" if finite else "a number above 0, or inf,"
        raise InvalidArgument(f"{field} is {value}; {allowed} is allowed", field=field)
