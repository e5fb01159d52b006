"""S3: a cached prefix is its key's own, through a real scheduler and the hash model's real executor."""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from chipmesh.inference.v1alpha1 import inference_pb2 as pb
from chipmesh.inference.v1alpha1 import inference_pb2_grpc
from gateway.app import GatewayService
from gateway.config import GatewayConfig
from meshkit.config import parse_config
from meshkit.rpc.channel import open_channel
from plugins.hash.oracle import continue_tokens
from scheduler_svc.app import SchedulerService
from scheduler_svc.config import SchedulerConfig
from tests.contract.gateway.gateway_client import Stream, request_of
from tests.contract.scheduler_svc.conftest import Mesh as SchedulerMesh
from tests.contract.scheduler_svc.test_hash_executor import PAGE_SIZE, VOCAB_SIZE, register_hash_executor

NAMES = ("alone", "alone-too", "shared", "shared-too")
PROMPT_TOKENS = 40
CACHED_AGAIN = (PROMPT_TOKENS - 1) // PAGE_SIZE * PAGE_SIZE
"""Of a prompt seen before all full pages are there, but for the last token, which is computed."""


@dataclass
class Clients:
    """Each key's client, by its name; "" has none."""

    stub: Any

    async def cached(self, name: str, prompt: Sequence[int], *, salt: str = "") -> int:
        """Prompt tokens that came from the cache; the answer is checked against the oracle."""
        request = request_of(
            prompt, sampling={"temperature": 0.0}, stop={"max_tokens": 4}, scheduling={"cache_salt": salt}
        )
        metadata = [("authorization", f"Bearer {_key(name)}")] if name else []
        stream = Stream(self.stub.Generate(request, timeout=20, metadata=metadata))
        finished: pb.Finished = await stream.end()
        assert stream.token_ids == continue_tokens(list(prompt), 4, VOCAB_SIZE)
        return finished.usage.cached_tokens


def _key(name: str) -> str:
    return f"cmk_the-key-of-{name}"


def _entries() -> list[dict[str, Any]]:
    return [
        {
            "name": name,
            "sha256": hashlib.sha256(_key(name).encode()).hexdigest(),
            "share_cache": name.startswith("shared"),
        }
        for name in NAMES
    ]


@asynccontextmanager
async def _gateway(scheduler: str, cache_dir: Path) -> AsyncIterator[Clients]:
    raw = {
        "scheduler_address": scheduler,
        "models": [{"name": "m", "context_length": 4096, "vocab_size": VOCAB_SIZE}],
        "cache_dir": str(cache_dir),
        "api_keys": _entries(),
        "allow_anonymous": True,
    }
    gateway = GatewayService(parse_config(GatewayConfig, raw, source="test"))
    addresses = await gateway.start()
    try:
        await gateway.wait_serving()
        async with open_channel(addresses.address) as channel:
            yield Clients(inference_pb2_grpc.InferenceServiceStub(channel))
    finally:
        await gateway.stop(0)


@pytest.fixture
async def clients(tmp_path: Path) -> AsyncIterator[Clients]:
    service = SchedulerService(SchedulerConfig(identity_check_delay_s=0.0), strict_identity=True)
    addresses = await service.start()
    mesh = SchedulerMesh(service, addresses.address, addresses.http_address)
    try:
        executor = await register_hash_executor(mesh, "w0", page_count=400)
        try:
            async with _gateway(addresses.address, tmp_path) as found:
                yield found
        finally:
            await executor.stop(0.2)
    finally:
        await mesh.close()


def prompt_of(number: int) -> list[int]:
    return [(number * 1000 + 7 * position) % VOCAB_SIZE for position in range(PROMPT_TOKENS)]


async def test_no_page_of_one_key_is_used_for_another(clients: Clients) -> None:
    prompt = prompt_of(1)
    assert await clients.cached("alone", prompt) == 0
    assert await clients.cached("alone", prompt) == CACHED_AGAIN
    for name, salt in (("alone-too", ""), ("alone-too", "alone"), ("shared", ""), ("", "alone")):
        assert await clients.cached(name, prompt, salt=salt) == 0
    assert await clients.cached("alone-too", prompt) == CACHED_AGAIN
    # And not the other way round, either: what those who share have seen is not there for who does not.
    seen_by_all = prompt_of(2)
    assert await clients.cached("", seen_by_all) == 0
    assert await clients.cached("alone", seen_by_all) == 0


async def test_keys_that_share_the_cache_use_each_others_pages(clients: Clients) -> None:
    prompt = prompt_of(3)
    assert await clients.cached("shared", prompt) == 0
    for name in ("shared-too", "shared", ""):
        assert await clients.cached(name, prompt) == CACHED_AGAIN
    assert await clients.cached("shared", prompt, salt="mine") == 0
    assert await clients.cached("shared-too", prompt, salt="mine") == CACHED_AGAIN


async def test_a_clients_own_salt_divides_its_keys_part_once_more(clients: Clients) -> None:
    prompt = prompt_of(4)
    assert await clients.cached("alone", prompt, salt="x") == 0
    assert await clients.cached("alone", prompt, salt="x") == CACHED_AGAIN
    assert await clients.cached("alone", prompt, salt="y") == 0
    assert await clients.cached("alone-too", prompt, salt="x") == 0
