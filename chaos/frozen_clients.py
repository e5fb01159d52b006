"""A process of clients that is there to be frozen: `python -m chaos.frozen_clients ADDRESS COUNT TOKENS`.

Each client has a connection of its own and reads as fast as it can. Says "going" once each has had an answer.
"""

from __future__ import annotations

import asyncio
import sys

from chaos.client import make_request
from chaos.history import History
from chaos.http2 import RawConnection

GENERATE = "/chipmesh.inference.v1alpha1.InferenceService/Generate"
WIDE = 2**30
"""A window that never closes."""


def long_request(*, tokens: int) -> bytes:
    """A request whose answers are large for their number of tokens: each has its logprob."""
    request = make_request(History([1, 2, 3], [0] * tokens))
    request.logprobs = True
    return request.SerializeToString()


async def main(address: str, count: int, tokens: int) -> None:
    """Run until this process is ended."""
    connections = [await RawConnection.open(address, window=WIDE) for _ in range(count)]
    for connection in connections:
        connection.begin(GENERATE, long_request(tokens=tokens))
    for connection in connections:
        await connection.headers_seen.wait()
    sys.stdout.write("going\n")
    sys.stdout.flush()
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3])))
