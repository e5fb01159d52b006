"""ExecutionService: loads, allocates, attaches, and keeps the device thread fed with step plans."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Mapping
from contextlib import aclosing
from functools import partial

from chipmesh.device.v1alpha1.execution_pb2 import (
    AllocateKvCacheRequest,
    AllocateKvCacheResponse,
    AttachRequest,
    AttachResponse,
    ExecuteStepsRequest,
    ExecuteStepsResponse,
    FollowRequest,
    FollowResponse,
    LoadModelRequest,
    LoadModelResponse,
    LoadProgress,
    ProfileRequest,
    ProfileResponse,
    UnloadModelRequest,
    UnloadModelResponse,
)
from chipmesh.device.v1alpha1.execution_pb2_grpc import ExecutionServiceServicer
from meshkit.errors import Aborted, AlreadyExists, FailedPrecondition, MeshError
from meshkit.rpc.handlers import Context
from meshkit.telemetry.logging import get_logger
from worker_svc.device_thread import DeviceThread
from worker_svc.executor.follow_stream import FollowStream
from worker_svc.executor.followers import Followers, OpenChannel
from worker_svc.executor.step_stream import StepStream
from worker_svc.profile.profiling import Profiling
from worker_svc.step_engine import StepEngine

log = get_logger(__name__)


class ExecutionService(ExecutionServiceServicer):
    """One model on one device, or one rank's part of it, for one scheduler at a time.

    open_channel: to another rank, by its address. facts: of the executor, for profiles.
    """

    def __init__(
        self,
        engine: StepEngine,
        device: DeviceThread,
        *,
        instance_id: str,
        open_channel: OpenChannel,
        facts: Mapping[str, str] | None = None,
    ) -> None:
        self._engine = engine
        self._device = device
        self._instance_id = instance_id
        self._profiling = Profiling(engine, device, facts=facts or {})
        self._streams: set[StepStream] = set()
        self._epochs = itertools.count(1)
        self._followers = Followers(engine, device, open_channel=open_channel, on_lost=self._set_is_over)
        self._is_led = False
        self.is_stopping = False
        """Set where the process ends by order: then a set's end is no loss."""

    async def LoadModel(
        self, request: LoadModelRequest, context: Context
    ) -> AsyncIterator[LoadModelResponse]:
        """Stream the progress of a load, then the model. A caller that leaves does not stop the load."""
        del context
        loop = asyncio.get_running_loop()
        stages: asyncio.Queue[LoadProgress | None] = asyncio.Queue()

        def report(stage: str, fraction: float) -> None:
            message = LoadProgress(stage=stage, fraction=min(max(fraction, 0.0), 1.0))
            loop.call_soon_threadsafe(stages.put_nowait, message)

        loading = self._device.submit(partial(self._engine.load, request, report))
        loading.add_done_callback(lambda _: stages.put_nowait(None))
        async for stage in _thinned(stages):
            yield LoadModelResponse(progress=stage)
        yield LoadModelResponse(model=await loading)

    async def AllocateKvCache(
        self, request: AllocateKvCacheRequest, context: Context
    ) -> AllocateKvCacheResponse:
        """Allocate the pages."""
        del context
        return await self._device.submit(partial(self._engine.allocate, request))

    async def Attach(self, request: AttachRequest, context: Context) -> AttachResponse:
        """Take the executor for a scheduler: fence the one before and open a new epoch."""
        del context
        if request.instance_id != self._instance_id:
            raise FailedPrecondition(
                f"instance_id is {request.instance_id!r}; this executor is {self._instance_id!r}",
                field="instance_id",
                reason="OTHER_INSTANCE",
                instance_id=self._instance_id,
            )
        self._require_leader()
        self._fence(f"scheduler {request.scheduler_id!r} attached")
        epoch = next(self._epochs)
        self._followers.attach(epoch)
        attached = await self._device.submit(partial(self._engine.attach, epoch))
        # A stream of the epoch before may have been opened while this waited for its turn.
        self._fence(f"scheduler {request.scheduler_id!r} attached")
        log.info("scheduler attached", scheduler_id=request.scheduler_id, epoch=attached.epoch)
        return attached

    async def ExecuteSteps(
        self, request_iterator: AsyncIterator[ExecuteStepsRequest], context: Context
    ) -> AsyncIterator[ExecuteStepsResponse]:
        """Take plans and send results, in order; plans are queued on the device ahead of results."""
        del context
        self._require_leader()

        def take_over() -> None:
            self._fence("its scheduler opened another one", but=stream)

        stream = StepStream(self._engine, self._device, followers=self._followers, take_over=take_over)
        self._streams.add(stream)
        try:
            async with aclosing(stream.run(request_iterator)) as results:
                async for steps in results:
                    yield ExecuteStepsResponse(results=steps)
        finally:
            self._streams.discard(stream)

    async def Follow(
        self, request_iterator: AsyncIterator[FollowRequest], context: Context
    ) -> AsyncIterator[FollowResponse]:
        """Do what the leader does, until its stream ends, which is the end of the set."""
        del context
        self._begin_to_follow()
        stream = FollowStream(self._engine, self._device)
        try:
            async with aclosing(stream.run(request_iterator)) as answers:
                async for answer in answers:
                    yield answer
        finally:
            if not self.is_stopping:
                leader = next(iter(self._engine.ranks), None)
                where = f" at {leader.address}" if leader is not None else ""
                self._engine.fail(f"the set is over: its leader, rank 0{where}, was lost", reason="RANK_LOST")

    async def Profile(self, request: ProfileRequest, context: Context) -> ProfileResponse:
        """Record the device while it serves."""
        del context
        return ProfileResponse(chrome_trace=await self._profiling.run(request.duration))

    async def UnloadModel(self, request: UnloadModelRequest, context: Context) -> UnloadModelResponse:
        """Free the model and the pages; of a set its end."""
        del request, context
        self._fence("the model is unloaded")
        await self._followers.close()
        await self._device.submit(self._engine.unload)
        return UnloadModelResponse()

    async def close(self) -> None:
        """End what this executor leads."""
        await self._followers.close()

    def _require_leader(self) -> None:
        if rank := self._engine.rank:
            raise FailedPrecondition(
                f"this executor is rank {rank} of a set; a scheduler attaches to rank 0, which leads it",
                reason="NOT_THE_LEADER",
                rank=rank,
            )

    def _begin_to_follow(self) -> None:
        if not self._engine.rank:
            raise FailedPrecondition(
                "this executor leads its set, or is alone; only the other ranks follow",
                reason="NOT_A_FOLLOWER",
            )
        if self._is_led:
            raise AlreadyExists(
                f"rank {self._engine.rank} is led already, once for the life of its set", reason="IS_LED"
            )
        self._is_led = True

    def _set_is_over(self, error: MeshError) -> None:
        """A rank was lost: no step can be right any more, and those that run may never end."""
        if self.is_stopping:
            return
        self._engine.fail(error.message, reason=error.reason)
        for stream in self._streams:
            stream.fence(error)

    def _fence(self, why: str, *, but: StepStream | None = None) -> None:
        for stream in self._streams - {but}:
            stream.fence(Aborted(f"this stream has ended: {why}. Attach again", reason="FENCED"))
            self._streams.discard(stream)


async def _thinned(stages: asyncio.Queue[LoadProgress | None]) -> AsyncIterator[LoadProgress]:
    """Progress until None, without messages that tell nothing new (same stage, less than 1 % more)."""
    sent: LoadProgress | None = None
    while (stage := await stages.get()) is not None:
        is_new = sent is None or stage.stage != sent.stage
        if is_new or stage.fraction >= 1.0 or (sent is not None and stage.fraction - sent.fraction >= 0.01):
            sent = stage
            yield stage
