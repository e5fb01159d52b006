"""An executor in this process with the hash plugin behind it, and a small scheduler's end of a stream."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import grpc.aio

from chipmesh.device.v1alpha1.execution_pb2 import (
    AdmittedRequest,
    AllocateKvCacheRequest,
    AttachRequest,
    AttachResponse,
    ExecuteStepsRequest,
    LoadModelRequest,
    PageDelta,
    PrefillChunk,
    StepPlan,
    StepResult,
)
from chipmesh.device.v1alpha1.sampling_pb2 import SamplingParameters

if TYPE_CHECKING:  # generated for type checkers only
    from chipmesh.device.v1alpha1.execution_pb2_grpc import ExecutionServiceAsyncStub

INSTANCE = "instance-1"
PAGE = 4
PAGES = 64
SLOTS = 8
VOCAB = 32_000
GREEDY = SamplingParameters(top_p=1.0, repetition_penalty=1.0)


@dataclass
class Harness:
    """A served executor."""

    channel: grpc.aio.Channel
    execution: ExecutionServiceAsyncStub

    async def load(self) -> None:
        """Load the hash model and allocate its pages."""
        async for _ in self.execution.LoadModel(LoadModelRequest()):
            pass
        await self.execution.AllocateKvCache(
            AllocateKvCacheRequest(page_count=PAGES, page_size_tokens=PAGE, max_slots=SLOTS)
        )

    async def attach(self, scheduler: str = "scheduler-1") -> AttachResponse:
        """Take the executor."""
        return await self.execution.Attach(AttachRequest(scheduler_id=scheduler, instance_id=INSTANCE))

    async def drive(self) -> Driver:
        """Attach and open a stream."""
        attached = await self.attach()
        return Driver(self.execution.ExecuteSteps(), attached.epoch)


@dataclass
class Driver:
    """The scheduler's end of one ExecuteSteps stream."""

    call: Any
    epoch: int
    step_seq: int = 0
    tokens: dict[int, list[int]] = field(default_factory=dict)

    async def send(
        self,
        *,
        released: Sequence[int] = (),
        admitted: Sequence[AdmittedRequest] = (),
        pages: Mapping[int, Sequence[int]] | None = None,
        prefill: Sequence[PrefillChunk] = (),
        decode: bool = False,
    ) -> None:
        """Send the next plan."""
        self.step_seq += 1
        await self.send_plan(
            StepPlan(
                epoch=self.epoch,
                step_seq=self.step_seq,
                released_slots=released,
                admitted=admitted,
                pages=[PageDelta(slot=slot, page_ids=ids) for slot, ids in (pages or {}).items()],
                prefill=prefill,
                decode=decode,
            )
        )

    async def send_plan(self, plan: StepPlan) -> None:
        """Send a plan as it is."""
        await self.call.write(ExecuteStepsRequest(plans=[plan]))

    async def result(self) -> StepResult:
        """The next result; its tokens are added to `tokens`."""
        response = await self.call.read()
        if response is grpc.aio.EOF:
            raise await failure_of(self.call)
        (result,) = response.results
        for slot, token in zip(result.slots, result.token_ids, strict=True):
            self.tokens.setdefault(slot, []).append(token)
        return result  # type: ignore[no-any-return]

    async def step(self, **plan: Any) -> StepResult:
        """Send a plan and await its result."""
        await self.send(**plan)
        return await self.result()


async def failure_of(call: Any) -> Exception:
    """The error that a finished call ended with."""
    if await call.code() is grpc.StatusCode.OK:
        return AssertionError("the stream ended without an error")
    return grpc.aio.AioRpcError(
        await call.code(), await call.initial_metadata(), await call.trailing_metadata(), await call.details()
    )


def admit(slot: int, pages: Sequence[int], *, cached: int = 0, traceparent: str = "") -> AdmittedRequest:
    """An admitted request that samples greedily."""
    return AdmittedRequest(
        slot=slot, sampling=GREEDY, page_ids=pages, cached_tokens=cached, traceparent=traceparent
    )


def chunk(slot: int, tokens: Sequence[int], *, start: int = 0, last: bool = True) -> PrefillChunk:
    """A prompt chunk."""
    return PrefillChunk(slot=slot, start=start, token_ids=tokens, last=last)
