"""The agreement between the keepalive settings of server and client."""

from __future__ import annotations

import pytest

from meshkit.rpc.keepalive import KEEPALIVE, Keepalive, client_options, server_options

KEEPALIVES = [KEEPALIVE, Keepalive(interval_ms=30_000, ping_timeout_ms=5_000)]


@pytest.mark.parametrize("keepalive", KEEPALIVES)
def test_the_server_tolerates_pings_more_frequent_than_clients_send(keepalive: Keepalive) -> None:
    server, client = dict(server_options(1, keepalive)), dict(client_options(1, keepalive))
    sent_every_ms = client["grpc.keepalive_time_ms"]
    assert server["grpc.http2.min_ping_interval_without_data_ms"] < sent_every_ms
    assert server["grpc.http2.min_recv_ping_interval_without_data_ms"] < sent_every_ms
    assert server["grpc.http2.max_pings_without_data"] == client["grpc.http2.max_pings_without_data"] == 0
    assert server["grpc.keepalive_permit_without_calls"] == client["grpc.keepalive_permit_without_calls"]


@pytest.mark.parametrize("keepalive", KEEPALIVES)
def test_both_sides_bound_the_wait_for_a_ping_and_the_size_of_a_message_alike(keepalive: Keepalive) -> None:
    server, client = dict(server_options(77, keepalive)), dict(client_options(77, keepalive))
    for name in ("grpc.http2.ping_timeout_ms", "grpc.keepalive_time_ms", "grpc.keepalive_timeout_ms"):
        assert server[name] == client[name] > 0
    for name in ("grpc.max_send_message_length", "grpc.max_receive_message_length"):
        assert server[name] == client[name] == 77


def test_a_frozen_peer_is_noticed_within_three_seconds_by_default() -> None:
    assert KEEPALIVE.interval_ms + KEEPALIVE.ping_timeout_ms <= 3_000


def test_a_server_never_shares_its_port() -> None:
    assert dict(server_options(1))["grpc.so_reuseport"] == 0
