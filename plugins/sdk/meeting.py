"""Where the ranks of a group meet: a store that all of them reach, and what each has come to so far."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from torch import distributed

from meshkit.address import is_loopback
from meshkit.errors import DeadlineExceeded, InvalidArgument, Unavailable


class Meeting:
    """One rank's view of its group. Each rank writes the number of its latest call and never waits for the
    others' (5 to 10 us); they are read only when a call failed, to name who had not come to it.
    """

    def __init__(self, store: Any, *, group: str, rank: int, world_size: int) -> None:
        self._marks = distributed.PrefixStore(f"chipmesh/{group}", store)  # type: ignore[attr-defined]
        self._group = group
        self._rank = rank
        self._world_size = world_size
        self.is_lost = False
        """Whether the store was found to be gone: with whoever held it, who may be in another group."""

    def join(self, *, timeout_s: float) -> None:
        """Come, and wait until all ranks have.

        Raises:
            DeadlineExceeded: names the ranks that did not come. Unavailable: the store was lost.
        """
        self.arrive(0)
        try:
            self._marks.wait([str(rank) for rank in range(self._world_size)], timedelta(seconds=timeout_s))
        except RuntimeError as error:
            absent = self.absent(0)
            if absent:
                raise ranks_missing(self._group, self._world_size, absent) from error
            raise Unavailable(f"the meeting point of group {self._group!r} was lost: {error}") from error

    def hear_first(self, topic: str, text: str, *, timeout_s: float) -> str:
        """What rank 0 says of a topic; `text` is what this rank would say. Once a topic.

        Raises:
            DeadlineExceeded: rank 0 did not come. Unavailable: the store was lost.
        """
        try:
            if self._rank == 0:
                self._marks.set(topic, text)
                return text
            self._marks.wait([topic], timedelta(seconds=timeout_s))
            return str(self._marks.get(topic).decode())
        except RuntimeError as error:
            if self.absent(0):
                raise ranks_missing(self._group, self._world_size, [0]) from error
            raise Unavailable(
                f"rank 0 of group {self._group!r} did not say its {topic}: {error}", reason="RANK_LOST"
            ) from error

    def arrive(self, call: int) -> None:
        """Tell that this rank has come to its call of that number; numbers grow.

        Raises:
            Unavailable: the store was lost.
        """
        try:
            self._marks.set(str(self._rank), str(call))
        except RuntimeError as error:
            self.is_lost = True
            raise Unavailable(
                f"the meeting point of group {self._group!r} was lost: {error}",
                reason="RANK_LOST",
                meeting_point="lost",
            ) from error

    def absent(self, call: int) -> list[int]:
        """Ranks that have not come to that call yet. Where the store is gone it is rank 0, which held it."""
        try:
            return [rank for rank in range(self._world_size) if not self._has_come(rank, call)]
        except RuntimeError:
            self.is_lost = True
            return [0]

    def _has_come(self, rank: int, call: int) -> bool:
        return bool(self._marks.check([str(rank)]) and int(self._marks.get(str(rank))) >= call)


def open_store(rendezvous: str, *, group: str, rank: int, world_size: int, timeout_s: float) -> Any:
    """The store at "tcp://HOST:PORT", which rank 0 holds, or "file:///PATH" on one host, for tests and tools.
    A file grows by some bytes a call, and serves one life of a group: beginning anew takes a new one.

    Raises:
        InvalidArgument: another form. DeadlineExceeded: rank 0 did not come.
    """
    place = urlsplit(rendezvous)
    if place.scheme == "file" and place.path:
        if not Path(place.path).parent.is_dir():  # the library would try to open it for minutes
            raise InvalidArgument(f"rendezvous is {rendezvous!r}; its folder is not here", field="rendezvous")
        return distributed.FileStore(place.path, world_size)  # type: ignore[attr-defined]
    if place.scheme != "tcp" or not place.hostname or not place.port:
        raise InvalidArgument(
            f"rendezvous is {rendezvous!r}; write tcp://HOST:PORT or file:///PATH", field="rendezvous"
        )
    try:
        return _tcp_store(place.hostname, place.port, rank=rank, world_size=world_size, timeout_s=timeout_s)
    except RuntimeError as error:
        raise ranks_missing(group, world_size, [0]) from error


def is_on_one_host(rendezvous: str) -> bool:
    """Whether no rank of another host can come there."""
    place = urlsplit(rendezvous)
    return place.scheme == "file" or is_loopback(place.hostname or "")


def _tcp_store(host: str, port: int, *, rank: int, world_size: int, timeout_s: float) -> Any:
    """torch's own listens on all of a host's addresses; where the ranks meet on loopback, it gets a socket
    that does not.
    """
    listening: int | None = None
    if rank == 0 and is_loopback(host):
        try:
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            listening = socket.create_server((host, port), family=family).detach()  # the store closes it
        except OSError as error:
            raise Unavailable(f"rank 0 cannot listen at {host}:{port}: {error.strerror}") from error
    return distributed.TCPStore(  # type: ignore[attr-defined]
        host,
        port,
        world_size,
        is_master=rank == 0,
        timeout=timedelta(seconds=timeout_s),
        wait_for_workers=False,
        master_listen_fd=listening,
    )


def ranks_missing(group: str, world_size: int, ranks: Sequence[int]) -> DeadlineExceeded:
    """The error that names `ranks`, in its text and in `missing`."""
    names = ", ".join(map(str, ranks))
    return DeadlineExceeded(
        f"group {group!r} of {world_size} ranks: rank {names} did not come in time",
        reason="RANKS_MISSING",
        missing=names,
    )
