"""What a rank does that follows: the leader's messages, in order, one answer to each."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from functools import partial

from chipmesh.device.v1alpha1.execution_pb2 import FollowRequest, FollowResponse, StepPlan
from meshkit.errors import InvalidArgument, MeshError
from worker_svc.device_thread import DeviceThread
from worker_svc.step_engine import StepEngine

Answers = asyncio.Future[FollowResponse]


class FollowStream:
    """The messages of one Follow call. Each goes to the device thread as soon as it is read."""

    def __init__(self, engine: StepEngine, device: DeviceThread) -> None:
        self._engine = engine
        self._device = device
        self._answers: asyncio.Queue[Answers | None] = asyncio.Queue()

    async def run(self, requests: AsyncIterator[FollowRequest]) -> AsyncGenerator[FollowResponse, None]:
        """Answers in order, until the requests end.

        Raises:
            InvalidArgument: an empty message. Unavailable: this rank's engine takes no more steps.
        """
        reader = asyncio.create_task(self._read(requests), name="leader's plans")
        try:
            while (answer := await self._answers.get()) is not None:
                yield await answer
            await reader
        finally:
            reader.cancel()
            await asyncio.gather(reader, return_exceptions=True)

    async def _read(self, requests: AsyncIterator[FollowRequest]) -> None:
        try:
            async for request in requests:
                answer = self._device.submit(self._job(request))
                # Of one that nobody waits for any more asyncio shall not complain.
                answer.add_done_callback(_look_at)
                self._answers.put_nowait(answer)
        finally:
            # Wakes `run`, which then sees how the reading ended.
            self._answers.put_nowait(None)

    def _job(self, request: FollowRequest) -> Callable[[], FollowResponse]:
        kind = request.WhichOneof("event")
        if kind == "attach":
            return partial(self._attach, request.attach.epoch)
        if kind == "steps" and request.steps.plans:
            return partial(self._execute, request.steps.plans)
        raise InvalidArgument("a message of Follow needs an attach, or plans", field="event")

    def _attach(self, epoch: int) -> FollowResponse:
        self._engine.attach(epoch)
        return FollowResponse(epoch=epoch)

    def _execute(self, plans: Sequence[StepPlan]) -> FollowResponse:
        """Runs the plans up to the first one that is refused, as the leader does."""
        for plan in plans:
            try:
                self._engine.execute(plan)
            except MeshError as error:
                if self._engine.failure:
                    raise
                return FollowResponse(epoch=plan.epoch, step_seq=plan.step_seq, error=error.message)
        return FollowResponse(epoch=plans[-1].epoch, step_seq=plans[-1].step_seq)


def _look_at(answer: Answers) -> None:
    if not answer.cancelled():
        answer.exception()
