"""Calls whose messages are bytes as they are: what a client of no known make would send."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Any

import grpc.aio


async def call_raw(
    channel: grpc.aio.Channel,
    path: str,
    bodies: Sequence[bytes],
    *,
    timeout_s: float,
    takes_stream: bool = False,
    most_answers: int | None = None,
) -> None:
    """Follow one call to its end, or until so many answers came. takes_stream: of requests; else one is sent.

    Raises:
        AioRpcError: as the server answers.
    """

    async def each() -> AsyncIterator[bytes]:
        for body in bodies:
            yield body

    # As a stream of answers a call of either kind can be followed. Stubs know no methods without serializers.
    begin: Any = channel.stream_stream(path) if takes_stream else channel.unary_stream(path)
    call = begin(each() if takes_stream else bodies[0], timeout=timeout_s)
    answers = 0
    try:
        async for _ in call:
            answers += 1
            if answers == most_answers:
                break
    finally:
        call.cancel()
