"""Clients of a gateway: each follows one stream and writes down what came, and when."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Sequence

import grpc
import grpc.aio

from chaos.history import History, Received
from chaos.mesh import MODEL, VOCAB_SIZE
from chipmesh.inference.v1alpha1 import inference_pb2, inference_pb2_grpc
from meshkit.rpc.channel import open_channel
from plugins.hash.oracle import continue_tokens

MOST_CONNECTIONS = 4
"""Of one stream: the first, and how often it goes on elsewhere."""


def make_request(history: History) -> inference_pb2.GenerateRequest:
    """A greedy request by token ids that goes on after what the client has."""
    return inference_pb2.GenerateRequest(
        model=MODEL,
        prompt=inference_pb2.Prompt(tokens=inference_pb2.TokenPrompt(token_ids=history.prompt)),
        sampling=inference_pb2.SamplingOptions(temperature=0.0),
        stop=inference_pb2.StopOptions(max_tokens=len(history.expected)),
        output_token_ids=history.tokens(),
    )


class Client:
    """One stream, from its request to its end."""

    def __init__(self, prompt: Sequence[int], *, tokens: int) -> None:
        self.history = History(prompt, continue_tokens(prompt, tokens, VOCAB_SIZE))
        self.task: asyncio.Task[None] | None = None
        self._progress = asyncio.Event()

    def __repr__(self) -> str:
        return f"<Client {self.count} of {len(self.history.expected)}, error={self.history.error}>"

    @property
    def count(self) -> int:
        """Tokens received so far."""
        last = self.history.received[-1] if self.history.received else None
        return 0 if last is None else last.first_index + len(last.token_ids)

    @property
    def ended(self) -> bool:
        """Whether nothing more will come."""
        return self.history.ended_at is not None

    async def until_count(self, count: int) -> None:
        """Return once that many tokens came, or the stream has ended."""
        while self.count < count and not self.ended:
            self._progress.clear()
            await self._progress.wait()

    async def run(self, channels: Sequence[grpc.aio.Channel]) -> None:
        """Follow the stream to its end; how it failed is written down, not raised.

        A connection that breaks is no failure where there is another gateway: the client goes on there.
        """
        turns = list(
            itertools.islice(itertools.cycle(channels), MOST_CONNECTIONS if len(channels) > 1 else 1)
        )
        try:
            for number, channel in enumerate(turns, start=1):
                try:
                    return await self._follow(channel)
                except grpc.aio.AioRpcError as error:
                    if error.code() is not grpc.StatusCode.UNAVAILABLE or number == len(turns):
                        self.history.error = f"{error.code().name}: {error.details()}"
                        return None
        finally:
            self._end()

    async def _follow(self, channel: grpc.aio.Channel) -> None:
        kinds: list[str] = []
        self.history.attempts.append(kinds)
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        async for response in stub.Generate(make_request(self.history)):
            self._take(response.event, kinds)

    def _take(self, event: inference_pb2.GenerationEvent, kinds: list[str]) -> None:
        kinds.append(event.WhichOneof("kind") or "nothing")
        if kinds[-1] == "output":
            output = event.output
            self.history.received.append(
                Received(time.monotonic(), output.first_index, tuple(output.token_ids))
            )
        elif kinds[-1] == "finished":
            self.history.completion_tokens = event.finished.usage.completion_tokens
        self._progress.set()

    def _end(self) -> None:
        self.history.ended_at = time.monotonic()
        self._progress.set()


class Clients:
    """All clients of one run. They begin at the first of these gateways, over one connection to each."""

    def __init__(self, addresses: Sequence[str]) -> None:
        self._channels = [open_channel(address, traced=False) for address in addresses]
        self.all: list[Client] = []

    def start(self, prompt: Sequence[int], *, tokens: int) -> Client:
        """Start one more stream."""
        client = Client(prompt, tokens=tokens)
        client.task = asyncio.create_task(client.run(self._channels), name=f"client {len(self.all)}")
        self.all.append(client)
        return client

    async def until_all_count(self, count: int, *, timeout_s: float) -> None:
        """Return once every stream has that many tokens. Raises TimeoutError."""
        await asyncio.wait_for(asyncio.gather(*(each.until_count(count) for each in self.all)), timeout_s)

    async def end(self, *, timeout_s: float) -> None:
        """Return when all streams have ended; those that have not in time are cancelled: they failed."""
        tasks = [client.task for client in self.all if client.task is not None]
        _, late = await asyncio.wait(tasks, timeout=timeout_s)
        for task in late:
            task.cancel()
        for result in await asyncio.gather(*tasks, return_exceptions=True):
            if isinstance(result, Exception):
                raise result
        for client in self.all:
            if client.history.completion_tokens is None and client.history.error is None:
                client.history.error = f"no end after {timeout_s:g} s and {client.count} tokens"

    async def close(self) -> None:
        """Cancel what still runs and close the connection."""
        tasks = [client.task for client in self.all if client.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for channel in self._channels:
            await channel.close()
