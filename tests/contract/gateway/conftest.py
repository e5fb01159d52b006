"""Meshes of one gateway and a fake scheduler, over real gRPC in this process."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from gateway.app import GatewayService
from gateway.config import GatewayConfig
from meshkit.config import TracingConfig, parse_config
from meshkit.rpc.channel import open_channel
from meshkit.telemetry.tracing import configure_tracing
from tests.contract.gateway.fake_scheduler import FakeScheduler
from tests.contract.gateway.gateway_client import Mesh, MeshFactory
from tests.unit.gateway.tiny_model import write_tiny_model


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="session")
def token_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model") / "tokens", tokenizer=False)


@pytest.fixture
def run_mesh(tiny_model: Path, tmp_path: Path) -> MeshFactory:
    """`async with run_mesh(**config) as mesh:`"""

    @asynccontextmanager
    async def run(
        *, scheduler_up: bool = True, stop_grace_s: float = 0.0, **config: Any
    ) -> AsyncIterator[Mesh]:
        scheduler = FakeScheduler()
        await scheduler.start()
        if not scheduler_up:
            await scheduler.stop()
        raw = {
            "scheduler_address": scheduler.address,
            "models": [{"name": "tiny", "path": str(tiny_model)}],
            "cache_dir": str(tmp_path),
            **config,
        }
        gateway = GatewayService(parse_config(GatewayConfig, raw, source="test"))
        addresses = await gateway.start()
        channel = open_channel(addresses.address)
        try:
            yield Mesh(scheduler, gateway, addresses.address, addresses.http_address, channel)
        finally:
            await channel.close()
            await gateway.stop(stop_grace_s)
            await scheduler.stop()

    return run


@pytest.fixture
async def mesh(run_mesh: MeshFactory) -> AsyncIterator[Mesh]:
    """A mesh with defaults."""
    async with run_mesh() as running:
        yield running


@pytest.fixture
def spans() -> Iterator[InMemorySpanExporter]:
    """Tracing on, into memory."""
    exporter = InMemorySpanExporter()
    handle = configure_tracing("test", TracingConfig(), exporter=exporter)
    yield exporter
    handle.shutdown()
