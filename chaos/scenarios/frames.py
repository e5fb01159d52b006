"""R20: frames of random bytes and random messages at every port that speaks gRPC."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from functools import partial

import grpc
import grpc.aio

from chaos.fuzz import PORTS, Method, all_methods, frames
from chaos.mesh import Shape
from chaos.raw_calls import call_raw
from chaos.report import Target
from chaos.scenario import Run, scenario
from chaos.scenarios.inputs import INTERNAL_TEXT, expect_no_restart, processes_of
from meshkit.rpc.channel import open_channel

FRAMES_OF_A_RUN = 5000
CALL_TIMEOUT_S = 2.0
AT_ONCE = 16
MOST_ANSWERS = 3
"""A call that is understood is given up after so many."""
OUR_FAULT = "internal error (id"

fuzz = scenario(
    "R20",
    f"{FRAMES_OF_A_RUN} fuzzed protobuf frames for each run, to gateway, scheduler and executor",
    target=Target(figures={"restarts": 0, "unknown": 0, "internal": 0, "leaked_texts": 0}),
    shape=Shape(text_model=True),
    tokens=300,
    full_runs=20,
    notes={"json": "its JSON is fuzzed by the contract tests of gateway/openai_http, not here"},
)


@fuzz.variant("protobuf")
async def send_frames(run: Run) -> None:
    """All methods of all ports in turns."""
    before = await processes_of(run)
    sender = _Sender(run)
    try:
        await run.strike(partial(sender.send_many, run.times(FRAMES_OF_A_RUN)))
    finally:
        await sender.close()
    run.struck(time.monotonic(), times=sender.sent - 1)
    run.measure("frames", sender.sent)
    for name in ("unknown", "internal", "leaked_texts"):
        run.measure(name, sender.bad[name])
    for code, count in sender.codes.items():
        run.measure(f"answers_{code}", count)
    await expect_no_restart(run, before)


class _Sender:
    """Sends calls, and counts what came of them."""

    def __init__(self, run: Run) -> None:
        self._run = run
        mesh = run.mesh
        addresses = {
            "gateway": mesh.address(mesh.gateway_names[0]),
            "scheduler": mesh.address("scheduler"),
            "executor": mesh.executor_address(run.draw.choice(mesh.worker_names)),
        }
        self._channels = {port: open_channel(address, traced=False) for port, address in addresses.items()}
        self._methods = {port: all_methods(port) for port in PORTS}
        self.sent = 0
        self.codes: Counter[str] = Counter()
        self.bad: Counter[str] = Counter()
        self._told: set[tuple[str, str]] = set()

    async def close(self) -> None:
        """Hang up."""
        await asyncio.gather(*(channel.close() for channel in self._channels.values()))

    async def send_many(self, count: int) -> float:
        """At least so many frames; the instant of the first."""
        at = time.monotonic()

        async def work() -> None:
            while self.sent < count:
                await self._call(self._run.draw.choice(self._methods[self._run.draw.choice(list(PORTS))]))

        await asyncio.gather(*(work() for _ in range(AT_ONCE)))
        return at

    async def _call(self, method: Method) -> None:
        bodies = frames(method, self._run.draw)
        self.sent += len(bodies)
        try:
            await call_raw(
                self._channels[method.port],
                method.path,
                bodies,
                timeout_s=CALL_TIMEOUT_S,
                takes_stream=method.takes_stream,
                most_answers=MOST_ANSWERS,
            )
            self.codes["OK"] += 1
        except grpc.aio.AioRpcError as error:
            self._judge(method, error, bodies)

    def _judge(self, method: Method, error: grpc.aio.AioRpcError, bodies: list[bytes]) -> None:
        code, text = error.code(), f"{error.details()} {error.trailing_metadata()!r}"
        self.codes[code.name] += 1
        found = []
        if code is grpc.StatusCode.UNKNOWN:
            found.append("unknown")
        if OUR_FAULT in text:
            found.append("internal")
        if INTERNAL_TEXT.search(text):
            found.append("leaked_texts")
        for kind in found:
            self.bad[kind] += 1
            if (kind, method.path) not in self._told:
                self._told.add((kind, method.path))
                what = f"{kind}: {method.path} answered {code.name} {text[:300]}"
                self._run.expect(False, f"{what} to {[body[:200] for body in bodies]}")
