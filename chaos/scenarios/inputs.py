"""R19 and R20: what clients, operators and workers may not send, and what nobody would."""

from __future__ import annotations

import re
import time
from functools import partial

import grpc
import grpc.aio

from chaos.bad_inputs import ADMIN, REGISTRY, BadInput, all_bad_inputs, harmless_cancels, known_request
from chaos.mesh import Shape
from chaos.raw_calls import call_raw
from chaos.report import Target
from chaos.scenario import Run, scenario
from chipmesh.inference.v1alpha1 import inference_pb2_grpc
from meshkit.cli.processes import ProcessRecord
from meshkit.errors import MeshError, from_rpc_error
from meshkit.rpc.channel import open_channel

LEAST_INPUTS = 300
CALL_TIMEOUT_S = 20.0
INTERNAL_TEXT = re.compile(
    r"""Traceback|File\ "|\.py\b|site-packages|/(?:work|usr|root|tmp|home)/
    |\b0x[0-9a-f]{6,}|\ object\ at\ |<class
    |\b(?:gateway|scheduler_svc|worker_svc|meshkit|plugins|chaos|google\.protobuf|grpc|builtins)\.\w
    |\b[A-Z][A-Za-z]+(?:Error|Exception|Servicer|Warning)\b""",
    re.VERBOSE,
)
"""Tracebacks, paths, addresses, modules and classes."""

bad_inputs = scenario(
    "R19",
    f"At least {LEAST_INPUTS} bad inputs, for each field what it may not hold",
    target=Target(figures={"field_not_named": 0, "wrong_code": 0, "leaked_texts": 0, "restarts": 0}),
    shape=Shape(text_model=True),
    tokens=300,
    full_runs=2,
)


@bad_inputs.variant("all fields")
async def send_bad_inputs(run: Run) -> None:
    """One after another: the streams beside them go on."""
    before = await processes_of(run)
    inputs = all_bad_inputs()
    chosen = inputs if run.share >= 1 else run.draw.sample(inputs, run.times(len(inputs)))
    desk = _Desk(run)
    try:
        await desk.make_known()
        await run.strike(partial(desk.send_all, chosen))
        run.struck(time.monotonic(), times=len(chosen) - 1)
        await desk.cancel_nothing()
    finally:
        await desk.close()
    run.measure("bad_inputs", len(chosen))
    run.measure("field_not_named", desk.unnamed)
    run.measure("wrong_code", desk.miscoded)
    run.measure("leaked_texts", desk.leaks)
    run.expect(len(inputs) >= LEAST_INPUTS, f"there are only {len(inputs)} bad inputs")
    await expect_no_restart(run, before)


class _Desk:
    """Sends bad inputs and looks at how they are refused."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._gateway = open_channel(run.mesh.address(run.mesh.gateway_names[0]), traced=False)
        self._scheduler = open_channel(run.mesh.address("scheduler"), traced=False)
        self.unnamed = self.miscoded = self.leaks = 0

    async def close(self) -> None:
        """Hang up."""
        await self._gateway.close()
        await self._scheduler.close()

    async def make_known(self) -> None:
        """The request that some inputs refer to."""
        stub = inference_pb2_grpc.InferenceServiceStub(self._gateway)
        async for _ in stub.Generate(known_request()):
            pass

    async def cancel_nothing(self) -> None:
        """CancelGeneration takes any id: there is nothing to cancel."""
        stub = inference_pb2_grpc.InferenceServiceStub(self._gateway)
        for request in harmless_cancels():
            reply = await stub.CancelGeneration(request, timeout=CALL_TIMEOUT_S)
            self._run.expect(
                not reply.cancelled, f"cancelled {request.request_id!r}, which is no live request"
            )

    async def send_all(self, inputs: list[BadInput]) -> float:
        """Each of them; the instant of the first."""
        at = time.monotonic()
        for bad in inputs:
            await self._send(bad)
        return at

    async def _send(self, bad: BadInput) -> None:
        service = bad.method.partition("/")[0]
        channel = self._scheduler if service in (ADMIN, REGISTRY) else self._gateway
        body = bad.request.SerializeToString()
        try:
            await call_raw(channel, f"/{bad.method}", [body], timeout_s=CALL_TIMEOUT_S)
        except grpc.aio.AioRpcError as refusal:
            self._judge(bad, refusal)
        else:
            self.miscoded += 1
            self._complain(bad, "was taken")

    def _judge(self, bad: BadInput, refusal: grpc.aio.AioRpcError) -> None:
        error = from_rpc_error(refusal)
        if error.code is not bad.code:
            self.miscoded += 1
            self._complain(bad, f"ended with {_in_words(error)}")
        elif error.field != bad.field:
            self.unnamed += 1
            self._complain(bad, f"was refused for its field {error.field!r}: {error.message[:200]}")
        told = f"{refusal.details()} {refusal.trailing_metadata()!r}"
        found = INTERNAL_TEXT.search(told)
        if found is not None:
            self.leaks += 1
            self._complain(bad, f"was told of {found.group()!r}: {told[:300]}")

    def _complain(self, bad: BadInput, what: str) -> None:
        shown = " ".join(str(bad.request).split())[:120]
        self._run.expect(
            False, f"{bad.method} with a bad {bad.field} ({shown}) {what}; due is {bad.code.name}"
        )


def _in_words(error: MeshError) -> str:
    return f"{error.code.name}, field {error.field!r}: {error.message[:200]}"


async def processes_of(run: Run) -> set[ProcessRecord]:
    """All processes of the mesh."""
    mesh = run.mesh
    services = [mesh.process(name) for name in ("scheduler", *mesh.gateway_names, *mesh.worker_names)]
    return {*services, *(replica.executor for replica in await mesh.view.replicas())}


async def expect_no_restart(run: Run, before: set[ProcessRecord]) -> None:
    """The same processes as before; measures `restarts`."""
    await run.until_serving(*run.mesh.worker_names)
    gone = before - await processes_of(run)
    run.measure("restarts", len(gone))
    run.expect(not gone, f"{len(gone)} processes are not there any more")
