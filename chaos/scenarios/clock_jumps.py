"""R22: the wall clock of a process jumps, as when an operator or NTP sets the time."""

from __future__ import annotations

import asyncio
import email.utils
import time
from functools import partial

import grpc
import grpc.aio

from chaos.bad_inputs import known_request
from chaos.mesh import Shape
from chaos.metrics import get
from chaos.processes import FaultDidNotHappen, until
from chaos.report import Target
from chaos.scenario import Run, scenario
from chaos.view import replicas_of
from chipmesh.inference.v1alpha1 import inference_pb2, inference_pb2_grpc
from meshkit.cli.processes import ProcessRecord
from meshkit.rpc.channel import open_channel

HOUR_S = 3600.0
READ_TIMEOUT_S = 10.0
DEADLINE_S = 8.0
"""Of requests that are made while a clock is wrong."""
LEASES_S = 1.2
"""A lease and some more: what is to expire does by then."""
FLIPPING_S, LONGEST_FLIP_S = 1.5, 0.15
MOST_DATE_ERROR_S = 5.0

jumps = scenario(
    "R22",
    "The wall clock of each process in turn jumps by an hour, and back",
    target=Target(gap_ms=2000, figures={"spurious_expiries": 0}),
    shape=Shape(clocks=True),
    tokens=700,
)


@jumps.variant("forward")
async def jump_forward(run: Run) -> None:
    """What was to last is over long ago."""
    await _jump_all(run, HOUR_S)


@jumps.variant("backward")
async def jump_backward(run: Run) -> None:
    """What was to last lasts an hour more; deadlines lie in a far future."""
    await _jump_all(run, -HOUR_S)


async def _jump_all(run: Run, offset_s: float) -> None:
    """One process after another, many times; then all that are wrong for as long as a lease; then back."""
    processes = await _processes(run)
    before = await _leases(run)
    asker = _Asker(run)
    try:
        await asker.begin_known()
        for name, process in processes.items():
            await run.strike(partial(_jump, run, name, process, offset_s))
            await _flip(run, process, offset_s)
            await asker.ask(f"when the clock of {name} had jumped by {offset_s:+g} s")
        await _until_all_tell(run, offset_s)
        await asyncio.sleep(LEASES_S)
        for process in processes.values():
            run.mesh.clocks.set(process, offset_s=0.0)
        await asker.ask("when all clocks were right again")
    finally:
        for process in processes.values():
            run.mesh.clocks.set(process, offset_s=0.0)
        await asker.close()
    after = await _leases(run)
    lost = {worker for worker, lease in before.items() if after.get(worker) != lease}
    run.expect(not lost, f"the leases of {', '.join(sorted(lost))} did not outlast the jumps")
    run.measure("spurious_expiries", len(lost) + asker.expired)


async def _processes(run: Run) -> dict[str, ProcessRecord]:
    mesh = run.mesh
    names = ["scheduler", *mesh.gateway_names, *mesh.worker_names]
    executors = {f"executor of {each.worker}": each.executor for each in await mesh.view.replicas()}
    return {**{name: mesh.process(name) for name in names}, **executors}


async def _leases(run: Run) -> dict[str, tuple[str, int, int]]:
    """For each worker what an expiry would change: executor and epoch; for all the sessions of gateways."""
    mesh = await run.mesh.view.mesh()
    return {
        each.worker: (each.instance_id, each.epoch, mesh.scheduler.gateways) for each in replicas_of(mesh)
    }


async def _jump(run: Run, name: str, process: ProcessRecord, offset_s: float) -> float:
    """Set a process' clock; returns once it has read it."""
    at = time.monotonic()
    run.mesh.clocks.set(process, offset_s=offset_s)
    try:
        await until(
            lambda: run.mesh.clocks.readings(process) > 0,
            timeout_s=READ_TIMEOUT_S,
            what=f"{name} reads its clock",
        )
    except TimeoutError as error:
        raise FaultDidNotHappen(str(error)) from error
    return at


async def _flip(run: Run, process: ProcessRecord, offset_s: float) -> None:
    """Back and forth: an expiry that compares readings of this clock is to catch one before and one after."""
    ends = time.monotonic() + run.share * FLIPPING_S
    while time.monotonic() < ends:
        for offset in (0.0, offset_s):
            run.mesh.clocks.set(process, offset_s=offset)
            await asyncio.sleep(run.draw.uniform(0.01, LONGEST_FLIP_S))
        if run.mesh.clocks.readings(process) > 0:
            run.struck(time.monotonic())


async def _until_all_tell(run: Run, offset_s: float) -> None:
    """What services tell others of the time is as wrong as their clocks."""
    for name in ("scheduler", *run.mesh.gateway_names, *run.mesh.worker_names):
        tells = partial(_tells, run, name, offset_s)
        try:
            await until(tells, timeout_s=READ_TIMEOUT_S, what=f"{name} tells its time", poll_s=0.1)
        except TimeoutError as error:
            raise FaultDidNotHappen(str(error)) from error


async def _tells(run: Run, name: str, offset_s: float) -> bool:
    """Whether the Date of a service's HTTP answers is off by so much."""
    _, headers = await get(run.mesh.http_address(name), "/health")
    told = email.utils.parsedate_to_datetime(headers["date"]).timestamp()
    return abs(told - (time.time() + offset_s)) < MOST_DATE_ERROR_S


class _Asker:
    """Makes requests with a deadline, and goes on with one that has ended: neither may have expired."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._channel = open_channel(run.mesh.address(run.mesh.gateway_names[0]), traced=False)
        self._stub = inference_pb2_grpc.InferenceServiceStub(self._channel)
        self._known = known_request()
        self._known.request_id += f"-{run.draw.randrange(10**9)}"
        self.expired = 0

    async def close(self) -> None:
        """Hang up."""
        await self._channel.close()

    async def begin_known(self) -> None:
        """The request that is resumed later."""
        async for _ in self._stub.Generate(self._known, timeout=DEADLINE_S):
            pass

    async def ask(self, when: str) -> None:
        """One new request and one resumed."""
        again = inference_pb2.ResumeGenerationRequest(request_id=self._known.request_id)
        new = known_request()
        new.ClearField("request_id")
        for call in (self._stub.Generate(new, timeout=DEADLINE_S),
                     self._stub.ResumeGeneration(again, timeout=DEADLINE_S)):  # fmt: skip
            try:
                async for _ in call:
                    pass
            except grpc.aio.AioRpcError as error:
                self.expired += 1
                self._run.expect(False, f"{when} a request failed: {error.code().name} {error.details()}")
