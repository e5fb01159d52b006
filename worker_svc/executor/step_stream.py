"""One stream of step plans: reads ahead while the device runs, sends results in order, can be fenced."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from functools import partial

from chipmesh.device.v1alpha1.execution_pb2 import ExecuteStepsRequest, StepPlan, StepResult
from meshkit.errors import Aborted, InvalidArgument, MeshError, Unavailable
from meshkit.telemetry.logging import get_logger
from worker_svc.device_thread import DeviceThread
from worker_svc.executor.followers import Followers
from worker_svc.step_engine import StepEngine, StepOutcome

log = get_logger(__name__)

MAX_MESSAGES_AHEAD = 8
"""Messages whose results are not sent yet; more wait in gRPC's window. A scheduler sends two."""

Outcomes = asyncio.Future[list[StepOutcome]]


class StepStream:
    """The plans of one ExecuteSteps call.

    The plans of a message go to the device thread together and as soon as they are read, so the next ones
    wait there while they run; their results leave in one message, too. The first error ends the stream; plans
    queued behind it are skipped, or refused by the engine for their number.

    followers: the other ranks of the set; they get each message before it is queued here.
    take_over: called when the first plan has come and is of the present epoch.
    """

    def __init__(
        self,
        engine: StepEngine,
        device: DeviceThread,
        *,
        followers: Followers,
        take_over: Callable[[], None],
    ) -> None:
        self._engine = engine
        self._device = device
        self._followers = followers
        self._take_over = take_over
        self._outcomes: asyncio.Queue[Outcomes | MeshError | None] = asyncio.Queue()
        self._room = asyncio.Semaphore(MAX_MESSAGES_AHEAD)
        self._submitted: set[Outcomes] = set()
        self._epoch: int | None = None

    def __repr__(self) -> str:
        return f"<StepStream epoch={self._epoch} in_flight={len(self._submitted)}>"

    def fence(self, error: MeshError) -> None:
        """End the stream with `error`. Plans that wait will never run, unless other ranks have them."""
        self._drop_queued()
        self._outcomes.put_nowait(error)

    async def run(
        self, requests: AsyncIterator[ExecuteStepsRequest]
    ) -> AsyncGenerator[list[StepResult], None]:
        """Results in order, those of a message together, until the requests end.

        Raises:
            Aborted: the first plan is of another epoch. InvalidArgument: a message without plans. MeshError:
            as StepEngine.execute, or the error of `fence`.
        """
        reader = asyncio.create_task(self._read(requests), name="step plans")
        try:
            while (outcome := await self._outcomes.get()) is not None:
                if isinstance(outcome, MeshError):
                    raise outcome
                if not outcome.cancelled():
                    yield [step.to_proto() for step in outcome.result()]
                self._room.release()
            await reader
        finally:
            await self._close(reader)

    async def _read(self, requests: AsyncIterator[ExecuteStepsRequest]) -> None:
        try:
            async for request in requests:
                if not request.plans:
                    raise InvalidArgument("a message of ExecuteSteps needs at least one plan", field="plans")
                if self._epoch is None:
                    self._begin(request.plans[0])
                await self._room.acquire()
                # Nothing may come between the two: all ranks do all things in one order.
                self._followers.hand_on(request)
                self._submit(request.plans)
            if self._submitted:
                await asyncio.wait(set(self._submitted))
        finally:
            # Wakes `run`, which then sees how the reading ended.
            self._outcomes.put_nowait(None)

    def _begin(self, first: StepPlan) -> None:
        if first.epoch != self._engine.epoch:
            raise Aborted(
                f"plan.epoch is {first.epoch}; the executor is at epoch {self._engine.epoch}. Attach again",
                reason="STALE_EPOCH",
                epoch=self._engine.epoch,
            )
        self._epoch = first.epoch
        self._take_over()

    def _submit(self, plans: Sequence[StepPlan]) -> None:
        outcome = self._device.submit(partial(self._execute, plans))
        self._submitted.add(outcome)
        outcome.add_done_callback(self._settled)

    def _execute(self, plans: Sequence[StepPlan]) -> list[StepOutcome]:
        return [self._engine.execute(plan) for plan in plans]

    def _settled(self, outcome: Outcomes) -> None:
        self._submitted.discard(outcome)
        if not outcome.cancelled():
            # Those behind the first error are never looked at again; asyncio shall not complain of that.
            outcome.exception()
        self._outcomes.put_nowait(outcome)

    def _drop_queued(self) -> None:
        if self._followers:
            return  # The other ranks run what they were handed, and would wait for us.
        for outcome in list(self._submitted):
            outcome.cancel()

    async def _close(self, reader: asyncio.Task[None]) -> None:
        """Stop reading, skip what is queued, end the spans of what the slots still hold."""
        self._drop_queued()
        reader.cancel()
        # Before the first await: a call that is cancelled twice would never come to what follows one.
        self._end_spans()
        await asyncio.gather(reader, return_exceptions=True)

    def _end_spans(self) -> None:
        if self._epoch is None:
            return
        try:
            self._device.submit(partial(self._engine.end_stream, self._epoch))
        except Unavailable:
            log.debug("the device thread was stopped before its stream", epoch=self._epoch)
