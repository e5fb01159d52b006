"""Certificates that change while a server and its clients run: calls go on, new ones use the new one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from cryptography import x509
from google.protobuf.wrappers_pb2 import StringValue

from meshkit.config import TlsConfig
from meshkit.rpc.channel import open_channel
from meshkit.rpc.handlers import Context
from meshkit.rpc.policy import Access, Role
from meshkit.rpc.rotating_channel import RotatingChannel
from meshkit.rpc.server import RpcServer
from meshkit.rpc.tls import server_credentials, service_credentials
from tests.support.certificates import LIFETIME, Pki

SERVICE = "meshkit.test.Names"
ACCESS = Access(policy={f"/{SERVICE}/{name}": frozenset({Role.WORKER}) for name in ("Ask", "Follow")})


@dataclass
class Server:
    """Remembers the certificate that each call came with."""

    address: str = ""
    serials: list[int] = field(default_factory=list)

    async def ask(self, request: StringValue, context: Context) -> StringValue:
        facts: Any = context.auth_context()
        self.serials.append(x509.load_pem_x509_certificate(facts["x509_pem_cert"][0]).serial_number)
        return request

    async def follow(
        self, requests: AsyncIterator[StringValue], context: Context
    ) -> AsyncIterator[StringValue]:
        async for request in requests:
            yield request

    def add(self, servicer: object, server: grpc.aio.Server) -> None:
        pair: Any = {"request_deserializer": StringValue.FromString,
                "response_serializer": StringValue.SerializeToString}  # fmt: skip
        handlers = {
            "Ask": grpc.unary_unary_rpc_method_handler(self.ask, **pair),
            "Follow": grpc.stream_stream_rpc_method_handler(self.follow, **pair),
        }
        server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler(SERVICE, handlers)])


PAIR: dict[str, Any] = {
    "request_serializer": StringValue.SerializeToString,
    "response_deserializer": StringValue.FromString,
}


async def ask(channel: grpc.aio.Channel) -> None:
    await channel.unary_unary(f"/{SERVICE}/Ask", **PAIR)(StringValue(value="x"), timeout=5)


async def echo(stream: Any, text: str) -> None:
    await stream.write(StringValue(value=text))
    assert (await stream.read()).value == text


@pytest.fixture
def own(tmp_path: Path) -> Pki:
    """Certificates that this test may change."""
    pki = Pki(tmp_path)
    pki.good(Role.SCHEDULER, "s")
    pki.good(Role.WORKER, "w")
    return pki


@pytest.fixture
async def server(own: Pki) -> AsyncIterator[Server]:
    tls = await asyncio.to_thread(own.good, Role.SCHEDULER, "s")
    server, rpc = (
        Server(),
        RpcServer(listen="127.0.0.1:0", credentials=service_credentials(tls), access=ACCESS),
    )
    rpc.add(server.add, None, SERVICE)
    server.address = await rpc.start()
    yield server
    await rpc.stop(0)


async def serial_of(tls: TlsConfig) -> int:
    pem = await asyncio.to_thread(tls.certificate.read_bytes)
    return x509.load_pem_x509_certificate(pem).serial_number


async def rotate(pki: Pki) -> None:
    """A new authority, new certificates of everybody, and the former authority forgotten."""
    await asyncio.to_thread(pki.folder.rotate, lifetime=LIFETIME, new_authority=True)
    await asyncio.to_thread(pki.folder.retire)


@pytest.mark.parametrize("traced", [False, True])
async def test_a_stream_goes_on_while_each_new_call_brings_the_newest_certificate(
    own: Pki, server: Server, traced: bool
) -> None:
    tls = await asyncio.to_thread(own.good, Role.WORKER, "w")
    async with open_channel(server.address, traced=traced, tls=tls, role=Role.SCHEDULER) as channel:
        stream = channel.stream_stream(f"/{SERVICE}/Follow", **PAIR)()
        expected = []
        for round_number in range(4):
            await ask(channel)
            await echo(stream, f"{round_number}")
            expected.append(await serial_of(tls))
            await rotate(own)
        await echo(stream, "still there")
        await stream.done_writing()
        assert await stream.read() is grpc.aio.EOF
    assert server.serials == expected
    assert len(set(expected)) == 4


async def test_a_former_authoritys_certificate_opens_no_connection_any_more(own: Pki, server: Server) -> None:
    tls = await asyncio.to_thread(own.good, Role.WORKER, "w")
    files = (tls.certificate, tls.key, tls.authority)
    certificate, key, authority = [await asyncio.to_thread(_copy, path) for path in files]
    old = TlsConfig(certificate=certificate, key=key, authority=authority)
    async with open_channel(server.address, tls=old, role=Role.SCHEDULER) as channel:
        await ask(channel)
    await rotate(own)
    async with open_channel(server.address, tls=old, role=Role.SCHEDULER) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await ask(channel)
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    async with open_channel(server.address, tls=tls, role=Role.SCHEDULER) as channel:
        await ask(channel)


def _copy(path: Path) -> Path:
    copy = path.with_suffix(".old")
    copy.write_bytes(path.read_bytes())
    return copy


async def test_a_connection_that_nobody_uses_any_more_is_closed(own: Pki, server: Server) -> None:
    tls = await asyncio.to_thread(own.good, Role.WORKER, "w")
    async with open_channel(server.address, traced=False, tls=tls, role=Role.SCHEDULER) as channel:
        assert isinstance(channel, RotatingChannel)
        first: Any = channel.current()
        stream = channel.stream_stream(f"/{SERVICE}/Follow", **PAIR)()
        await echo(stream, "x")
        await rotate(own)
        await ask(channel)
        assert not first.closing, "a stream runs on it"
        stream.cancel()
        deadline = asyncio.get_running_loop().time() + 5
        while first.closing is None:
            assert asyncio.get_running_loop().time() < deadline
            await asyncio.sleep(0.01)
        await first.closing
        assert first.channel.get_state() is grpc.ChannelConnectivity.SHUTDOWN
        await ask(channel)


async def test_a_public_listener_shows_its_newest_certificate_and_asks_for_none(own: Pki) -> None:
    tls = await asyncio.to_thread(own.good, Role.SCHEDULER, "s")
    credentials = server_credentials(certificate=tls.certificate, key=tls.key, field="listen_tls")
    access = Access(everyone=Role.CLIENT, policy={f"/{SERVICE}/Follow": frozenset({Role.CLIENT})})
    rpc = RpcServer(listen="127.0.0.1:0", credentials=credentials, access=access)
    rpc.add(Server().add, None, SERVICE)
    address = await rpc.start()
    for _ in range(2):
        await rotate(own)
        authority = await asyncio.to_thread((own.root / "authority.pem").read_bytes)
        options = [("grpc.ssl_target_name_override", "s.scheduler.chipmesh.internal")]
        trust = grpc.ssl_channel_credentials(authority)
        async with grpc.aio.secure_channel(address, trust, options) as channel:
            stream: Any = channel.stream_stream(f"/{SERVICE}/Follow", **PAIR)(timeout=5)
            await echo(stream, "x")
            stream.cancel()
    await rpc.stop(0)
