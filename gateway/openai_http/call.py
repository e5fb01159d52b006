"""One HTTP call: its body read within bounds, its answer sent whole or as events, its client watched."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Mapping
from typing import Any, TypeVar

import orjson
from starlette.datastructures import Headers
from starlette.types import Receive, Scope, Send

from gateway.openai_http.bodies import SamplingBody
from gateway.tenant import Tenant
from meshkit.errors import InvalidArgument

T = TypeVar("T")

_EVENTS = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-cache",
    # Proxies that gather an answer would take the stream away from it.
    "x-accel-buffering": "no",
}


class ClientGone(Exception):
    """Nobody waits for the answer any more."""


class Call:
    """One request of a client.

    tenant: whose it is. request_id: for the header of the answer. headers: those that every answer of this
    call has. body: once it was read.
    """

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.headers_in = Headers(scope=scope)
        self.path_parameters: Mapping[str, str] = scope.get("path_params", {})
        self.headers: dict[str, str] = {}
        self.tenant = Tenant()
        self.request_id = ""
        self.body: SamplingBody | None = None
        self.status: int | None = None
        self._receive = receive
        self._send = send
        self._is_complete = False

    @property
    def is_begun(self) -> bool:
        """Whether the status has gone out."""
        return self.status is not None

    async def read(self, *, limit_bytes: int) -> bytes:
        """The body, which has to be JSON by its type: a browser asks before it sends such a one for a
        stranger's page.

        Raises:
            InvalidArgument: it is too large, by its length before any of it was read, or of another type.
            ClientGone: it did not come to its end.
        """
        if self.headers_in.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
            raise InvalidArgument(
                "the body has to be JSON; send it with the header content-type: application/json",
                reason="CONTENT_TYPE_UNSUPPORTED",
            )
        length = self.headers_in.get("content-length", "")
        if length.isascii() and length.isdigit() and int(length) > limit_bytes:
            raise _too_large(limit_bytes)
        content = bytearray()
        while True:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                raise ClientGone
            content += message.get("body", b"")
            if len(content) > limit_bytes:
                raise _too_large(limit_bytes)
            if not message.get("more_body", False):
                return bytes(content)

    async def while_connected(self, work: Coroutine[Any, Any, T]) -> T:
        """What `work` returns; it is cancelled, and waited for, when the client goes away.

        Raises:
            ClientGone: it did.
        """
        task, gone = asyncio.ensure_future(work), asyncio.ensure_future(self._wait_gone())
        try:
            await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                raise ClientGone
            return task.result()
        finally:
            for each in (task, gone):
                each.cancel()
            await asyncio.gather(task, gone, return_exceptions=True)

    async def answer(
        self,
        status: int,
        body: object,
        headers: Mapping[str, str] | None = None,
        *,
        kind: str = "application/json",
    ) -> None:
        """The whole answer: bytes as they are, all else as JSON."""
        content = body if isinstance(body, bytes) else orjson.dumps(body)
        own = {"content-type": kind, "content-length": str(len(content))}
        await self._begin(status, {**own, **(headers or {})})
        await self._finish(content)

    async def begin_events(self) -> None:
        """A stream of events begins; errors are events from here on."""
        await self._begin(200, _EVENTS)

    async def send_event(self, data: object) -> None:
        """One event, waiting while the client reads too slowly."""
        content = b"data: " + orjson.dumps(data) + b"\n\n"
        await self._send({"type": "http.response.body", "body": content, "more_body": True})

    async def end_events(self, last: bytes = b"") -> None:
        """The stream ends. last: goes before."""
        await self._finish(last)

    async def _begin(self, status: int, headers: Mapping[str, str]) -> None:
        self.status = status
        raw = [
            (name.encode(), value.encode("latin-1")) for name, value in {**self.headers, **headers}.items()
        ]
        await self._send({"type": "http.response.start", "status": status, "headers": raw})

    async def _finish(self, content: bytes) -> None:
        self._is_complete = True
        await self._send({"type": "http.response.body", "body": content, "more_body": False})

    async def _wait_gone(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        if self._is_complete:
            # That the answer is complete is told the same way; what is left to do for it is to be done.
            await asyncio.Event().wait()


def _too_large(limit_bytes: int) -> InvalidArgument:
    return InvalidArgument(
        f"the body has more than {limit_bytes} bytes, which is the limit (max_prompt_bytes of the gateway "
        "and some for the rest); shorten it",
        reason="BODY_TOO_LARGE",
    )
