"""How the doctor speaks to services: gRPC as their own clients do, plain HTTP for health and metrics."""

from __future__ import annotations

import http.client
import time
from dataclasses import dataclass
from email.utils import parsedate_to_datetime

import grpc
import grpc.aio

from meshkit.cli.doctor.facts import ClockFacts
from meshkit.config import TlsConfig
from meshkit.rpc.keepalive import DEFAULT_MAX_MESSAGE_BYTES, client_options
from meshkit.rpc.peers import server_name
from meshkit.rpc.policy import Role
from meshkit.rpc.tls import channel_credentials, service_files

TIMEOUT_S = 2.0
DATE_IS_LATE_BY_S = 2.1
"""A Date header has whole seconds, and our servers write it anew once a second."""


def open_probe(
    address: str, *, role: str, identity: TlsConfig | None, alone: bool = False
) -> grpc.aio.Channel:
    """A channel with our clients' own settings. role: that the other side's certificate must name, where
    `identity` is given, the certificate that we show.

    alone: a connection of its own, shared with no other channel.
    """
    options: list[tuple[str, int | str]] = [*client_options(DEFAULT_MAX_MESSAGE_BYTES)]
    if alone:
        options.append(("grpc.use_local_subchannel_pool", 1))
    if identity is None or address.startswith("unix:"):
        return grpc.aio.insecure_channel(address, options=options)
    credentials = channel_credentials(service_files(identity).read())
    options.append(("grpc.ssl_target_name_override", server_name(Role(role))))
    return grpc.aio.secure_channel(address, credentials, options=options)


@dataclass(frozen=True)
class Page:
    """An answer over HTTP. clock: what its Date header says of the other side's clock."""

    status: int
    body: bytes
    clock: ClockFacts | None


def fetch(address: str, path: str) -> Page:
    """GET, without a proxy. Blocks, for at most some TIMEOUT_S.

    Raises:
        OSError, http.client.HTTPException: no answer, or none that is HTTP.
    """
    connection = http.client.HTTPConnection(address, timeout=TIMEOUT_S)
    try:
        sent = time.time()
        connection.request("GET", path)
        reply = connection.getresponse()
        received = time.time()
        return Page(reply.status, reply.read(), _clock(reply.getheader("date"), sent, received))
    finally:
        connection.close()


def _clock(header: str | None, sent: float, received: float) -> ClockFacts | None:
    """The Date is not later than the answer was written, and earlier by DATE_IS_LATE_BY_S at most."""
    if header is None:
        return None
    try:
        told = parsedate_to_datetime(header).timestamp()
    except ValueError:
        return None
    return ClockFacts(told - received, told + DATE_IS_LATE_BY_S - sent)


def narrowed(first: ClockFacts | None, second: ClockFacts | None) -> ClockFacts | None:
    """What both readings allow; the later one alone where they contradict each other: the clock was set."""
    if first is None or second is None:
        return second or first
    both = ClockFacts(max(first.low_s, second.low_s), min(first.high_s, second.high_s))
    return both if both.low_s <= both.high_s else second
