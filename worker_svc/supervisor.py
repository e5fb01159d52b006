"""Keeps one worker's executor alive: starts it, watches it, replaces it, drains it.

No torch, no chip's name.
"""

from __future__ import annotations

import asyncio
import os
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import grpc.aio
from google.protobuf.duration_pb2 import Duration

from chipmesh.device.v1alpha1.plugin_pb2 import ProbeRequest, ProbeResponse
from chipmesh.device.v1alpha1.plugin_pb2_grpc import PluginServiceStub
from chipmesh.scheduler.v1alpha1.registry_pb2 import SwapOrder, SwapProgress
from meshkit.errors import MeshError, ResourceExhausted, Unavailable
from meshkit.rpc.channel import open_channel
from meshkit.rpc.policy import Role
from meshkit.telemetry.logging import get_logger
from worker_svc.config import WorkerConfig
from worker_svc.executor.settings import ExecutorSettings
from worker_svc.executor_process import ExecutorFailed, ExecutorProcess, spawn_executor
from worker_svc.executor_setup import ReadyExecutor, registration_of, set_up_executor
from worker_svc.registration import ExecutorState, Registrar

if TYPE_CHECKING:  # generated for type checkers only
    from chipmesh.device.v1alpha1.plugin_pb2_grpc import PluginServiceAsyncStub

log = get_logger(__name__)

PROBE_TIMEOUT_S = 2.0
SPIN_COUNT = 5000
"""Turns that a thread of GNU OpenMP waits for work by spinning, before it sleeps (some tens of microseconds).
libgomp's own choice is milliseconds; where two executors share processors, as in a swap, the waiting of one
then is time that the other does not get. See docs/performance.md, "Threads that wait".
"""
_NO_ROOM = grpc.StatusCode.RESOURCE_EXHAUSTED.name


@dataclass(slots=True)
class SupervisorStatus:
    """What is to be seen from outside. since_last_step_s: as the executor's last probe said."""

    state: ExecutorState.ValueType = ExecutorState.EXECUTOR_STATE_STARTING
    restarts: int = 0
    since_last_step_s: float | None = None
    probe_message: str = ""


@dataclass(slots=True)
class _Executor:
    process: ExecutorProcess
    channel: grpc.aio.Channel
    ready: ReadyExecutor


class Supervisor:
    """One worker id, one executor at a time.

    on_progress: told of each stage of loading a model and the share done.
    """

    def __init__(
        self,
        config: WorkerConfig,
        registrar: Registrar,
        *,
        on_progress: Callable[[str, float], None] | None = None,
        on_change: Callable[[], None] | None = None,
    ) -> None:
        self._config = config
        self._registrar = registrar
        self._on_progress = on_progress or log_progress
        self._on_change = on_change or _nothing
        given = config.takeover_token
        self._takeover_token = given.get_secret_value() if given else secrets.token_hex(16)
        self._executor: _Executor | None = None
        self._leaving: _Executor | None = None
        """One that was ended to make room for its successor."""
        self._swap_id = ""
        self._swapping: asyncio.Task[None] | None = None
        self._swapped = asyncio.Event()
        self.status = SupervisorStatus()

    def __repr__(self) -> str:
        state = ExecutorState.Name(self.status.state)
        return f"<Supervisor {self._config.worker_id} {state} restarts={self.status.restarts}>"

    @property
    def process(self) -> ExecutorProcess:
        """The present executor's process, alive or not.

        Raises:
            Unavailable: none was started yet.
        """
        return self._present().process

    @property
    def ready(self) -> ReadyExecutor:
        """What the present executor reported. Raises Unavailable as `process`."""
        return self._present().ready

    async def start(self) -> None:
        """Start the first executor and announce it.

        Raises:
            MeshError: it failed; a first start is not tried again, since its cause will stay.
        """
        self._executor = await self._launch(self._config)
        self._announce(self._executor)

    async def run(self) -> None:
        """Replace the executor whenever it ends, is unhealthy or does not answer; returns never.

        Raises:
            MeshError: the start failed `executor.max_restarts` times in a row.
        """
        while True:
            executor = self._present()
            loop = asyncio.get_running_loop()
            began = loop.time()
            reason = await self._watch(executor)
            if reason is None:
                continue  # Another executor has taken its place.
            lasted_s = loop.time() - began
            if executor is self._leaving:
                log.info("executor has made room", pid=executor.process.pid)
            else:
                log.error("executor is lost", reason=reason, pid=executor.process.pid, lasted_s=lasted_s)
                self._set_state(ExecutorState.EXECUTOR_STATE_DEAD, executor.process.instance_id)
            await self._bury(executor)
            if self._swapping is not None:
                await asyncio.wait({self._swapping})  # Its new executor serves too, and is loading already.
                if self._executor is not executor:
                    continue
            self._executor = await self._launch_again()
            self._announce(self._executor)

    def order_swap(self, order: SwapOrder) -> None:
        """Put another executor in the present one's place, under the same worker id. An order is carried out
        once, however often it comes; its progress goes with the heartbeats. One that fails leaves the present
        executor serving.
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
        wanted = self._config.model_copy(update=_changes(order))
        self._tell_swap("load", 0.0)
        try:
            new = await self._launch_instead(wanted, never_pause=order.never_pause)
        except MeshError as error:
            outcome = "serves on" if self._leaving is None else "is loaded again"
            log.error("swap failed", backend=wanted.backend, former=outcome, error=error.message)
            message = f"{error.message}; the former chip {outcome}"
            self._tell_swap("failed", 1.0, error=message, reason=error.reason, field=error.field or "")
            return
        old, self._executor, self._config = self._executor, new, wanted
        self._announce(new)
        self._swapped.set()
        self._tell_swap("register", 0.0)
        try:
            await self._registrar.registered.wait()
        finally:
            if old is not None:
                await self._bury(old)
        log.info("swapped", backend=wanted.backend, instance_id=new.process.instance_id)

    async def _launch_instead(self, wanted: WorkerConfig, *, never_pause: bool) -> _Executor:
        """A new executor beside the present one; where both do not fit, once that has made room.

        Raises:
            MeshError: it does not start.
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
        self._set_state(ExecutorState.EXECUTOR_STATE_STARTING, self._leaving.process.instance_id)
        await self._leaving.process.stop(timeout_s=self._config.executor.stop_timeout_s)
        return await self._launch(wanted, beside=self._tell_swap)

    async def stop(self) -> None:
        """Tell the scheduler, let running requests end, then end the executor.

        Call it after `run` was cancelled.
        """
        executor = self._executor
        if executor is None:
            return
        if executor.process.alive:
            self._set_state(ExecutorState.EXECUTOR_STATE_DRAINING, executor.process.instance_id)
            drained = await executor.process.drain(timeout_s=self._config.drain_timeout_s)
            log.info("drained" if drained else "requests move, the time to drain is over")

    async def close(self) -> None:
        """End the executor's process, and one that is being loaded in its place."""
        if self._swapping is not None:
            self._swapping.cancel()
            await asyncio.gather(self._swapping, return_exceptions=True)
        executor, self._executor = self._executor, None
        if executor is not None:
            await self._bury(executor)

    # ---- starting

    async def _launch(
        self, config: WorkerConfig, *, beside: Callable[[str, float], None] | None = None
    ) -> _Executor:
        """beside: gets the progress of one that is loaded while another serves; None: it is the only one."""
        settings = _settings(config)
        if beside is None:
            self._set_state(ExecutorState.EXECUTOR_STATE_STARTING, settings.instance_id)
        process = await spawn_executor(
            settings,
            python=config.executor.python,
            environment=_environment(config),
            timeout_s=config.executor.start_timeout_s,
        )
        log.info(
            "executor started", pid=process.pid, address=process.address, instance_id=process.instance_id
        )
        channel = open_channel(
            process.address, traced=False, tls=config.tls, role=Role.WORKER, name=config.worker_id
        )
        try:
            ready = await self._set_up(process, channel, config, beside or self._on_progress)
        except BaseException:
            await channel.close()
            await process.stop(timeout_s=config.executor.stop_timeout_s)
            raise
        return _Executor(process, channel, ready)

    async def _set_up(
        self,
        process: ExecutorProcess,
        channel: grpc.aio.Channel,
        config: WorkerConfig,
        progress: Callable[[str, float], None],
    ) -> ReadyExecutor:
        """Set the executor up; its death while it loads is an error at once, not a broken call later."""
        setup = asyncio.create_task(
            set_up_executor(channel, config, progress=progress), name="executor setup"
        )
        death = asyncio.create_task(process.wait(), name="executor death")
        try:
            await asyncio.wait({setup, death}, return_when=asyncio.FIRST_COMPLETED)
            if death.done() and not (setup.done() and setup.exception() is None):
                raise ExecutorFailed(
                    f"the executor {death.result()} while it loaded the model", reason="EXECUTOR_DIED"
                )
            return await setup
        finally:
            for task in (setup, death):
                task.cancel()
            await asyncio.gather(setup, death, return_exceptions=True)

    async def _launch_again(self) -> _Executor:
        """A new executor, with growing pauses between attempts."""
        limits = self._config.executor
        backoff_s = limits.restart_backoff_s
        failures = 0
        while True:
            await asyncio.sleep(backoff_s)
            self.status.restarts += 1
            try:
                return await self._launch(self._config)
            except MeshError as error:
                failures += 1
                if failures > limits.max_restarts:
                    raise ExecutorFailed(
                        f"the executor could not be replaced after {failures} attempts; the last "
                        f"one: {error.message}",
                        field=error.field,
                        reason=error.reason,
                    ) from error
                log.warning("executor could not be started", error=error.message, attempt=failures)
                backoff_s = min(backoff_s * 2, limits.restart_backoff_max_s)

    def _announce(self, executor: _Executor) -> None:
        request = registration_of(
            executor.ready, self._config, executor.process, takeover_token=self._takeover_token
        )
        self.status.state = ExecutorState.EXECUTOR_STATE_READY
        self._registrar.announce(request)
        self._on_change()

    # ---- watching

    async def _watch(self, executor: _Executor) -> str | None:
        """Return when the executor must be replaced: why; None where it was."""
        self._swapped.clear()
        if self._executor is not executor:
            return None
        death = asyncio.create_task(executor.process.wait(), name="executor death")
        illness = asyncio.create_task(self._probe_until_ill(executor), name="executor probe")
        swapped = asyncio.create_task(self._swapped.wait(), name="executor swap")
        tasks: set[asyncio.Task[Any]] = {death, illness, swapped}
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if self._executor is not executor:
                return None
            return str(next(iter(done - {swapped})).result())
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _probe_until_ill(self, executor: _Executor) -> str:
        stub: PluginServiceAsyncStub = PluginServiceStub(executor.channel)
        loop = asyncio.get_running_loop()
        answered = loop.time()
        while True:
            await asyncio.sleep(self._config.executor.probe_interval_s)
            try:
                probe = await stub.Probe(ProbeRequest(), timeout=PROBE_TIMEOUT_S)
            except grpc.aio.AioRpcError as error:
                silent_s = loop.time() - answered
                self.status.probe_message = f"no answer for {silent_s:.1f} s ({error.code().name})"
                if silent_s > self._config.executor.unresponsive_after_s:
                    return f"answered no probe for {silent_s:.1f} s"
                continue
            answered = loop.time()
            self._note_probe(probe)
            if probe.readiness == ProbeResponse.READINESS_UNHEALTHY:
                return f"is unhealthy: {probe.message}"

    def _note_probe(self, probe: ProbeResponse) -> None:
        self.status.probe_message = probe.message
        self.status.since_last_step_s = (
            _seconds(probe.since_last_step) if probe.HasField("since_last_step") else None
        )

    # ---- ending

    async def _bury(self, executor: _Executor) -> None:
        await executor.channel.close()
        timeout_s = self._config.executor.stop_timeout_s if executor.process.alive else 0.1
        await executor.process.stop(timeout_s=timeout_s)

    def _set_state(self, state: ExecutorState.ValueType, instance_id: str) -> None:
        self.status.state = state
        self._registrar.set_state(state, instance_id=instance_id)
        self._on_change()

    def _present(self) -> _Executor:
        if self._executor is None:
            raise Unavailable("no executor is running", reason="NO_EXECUTOR")
        return self._executor


def log_progress(stage: str, fraction: float) -> None:
    """The event that the command line shows as a progress bar."""
    log.info("load_progress", stage=stage, fraction=fraction)


def _changes(order: SwapOrder) -> dict[str, Any]:
    """What an order changes of the configuration."""
    changes: dict[str, Any] = {}
    if order.backend:
        changes |= {
            "backend": order.backend, "device": order.device, "backend_options": dict(order.backend_options)
        }  # fmt: skip
    if order.model_path:
        changes["model_path"] = order.model_path
    return changes


def _lacks_room(error: MeshError) -> bool:
    """Whether an executor did not start for want of memory: its own refusal, or ours of its numbers."""
    return isinstance(error, ResourceExhausted) or error.metadata.get("cause_code") == _NO_ROOM


def _settings(config: WorkerConfig) -> ExecutorSettings:
    return ExecutorSettings(
        backend=config.backend,
        backend_options=config.backend_options,
        instance_id=f"{config.worker_id}-{secrets.token_hex(6)}",
        device=config.device,
        listen=config.executor.listen,
        cache_dir=config.cache_dir,
        tracing=config.tracing,
        log_level=config.log_level,
        reflection=config.reflection,
        hung_after_s=config.executor.hung_after_s,
        span_attributes={
            "chipmesh.worker": config.worker_id,
            "chipmesh.group": config.group,
            "chipmesh.model": config.model,
        },
        tls=config.tls,
        worker=config.worker_id,
    )


def _environment(config: WorkerConfig) -> Mapping[str, str]:
    """What is set before the executor's interpreter starts: runtimes read thread counts and
    visibility once.
    """
    chosen = {"GOMP_SPINCOUNT": str(SPIN_COUNT)}
    threads = _threads(config)
    if threads is not None:
        chosen["OMP_NUM_THREADS"] = str(threads)
    return {**chosen, **config.executor.environment}


def _threads(config: WorkerConfig) -> int | None:
    """As configured, else a fair share: executors that each take all processors slow each other down
    several times over. None: the only one on its host takes what its libraries think right.
    """
    if config.executor.threads is not None or config.executors_on_host == 1:
        return config.executor.threads
    return max(1, len(os.sched_getaffinity(0)) // config.executors_on_host)


def _seconds(duration: Duration) -> float:
    return duration.seconds + duration.nanos / 1e9


def _nothing() -> None:
    return None
