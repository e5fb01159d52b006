"""One attachment to one executor: its stream of steps, from Attach to the first sign that it is over.

Plans go out while fewer than `depth` messages are in flight and the batcher has work, but no sooner than the
device needs them, since a request that comes later is not in them; an idle link waits on one event. A message
carries as many decode steps as its window of time holds, or ends with a step that computes prompts, or one
that ends a request. `close` is synchronous and happens once: from then on no result of this epoch can reach
the core.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, TypeVar

import grpc
import grpc.aio
from google.protobuf.duration_pb2 import Duration

from chipmesh.device.v1alpha1 import execution_pb2, plugin_pb2
from chipmesh.device.v1alpha1.execution_pb2_grpc import ExecutionServiceStub
from chipmesh.device.v1alpha1.plugin_pb2_grpc import PluginServiceStub
from meshkit.config import TlsConfig
from meshkit.errors import STATUS_DETAILS_KEY, FailedPrecondition, from_rpc_error
from meshkit.rpc.channel import open_channel
from meshkit.rpc.policy import Role
from meshkit.telemetry.logging import get_logger
from scheduler_svc.core.structures import ReplicaId, StepPlan, StepResult
from scheduler_svc.step_codec import MalformedResult, decode_result, encode_plans
from scheduler_svc.step_time import StepDeadline, StepTimePredictor, StepTimes, share_time

log = get_logger(__name__)

if TYPE_CHECKING:  # generic in the stubs only
    StepCall: TypeAlias = grpc.aio.StreamStreamCall[
        execution_pb2.ExecuteStepsRequest, execution_pb2.ExecuteStepsResponse
    ]
else:
    StepCall = grpc.aio.StreamStreamCall

T = TypeVar("T")

_SHORT_S = 0.01
"""A message is there in less time, on a busy machine too, and less is not worth another one."""

_SOON_S = 0.001
"""Of less no timer is made."""


class StepSource(Protocol):
    """What a link needs of the engine. All of it runs on the event loop and returns at once."""

    def plan_step(self, replica: ReplicaId) -> StepPlan | None:
        """The next step of a replica, or None where there is nothing to do."""

    def is_shared(self, replica: ReplicaId) -> bool:
        """Whether several requests run on a replica."""

    def apply_step(self, replica: ReplicaId, result: StepResult, times: StepTimes) -> None:
        """Apply the result of the oldest step in flight."""

    def count_stale_result(self, replica: ReplicaId) -> None:
        """A result came that belongs to no step in flight; it was ignored."""


@dataclass(frozen=True, slots=True)
class LinkSettings:
    """What all links of a scheduler have in common.

    depth: messages of plans in flight at most. window_s: decode steps that take so long together travel in
    one message; a request that comes waits for those that are planned. None: as the chip prefers.
    """

    scheduler_id: str
    depth: int
    window_s: float | None
    attach_timeout_s: float
    deadline: StepDeadline
    max_message_bytes: int
    tls: TlsConfig | None = None


@dataclass(slots=True)
class _StepInFlight:
    step_seq: int
    prefill_tokens: int
    message_steps: int
    """Steps of its message: results come when all of them are there."""
    ends_message: bool
    began_at: float
    """Loop time at which it was sent, or the step before it ended, whichever came later."""


class ExecutorLink:
    """One epoch of one executor.

    preferred_window_s: of its chip. worker: whose executor it is; with `tls` the other side must have a
        certificate of that name.
    on_attached: called once the executor is ours; makes the replica known to the engine.
    on_closed: called once, in `close`, if `on_attached` was; takes the replica away from the engine. Its
        argument says whether the requests that ran may be at fault.
    """

    def __init__(
        self,
        replica: ReplicaId,
        *,
        worker: str,
        preferred_window_s: float,
        target: str,
        instance_id: str,
        source: StepSource,
        settings: LinkSettings,
        on_attached: Callable[[execution_pb2.AttachResponse], None],
        on_closed: Callable[[bool], None],
    ) -> None:
        self.replica = replica
        self.epoch: int | None = None
        self.last_step_seq = 0
        self.close_reason: str | None = None
        self.was_cut = False
        """The connection was lost; the executor itself has said nothing."""
        self._worker = worker
        self._window_s = preferred_window_s if settings.window_s is None else settings.window_s
        self._target = target
        self._instance_id = instance_id
        self._source = source
        self._settings = settings
        self._on_attached = on_attached
        self._on_closed = on_closed
        self._loop = asyncio.get_running_loop()
        self._work = asyncio.Event()
        self._over = asyncio.Event()
        self._steps: deque[_StepInFlight] = deque()
        self._times = StepTimePredictor()
        self._messages = 0
        """Messages in flight."""
        self._watch: asyncio.TimerHandle | None = None
        self._next_look: asyncio.TimerHandle | None = None
        """When the next message is due."""

    def __repr__(self) -> str:
        state = self.close_reason or ("attached" if self.epoch is not None else "attaching")
        return f"<ExecutorLink {self.replica} epoch={self.epoch} in_flight={len(self._steps)}: {state}>"

    @property
    def attached(self) -> bool:
        """Whether steps can be sent."""
        return self.epoch is not None and self.close_reason is None

    def wake(self) -> None:
        """There may be new work."""
        self._work.set()

    def close(self, reason: str, *, blame: bool = True) -> None:
        """End the attachment now; only the first call counts.

        blame: the requests that ran may have caused it.
        """
        if self.close_reason is not None:
            return
        self.close_reason = reason
        self._over.set()
        for timer in (self._watch, self._next_look):
            if timer is not None:
                timer.cancel()
        if self.epoch is not None:
            self._on_closed(blame)

    async def run(self) -> str:
        """Attach and carry steps until the link closes; returns why it did.

        Raises:
            MeshError: the executor could not be attached.
        """
        channel = open_channel(
            self._target,
            traced=False,
            max_message_bytes=self._settings.max_message_bytes,
            tls=self._settings.tls,
            role=Role.WORKER,
            name=self._worker,
        )
        async with channel:
            try:
                epoch = await self._attach(channel)
                if self.close_reason is None:
                    await self._carry(ExecutionServiceStub(channel).ExecuteSteps(), epoch)
            finally:
                self.close("the link was given up")
        return self.close_reason or ""

    async def _attach(self, channel: grpc.aio.Channel) -> int:
        info = await self._call(PluginServiceStub(channel).GetPluginInfo, plugin_pb2.GetPluginInfoRequest())
        if info.instance_id != self._instance_id:
            raise FailedPrecondition(
                f"{self._target} is instance {info.instance_id!r}, not {self._instance_id!r} as registered",
                reason="INSTANCE_MISMATCH",
            )
        request = execution_pb2.AttachRequest(
            scheduler_id=self._settings.scheduler_id, instance_id=self._instance_id
        )
        response = await self._call(ExecutionServiceStub(channel).Attach, request)
        if self.close_reason is None:
            self.epoch = response.epoch
            self._on_attached(response)
        return response.epoch

    async def _call(self, method: Callable[..., Awaitable[T]], request: Any) -> T:
        try:
            return await method(request, timeout=self._settings.attach_timeout_s)
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error) from error

    async def _carry(self, call: StepCall, epoch: int) -> None:
        tasks = [
            asyncio.create_task(self._read_results(call), name=f"results of {self.replica}"),
            asyncio.create_task(self._send_plans(call, epoch), name=f"plans for {self.replica}"),
            asyncio.create_task(self._over.wait(), name=f"end of {self.replica}"),
        ]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in tasks:
                if task.done():
                    task.result()
        finally:
            # First the core forgets the replica, then the tasks are awaited: nothing slips in between.
            self.close("the link was given up")
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            call.cancel()

    async def _send_plans(self, call: StepCall, epoch: int) -> None:
        while self.close_reason is None:
            await self._work.wait()
            self._work.clear()
            await self._send_what_fits(call, epoch)

    async def _send_what_fits(self, call: StepCall, epoch: int) -> None:
        while self.close_reason is None and (plans := self._plan_message()):
            self._note_sent(plans)
            try:
                await call.write(encode_plans(plans, epoch=epoch))
            except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
                await self._close_with(call)

    def _plan_message(self) -> list[StepPlan]:
        """The plans of the next message; none where enough is under way, or there is nothing to do."""
        plans: list[StepPlan] = []
        if self._messages >= self._settings.depth or not self._is_due():
            return plans
        left = self._times.steps_within(self._window_s) if self._settings.depth > 1 else 1
        while left and (plan := self._source.plan_step(self.replica)) is not None:
            plans.append(plan)
            left -= 1
            # Somebody waits for what follows from it.
            if plan.prefill or (plan.ends_request and self._times.predict(steps=left) > _SHORT_S):
                break
        return plans

    def _is_due(self) -> bool:
        """Whether half of what is under way should be over, or all but little of it. If not, wake up by then.

        Half, since a step may be faster than those before it, and a device that waits costs more. Beside a
        single request it is always due: others are rare then, and waking up is not for free.
        """
        if self._next_look is not None:
            self._next_look.cancel()
            self._next_look = None
        if not self._steps or not self._source.is_shared(self.replica):
            return True
        prefill_tokens = sum(step.prefill_tokens for step in self._steps)
        whole_s = self._times.predict(prefill_tokens=prefill_tokens, steps=len(self._steps))
        due_at = self._steps[0].began_at + whole_s - max(_SHORT_S, whole_s / 2)
        if due_at - self._loop.time() < _SOON_S:
            return True
        self._next_look = self._loop.call_at(due_at, self.wake)
        return False

    async def _read_results(self, call: StepCall) -> None:
        while self.close_reason is None:
            response = await _read(call)
            if response is None:
                await self._close_with(call)
            else:
                self._take_results(response.results)

    async def _close_with(self, call: StepCall) -> None:
        """Close for the reason that the stream ended with. ABORTED is a matter between us two alone."""
        code = await call.code()
        # An executor that ends a stream says why; a status without that is made by grpc on this side.
        self.was_cut = all(key != STATUS_DETAILS_KEY for key, _ in await call.trailing_metadata() or ())
        self.close(
            f"stream ended: {code.name} {await call.details()}", blame=code is not grpc.StatusCode.ABORTED
        )

    def _take_results(self, results: Sequence[execution_pb2.StepResult]) -> None:
        if not results:
            self.close("malformed result: a message without any")
            return
        now = self._loop.time()
        elapsed_s = now - self._steps[0].began_at if self._steps else 0.0
        walls_s = share_time(elapsed_s, [_seconds(result.device_time) for result in results])
        for result, wall_s in zip(results, walls_s, strict=True):
            if self.close_reason is not None:
                return  # They came while the link was being closed; the core has given its requests away.
            self._take_result(result, wall_s=wall_s, now=now)
        self._work.set()

    def _take_result(self, result: execution_pb2.StepResult, *, wall_s: float, now: float) -> None:
        head = self._steps[0] if self._steps else None
        if head is not None and result.epoch == self.epoch and result.step_seq > head.step_seq:
            # What that step made is gone, and waiting for it until its deadline would bring nothing.
            self.close(f"step {result.step_seq} came where {head.step_seq} is the next one", blame=False)
            return
        if head is None or result.epoch != self.epoch or result.step_seq != head.step_seq:
            self._source.count_stale_result(self.replica)
            return
        try:
            decoded = decode_result(result)
        except MalformedResult as error:
            self.close(f"malformed result: {error}")
            return
        self._note_ended(head, wall_s=wall_s, now=now)
        times = StepTimes(
            wall_s=wall_s,
            device_s=_seconds(result.device_time),
            idle_s=_seconds(result.idle_time),
            constraint_s=_seconds(result.constraint_time) if result.HasField("constraint_time") else None,
        )
        self._source.apply_step(self.replica, decoded, times)

    # ------------------------------------------------------------ deadlines

    def _note_sent(self, plans: Sequence[StepPlan]) -> None:
        now = self._loop.time()
        self._messages += 1
        for plan in plans:
            prefill_tokens = sum(len(chunk.token_ids) for chunk in plan.prefill)
            is_last = plan is plans[-1]
            self._steps.append(_StepInFlight(plan.step_seq, prefill_tokens, len(plans), is_last, now))
        if self._watch is None:
            self._watch = self._loop.call_at(self._head_deadline(), self._check_deadline)

    def _note_ended(self, step: _StepInFlight, *, wall_s: float, now: float) -> None:
        self._times.observe(wall_s, prefill_tokens=step.prefill_tokens)
        self.last_step_seq = step.step_seq
        self._steps.popleft()
        self._messages -= step.ends_message
        if self._steps:
            self._steps[0].began_at = now

    def _head_deadline(self) -> float:
        head = self._steps[0]
        return head.began_at + self._times.deadline(
            self._settings.deadline, prefill_tokens=head.prefill_tokens, steps=head.message_steps
        )

    def _check_deadline(self) -> None:
        """Runs at the deadline of a step that may long be over: one timer serves many steps."""
        self._watch = None
        if not self._steps or self.close_reason is not None:
            return
        if self._loop.time() < self._head_deadline():
            self._watch = self._loop.call_at(self._head_deadline(), self._check_deadline)
            return
        allowed_s = self._head_deadline() - self._steps[0].began_at
        log.error("step missed its deadline", replica=self.replica, step_seq=self._steps[0].step_seq,
                  allowed_s=allowed_s)  # fmt: skip
        self.close(f"step {self._steps[0].step_seq} missed its deadline of {allowed_s:.3f} s")


def _seconds(duration: Duration) -> float:
    """0.0 for an absent one."""
    return duration.seconds + duration.nanos * 1e-9


async def _read(call: StepCall) -> execution_pb2.ExecuteStepsResponse | None:
    """The next message, or None where the stream is over."""
    try:
        response = await call.read()
    except grpc.aio.AioRpcError:
        return None
    return response if isinstance(response, execution_pb2.ExecuteStepsResponse) else None
