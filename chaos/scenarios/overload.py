"""R15: ten times the requests that the mesh can serve."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from chaos.client import make_request
from chaos.history import History
from chaos.mesh import Shape
from chaos.metrics import get
from chaos.processes import FaultDidNotHappen
from chaos.report import Target, percentiles
from chaos.scenario import Run, scenario
from chipmesh.inference.v1alpha1 import inference_pb2_grpc
from meshkit.rpc.channel import open_channel

WORKERS, SLOTS, QUEUE = 2, 16, 40
STEP_MS = 30.0
TOKENS = 60
"""Of each request. All streams of a run may come at once, and have to find room in the queue."""
CAPACITY_PER_S = WORKERS * SLOTS / (TOKENS * STEP_MS / 1e3)
"""Requests: what the slots can end. The hash model's steps take their time, however many rows they have."""
FACTOR = 10
WINDOW_S = 6.0
RAMP_S = 0.6
HEALTH_INTERVAL_S = 0.05

overload = scenario(
    "R15",
    f"{FACTOR} times as many requests as the mesh can serve ({CAPACITY_PER_S:.0f} per second)",
    target=Target(figures={"goodput_lost_percent": 10, "refusal_ms": 50, "health_ms": 100}),
    shape=Shape(
        workers=WORKERS,
        step_ms=STEP_MS,
        worker={"max_running_requests": SLOTS},
        scheduler={"max_queued_requests": QUEUE},
    ),
    tokens=100,
    full_runs=10,
)


@overload.variant("open loop")
async def offer_too_much(run: Run) -> None:
    """First too much, on top of the streams that are going; then, for comparison, what can be served.

    Refusals and health are bounded at their 99th percentiles: the harness shares the services' cores.
    """
    window_s = max(1.2, run.share * WINDOW_S)
    load = _Load(run)
    try:
        at = await run.strike(lambda: _offer(load))
        async with _Watched(run):
            await run.clients.end(timeout_s=60.0)
            goodput = await load.goodput(window_s)
            offered = load.offered / (time.monotonic() - at)
        await load.end()
        _judge_refusals(run, load, offered)
        peak = await _peak(run, window_s)
    finally:
        await load.close()
    run.measure("peak_tokens_per_s", peak)
    run.measure("goodput_tokens_per_s", goodput)
    run.measure("offered_times_capacity", offered / CAPACITY_PER_S)
    run.measure("goodput_lost_percent", max(0.0, 100.0 * (1 - goodput / peak)))
    run.expect(
        offered >= 0.8 * FACTOR * CAPACITY_PER_S, f"only {offered:.0f} requests per second were offered"
    )


@dataclass
class _Load:
    """Requests that are begun without waiting for others, and what became of them."""

    run: Run
    offered: int = 0
    refused_ms: list[float] = field(default_factory=list)
    other_errors: dict[str, int] = field(default_factory=dict)
    tokens: int = 0
    """Received by requests that were accepted."""

    def __post_init__(self) -> None:
        self._channel = open_channel(self.run.mesh.address(self.run.mesh.gateway_names[0]), traced=False)
        self._stub = inference_pb2_grpc.InferenceServiceStub(self._channel)
        self._tasks: set[asyncio.Task[None]] = set()
        self._spawner: asyncio.Task[None] | None = None

    def begin(self, *, per_s: float) -> None:
        """Begin so many requests a second from now on."""
        self._spawner = asyncio.create_task(self._spawn(per_s))

    async def _spawn(self, per_s: float) -> None:
        began = time.monotonic()
        while True:
            due = int((time.monotonic() - began) * per_s) - self.offered
            for _ in range(due):
                self._start(self._one())
            await asyncio.sleep(0.005)

    def keep(self, count: int) -> None:
        """Keep so many requests going, each after another."""

        async def one_after_another() -> None:
            while True:
                await self._one()

        for _ in range(count):
            self._start(one_after_another())

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _one(self) -> None:
        self.offered += 1
        request = make_request(History(self.run.prompt()[:32], [0] * TOKENS))
        began = time.monotonic()
        call = self._stub.Generate(request)
        try:
            async for response in call:
                self.tokens += len(response.event.output.token_ids)
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED:
                self.refused_ms.append(1e3 * (time.monotonic() - began))
            else:
                name = f"{error.code().name}: {error.details()}"
                self.other_errors[name] = self.other_errors.get(name, 0) + 1
        finally:
            call.cancel()

    async def goodput(self, seconds: float) -> float:
        """Tokens per second over the next `seconds`."""
        began, before = time.monotonic(), self.tokens
        await asyncio.sleep(seconds)
        return (self.tokens - before) / (time.monotonic() - began)

    async def end(self) -> None:
        """Begin no more, and give up those that go on."""
        if self._spawner is not None:
            self._spawner.cancel()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def close(self) -> None:
        """As `end`, and hang up."""
        await self.end()
        await self._channel.close()


async def _offer(load: _Load) -> float:
    """Returns once requests are refused: that is what too much is."""
    at = time.monotonic()
    load.begin(per_s=FACTOR * CAPACITY_PER_S)
    while not load.refused_ms:
        if time.monotonic() - at > 10.0:
            raise FaultDidNotHappen(f"{load.offered} requests were offered, and none was refused")
        await asyncio.sleep(0.01)
    return at


async def _peak(run: Run, seconds: float) -> float:
    """Tokens per second with as many requests as there are slots, and some that wait."""
    load = _Load(run)
    try:
        load.keep(WORKERS * SLOTS + QUEUE // 2)
        await asyncio.sleep(RAMP_S)
        return await load.goodput(seconds)
    finally:
        await load.close()


def _judge_refusals(run: Run, load: _Load, offered: float) -> None:
    refusals = percentiles(load.refused_ms)
    run.expect(not load.other_errors, f"requests failed otherwise than by a refusal: {load.other_errors}")
    if refusals is not None:
        run.measure("refusal_p50_ms", refusals["p50"])
        run.measure("refusal_ms", refusals["p99"])
        run.measure("refused_percent", 100.0 * len(load.refused_ms) / load.offered)


class _Watched:
    """Asks the gateway for its health, by gRPC and by HTTP, all the time; measures the 99th percentile."""

    def __init__(self, run: Run) -> None:
        self._run = run
        name = run.mesh.gateway_names[0]
        self._channel = open_channel(run.mesh.address(name), traced=False)
        self._http_address = run.mesh.http_address(name)
        self._times: list[float] = []

    async def __aenter__(self) -> None:
        self._tasks = [asyncio.create_task(self._ask(ask)) for ask in (self._by_grpc, self._by_http)]

    async def __aexit__(self, *_: object) -> None:
        for task in self._tasks:
            task.cancel()
        results = await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._channel.close()
        failed = [result for result in results if isinstance(result, Exception)]
        self._run.expect(not failed, f"health was not told: {failed}")
        summary = percentiles(self._times)
        if summary is not None:
            self._run.measure("health_ms", summary["p99"])

    async def _ask(self, ask: Callable[[], Awaitable[None]]) -> None:
        while True:
            began = time.monotonic()
            await ask()
            self._times.append(1e3 * (time.monotonic() - began))
            await asyncio.sleep(HEALTH_INTERVAL_S)

    async def _by_grpc(self) -> None:
        reply = await health_pb2_grpc.HealthStub(self._channel).Check(
            health_pb2.HealthCheckRequest(), timeout=10
        )
        self._run.expect(reply.status == reply.SERVING, "the gateway said that it does not serve")

    async def _by_http(self) -> None:
        await get(self._http_address, "/health")
