"""What speaks to the scheduler in its contract tests: supervisors and gateways."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import grpc.aio

from chipmesh.device.v1alpha1 import plugin_pb2, sampling_pb2
from chipmesh.scheduler.v1alpha1 import registry_pb2, session_pb2
from chipmesh.scheduler.v1alpha1.registry_pb2_grpc import WorkerRegistryServiceStub
from chipmesh.scheduler.v1alpha1.session_pb2_grpc import SessionServiceStub
from meshkit.errors import MeshError, NotFound, from_rpc_error
from meshkit.rpc.channel import open_channel
from scheduler_svc.servicers.registry import CONTRACT_VERSION
from tests.contract.scheduler_svc.fake_executor import FakeExecutor

READY = registry_pb2.HeartbeatRequest.EXECUTOR_STATE_READY
WAIT_S = 10.0


async def until(condition: Callable[[], Any], what: str) -> None:
    """Return once `condition()` holds; a state that never comes fails the test."""
    deadline = asyncio.get_running_loop().time() + WAIT_S
    while not condition():
        assert asyncio.get_running_loop().time() < deadline, f"never came true: {what}"
        await asyncio.sleep(0.002)


STEP_WINDOW_MS = 1000
"""The fakes' steps are short: as many as may be travel in one message."""


def registration(executor: FakeExecutor, worker: str = "w0", **changes: Any) -> registry_pb2.RegisterRequest:
    request = registry_pb2.RegisterRequest(
        worker_id=worker,
        instance_id=executor.instance_id,
        executor_address=executor.address,
        group="g",
        model="m",
        plugin=plugin_pb2.GetPluginInfoResponse(name="fake", contract_version=CONTRACT_VERSION),
        capabilities=plugin_pb2.CapabilityReport(
            chip="fake", emulated=True, preferred_step_window_ms=STEP_WINDOW_MS
        ),
        loaded_model=executor.model,
        page_count=executor.page_count,
        page_size_tokens=executor.page_size,
        max_slots=executor.max_slots,
        supervisor_pid=100,
        executor_pid=101,
    )
    for field_name, value in changes.items():
        setattr(request, field_name, value)
    return request


class FakeSupervisor:
    """Registers an executor and beats until it is told to stop."""

    def __init__(self, scheduler: str) -> None:
        self.channel = open_channel(scheduler)
        self.registry = WorkerRegistryServiceStub(self.channel)
        self.lease: registry_pb2.RegisterResponse | None = None
        self.state = READY
        self.lease_refused = asyncio.Event()
        self._beating: asyncio.Task[None] | None = None

    async def register(self, request: registry_pb2.RegisterRequest) -> registry_pb2.RegisterResponse:
        try:
            self.lease = await self.registry.Register(request)
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error) from None
        self.stop_beating()
        self._beating = asyncio.create_task(self._beat(request))
        return self.lease

    async def heartbeat(self, request: registry_pb2.RegisterRequest, **changes: Any) -> None:
        assert self.lease is not None
        beat = registry_pb2.HeartbeatRequest(
            worker_id=request.worker_id, lease_id=self.lease.lease_id, instance_id=request.instance_id,
            executor_state=self.state,
        )  # fmt: skip
        for field_name, value in changes.items():
            setattr(beat, field_name, value)
        try:
            await self.registry.Heartbeat(beat)
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error) from None

    async def _beat(self, request: registry_pb2.RegisterRequest) -> None:
        assert self.lease is not None
        interval_s = self.lease.heartbeat_interval.ToNanoseconds() / 1e9
        while True:
            try:
                await self.heartbeat(request)
            except NotFound:
                self.lease_refused.set()
                return
            await asyncio.sleep(interval_s)

    def stop_beating(self) -> None:
        if self._beating is not None:
            self._beating.cancel()
            self._beating = None

    async def close(self) -> None:
        self.stop_beating()
        await self.channel.close()


@dataclass
class Seen:
    """All events of one request, in order."""

    number: int
    queued: bool = False
    placed: list[session_pb2.RequestPlaced] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finished: int | None = None
    failed: session_pb2.RequestFailed | None = None
    ended: asyncio.Event = field(default_factory=asyncio.Event)

    def take(self, event: session_pb2.RequestEvent) -> None:
        assert not self.ended.is_set(), f"an event after the last: {event}"
        kind = event.WhichOneof("event")
        if kind == "queued":
            assert not self.queued
            self.queued = True
        elif kind == "placed":
            self.placed.append(event.placed)
        elif kind == "tokens":
            assert event.tokens.first_index == len(self.tokens), "a token lost, repeated or out of order"
            self.tokens.extend(event.tokens.token_ids)
            self.logprobs.extend(event.tokens.logprobs)
        elif kind == "finished":
            self.finished = event.finished.reason
            self.ended.set()
        else:
            self.failed = event.failed
            self.ended.set()

    async def end(self) -> Seen:
        await asyncio.wait_for(self.ended.wait(), WAIT_S)
        return self

    async def has_tokens(self, count: int) -> None:
        await until(lambda: len(self.tokens) >= count, f"{count} tokens of request {self.number}")


class FakeGateway:
    """One session; `submit` gives a Seen that fills as events come."""

    def __init__(self, scheduler: str, gateway_id: str = "gw") -> None:
        self.channel = open_channel(scheduler, traced=False)
        self.gateway_id = gateway_id
        self.requests: dict[int, Seen] = {}
        self.batches: list[session_pb2.OpenSessionResponse] = []
        self.scheduler_id = ""
        self.end: MeshError | None = None
        self.reading: asyncio.Task[None] | None = None
        self._call: Any = None

    async def open(self) -> FakeGateway:
        self._call = SessionServiceStub(self.channel).OpenSession()
        hello = session_pb2.SessionHello(gateway_id=self.gateway_id)
        await self._call.write(session_pb2.OpenSessionRequest(hello=hello))
        first = await self._call.read()
        self.scheduler_id = first.welcome.scheduler_id
        self.reading = asyncio.create_task(self._read())
        return self

    async def _read(self) -> None:
        try:
            while (batch := await self._call.read()) is not grpc.aio.EOF:
                self.batches.append(batch)
                for event in batch.events:
                    self.requests[event.request_number].take(event)
        except grpc.aio.AioRpcError as error:
            self.end = from_rpc_error(error)

    async def send(self, *commands: session_pb2.RequestCommand) -> None:
        await self._call.write(session_pb2.OpenSessionRequest(commands=commands))

    def command(self, prompt: list[int], count: int, **changes: Any) -> session_pb2.RequestCommand:
        number = len(self.requests) + 1
        already = changes.get("output_token_ids", [])
        self.requests[number] = Seen(number, tokens=list(already))
        sampling = sampling_pb2.SamplingParameters(top_p=1.0, repetition_penalty=1.0)
        fields: dict[str, Any] = {
            "request_id": f"r{number}", "model": "m", "prompt_token_ids": prompt, "max_output_tokens": count,
            "sampling": sampling, **changes,
        }  # fmt: skip
        return session_pb2.RequestCommand(request_number=number, submit=session_pb2.SubmitRequest(**fields))

    async def submit(self, prompt: list[int], count: int, **changes: Any) -> Seen:
        command = self.command(prompt, count, **changes)
        await self.send(command)
        return self.requests[command.request_number]

    async def cancel(self, seen: Seen) -> None:
        cancel = session_pb2.CancelRequest()
        await self.send(session_pb2.RequestCommand(request_number=seen.number, cancel=cancel))

    async def close(self) -> None:
        if self._call is not None:
            self._call.cancel()
        if self.reading is not None:
            await asyncio.gather(self.reading, return_exceptions=True)
        await self.channel.close()
