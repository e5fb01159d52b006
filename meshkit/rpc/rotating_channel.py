"""A channel whose certificate may change: each call begins with the one that the files hold then."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import grpc
import grpc.aio

from meshkit.rpc.tls import PemFiles, Pems
from meshkit.telemetry.logging import get_logger

log = get_logger(__name__)


class _Connected:
    """One channel of grpc's, and the calls on it. One that is retired closes when its last call has ended."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self.channel = channel
        self.closing: asyncio.Task[None] | None = None
        self._calls: set[Any] = set()
        self._retired = False

    def began(self, call: Any) -> None:
        self._calls.add(call)
        call.add_done_callback(self._ended)

    def retire(self) -> None:
        self._retired = True
        self._close_if_unused()

    def _ended(self, call: Any) -> None:
        self._calls.discard(call)
        self._close_if_unused()

    def _close_if_unused(self) -> None:
        if self._retired and not self._calls and self.closing is None:
            self.closing = asyncio.get_running_loop().create_task(self.channel.close(), name="close channel")


class RotatingChannel(grpc.aio.Channel):
    """Calls that run when the files change go on as they are, on the connection that they began on.

    connect: opens a channel with a certificate.

    Raises:
        InvalidArgument: the files cannot be read.
    """

    def __init__(self, files: PemFiles, connect: Callable[[Pems], grpc.aio.Channel]) -> None:
        self._files = files
        self._connect = connect
        self._present = _Connected(connect(files.read()))
        self._former: list[_Connected] = []

    def __repr__(self) -> str:
        return f"<RotatingChannel {self._files!r} former={len(self._former)}>"

    def current(self) -> _Connected:
        """The connection for a call that begins now."""
        pems = self._files.read_if_changed()
        if pems is not None:
            log.info("certificate changed, a new connection is made", files=repr(self._files))
            self._former = [each for each in self._former if each.closing is None or not each.closing.done()]
            self._former.append(self._present)
            self._present.retire()
            self._present = _Connected(self._connect(pems))
        return self._present

    async def __aenter__(self) -> RotatingChannel:
        return self

    async def __aexit__(self, *raised: object) -> None:
        await self.close()

    async def close(self, grace: float | None = None) -> None:
        """As grpc's: calls get `grace` seconds."""
        for each in (*self._former, self._present):
            await each.channel.close(grace)
            if each.closing is not None:
                await each.closing

    def get_state(self, try_to_connect: bool = False) -> grpc.ChannelConnectivity:
        """Of the present connection."""
        return self._present.channel.get_state(try_to_connect)

    async def wait_for_state_change(self, last_observed_state: grpc.ChannelConnectivity) -> None:
        """Of the present connection."""
        await self._present.channel.wait_for_state_change(last_observed_state)

    async def channel_ready(self) -> None:
        """Return when a connection with the present certificate is there."""
        await self.current().channel.channel_ready()

    def unary_unary(self, method: str, *arguments: Any, **options: Any) -> Any:
        """As grpc's."""
        return _MultiCallable(self, "unary_unary", method, arguments, options)

    def unary_stream(self, method: str, *arguments: Any, **options: Any) -> Any:
        """As grpc's."""
        return _MultiCallable(self, "unary_stream", method, arguments, options)

    def stream_unary(self, method: str, *arguments: Any, **options: Any) -> Any:
        """As grpc's."""
        return _MultiCallable(self, "stream_unary", method, arguments, options)

    def stream_stream(self, method: str, *arguments: Any, **options: Any) -> Any:
        """As grpc's."""
        return _MultiCallable(self, "stream_stream", method, arguments, options)


class _MultiCallable:
    """One method on whichever connection is the present one."""

    def __init__(
        self, owner: RotatingChannel, kind: str, method: str, arguments: Any, options: dict[str, Any]
    ) -> None:
        self._owner = owner
        self._kind, self._method, self._arguments, self._options = kind, method, arguments, options
        self._made: tuple[_Connected, Any] | None = None

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        connected = self._owner.current()
        if self._made is None or self._made[0] is not connected:
            make = getattr(connected.channel, self._kind)
            self._made = (connected, make(self._method, *self._arguments, **self._options))
        call = self._made[1](*arguments, **options)
        connected.began(call)
        return call
