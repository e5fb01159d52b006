"""Composition root of the executor: one plugin, one device thread, one RPC server, one event loop."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path

import uvloop

import plugins
import worker_svc
from chipmesh.device.v1alpha1.collective_pb2_grpc import add_CollectiveServiceServicer_to_server
from chipmesh.device.v1alpha1.device_pb2_grpc import add_DeviceServiceServicer_to_server
from chipmesh.device.v1alpha1.execution_pb2_grpc import add_ExecutionServiceServicer_to_server
from chipmesh.device.v1alpha1.memory_pb2_grpc import add_MemoryServiceServicer_to_server
from chipmesh.device.v1alpha1.operator_pb2_grpc import add_OperatorServiceServicer_to_server
from chipmesh.device.v1alpha1.plugin_pb2_grpc import add_PluginServiceServicer_to_server
from meshkit.config import parse_config
from meshkit.errors import FailedPrecondition, Internal, InvalidArgument, MeshError
from meshkit.rpc.channel import open_channel
from meshkit.rpc.policy import Access, Role
from meshkit.rpc.server import RpcServer
from meshkit.rpc.tls import service_credentials
from meshkit.service import spare_the_collector
from meshkit.telemetry.logging import configure_logging, get_logger
from meshkit.telemetry.tracing import configure_tracing
from worker_svc.device_thread import DeviceThread
from worker_svc.executor.parent_pipe import ParentPipe
from worker_svc.executor.servicers.collective_service import CollectiveService
from worker_svc.executor.servicers.device_service import DeviceService
from worker_svc.executor.servicers.execution_service import ExecutionService
from worker_svc.executor.servicers.memory_service import MemoryService
from worker_svc.executor.servicers.operator_service import OperatorService
from worker_svc.executor.servicers.plugin_service import PluginService
from worker_svc.executor.settings import ExecutorSettings
from worker_svc.plugin_loader import LoadedPlugin, load_plugin
from worker_svc.step_engine import StepEngine

log = get_logger(__name__)

EXECUTE_STEPS = "/chipmesh.device.v1alpha1.ExecutionService/ExecuteSteps"
FOLLOW = "/chipmesh.device.v1alpha1.ExecutionService/Follow"
PROBE = "/chipmesh.device.v1alpha1.PluginService/Probe"
_PACKAGE = "chipmesh.device.v1alpha1"
EXIT_DEVICE_HANGS = 4
STOP_GRACE_S = 1.0
ORPHAN_GRACE_S = 5.0
IDLE_MEANS_DRAINED_S = 1.0


class Executor:
    """One plugin and its services in this process.

    load: makes the plugin, on the device thread.
    """

    def __init__(self, settings: ExecutorSettings, *, load: Callable[[], LoadedPlugin] | None = None) -> None:
        self._settings = settings
        self._load = load or partial(
            load_plugin,
            settings.backend,
            settings.backend_options,
            device=settings.device,
            cache_dir=str(settings.cache_dir or ""),
        )
        self._device = DeviceThread()
        self._server = RpcServer(
            listen=settings.listen,
            reflection=settings.reflection,
            untraced_methods=(EXECUTE_STEPS, FOLLOW, PROBE),
            credentials=service_credentials(settings.tls),
            access=_access(settings),
        )
        self._engine: StepEngine | None = None
        self._execution: ExecutionService | None = None

    def __repr__(self) -> str:
        return f"<Executor {self._settings.instance_id} {self._settings.backend} {self._engine!r}>"

    async def start(self) -> str:
        """Load the plugin and serve; returns the bound address.

        Raises:
            MeshError: the plugin does not load, or the address cannot be bound.
        """
        self._device.start()
        plugin = await self._device.submit(self._load)
        info, report = await self._device.submit(
            lambda: (plugin.backend.info(), plugin.backend.capabilities().to_proto())
        )
        facts = {**self._settings.span_attributes, "chipmesh.chip": report.chip}
        engine = self._engine = StepEngine(
            plugin.runner, page_sizes=report.page_sizes_tokens, span_attributes=facts
        )
        device, settings, backend = self._device, self._settings, plugin.backend
        add = self._add
        add(
            add_PluginServiceServicer_to_server,
            PluginService(
                info=info,
                report=report,
                instance_id=settings.instance_id,
                engine=engine,
                device=device,
                hung_after_s=settings.hung_after_s,
            ),
            "PluginService",
        )
        add(add_DeviceServiceServicer_to_server, DeviceService(backend, device), "DeviceService")
        add(add_MemoryServiceServicer_to_server, MemoryService(backend, device), "MemoryService")
        operators = OperatorService(backend, device)
        add(add_OperatorServiceServicer_to_server, operators, "OperatorService")
        collectives = CollectiveService(backend, device, index=settings.device)
        add(add_CollectiveServiceServicer_to_server, collectives, "CollectiveService")
        execution = self._execution = ExecutionService(
            engine,
            device,
            instance_id=settings.instance_id,
            # Ranks of a set are executors of one worker.
            open_channel=partial(
                open_channel, traced=False, tls=settings.tls, role=Role.WORKER, name=settings.worker
            ),
            facts={name.rpartition(".")[2]: value for name, value in facts.items()},
        )
        add(add_ExecutionServiceServicer_to_server, execution, "ExecutionService")
        address = await self._server.start()
        await self._server.set_serving(True)
        return address

    async def stop(self, grace_s: float) -> bool:
        """End the calls, unload, join the device thread; False where a hung device was left behind."""
        if self._execution is not None:
            self._execution.is_stopping = True
        await self._server.stop(grace_s)
        if self._execution is not None:
            await self._execution.close()
        if self._engine is not None and self._device.busy_for() is None:
            await self._device.submit(self._engine.unload)
        ended = await asyncio.to_thread(self._device.stop, timeout_s=grace_s)
        if not ended:
            log.error("the device thread does not end", busy_for_s=self._device.busy_for())
        return ended

    async def until_drained(self) -> None:
        """Return when no slot is in use, or those that are have seen no step for a second."""
        # Polled: slots belong to the device thread, and only a drain asks for them.
        while not self._is_drained():  # noqa: ASYNC110
            await asyncio.sleep(0.02)

    def _is_drained(self) -> bool:
        if self._engine is None or self._engine.occupied_slots == 0:
            return True
        since = self._device.since_last_job()
        return self._device.busy_for() is None and (since is None or since > IDLE_MEANS_DRAINED_S)

    def _add(self, adder: Callable[..., None], servicer: object, name: str) -> None:
        self._server.add(adder, servicer, f"{_PACKAGE}.{name}")


def _access(settings: ExecutorSettings) -> Access:
    """Of all workers only the executor's own commands it; of all schedulers the one that `tls` names."""
    names = {Role.WORKER: settings.worker}
    if settings.tls is not None and settings.tls.scheduler is not None:
        names[Role.SCHEDULER] = settings.tls.scheduler
    return Access(names=names)


def run_executor(pipe: ParentPipe) -> int:
    """Read the settings, serve until the pipe closes; returns the process' exit code."""
    # Ctrl-C is for the supervisor; it closes the pipe when its requests have ended.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        settings = _read_settings(pipe)
        _check_packages()
        configure_logging("executor", level=settings.log_level)
        tracing = configure_tracing("chipmesh-executor", settings.tracing)
        try:
            uvloop.run(_serve(settings, pipe))
        finally:
            tracing.shutdown()
    except MeshError as error:
        pipe.say(_error_line(error))
        return 1
    except Exception as error:
        log.exception("executor failed")
        pipe.say(_error_line(Internal(f"the executor failed: {type(error).__name__}: {error}")))
        return 1
    finally:
        pipe.close()
    return 0


async def _serve(settings: ExecutorSettings, pipe: ParentPipe) -> None:
    loop = asyncio.get_running_loop()
    ended, drain = asyncio.Event(), asyncio.Event()
    loop.add_signal_handler(signal.SIGTERM, ended.set)
    # Before the plugin loads, which may take long or hang: its parent's end must end it even then.
    pipe.watch(
        on_drain=lambda: _call_soon(loop, drain.set),
        on_end=lambda: _call_soon(loop, ended.set),
        grace_s=ORPHAN_GRACE_S,
    )
    executor = Executor(settings)
    address = await executor.start()
    spare_the_collector()  # The plugin has loaded its libraries.
    pipe.say({"address": address, "pid": os.getpid()})
    draining = asyncio.create_task(_say_when_drained(executor, drain, pipe), name="drain")
    try:
        await ended.wait()
    finally:
        draining.cancel()
        if not await executor.stop(STOP_GRACE_S):
            # The interpreter would wait for, or crash into, a thread that is inside the vendor's runtime.
            os._exit(EXIT_DEVICE_HANGS)


async def _say_when_drained(executor: Executor, drain: asyncio.Event, pipe: ParentPipe) -> None:
    await drain.wait()
    await executor.until_drained()
    pipe.say({"drained": True})


def _call_soon(loop: asyncio.AbstractEventLoop, callback: Callable[[], None]) -> None:
    try:
        loop.call_soon_threadsafe(callback)
    except RuntimeError:
        log.debug("the event loop has ended before the pipe")


def _read_settings(pipe: ParentPipe) -> ExecutorSettings:
    line = pipe.read_line()
    if not line.strip():
        raise InvalidArgument("no settings came on stdin: one line of JSON (ExecutorSettings)", field="stdin")
    try:
        return ExecutorSettings.model_validate_json(line)
    except ValueError:
        # The second reading is for its error: it names the field and what is allowed.
        return parse_config(ExecutorSettings, _json(line), source="stdin")


def _json(line: bytes) -> object:
    try:
        return json.loads(line)
    except ValueError as error:
        raise InvalidArgument(f"stdin holds no JSON: {error}", field="stdin") from error


def _check_packages() -> None:
    """Another interpreter may have another package called `plugins`, which must not be taken for ours."""
    ours, theirs = Path(worker_svc.__file__ or "").parents[1], Path(plugins.__file__ or "").parents[1]
    if ours != theirs:
        raise FailedPrecondition(
            f"`plugins` comes from {theirs}, worker_svc from {ours}; another package of that name "
            "is in the way. "
            "Remove it, or set PYTHONPATH in executor.environment",
            field="executor.python",
            reason="FOREIGN_PLUGINS",
        )


def _error_line(error: MeshError) -> dict[str, object]:
    """What the supervisor reads in place of a ready line."""
    return {
        "error": {
            "code": error.code.name,
            "reason": error.reason,
            "message": error.message,
            "field": error.field,
        }
    }
