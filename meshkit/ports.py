"""Free TCP ports for processes that are yet to start."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator

LOOPBACK = "127.0.0.1"


@contextlib.contextmanager
def reserve_port() -> Iterator[int]:
    """A free TCP port of loopback for a process that is yet to start: nobody else gets it meanwhile.

    A socket that is bound and does not listen keeps the system from giving the port away; a server may bind
    it all the same, since both allow the reuse of addresses, as gRPC's and torch's do.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind((LOOPBACK, 0))
        yield holder.getsockname()[1]
