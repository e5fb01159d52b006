"""R13: clients that go away, in every way and in every phase of their request."""

from __future__ import annotations

import asyncio
import time
import uuid
from functools import partial

import grpc
import grpc.aio

from chaos.client import make_request
from chaos.history import History
from chaos.metrics import read_metrics
from chaos.processes import FaultDidNotHappen, until
from chaos.report import Target
from chaos.scenario import Run, scenario
from chaos.view import replicas_of
from chipmesh.inference.v1alpha1 import inference_pb2, inference_pb2_grpc
from meshkit.rpc.channel import open_channel

CANCELS_OF_A_RUN = 500
PROBES_OF_A_RUN = 4
AT_ONCE = 48
MOST_TRIES = 20
"""For each cancel: a request that had ended before is none."""
TOKENS = 40
LONG_PROMPT_TOKENS = 6000
"""More than a step's chunk: a cancel may come in the middle of its prefill."""
LATEST_S = 0.6
SETTLE_TIMEOUT_S = 20.0

cancels = scenario(
    "R13",
    "Clients cancel in a random phase, by dropping the call, by CancelGeneration or by hanging up",
    target=Target(figures={"leaked_tasks": 0, "steps_after_cancel": 2}),
    tokens=400,
    full_runs=20,
)


@cancels.variant("all phases")
async def cancel_at_random(run: Run) -> None:
    """Half of them beside streams, half on an idle mesh, which has the same tasks before and after."""
    half = max(1, run.times(CANCELS_OF_A_RUN) // 2)
    await run.strike(partial(_cancel_many, run, half))
    run.struck(time.monotonic(), times=half - 1)
    await run.clients.end(timeout_s=60.0)
    before = await _settled_tasks(run)
    await _cancel_many(run, half)
    run.struck(time.monotonic(), times=half)
    after = await _settled_tasks(run)
    for service, count in after.items():
        run.measure("leaked_tasks", count - before[service])
        run.expect(count <= before[service], f"{service} had {before[service]:g} tasks and has {count:g}")
    for _ in range(run.times(PROBES_OF_A_RUN)):
        await _probe_steps(run)


class _Victim:
    """A request that will be cancelled."""

    def __init__(self, run: Run, channel: grpc.aio.Channel) -> None:
        draw = run.draw
        prompt = run.prompt()
        if draw.random() < 0.1:
            prompt += [draw.randrange(1000) for _ in range(LONG_PROMPT_TOKENS)]
        self.request = make_request(History(prompt, [0] * TOKENS))
        self.request.request_id = uuid.UUID(int=draw.getrandbits(128)).hex
        self._channel = channel
        self._last = asyncio.Event()
        self.kinds: list[str] = []
        self.task = asyncio.create_task(self._follow())

    async def _follow(self) -> grpc.StatusCode:
        call = inference_pb2_grpc.InferenceServiceStub(self._channel).Generate(self.request)
        try:
            async for response in call:
                self.kinds.append(response.event.WhichOneof("kind") or "nothing")
                if len(self.kinds) == TOKENS:
                    self._last.set()
        except grpc.aio.AioRpcError as error:
            return error.code()
        finally:
            self._last.set()
            call.cancel()
        return await call.code()

    async def until_last_token(self) -> None:
        """Return when about the last token has come, or the stream has ended."""
        await self._last.wait()


async def _cancel_many(run: Run, count: int) -> float:
    """Cancel so many requests that had not ended; the instant of the first."""
    began = time.monotonic()
    left, tries = count, 0

    async def work() -> None:
        nonlocal left, tries
        while left > 0:
            left, tries = left - 1, tries + 1
            if tries > MOST_TRIES * count:
                raise FaultDidNotHappen(
                    f"of {tries} requests {tries - left} had ended before they were cancelled"
                )
            if not await _cancel_one(run):
                left += 1

    await asyncio.gather(*(work() for _ in range(min(AT_ONCE, count))))
    return began


async def _cancel_one(run: Run) -> bool:
    """Whether there was something to cancel."""
    own = open_channel(run.mesh.address(run.mesh.gateway_names[0]), traced=False)
    victim = _Victim(run, own)
    try:
        await _reach_phase(run, victim)
        if victim.task.done():
            code = await victim.task
            run.expect(code is grpc.StatusCode.OK, f"a request ended by itself with {code} before its cancel")
            return False
        how = run.draw.choice(("drop", "rpc", "hang up"))
        if how == "rpc":
            return await _cancel_by_rpc(run, victim, own)
        if how == "hang up":
            await own.close()
        victim.task.cancel()
        await asyncio.gather(victim.task, return_exceptions=True)
        return True
    finally:
        victim.task.cancel()
        await asyncio.gather(victim.task, return_exceptions=True)
        await own.close()


async def _reach_phase(run: Run, victim: _Victim) -> None:
    """Before it is sent, on the way, while it waits or is prefilled, as it decodes, or at its last token."""
    longest_s = run.draw.choice((0.0, 0.003, 0.03, LATEST_S, None))
    if longest_s is None:
        await victim.until_last_token()
    else:
        await asyncio.sleep(run.draw.uniform(0.0, longest_s))


async def _cancel_by_rpc(run: Run, victim: _Victim, channel: grpc.aio.Channel) -> bool:
    stub = inference_pb2_grpc.InferenceServiceStub(channel)
    reply = await stub.CancelGeneration(
        inference_pb2.CancelGenerationRequest(request_id=victim.request.request_id), timeout=10
    )
    if not reply.cancelled:
        return False  # Not there yet, or over: the call is dropped, which counts as no cancel.
    code = await asyncio.wait_for(victim.task, 10)
    run.expect(
        code is grpc.StatusCode.OK, f"a request that was cancelled by CancelGeneration ended with {code}"
    )
    return True


async def _settled_tasks(run: Run) -> dict[str, float]:
    """Tasks of each service once nothing runs, and their number stays as it is."""
    await run.mesh.view.until_settled(run.mesh.worker_names, timeout_s=SETTLE_TIMEOUT_S)
    names = ["scheduler", *run.mesh.gateway_names, *run.mesh.worker_names]
    seen: dict[str, float] = {}

    async def is_steady() -> bool:
        nonlocal seen
        before, seen = seen, {name: await _tasks(run, name) for name in names}
        return before == seen

    # More than the interval at which a service counts them.
    await until(is_steady, timeout_s=SETTLE_TIMEOUT_S, what="the number of tasks is steady", poll_s=0.6)
    return seen


async def _tasks(run: Run, service: str) -> float:
    return (await read_metrics(run.mesh.http_address(service)))["chipmesh_asyncio_tasks"]


async def _probe_steps(run: Run) -> None:
    """Steps that a device still computed after the cancel of the only request was acknowledged."""
    channel = open_channel(run.mesh.address(run.mesh.gateway_names[0]), traced=False)
    victim = _Victim(run, channel)
    try:
        await until(lambda: len(victim.kinds) > run.draw.randrange(2, 20), timeout_s=10, what="tokens come")
        if await _cancel_by_rpc(run, victim, channel):
            at_cancel = await _steps(run)
            await run.mesh.view.until_settled(run.mesh.worker_names, timeout_s=SETTLE_TIMEOUT_S)
            await asyncio.sleep(10 * run.mesh.shape.step_ms / 1e3)
            # The last one computes nothing: it tells the executor that the slot is free.
            run.measure("steps_after_cancel", max(0, await _steps(run) - at_cancel - 1))
    finally:
        victim.task.cancel()
        await asyncio.gather(victim.task, return_exceptions=True)
        await channel.close()


async def _steps(run: Run) -> int:
    return sum(replica.step_seq for replica in replicas_of(await run.mesh.view.mesh()))
