"""A real gateway and a fake scheduler in this process; what speaks to the gateway is the test's matter."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gateway.app import GatewayAddresses, GatewayService
from gateway.config import GatewayConfig
from meshkit.config import parse_config
from tests.contract.gateway.fake_scheduler import FakeScheduler


@dataclass(frozen=True)
class RunningGateway:
    """addresses: where it listens."""

    scheduler: FakeScheduler
    gateway: GatewayService
    addresses: GatewayAddresses


@asynccontextmanager
async def running_gateway(
    model: Path,
    scratch: Path,
    /,
    *,
    scheduler: FakeScheduler | None = None,
    scheduler_up: bool = True,
    stop_grace_s: float = 0.0,
    **config: Any,
) -> AsyncIterator[RunningGateway]:
    """Serving `model` under the name "tiny", with its cache in `scratch`; config goes over the defaults.

    scheduler: None for a plain one.
    """
    scheduler = scheduler or FakeScheduler()
    await scheduler.start()
    if not scheduler_up:
        await scheduler.stop()
    raw = {
        "scheduler_address": scheduler.address,
        "models": [{"name": "tiny", "path": str(model)}],
        "cache_dir": str(scratch),
        **config,
    }
    gateway = GatewayService(parse_config(GatewayConfig, raw, source="test"))
    addresses = await gateway.start()
    try:
        yield RunningGateway(scheduler, gateway, addresses)
    finally:
        await gateway.stop(stop_grace_s)
        await scheduler.stop()
