"""A gateway with OpenAI's interface and a fake scheduler; its clients: the `openai` package, plain HTTP."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2 as httpx
import openai

from chipmesh.scheduler.v1alpha1 import session_pb2
from gateway.app import GatewayService
from tests.contract.gateway.fake_scheduler import FakeScheduler, FakeSession, Submitted
from tests.contract.gateway.running_gateway import running_gateway
from tests.unit.gateway.tiny_model import IM_END, tokens_of

WAIT_S = 10.0
HELLO = [{"role": "user", "content": "hello"}]

MeshFactory = Callable[..., Any]


@dataclass
class OpenAiMesh:
    """address, grpc_address: of the gateway's listeners."""

    scheduler: FakeScheduler
    gateway: GatewayService
    address: str
    grpc_address: str

    async def session(self) -> FakeSession:
        """The gateway's next session, once the gateway serves."""
        session = await self.scheduler.session()
        await self.gateway.wait_serving()
        return session

    @asynccontextmanager
    async def client(self, key: str = "none") -> AsyncIterator[Any]:
        """OpenAI's own `AsyncOpenAI`, which tries nothing twice.

        Untyped, since its overloads take no plain dictionaries.
        """
        async with openai.AsyncOpenAI(
            base_url=f"http://{self.address}/v1", api_key=key, max_retries=0, timeout=20
        ) as client:
            yield client

    @asynccontextmanager
    async def http(self, **headers: str) -> AsyncIterator[httpx.AsyncClient]:
        """Plain HTTP."""
        async with httpx.AsyncClient(
            base_url=f"http://{self.address}", headers=headers, timeout=20, trust_env=False
        ) as client:
            yield client


@asynccontextmanager
async def openai_mesh(model: Path, cache_dir: Path, **options: Any) -> AsyncIterator[OpenAiMesh]:
    """Running, with `model` under the name "tiny"."""
    listening = {"openai_listen": "127.0.0.1:0", **options}
    async with running_gateway(model, cache_dir, **listening) as running:
        addresses = running.addresses
        yield OpenAiMesh(running.scheduler, running.gateway, str(addresses.openai_address), addresses.address)


async def answer(session: FakeSession, text: str, **fields: Any) -> Submitted:
    """The next request gets `text` and ends."""
    submitted = await session.accepts()
    say(submitted, text, **fields)
    return submitted


def say(submitted: Submitted, text: str, *, logprob: float = -0.5) -> None:
    """All of `text`, a byte a token, and the end token."""
    tokens = [*tokens_of(text), IM_END]
    logprobs = [logprob] * len(tokens) if submitted.submit.sampling.logprobs else ()
    submitted.tokens(0, tokens, logprobs)
    finish(submitted)


def finish(submitted: Submitted) -> None:
    """It ends by its end token."""
    submitted.finished(session_pb2.RequestFinished.REASON_STOP)


def events_of(content: bytes) -> list[Any]:
    """The data of a stream's events: JSON, and "[DONE]" as such."""
    lines = [line for line in content.decode().split("\n\n") if line]
    assert all(line.startswith("data: ") for line in lines), lines
    data = [line.removeprefix("data: ") for line in lines]
    return [each if each == "[DONE]" else json.loads(each) for each in data]


async def wait_until(holds: Callable[[], bool], what: str) -> None:
    """Looks at a state until it is there."""
    deadline = asyncio.get_running_loop().time() + WAIT_S
    while not holds():
        assert asyncio.get_running_loop().time() < deadline, f"not in {WAIT_S} s: {what}"
        await asyncio.sleep(0.005)
