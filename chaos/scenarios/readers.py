"""R14: clients that do not read what they asked for, beside those that do."""

from __future__ import annotations

import asyncio
import itertools
import signal
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from chaos.frozen_clients import GENERATE, WIDE, long_request
from chaos.http2 import RawConnection
from chaos.metrics import resident_bytes
from chaos.processes import FaultDidNotHappen, freeze, identify
from chaos.report import Target, percentiles
from chaos.scenario import Run, scenario
from chaos.view import requests_in
from meshkit.cli.processes import ProcessRecord, send_signal

CLIENTS = 64
TOKENS = 20_000
"""More than is made within a run: none of them ends by itself."""
WITHOUT_S = 1.2
WITH_S = 2.5
SLOW_WINDOW_BYTES = 512
GRANT_BYTES, GRANT_INTERVAL_S = 64, 0.25
START_TIMEOUT_S = 30.0
DROP_TIMEOUT_S = 30.0

slow_clients = scenario(
    "R14",
    f"{CLIENTS} clients that read slowly, or not at all, or whose process is frozen",
    target=Target(figures={"kib_per_stream": 256, "others_gap_growth_ms": 50}),
    tokens=800,
)


@slow_clients.variant("slow")
async def read_slowly(run: Run) -> None:
    """Their transports live and answer pings. Half of them read a little now and then, half nothing. They are
    compared with as many that read: those cost what they cost.
    """
    memory = _GatewayMemory(run)
    async with _connections(run, window=WIDE) as readers:
        await _ask(readers)
        without = await _gaps_of(run, run.share * WITHOUT_S)
    await _until_only_ours(run)
    async with _connections(run, window=SLOW_WINDOW_BYTES) as connections:
        await run.strike(lambda: _ask(connections))
        async with _trickle(connections[::2]), memory.watched():
            with_slow = await _gaps_of(run, run.share * WITH_S)
        over = sum(connection.is_over for connection in connections)
        run.expect(not over, f"{over} slow clients were cut off, though their transports live")
        stalled = sum(connection.data_bytes <= SLOW_WINDOW_BYTES for connection in connections)
        run.expect(
            stalled >= CLIENTS // 2, f"only {stalled} clients were behind: nothing waited in the gateway"
        )
    _judge(run, memory, without, with_slow)


@slow_clients.variant("frozen")
async def freeze_clients(run: Run) -> None:
    """First they read. Then nobody answers pings: the gateway gives them up, and what they held is free."""
    memory = _GatewayMemory(run)
    async with _frozen_clients(run) as process, memory.watched():
        without = await _gaps_of(run, run.share * WITHOUT_S)
        at = await run.strike(lambda: freeze([process]))
        with_frozen = await _gaps_of(run, run.share * WITH_S)
        gone_at = await _until_only_ours(run)
        run.measure("given_up_ms", (gone_at - at) * 1e3)
    _judge(run, memory, without, with_frozen)


async def _until_only_ours(run: Run) -> float:
    """Return when the scheduler has no other requests than those of the run's own streams; the instant."""
    return await run.mesh.view.first_time(
        lambda mesh: requests_in(mesh) <= len(run.clients.all), timeout_s=DROP_TIMEOUT_S
    )


@asynccontextmanager
async def _connections(run: Run, *, window: int) -> AsyncIterator[list[RawConnection]]:
    connections = [await RawConnection.open(_gateway(run), window=window) for _ in range(CLIENTS)]
    try:
        yield connections
    finally:
        await asyncio.gather(*(connection.close() for connection in connections))


def _gateway(run: Run) -> str:
    return run.mesh.address(run.mesh.gateway_names[0])


async def _ask(connections: Sequence[RawConnection]) -> float:
    at = time.monotonic()
    body = long_request(tokens=TOKENS)
    for connection in connections:
        connection.begin(GENERATE, body)
    try:
        waits = (connection.headers_seen.wait() for connection in connections)
        await asyncio.wait_for(asyncio.gather(*waits), START_TIMEOUT_S)
    except asyncio.TimeoutError as error:
        raise FaultDidNotHappen("the requests were not answered") from error
    return at


@asynccontextmanager
async def _trickle(connections: Sequence[RawConnection]) -> AsyncIterator[None]:
    async def grant() -> None:
        while True:
            await asyncio.sleep(GRANT_INTERVAL_S)
            for connection in connections:
                connection.grant(GRANT_BYTES, stream=1)

    granting = asyncio.create_task(grant())
    try:
        yield
    finally:
        granting.cancel()
        await asyncio.gather(granting, return_exceptions=True)


@asynccontextmanager
async def _frozen_clients(run: Run) -> AsyncIterator[ProcessRecord]:
    """A process whose clients are all being served."""
    child = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "chaos.frozen_clients", _gateway(run), str(CLIENTS), str(TOKENS),
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL,
    )  # fmt: skip
    process = identify(child.pid)
    try:
        assert child.stdout is not None
        line = await asyncio.wait_for(child.stdout.readline(), START_TIMEOUT_S)
        if line != b"going\n":
            raise FaultDidNotHappen(f"the process of the frozen clients said {line!r}")
        yield process
    finally:
        send_signal(process, signal.SIGKILL)
        await child.wait()


class _GatewayMemory:
    """Memory of the gateway: before, and at most."""

    def __init__(self, run: Run) -> None:
        self._process = run.mesh.process(run.mesh.gateway_names[0])
        self.before = self.most = resident_bytes(self._process)

    @asynccontextmanager
    async def watched(self) -> AsyncIterator[None]:
        async def watch() -> None:
            while True:
                self.most = max(self.most, resident_bytes(self._process))
                await asyncio.sleep(0.1)

        watching = asyncio.create_task(watch())
        try:
            yield
        finally:
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)


async def _gaps_of(run: Run, seconds: float) -> list[float]:
    """Milliseconds between two receipts of one stream, of all streams that read, in the next `seconds`."""
    since = time.monotonic()
    await asyncio.sleep(seconds)
    gaps: list[float] = []
    for client in run.clients.all:
        times = [message.at for message in client.history.received if message.at >= since]
        gaps += [1e3 * (later - earlier) for earlier, later in itertools.pairwise(times)]
    run.expect(bool(gaps), "no other stream was going: there is nothing to compare")
    return gaps


def _judge(run: Run, memory: _GatewayMemory, without: list[float], with_them: list[float]) -> None:
    """Gaps of all runs are reported together; bounded is by how much a run's 99th percentile grew."""
    run.measure("kib_per_stream", (memory.most - memory.before) / 1024 / CLIENTS)
    run.outcome.figures.setdefault("others_gap_without_ms", []).extend(without)
    run.outcome.figures.setdefault("others_gap_with_ms", []).extend(with_them)
    before, after = percentiles(without), percentiles(with_them)
    if before is not None and after is not None:
        run.measure("others_gap_growth_ms", max(0.0, after["p99"] - before["p99"]))
