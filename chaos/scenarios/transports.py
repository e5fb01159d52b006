"""R21: connections that misuse HTTP/2 or never say what they want, and forms that nobody can compile."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import grpc.aio

from chaos.frozen_clients import GENERATE, long_request
from chaos.http2 import PREFACE, RawConnection, headers, settings
from chaos.mesh import TEXT_MODEL, Shape
from chaos.metrics import Page, quantile_bound, read_metrics
from chaos.processes import FaultDidNotHappen, until
from chaos.report import Target
from chaos.scenario import Run, scenario
from chipmesh.inference.v1alpha1 import inference_pb2, inference_pb2_grpc
from meshkit.rpc.channel import open_channel

ATTACK_S = 3.0
RESET_CONNECTIONS, RESETS_PER_S = 4, 1000
"""Of each connection: requests that are begun and given up at once."""
MOST_AT_ONCE = 50
SLOW_CONNECTIONS = 200
"""To each port."""
SLOW_INTERVAL_S = 0.2
TOKENS = 50
CATASTROPHES_AT_ONCE = 2
REFUSED_WITHIN_S = 20.0
"""Each takes a second of a processor, which it shares with all else here."""
LAG = "chipmesh_loop_lag_seconds"

misuse = scenario(
    "R21",
    f"{RESET_CONNECTIONS} connections of rapid resets; {SLOW_CONNECTIONS} to each port that end no request; "
    "catastrophic regular expressions",
    target=Target(figures={"loop_lag_p99_ms": 50, "catastrophes_not_refused": 0}),
    shape=Shape(text_model=True),
    tokens=400,
)


@misuse.variant("rapid reset")
async def reset_rapidly(run: Run) -> None:
    """Each request is reset as soon as it is sent, before its server can have answered."""
    connections = [
        await RawConnection.open(run.mesh.address(run.mesh.gateway_names[0]))
        for _ in range(RESET_CONNECTIONS)
    ]
    attack = _ResetAttack(run, connections)
    try:
        async with _lag_measured(run):
            await run.strike(attack.begin)
            await asyncio.sleep(run.share * ATTACK_S)
            done = await attack.end()
    finally:
        await attack.end()
        await asyncio.gather(*(connection.close() for connection in attack.connections))
    run.struck(time.monotonic(), times=done - 1)
    run.measure("resets", done)
    run.measure("connections_ended_by_gateway", attack.ended_by_gateway)


@misuse.variant("slowloris")
async def never_end(run: Run) -> None:
    """Half of the connections of a port send a preface and headers byte by byte, half of them nothing."""
    gateway = run.mesh.gateway_names[0]
    ports = [run.mesh.address(gateway), run.mesh.http_address(gateway), run.mesh.address("scheduler")]
    writers: list[asyncio.StreamWriter] = []
    dripping: list[asyncio.Task[None]] = []

    async def open_all() -> float:
        at = time.monotonic()
        for port in ports:
            for number in range(SLOW_CONNECTIONS):
                writer = await _connect(port)
                writers.append(writer)
                if number % 2:
                    dripping.append(asyncio.create_task(_drip(writer, is_http=port == ports[1])))
        return at

    try:
        async with _lag_measured(run):
            await run.strike(open_all)
            await asyncio.sleep(run.share * ATTACK_S)
    finally:
        for task in dripping:
            task.cancel()
        await asyncio.gather(*dripping, return_exceptions=True)
        for writer in writers:
            writer.close()
    run.struck(time.monotonic(), times=len(writers) - 1)
    run.measure("slow_connections", len(writers))


@misuse.variant("catastrophic regex")
async def ask_for_catastrophes(run: Run) -> None:
    """Clients that want outputs of forms which take minutes and gigabytes to compile, one after the other."""
    channel = open_channel(run.mesh.address(run.mesh.gateway_names[0]), traced=False)
    stub = inference_pb2_grpc.InferenceServiceStub(channel)
    codes: list[grpc.StatusCode] = []
    numbers = itertools.count()

    async def ask() -> float:
        at = time.monotonic()
        codes.append(await _code_of(stub, _catastrophe(next(numbers))))
        return at

    try:
        async with _lag_measured(run):
            await run.strike(ask)
            until_s = time.monotonic() + run.share * ATTACK_S
            while time.monotonic() < until_s:
                await asyncio.gather(*[ask() for _ in range(CATASTROPHES_AT_ONCE)])
    finally:
        await channel.close()
    run.struck(time.monotonic(), times=len(codes) - 1)
    refused = sum(code is grpc.StatusCode.INVALID_ARGUMENT for code in codes)
    run.measure("catastrophes", len(codes))
    run.measure("catastrophes_not_refused", len(codes) - refused)


async def _code_of(stub: Any, request: inference_pb2.GenerateRequest) -> grpc.StatusCode:
    """How a request ends, in a time that a client would wait."""
    try:
        async for _ in stub.Generate(request, timeout=REFUSED_WITHIN_S):
            pass
    except grpc.aio.AioRpcError as error:
        return error.code()
    return grpc.StatusCode.OK


def _catastrophe(number: int) -> inference_pb2.GenerateRequest:
    """Another one each time: a verdict is remembered."""
    regex = f"((((a{{{1000 + number}}}){{1000}}){{1000}}){{1000}})"
    return inference_pb2.GenerateRequest(
        model=TEXT_MODEL,
        prompt=inference_pb2.Prompt(text="hello"),
        sampling=inference_pb2.SamplingOptions(constraint=inference_pb2.OutputConstraint(regex=regex)),
    )


class _ResetAttack:
    """Requests begun and reset over some connections; one that the gateway ends is opened again."""

    def __init__(self, run: Run, connections: list[RawConnection]) -> None:
        self._run = run
        self.connections = connections
        self._body = long_request(tokens=TOKENS)
        self._tasks: list[asyncio.Task[None]] = []
        self.count = 0
        self.ended_by_gateway = 0

    async def begin(self) -> float:
        """Returns once many were sent and the gateway reads on."""
        at = time.monotonic()
        self._tasks = [asyncio.create_task(self._reset(index)) for index in range(len(self.connections))]
        try:
            await until(lambda: self.count > RESETS_PER_S // 4, timeout_s=10.0, what="requests are reset")
        except TimeoutError as error:
            raise FaultDidNotHappen(str(error)) from error
        return at

    async def _reset(self, index: int) -> None:
        began, sent = time.monotonic(), 0
        while True:
            connection = self.connections[index]
            if connection.is_over:
                self.ended_by_gateway += 1
                await connection.close()
                connection = self.connections[index] = await RawConnection.open(
                    self._run.mesh.address(self._run.mesh.gateway_names[0])
                )
            for _ in range(min(MOST_AT_ONCE, int((time.monotonic() - began) * RESETS_PER_S) - sent)):
                connection.reset(connection.begin(GENERATE, self._body))
                sent += 1
                self.count += 1
            await connection.flush()
            await asyncio.sleep(0.01)

    async def end(self) -> int:
        """Stop; how many were sent."""
        for task in self._tasks:
            task.cancel()
        for result in await asyncio.gather(*self._tasks, return_exceptions=True):
            if isinstance(result, Exception):
                raise result
        return self.count


async def _connect(address: str) -> asyncio.StreamWriter:
    host, _, port = address.rpartition(":")
    return (await asyncio.open_connection(host, int(port)))[1]


async def _drip(writer: asyncio.StreamWriter, *, is_http: bool) -> None:
    """The beginning of a request, a byte at a time."""
    http = b"GET /metrics HTTP/1.1\r\nHost: x\r\nX-Slow: " + b"x" * 10_000
    grpc = PREFACE + settings({}) + b"\x00\xff\xff\x01\x04\x00\x00\x00\x01" + headers(GENERATE, authority="x")
    for index in itertools.count():
        data = http if is_http else grpc
        try:
            writer.write(data[index : index + 1])
            await writer.drain()
        except ConnectionError:
            return
        await asyncio.sleep(SLOW_INTERVAL_S)


@asynccontextmanager
async def _lag_measured(run: Run) -> AsyncIterator[None]:
    """How late the event loops of gateway and scheduler woke up, as their own metrics say."""
    services = (run.mesh.gateway_names[0], "scheduler")
    before = {name: await _page(run, name) for name in services}
    yield
    for name in services:
        lag = quantile_bound(before[name], await _page(run, name), LAG, quantile=0.99)
        run.expect(lag is not None, f"{name} has measured no lag of its event loop")
        if lag is not None:
            run.measure("loop_lag_p99_ms", 1e3 * lag)


async def _page(run: Run, name: str) -> Page:
    return await read_metrics(run.mesh.http_address(name))
