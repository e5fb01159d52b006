"""A real scheduler, fake executors and a gateway with its page in this process; a browser's calls as HTTP."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx2 as httpx

from gateway.app import GatewayService
from gateway.config import GatewayConfig
from meshkit.config import parse_config
from scheduler_svc.app import SchedulerService
from scheduler_svc.config import SchedulerConfig
from tests.contract.scheduler_svc.conftest import Mesh

WAIT_S = 10.0
NO_TLS = False
"""Plain HTTP: no authorities to load for each client."""
GROUPS = [{"name": "g", "model": "m", "weight": 1.0}, {"name": "h", "model": "m", "weight": 1.0}]


@dataclass
class LiveView:
    """What a viewer has seen: the last event of each kind, and all of them."""

    last: dict[str, Any] = field(default_factory=dict)
    events: list[Any] = field(default_factory=list)
    is_over: bool = False
    _came: asyncio.Event = field(default_factory=asyncio.Event)

    async def until(self, holds: Callable[[dict[str, Any]], Any], what: str) -> dict[str, Any]:
        """The last events, as soon as they are as wanted."""

        async def look() -> dict[str, Any]:
            while not holds(self.last):
                assert not self.is_over, f"the stream has ended before: {what}"
                self._came.clear()
                await self._came.wait()
            return self.last

        try:
            return await asyncio.wait_for(look(), WAIT_S)
        except asyncio.TimeoutError:
            raise AssertionError(f"not in {WAIT_S} s: {what}; seen: {self.last}") from None

    async def read(self, response: httpx.Response) -> None:
        async for line in response.aiter_lines():
            if line.startswith("data: "):
                event = json.loads(line.removeprefix("data: "))
                self.events.append(event)
                self.last[event["kind"]] = event
                self._came.set()
        self.is_over = True
        self._came.set()


@dataclass
class PageMesh:
    """url: of the page. mesh: the scheduler's side, to add workers to."""

    url: str
    mesh: Mesh
    gateway: GatewayService

    @asynccontextmanager
    async def http(self, **headers: str) -> AsyncIterator[httpx.AsyncClient]:
        """A client with these headers in each call."""
        async with httpx.AsyncClient(
            base_url=self.url, headers=headers, timeout=20, trust_env=False, verify=NO_TLS
        ) as client:
            yield client

    @asynccontextmanager
    async def live(self, **headers: str) -> AsyncIterator[LiveView]:
        """A viewer."""
        view = LiveView()
        async with self.http(**headers) as http, http.stream("GET", "/page/api/live") as response:
            assert response.status_code == 200, await response.aread()
            reading = asyncio.create_task(view.read(response))
            try:
                yield view
            finally:
                reading.cancel()
                await asyncio.gather(reading, return_exceptions=True)

    async def post(self, path: str, body: object, **headers: str) -> httpx.Response:
        """One call that changes something."""
        async with self.http(**headers) as http:
            return await http.post(f"/page/api/{path}", json=body)


@asynccontextmanager
async def page_mesh(
    scratch: Path, *, scheduler: dict[str, Any] | None = None, **gateway: Any
) -> AsyncIterator[PageMesh]:
    """Two groups of one model, without workers yet; scheduler, gateway: configurations over the defaults."""
    config = {"groups": GROUPS, "identity_check_delay_s": 0.0, **(scheduler or {})}
    running = SchedulerService(parse_config(SchedulerConfig, config, source="test"))
    addresses = await running.start()
    mesh = Mesh(running, addresses.address, addresses.http_address)
    raw = {
        "scheduler_address": addresses.address,
        "models": [{"name": "m", "context_length": 128}],
        "cache_dir": str(scratch),
        "openai_listen": "127.0.0.1:0",
        **gateway,
    }
    service = GatewayService(parse_config(GatewayConfig, raw, source="test"))
    try:
        listening = await service.start()
        try:
            yield PageMesh(f"http://{listening.openai_address}", mesh, service)
        finally:
            await service.stop(0)
    finally:
        await mesh.close()
