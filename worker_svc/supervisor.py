"""Keeps one worker's executors alive: starts them, watches them, replaces them, drains them.

No torch, no chip's name.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import grpc.aio
from google.protobuf.duration_pb2 import Duration

from chipmesh.device.v1alpha1.plugin_pb2 import ProbeRequest, ProbeResponse
from chipmesh.device.v1alpha1.plugin_pb2_grpc import PluginServiceStub
from chipmesh.scheduler.v1alpha1.registry_pb2 import SwapOrder, SwapProgress
from meshkit.errors import (
    DeadlineExceeded,
    FailedPrecondition,
    InvalidArgument,
    MeshError,
    ResourceExhausted,
    Unavailable,
)
from meshkit.telemetry.logging import get_logger
from worker_svc.config import WorkerConfig, check_set
from worker_svc.executor_process import ExecutorFailed
from worker_svc.executor_set import ExecutorSet, Rank, spawn_set
from worker_svc.executor_setup import ReadyExecutor, registration_of, set_up_set
from worker_svc.registration import ExecutorState, Registrar

if TYPE_CHECKING:  # generated for type checkers only
    from chipmesh.device.v1alpha1.plugin_pb2_grpc import PluginServiceAsyncStub

log = get_logger(__name__)

PROBE_TIMEOUT_S = 2.0
DEATH_NOTICE_S = 0.5
"""How long the notice of a process' end may take after its peers have felt it."""
_NO_ROOM = grpc.StatusCode.RESOURCE_EXHAUSTED.name


@dataclass(slots=True)
class SupervisorStatus:
    """What is to be seen from outside. since_last_step_s, probe_message: of the first rank here, where all
    answer. last_loss: why the executors before these were replaced.
    """

    state: ExecutorState.ValueType = ExecutorState.EXECUTOR_STATE_STARTING
    restarts: int = 0
    since_last_step_s: float | None = None
    probe_message: str = ""
    last_loss: str = ""


@dataclass(slots=True)
class _Serving:
    """Executors that have a model."""

    executors: ExecutorSet
    ready: ReadyExecutor

    @property
    def instance_id(self) -> str:
        return self.executors.first.process.instance_id


class Supervisor:
    """One worker id, one set of executors at a time: mostly a set of one, which is an executor that is alone.

    on_progress: told of each stage of loading a model and the share done.
    """

    def __init__(
        self,
        config: WorkerConfig,
        registrar: Registrar,
        *,
        on_progress: Callable[[str, float], None] | None = None,
        on_change: Callable[[], None] | None = None,
        on_ready: Callable[[], None] | None = None,
    ) -> None:
        self._config = config
        self._registrar = registrar
        self._on_progress = on_progress or log_progress
        self._on_change = on_change or _nothing
        self._on_ready = on_ready or _nothing
        given = config.takeover_token
        self._takeover_token = given.get_secret_value() if given else secrets.token_hex(16)
        self._serving: _Serving | None = None
        self._leaving: _Serving | None = None
        """Those that were ended to make room for their successors."""
        self._swap_id = ""
        self._swapping: asyncio.Task[None] | None = None
        self._swapped = asyncio.Event()
        self.status = SupervisorStatus()

    def __repr__(self) -> str:
        state = ExecutorState.Name(self.status.state)
        return f"<Supervisor {self._config.worker_id} {state} restarts={self.status.restarts}>"

    @property
    def executors(self) -> ExecutorSet:
        """The present executors, alive or not.

        Raises:
            Unavailable: none were started yet.
        """
        return self._present().executors

    @property
    def ready(self) -> ReadyExecutor:
        """What the present executors reported. Raises Unavailable as `executors`."""
        return self._present().ready

    async def start(self) -> None:
        """Start the first executors and announce them.

        Raises:
            MeshError: they failed; a first start is not tried again, since its cause will stay, unless ranks
                on other hosts did not come.
        """
        try:
            self._serving = await self._launch(self._config)
        except MeshError as error:
            if not self._waits_for_others(error):
                raise
            log.warning("ranks of other hosts have not come, trying again", error=error.message)
            self._serving = await self._launch_again()
        self._announce(self._serving)

    async def run(self) -> None:
        """Replace all executors whenever one ends, is unhealthy or does not answer; returns never.

        Raises:
            MeshError: the start failed `executor.max_restarts` times in a row.
        """
        while True:
            serving = self._present()
            loop = asyncio.get_running_loop()
            began = loop.time()
            reason = await self._watch(serving)
            if reason is None:
                continue  # Others have taken their place.
            if serving is self._leaving:
                log.info("executor has made room", pids=serving.executors.pids)
            else:
                self._note_loss(serving, reason, lasted_s=loop.time() - began)
            await self._bury(serving)
            if self._swapping is not None:
                await asyncio.wait({self._swapping})  # Its new executor serves too, and is loading already.
                if self._serving is not serving:
                    continue
            self._serving = await self._launch_again()
            self._announce(self._serving)

    def _note_loss(self, serving: _Serving, reason: str, *, lasted_s: float) -> None:
        log.error("executor is lost", reason=reason, pids=serving.executors.pids, lasted_s=lasted_s)
        self.status.last_loss = reason
        self._set_state(ExecutorState.EXECUTOR_STATE_DEAD, serving.instance_id, why=reason)

    def order_swap(self, order: SwapOrder) -> None:
        """Put other executors in the present ones' place, under the same worker id. An order is carried out
        once, however often it comes; its progress goes with the heartbeats. One that fails leaves the present
        ones serving.
        """
        if order.swap_id == self._swap_id or self._swapping is not None:
            return
        self._swap_id, self._leaving = order.swap_id, None
        self._swapping = asyncio.create_task(self._swap(order), name=f"swap {order.swap_id}")
        self._swapping.add_done_callback(self._swap_ended)

    def _swap_ended(self, task: asyncio.Task[None]) -> None:
        self._swapping = None
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("swap ended by a fault of ours", error=repr(error))
            # Else the one who asked would wait for ever: the worker itself is alive.
            message = "the worker failed to swap by a fault of its own; its log tells more"
            self._tell_swap("failed", 1.0, error=message, reason="INTERNAL")

    def _tell_swap(self, stage: str, fraction: float, **failure: str) -> None:
        progress = SwapProgress(swap_id=self._swap_id, stage=stage, fraction=fraction, **failure)
        self._registrar.tell_swap(progress)

    async def _swap(self, order: SwapOrder) -> None:
        self._tell_swap("load", 0.0)
        try:
            wanted = _changed(self._config, order)
            new = await self._launch_instead(wanted, never_pause=order.never_pause)
        except MeshError as error:
            outcome = "serves on" if self._leaving is None else "is loaded again"
            log.error("swap failed", backend=order.backend, former=outcome, error=error.message)
            message = f"{error.message}; the former chip {outcome}"
            self._tell_swap("failed", 1.0, error=message, reason=error.reason, field=error.field or "")
            return
        old, self._serving, self._config = self._serving, new, wanted
        self._announce(new)
        self._swapped.set()
        self._tell_swap("register", 0.0)
        try:
            await self._registrar.registered.wait()
        finally:
            if old is not None:
                await self._bury(old)
        log.info("swapped", backend=wanted.backend, instance_id=new.instance_id)

    async def _launch_instead(self, wanted: WorkerConfig, *, never_pause: bool) -> _Serving:
        """New executors beside the present ones; where both do not fit, once those have made room.

        Raises:
            MeshError: they do not start.
        """
        try:
            return await self._launch(wanted, beside=self._tell_swap)
        except MeshError as error:
            if never_pause or not _lacks_room(error):
                raise
            log.warning("both executors do not fit, the present one makes room", error=error.message)
        self._tell_swap("room", 0.0)
        self._leaving = self._present()
        # Its requests move to peers, or wait: the scheduler replays them, as after a death.
        self._set_state(ExecutorState.EXECUTOR_STATE_STARTING, self._leaving.instance_id)
        await self._bury(self._leaving)
        return await self._launch(wanted, beside=self._tell_swap)

    async def stop(self) -> None:
        """Tell the scheduler and let running requests end.

        Call it after `run` was cancelled.
        """
        serving = self._serving
        if serving is None:
            return
        if serving.executors.alive and serving.executors.leads:
            self._set_state(ExecutorState.EXECUTOR_STATE_DRAINING, serving.instance_id)
            leader = serving.executors.first.process
            drained = await leader.drain(timeout_s=self._config.drain_timeout_s)
            log.info("drained" if drained else "requests move, the time to drain is over")

    async def close(self) -> None:
        """End the executors' processes, and those that are being loaded in their place."""
        if self._swapping is not None:
            self._swapping.cancel()
            await asyncio.gather(self._swapping, return_exceptions=True)
        serving, self._serving = self._serving, None
        if serving is not None:
            await self._bury(serving)

    # ---- starting

    async def _launch(
        self, config: WorkerConfig, *, beside: Callable[[str, float], None] | None = None
    ) -> _Serving:
        """beside: gets the progress of those that are loaded while others serve; None: they are the only
        ones.
        """
        instance_id = f"{config.worker_id}-{secrets.token_hex(6)}"
        if beside is None:
            self._set_state(ExecutorState.EXECUTOR_STATE_STARTING, instance_id)
        executors = await spawn_set(config, instance_id=instance_id)
        try:
            ready = await self._set_up(executors, config, beside or self._on_progress)
        except BaseException:
            await executors.stop(timeout_s=config.executor.stop_timeout_s)
            raise
        return _Serving(executors, ready)

    async def _set_up(
        self, executors: ExecutorSet, config: WorkerConfig, progress: Callable[[str, float], None]
    ) -> ReadyExecutor:
        """Set the executors up; a death while they load is an error at once, not a broken call later."""
        setup = asyncio.create_task(set_up_set(executors, config, progress=progress), name="executor setup")
        death = asyncio.create_task(executors.wait(), name="executor death")
        try:
            await asyncio.wait({setup, death}, return_when=asyncio.FIRST_COMPLETED)
            if setup.done() and setup.exception() is not None:
                # The other ranks may have felt a death before we hear of it, which tells more.
                await asyncio.wait({death}, timeout=DEATH_NOTICE_S if config.is_set else 0)
            if death.done() and not (setup.done() and setup.exception() is None):
                raise ExecutorFailed(
                    f"the {death.result()} while it loaded the model", reason="EXECUTOR_DIED"
                )
            return await setup
        finally:
            for task in (setup, death):
                task.cancel()
            await asyncio.gather(setup, death, return_exceptions=True)

    async def _launch_again(self) -> _Serving:
        """New executors, with growing pauses between attempts. Ranks of other hosts are waited for."""
        limits = self._config.executor
        backoff_s = limits.restart_backoff_s
        failures = 0
        while True:
            await asyncio.sleep(backoff_s)
            self.status.restarts += 1
            try:
                return await self._launch(self._config)
            except MeshError as error:
                failures += not self._waits_for_others(error)
                if failures > limits.max_restarts:
                    raise ExecutorFailed(
                        f"the executor could not be replaced after {failures} attempts; the last "
                        f"one: {error.message}",
                        field=error.field,
                        reason=error.reason,
                    ) from error
                log.warning("executor could not be started", error=error.message, attempt=failures)
                backoff_s = min(backoff_s * 2, limits.restart_backoff_max_s)

    def _waits_for_others(self, error: MeshError) -> bool:
        """Whether a start failed for want of ranks that another host's supervisor keeps alive."""
        return self._config.spans_hosts and isinstance(error, (Unavailable, DeadlineExceeded))

    def _announce(self, serving: _Serving) -> None:
        """Tell the scheduler; ranks that follow another host's leader have nothing to tell it."""
        self.status.state = ExecutorState.EXECUTOR_STATE_READY
        if serving.executors.leads:
            request = registration_of(
                serving.ready, self._config, serving.executors, takeover_token=self._takeover_token
            )
            self._registrar.announce(request)
        else:
            log.info("ranks follow", ranks=[rank.label for rank in serving.executors.ranks],
                     leader=serving.ready.ranks[0].address)  # fmt: skip
            self._on_ready()
        self._on_change()

    # ---- watching

    async def _watch(self, serving: _Serving) -> str | None:
        """Return when they must be replaced: which of them and why; None where they were."""
        self._swapped.clear()
        if self._serving is not serving:
            return None
        executors = serving.executors
        death = asyncio.create_task(executors.wait(), name="executor death")
        illnesses = [
            asyncio.create_task(
                self._probe_until_ill(rank, first=rank is executors.first), name="executor probe"
            )
            for rank in executors.ranks
        ]
        swapped = asyncio.create_task(self._swapped.wait(), name="executor swap")
        tasks: set[asyncio.Task[Any]] = {death, swapped, *illnesses}
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if self._serving is not serving:
                return None
            if death not in done and len(executors.ranks) > 1:
                # A rank's end makes the others ill; it tells more than they do.
                await asyncio.wait({death}, timeout=DEATH_NOTICE_S)
            found = [death] if death.done() else [task for task in illnesses if task in done]
            return "; ".join(str(task.result()) for task in found)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _probe_until_ill(self, rank: Rank, *, first: bool) -> str:
        stub: PluginServiceAsyncStub = PluginServiceStub(rank.channel)
        loop = asyncio.get_running_loop()
        answered = loop.time()
        while True:
            await asyncio.sleep(self._config.executor.probe_interval_s)
            try:
                probe = await stub.Probe(ProbeRequest(), timeout=PROBE_TIMEOUT_S)
            except grpc.aio.AioRpcError as error:
                silent_s = loop.time() - answered
                self.status.probe_message = (
                    f"{rank.label}: no answer for {silent_s:.1f} s ({error.code().name})"
                )
                if silent_s > self._config.executor.unresponsive_after_s:
                    return f"{rank.label} answered no probe for {silent_s:.1f} s"
                continue
            answered = loop.time()
            if first:
                self._note_probe(probe)
            if probe.readiness == ProbeResponse.READINESS_UNHEALTHY:
                return f"{rank.label} is unhealthy: {probe.message}"

    def _note_probe(self, probe: ProbeResponse) -> None:
        self.status.probe_message = probe.message
        self.status.since_last_step_s = (
            _seconds(probe.since_last_step) if probe.HasField("since_last_step") else None
        )

    # ---- ending

    async def _bury(self, serving: _Serving) -> None:
        await serving.executors.stop(timeout_s=self._config.executor.stop_timeout_s)

    def _set_state(self, state: ExecutorState.ValueType, instance_id: str, *, why: str = "") -> None:
        self.status.state = state
        self._registrar.set_state(state, instance_id=instance_id, why=why)
        self._on_change()

    def _present(self) -> _Serving:
        if self._serving is None:
            raise Unavailable("no executor is running", reason="NO_EXECUTOR")
        return self._serving


def log_progress(stage: str, fraction: float) -> None:
    """The event that the command line shows as a progress bar."""
    log.info("load_progress", stage=stage, fraction=fraction)


def _changed(config: WorkerConfig, order: SwapOrder) -> WorkerConfig:
    """The configuration after an order.

    Raises:
        FailedPrecondition: the set has ranks on other hosts. InvalidArgument: as the configuration's checks.
    """
    if config.spans_hosts:
        raise FailedPrecondition(
            "this worker's ranks are on several hosts, which change their chips by their own configurations: "
            "stop them, and start them with others",
            field="worker",
            reason="SET_OVER_HOSTS",
        )
    changes: dict[str, Any] = {}
    if order.backend:
        devices = tuple(order.devices) or (order.device,)
        alone = len(devices) == 1
        changes |= {
            "backend": order.backend,
            "device": devices[0] if alone else 0,
            "devices": () if alone else devices,
            "backend_options": dict(order.backend_options),
            "tensor_parallel_size": order.tensor_parallel_size or None,
            "pipeline_parallel_size": order.pipeline_parallel_size or None,
        }
    if order.model_path:
        changes["model_path"] = order.model_path
    wanted = config.model_copy(update=changes)
    try:
        check_set(wanted)
    except ValueError as error:
        raise InvalidArgument(str(error), field="devices") from error
    return wanted


def _lacks_room(error: MeshError) -> bool:
    """Whether an executor did not start for want of memory: its own refusal, or ours of its numbers."""
    return isinstance(error, ResourceExhausted) or error.metadata.get("cause_code") == _NO_ROOM


def _seconds(duration: Duration) -> float:
    return duration.seconds + duration.nanos / 1e9


def _nothing() -> None:
    return None
