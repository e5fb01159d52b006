"""Where the ranks of a set meet, by plain sockets: rank 0 hears all and tells each what all said."""

from __future__ import annotations

import json
import select
import socket
import struct
import time
from collections.abc import Mapping
from urllib.parse import urlsplit

from meshkit.errors import DeadlineExceeded, InvalidArgument, MeshError, Unavailable
from plugins.sdk.runner import ParallelOptions

_LENGTH = struct.Struct(">I")
_REPLY_MARGIN_S = 1.0
"""Rank 0 finds out who is missing; the others wait for its word, this much longer."""
_PAUSE_S = 0.05


class HashRanks:
    """One rank's side of its set. `exchange` is the one primitive; all else is made of it.

    Raises, also later: DeadlineExceeded (RANKS_MISSING) and Unavailable (RANK_LOST), which name ranks. The
    first of them is its end: it leaves, and the others learn of it.
    """

    def __init__(self, options: ParallelOptions) -> None:
        self._rank = options.rank
        self._count = options.tensor * options.pipeline
        self._timeout_s = options.step_timeout_s
        self._others: dict[int, socket.socket] = {}
        self._has_left = False
        deadline = time.monotonic() + options.join_timeout_s
        host, port = _place(options.rendezvous)
        try:
            if self._rank == 0:
                self._gather_ranks(host, port, deadline)
            else:
                self._others[0] = self._reach_leader(host, port, deadline)
        except BaseException:
            self.close()
            raise
        self.exchange(str(self._rank), timeout_s=max(deadline - time.monotonic(), self._timeout_s))

    def __repr__(self) -> str:
        return f"<HashRanks {self._rank} of {self._count}>"

    def exchange(self, text: str, *, timeout_s: float | None = None) -> tuple[str, ...]:
        """What each rank said, by rank; all must call it. timeout_s: None: as for a step."""
        if self._has_left:
            raise Unavailable(f"rank {self._rank} has left its set", reason="RANK_LOST")
        deadline = time.monotonic() + (self._timeout_s if timeout_s is None else timeout_s)
        try:
            return (
                self._hear_leader(text, deadline + _REPLY_MARGIN_S)
                if self._rank
                else self._lead(text, deadline)
            )
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Leave. Idempotent."""
        self._has_left = True
        for connection in self._others.values():
            connection.close()
        self._others.clear()

    def _lead(self, text: str, deadline: float) -> tuple[str, ...]:
        said = {0: text}
        try:
            for rank in sorted(self._others):
                said[rank] = self._receive(rank, deadline)
        except DeadlineExceeded:
            error = self._missing(
                [rank for rank in self._others if rank not in said and not self._spoke(rank)]
            )
            self._tell({"missing": error.message})
            raise error from None
        except Unavailable as error:
            self._tell({"lost": error.message})
            raise
        answer = [said[rank] for rank in range(self._count)]
        self._tell({"said": answer})
        return tuple(answer)

    def _gather_ranks(self, host: str, port: int, deadline: float) -> None:
        with socket.create_server((host, port)) as listener:
            while len(self._others) < self._count - 1:
                listener.settimeout(max(deadline - time.monotonic(), 0.001))
                try:
                    connection, _ = listener.accept()
                except TimeoutError:
                    raise self._missing(sorted(set(range(1, self._count)) - self._others.keys())) from None
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                try:
                    rank = _LENGTH.unpack(_read(connection, _LENGTH.size, deadline))[0]
                except BaseException:
                    connection.close()
                    raise
                self._others[rank] = connection

    def _reach_leader(self, host: str, port: int, deadline: float) -> socket.socket:
        while True:
            connection: socket.socket | None = None
            try:
                connection = socket.create_connection((host, port), max(deadline - time.monotonic(), 0.001))
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                connection.sendall(_LENGTH.pack(self._rank))
            except OSError:
                if connection is not None:
                    connection.close()
                if time.monotonic() > deadline:
                    raise self._missing([0]) from None
                time.sleep(_PAUSE_S)
            else:
                return connection

    def _hear_leader(self, text: str, deadline: float) -> tuple[str, ...]:
        try:
            self._send(0, text)
            answer = json.loads(self._receive(0, deadline))
        except DeadlineExceeded:
            raise self._missing([0]) from None
        if "missing" in answer:
            raise DeadlineExceeded(answer["missing"], reason="RANKS_MISSING")
        if "lost" in answer:
            raise Unavailable(answer["lost"], reason="RANK_LOST")
        return tuple(answer["said"])

    def _tell(self, answer: Mapping[str, object]) -> None:
        text, lost = json.dumps(answer), None
        for rank in self._others:
            try:
                self._send(rank, text)
            except MeshError as error:
                lost = error
        if lost is not None and "said" in answer:
            raise lost

    def _send(self, rank: int, text: str) -> None:
        data = text.encode()
        try:
            self._others[rank].sendall(_LENGTH.pack(len(data)) + data)
        except OSError as error:
            raise self._lost(rank, error) from error

    def _receive(self, rank: int, deadline: float) -> str:
        """Raises DeadlineExceeded, or Unavailable where the rank has gone."""
        connection = self._others[rank]
        try:
            length = _LENGTH.unpack(_read(connection, _LENGTH.size, deadline))[0]
            return _read(connection, length, deadline).decode()
        except OSError as error:
            raise self._lost(rank, error) from error

    def _spoke(self, rank: int) -> bool:
        return bool(select.select([self._others[rank]], [], [], 0)[0])

    def _missing(self, ranks: list[int]) -> DeadlineExceeded:
        names = ", ".join(map(str, ranks))
        return DeadlineExceeded(
            f"a set of {self._count} ranks: rank {names} did not come in time",
            reason="RANKS_MISSING",
            missing=names,
        )

    def _lost(self, rank: int, error: OSError) -> Unavailable:
        return Unavailable(f"a set of {self._count} ranks: rank {rank} was lost: {error}", reason="RANK_LOST")


def _place(rendezvous: str) -> tuple[str, int]:
    place = urlsplit(rendezvous)
    if place.scheme != "tcp" or not place.hostname or not place.port:
        raise InvalidArgument(f"rendezvous is {rendezvous!r}; write tcp://HOST:PORT", field="rendezvous")
    return place.hostname, place.port


def _read(connection: socket.socket, count: int, deadline: float) -> bytes:
    """Raises DeadlineExceeded, or OSError where the other side has gone."""
    data = b""
    while len(data) < count:
        connection.settimeout(max(deadline - time.monotonic(), 0.001))
        try:
            part = connection.recv(count - len(data))
        except TimeoutError:
            raise DeadlineExceeded("not in time") from None
        if not part:
            raise ConnectionResetError("its connection has ended")
        data += part
    return data
