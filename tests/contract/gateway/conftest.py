"""Meshes of one gateway and a fake scheduler, over real gRPC in this process."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from meshkit.config import TracingConfig
from meshkit.rpc.channel import open_channel
from meshkit.telemetry.tracing import configure_tracing
from tests.contract.gateway.gateway_client import Mesh, MeshFactory
from tests.contract.gateway.running_gateway import running_gateway


@pytest.fixture
def run_mesh(tiny_model: Path, tmp_path: Path) -> MeshFactory:
    """`async with run_mesh(**config) as mesh:`"""

    @asynccontextmanager
    async def run(**options: Any) -> AsyncIterator[Mesh]:
        async with running_gateway(tiny_model, tmp_path, **options) as running:
            addresses = running.addresses
            channel = open_channel(addresses.address)
            try:
                yield Mesh(
                    running.scheduler, running.gateway, addresses.address, addresses.http_address, channel
                )
            finally:
                await channel.close()

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
