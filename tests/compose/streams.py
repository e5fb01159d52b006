"""Clients that stream without pause while something happens to the mesh; each answer is compared."""

from __future__ import annotations

import threading
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType

from tests.support.golden import Golden
from tests.support.mesh import MeshClient, token_request

STREAMS = 4
OUTPUT_TOKENS = 48


class Streams:
    """STREAMS clients, each one generation after the other, until the block ends. Its end raises what went
    wrong: an error that a client saw, a token that differs.
    """

    def __init__(self, address: str, prompts: list[Golden]) -> None:
        self._client = MeshClient(address)
        # The shortest answers: several streams end beside each thing that happens.
        self._prompts = sorted(prompts, key=lambda golden: len(golden.token_ids))[:STREAMS]
        self._pool = ThreadPoolExecutor(STREAMS)
        self._stopping = threading.Event()
        self._done = threading.Condition()
        self._clients: list[Future[None]] = []
        self.ended = 0
        """Streams that came to their right end."""

    def __enter__(self) -> Streams:
        self._clients = [self._pool.submit(self._stream_on, golden) for golden in self._prompts]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stopping.set()
        self._pool.shutdown()
        self._client.close()
        if error is None:
            for client in self._clients:
                client.result()

    def wait_for_more(self, count: int = 2, *, timeout_s: float = 90.0) -> None:
        """Return when `count` more streams have come to their right end, or one has failed."""
        with self._done:
            wanted = self.ended + count
            self._done.wait_for(lambda: self.ended >= wanted or self._failed(), timeout=timeout_s)
            assert self.ended >= wanted or self._failed(), (
                f"{self.ended} of {wanted} streams after {timeout_s} s"
            )
        for client in self._clients:
            if client.done():
                client.result()

    def look_on(self, seconds: float) -> None:
        """Let so much time pass; what a client meets meanwhile is raised."""
        with self._done:
            self._done.wait_for(self._failed, timeout=seconds)
        for client in self._clients:
            if client.done():
                client.result()

    def _failed(self) -> bool:
        return any(client.done() for client in self._clients)

    def _stream_on(self, golden: Golden) -> None:
        try:
            while not self._stopping.is_set():
                answer = self._client.generate(
                    token_request(golden.prompt_token_ids, max_tokens=OUTPUT_TOKENS)
                )
                golden.check(answer.token_ids, where="in containers")
                with self._done:
                    self.ended += 1
                    self._done.notify_all()
        except BaseException:
            with self._done:
                self._done.notify_all()
            raise
