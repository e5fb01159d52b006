"""A small executor that keeps the step protocol, with hash tokens and faults on demand."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Coroutine
from dataclasses import dataclass, field
from typing import Any

import grpc

from chipmesh.device.v1alpha1 import execution_pb2, plugin_pb2
from chipmesh.device.v1alpha1.execution_pb2_grpc import (
    ExecutionServiceServicer,
    add_ExecutionServiceServicer_to_server,
)
from chipmesh.device.v1alpha1.plugin_pb2_grpc import (
    PluginServiceServicer,
    add_PluginServiceServicer_to_server,
)
from meshkit.errors import Aborted, FailedPrecondition, InvalidArgument, MeshError
from meshkit.rpc.server import RpcServer

VOCAB_SIZE = 1000
START = hashlib.sha256(b"chipmesh-hash-model").digest()


def absorb(digest: bytes, token: int) -> bytes:
    return hashlib.sha256(digest + token.to_bytes(4, "big")).digest()


def sample(digest: bytes) -> int:
    return int.from_bytes(digest[:8], "big") % VOCAB_SIZE


def expected_tokens(prompt: list[int], count: int) -> list[int]:
    """What the model answers, without pages, slots or steps."""
    digest, answer = START, []
    for token in prompt:
        digest = absorb(digest, token)
    for _ in range(count):
        answer.append(sample(digest))
        digest = absorb(digest, answer[-1])
    return answer


@dataclass
class SlotState:
    admitted: execution_pb2.AdmittedRequest
    pages: list[int]
    length: int
    last_token: int | None = None


@dataclass
class Stream:
    """One ExecuteSteps call. `extra` results are written before the next real one."""

    plans: asyncio.Queue[execution_pb2.StepPlan | None] = field(default_factory=asyncio.Queue)
    end: MeshError | None = None
    is_cut: bool = False
    over: asyncio.Event = field(default_factory=asyncio.Event)
    extra: list[execution_pb2.StepResult] = field(default_factory=list)


class FakeExecutor(ExecutionServiceServicer, PluginServiceServicer):
    """`gate` cleared: steps are taken in but not executed."""

    def __init__(
        self, instance_id: str, *, page_count: int = 64, page_size: int = 4, max_slots: int = 8,
        context_tokens: int = 200, numeric_class: str = "exact", logprob: float = -0.5,
        skew_after: int = 1000,
    ) -> None:  # fmt: skip
        self.instance_id = instance_id
        self.page_count, self.page_size, self.max_slots = page_count, page_size, max_slots
        self.model = execution_pb2.LoadedModel(
            architecture="Hash",
            vocab_size=VOCAB_SIZE,
            context_tokens=context_tokens,
            numeric_class=numeric_class,
        )
        self.logprob = logprob
        self.skew_after = skew_after
        """Sequences longer than so many tokens get wrong ones."""
        self.epoch = 0
        self.gate = asyncio.Event()
        self.gate.set()
        self.plans: list[execution_pb2.StepPlan] = []
        self.profiles: list[execution_pb2.ProfileRequest] = []
        self.profile_error: MeshError | None = None
        self.message_sizes: list[int] = []
        """Plans of each message."""
        self._executed = 0
        self._hold_at: int | None = None
        self.fail_slots: dict[int, str] = {}
        self.slots: dict[int, SlotState] = {}
        self.address = ""
        self._cells: dict[tuple[int, int], int] = {}
        self._stream: Stream | None = None
        self._server = RpcServer(listen="127.0.0.1:0")
        self._server.add(
            add_ExecutionServiceServicer_to_server, self, "chipmesh.device.v1alpha1.ExecutionService"
        )
        self._server.add(add_PluginServiceServicer_to_server, self, "chipmesh.device.v1alpha1.PluginService")

    async def start(self) -> None:
        self.address = await self._server.start()

    async def stop(self) -> None:
        """As a process that dies: every stream breaks, the port closes."""
        await self._server.stop(0)
        self.gate.set()

    # ------------------------------------------------------------ faults

    def hold_after(self, steps: int) -> None:
        """Execute so many more steps, then close the gate: what runs is still running when a test acts."""
        self._hold_at = self._executed + steps

    def release(self) -> None:
        """Go on executing, whatever was held."""
        self._hold_at = None
        self.gate.set()

    @property
    def is_streaming(self) -> bool:
        """Whether a scheduler has its stream of steps open."""
        return self._stream is not None

    def break_stream(self, error: MeshError) -> None:
        assert self._stream is not None
        self._stream.end = error
        self._stream.plans.put_nowait(None)
        self._stream.over.set()

    def cut_stream(self) -> None:
        """As a connection that is lost: the status is not one of ours."""
        assert self._stream is not None
        self._stream.is_cut = True
        self._stream.plans.put_nowait(None)
        self._stream.over.set()

    def send_with_next(self, result: execution_pb2.StepResult) -> None:
        assert self._stream is not None
        self._stream.extra.append(result)

    # ------------------------------------------------------------ services

    async def GetPluginInfo(
        self, request: plugin_pb2.GetPluginInfoRequest, context: Any
    ) -> plugin_pb2.GetPluginInfoResponse:
        return plugin_pb2.GetPluginInfoResponse(name="fake", instance_id=self.instance_id)

    async def GetCapabilities(self, request: Any, context: Any) -> Any:
        raise NotImplementedError

    async def Probe(self, request: Any, context: Any) -> Any:
        raise NotImplementedError

    async def LoadModel(self, request: Any, context: Any) -> Any:  # type: ignore[override]
        raise NotImplementedError

    async def AllocateKvCache(self, request: Any, context: Any) -> Any:
        raise NotImplementedError

    async def Profile(
        self, request: execution_pb2.ProfileRequest, context: Any
    ) -> execution_pb2.ProfileResponse:
        self.profiles.append(request)
        if self.profile_error is not None:
            raise self.profile_error
        return execution_pb2.ProfileResponse(chrome_trace=b"the trace of " + self.instance_id.encode())

    async def UnloadModel(self, request: Any, context: Any) -> Any:
        raise NotImplementedError

    def Follow(self, request_iterator: Any, context: Any) -> Any:
        raise NotImplementedError

    async def Attach(
        self, request: execution_pb2.AttachRequest, context: Any
    ) -> execution_pb2.AttachResponse:
        if request.instance_id != self.instance_id:
            raise FailedPrecondition("another instance")
        if self._stream is not None:
            self.break_stream(Aborted("attached anew"))
        self.epoch += 1
        self.slots.clear()
        return execution_pb2.AttachResponse(
            epoch=self.epoch, page_count=self.page_count, page_size_tokens=self.page_size,
            max_slots=self.max_slots, model=self.model,
        )  # fmt: skip

    async def ExecuteSteps(  # type: ignore[override]
        self, request_iterator: AsyncIterator[execution_pb2.ExecuteStepsRequest], context: Any
    ) -> None:
        stream = self._stream = Stream()
        reading = asyncio.create_task(self._read(stream, request_iterator))
        try:
            await self._execute_all(stream, context)
        finally:
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)
            if self._stream is stream:
                self._stream = None

    async def _read(self, stream: Stream, requests: AsyncIterator[execution_pb2.ExecuteStepsRequest]) -> None:
        async for message in requests:
            self.message_sizes.append(len(message.plans))
            for plan in message.plans:
                self.plans.append(plan)
                stream.plans.put_nowait(plan)
        stream.plans.put_nowait(None)

    async def _execute_all(self, stream: Stream, context: Any) -> None:
        next_seq = 1
        while (plan := await stream.plans.get()) is not None:
            await first_of(self.gate.wait(), stream.over.wait())
            if stream.end is not None or stream.is_cut:
                break
            if plan.epoch != self.epoch or plan.step_seq != next_seq:
                raise Aborted(f"epoch {plan.epoch} of {self.epoch}, step {plan.step_seq} of {next_seq}")
            next_seq += 1
            for extra in stream.extra:
                await context.write(execution_pb2.ExecuteStepsResponse(results=[extra]))
            stream.extra.clear()
            result = self._execute(plan)
            self._executed += 1
            if self._executed == self._hold_at:
                self.gate.clear()
            await context.write(execution_pb2.ExecuteStepsResponse(results=[result]))
        if stream.is_cut:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "Socket closed")
        if stream.end is not None:
            raise stream.end

    # ------------------------------------------------------------ one step

    def _execute(self, plan: execution_pb2.StepPlan) -> execution_pb2.StepResult:
        for released in plan.released_slots:
            if self.slots.pop(released, None) is None:
                raise InvalidArgument(f"slot {released} is free already")
        for admitted in plan.admitted:
            if admitted.slot in self.slots or admitted.slot >= self.max_slots:
                raise InvalidArgument(f"slot {admitted.slot} cannot be taken")
            self.slots[admitted.slot] = SlotState(admitted, list(admitted.page_ids), admitted.cached_tokens)
        for delta in plan.pages:
            self.slots[delta.slot].pages.extend(delta.page_ids)
        result = execution_pb2.StepResult(epoch=plan.epoch, step_seq=plan.step_seq)
        if plan.decode:
            for number in sorted(self.slots):
                slot = self.slots[number]
                if slot.last_token is not None:
                    self._write(slot, slot.length, slot.last_token)
                    self._sample(number, slot, result)
        for chunk in plan.prefill:
            slot = self.slots[chunk.slot]
            if chunk.start != slot.length:
                raise InvalidArgument(f"chunk starts at {chunk.start}, slot holds {slot.length}")
            for position, token in enumerate(chunk.token_ids, start=chunk.start):
                self._write(slot, position, token)
            if chunk.last:
                self._sample(chunk.slot, slot, result)
        self._add_logprobs(result)
        return result

    def _add_logprobs(self, result: execution_pb2.StepResult) -> None:
        """As the contract says: of all slots where any asked, else of none."""
        if any(self.slots[number].admitted.sampling.logprobs for number in result.slots):
            result.logprobs.extend([self.logprob] * len(result.slots))

    def _sample(self, number: int, slot: SlotState, result: execution_pb2.StepResult) -> None:
        if number in self.fail_slots:
            slot.last_token = None
            result.failures.add(slot=number, reason=self.fail_slots.pop(number), message="made to fail")
            return
        right = sample(self._digest_through_pages(slot))
        slot.last_token = right if slot.length < self.skew_after else (right + 1) % VOCAB_SIZE
        result.slots.append(number)
        result.token_ids.append(slot.last_token)

    def _write(self, slot: SlotState, position: int, token: int) -> None:
        page, offset = divmod(position, self.page_size)
        if page >= len(slot.pages):
            raise InvalidArgument(f"position {position} lies past the {len(slot.pages)} pages of its slot")
        self._cells[slot.pages[page], offset] = token
        slot.length = position + 1

    def _digest_through_pages(self, slot: SlotState) -> bytes:
        """From the tokens in the pages alone, so a wrong page shows as a wrong token."""
        digest = START
        for position in range(slot.length):
            page, offset = divmod(position, self.page_size)
            digest = absorb(digest, self._cells[slot.pages[page], offset])
        return digest


async def first_of(*waits: Coroutine[Any, Any, Any]) -> None:
    """Return when the first of them does."""
    tasks = [asyncio.ensure_future(wait) for wait in waits]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
