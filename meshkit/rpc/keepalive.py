"""Keepalive, message limits and reconnection of server and client, in one place because the two must agree.

A server that pings or allows pings on other terms than its client ends every stream with `too_many_pings`
within seconds. And without a ping timeout of its own a frozen peer is noticed only after about a minute.
"""

from __future__ import annotations

from dataclasses import dataclass

DEFAULT_MAX_MESSAGE_BYTES = 64 * 1024 * 1024
"""Of every hop alike: what a gateway takes, scheduler and executor take too. Holds millions of token ids."""

Options = list[tuple[str, int]]


@dataclass(frozen=True)
class Keepalive:
    """Times in milliseconds. `ping_timeout_ms` bounds how long a frozen peer stays unnoticed after a ping."""

    interval_ms: int = 1_000
    ping_timeout_ms: int = 1_000

    @property
    def min_accepted_interval_ms(self) -> int:
        """What a server tolerates: half the interval that clients use, so that timer jitter is no offence."""
        return self.interval_ms // 2


KEEPALIVE = Keepalive()


def _shared_options(max_message_bytes: int, keepalive: Keepalive) -> Options:
    return [
        ("grpc.max_send_message_length", max_message_bytes),
        ("grpc.max_receive_message_length", max_message_bytes),
        ("grpc.keepalive_time_ms", keepalive.interval_ms),
        ("grpc.keepalive_timeout_ms", keepalive.ping_timeout_ms),
        ("grpc.http2.ping_timeout_ms", keepalive.ping_timeout_ms),
        ("grpc.http2.max_pings_without_data", 0),
    ]


def server_options(max_message_bytes: int, keepalive: Keepalive = KEEPALIVE) -> Options:
    """Channel arguments of a server. `max_message_bytes`: largest message in either direction."""
    return [
        *_shared_options(max_message_bytes, keepalive),
        # Two servers on one port would share its connections silently, and a swap would be unsafe.
        ("grpc.so_reuseport", 0),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.min_ping_interval_without_data_ms", keepalive.min_accepted_interval_ms),
        ("grpc.http2.min_recv_ping_interval_without_data_ms", keepalive.min_accepted_interval_ms),
    ]


def client_options(max_message_bytes: int, keepalive: Keepalive = KEEPALIVE) -> Options:
    """Channel arguments of a client: as the server's, plus a reconnection that is quick after a restart, also
    of a peer that comes back at another address: gRPC by itself asks for it once in 30 s at most.
    """
    return [
        *_shared_options(max_message_bytes, keepalive),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.min_reconnect_backoff_ms", 500),
        ("grpc.max_reconnect_backoff_ms", 1_000),
        ("grpc.dns_min_time_between_resolutions_ms", 500),
    ]
