"""Where ranks meet: a store that all of them reach, and a check-in at it that names who does not come."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any
from urllib.parse import urlsplit

from torch import distributed

from meshkit.errors import DeadlineExceeded, InvalidArgument

_POLL_S = 0.01


def open_store(rendezvous: str, *, group: str, rank: int, world_size: int, timeout_s: float) -> Any:
    """The store at "tcp://HOST:PORT", which rank 0 holds, or "file:///PATH".

    Raises:
        InvalidArgument: another form. DeadlineExceeded: rank 0 did not come.
    """
    place = urlsplit(rendezvous)
    if place.scheme == "file" and place.path:
        return distributed.FileStore(place.path, world_size)  # type: ignore[attr-defined]
    if place.scheme != "tcp" or not place.hostname or not place.port:
        raise InvalidArgument(
            f"rendezvous is {rendezvous!r}; write tcp://HOST:PORT or file:///PATH", field="rendezvous"
        )
    try:
        return distributed.TCPStore(  # type: ignore[attr-defined]
            place.hostname,
            place.port,
            world_size,
            is_master=rank == 0,
            timeout=timedelta(seconds=timeout_s),
            wait_for_workers=False,
        )
    except RuntimeError as error:
        raise _missing(group, world_size, [0]) from error


def check_in(store: Any, key: str, *, group: str, rank: int, world_size: int, deadline: float) -> float:
    """Leave `rank`'s mark under `key` and wait for all others'; returns the seconds left until `deadline`.

    Raises:
        DeadlineExceeded: names the ranks that did not come.
    """
    store.set(f"{key}/{rank}", "here")
    absent = [each for each in range(world_size) if each != rank]
    while absent := [each for each in absent if not store.check([f"{key}/{each}"])]:
        if time.monotonic() >= deadline:
            raise _missing(group, world_size, absent)
        time.sleep(_POLL_S)
    return max(deadline - time.monotonic(), 0.1)


def _missing(group: str, world_size: int, ranks: list[int]) -> DeadlineExceeded:
    names = ", ".join(map(str, ranks))
    return DeadlineExceeded(
        f"group {group!r} of {world_size} ranks: rank {names} did not come in time",
        field="rendezvous",
        reason="RANKS_MISSING",
        missing=names,
    )
