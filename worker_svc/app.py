"""Composition root of the worker: builds supervisor, registration, health and metrics by its file."""

from __future__ import annotations

import asyncio
import os
from dataclasses import dataclass
from pathlib import Path

from chipmesh.scheduler.v1alpha1.registry_pb2 import RegisterRequest
from meshkit.certificates.reading import check_own
from meshkit.config import describe, load_config
from meshkit.errors import FailedPrecondition, InvalidArgument, Unavailable
from meshkit.http.observability import HealthReport, ObservabilityServer
from meshkit.rpc.channel import open_channel
from meshkit.rpc.exposure import check_exposure
from meshkit.rpc.policy import Role
from meshkit.rpc.server import RpcServer
from meshkit.rpc.tls import service_credentials
from meshkit.service import StopSignal, run_service, supervise, write_ready
from meshkit.telemetry.logging import configure_logging, get_logger
from meshkit.telemetry.loop_lag import LoopLag
from meshkit.telemetry.metrics import Metrics
from worker_svc.config import WorkerConfig
from worker_svc.metrics import WorkerMetrics, state_word
from worker_svc.registration import ExecutorState, Registrar
from worker_svc.supervisor import Supervisor

log = get_logger(__name__)

STOP_GRACE_S = 0.5


@dataclass(frozen=True)
class WorkerAddresses:
    """Where the supervisor listens: gRPC (health only) and HTTP."""

    address: str
    http_address: str


class WorkerService:
    """One worker: a supervisor and its executors. Must be made inside the event loop that it runs on.

    Raises:
        InvalidArgument: it would speak in plain text beyond this host, or its certificate cannot be used.
    """

    def __init__(self, config: WorkerConfig) -> None:
        self._config = config
        metrics = Metrics()
        check_exposure(
            config,
            {
                "listen": config.listen,
                "executor.listen": config.executor.listen,
                **({"rendezvous": config.rendezvous} if config.rendezvous else {}),
                "scheduler_address": config.scheduler_address,
            },
            metrics=metrics,
        )
        self._channel = open_channel(
            config.scheduler_address,
            traced=False,
            tls=config.tls,
            role=Role.SCHEDULER,
            name=config.tls.scheduler if config.tls else None,
        )
        self._addresses = WorkerAddresses("", "")
        self.registrar = Registrar(self._channel, on_registered=self._tell_ready)
        self._metrics = WorkerMetrics(metrics, config)
        self._lag = LoopLag(metrics)
        self.supervisor = Supervisor(
            config, self.registrar, on_change=self._refresh, on_ready=self._tell_following
        )
        self.registrar.on_swap = self.supervisor.order_swap
        self._rpc = RpcServer(
            listen=config.listen, reflection=config.reflection, credentials=service_credentials(config.tls)
        )
        self._http = ObservabilityServer(config.http_listen, self._metrics.registry, self._health)

    def __repr__(self) -> str:
        return f"<WorkerService {self.supervisor!r}>"

    async def start(self) -> WorkerAddresses:
        """Bind, then start the executor; returns when it is ready to be registered.

        Raises:
            MeshError: an address cannot be bound, or the executor did not start: nothing is left running.
        """
        try:
            own = self._config
            await asyncio.to_thread(check_own, own.tls, Role.WORKER, name=own.worker_id)
            address = await self._rpc.start()
            http_address = await self._http.start()
            await self.supervisor.start()
        except BaseException:
            await self.stop(drain=False)
            raise
        await self._rpc.set_serving(True)
        self._addresses = WorkerAddresses(address, http_address)
        return self._addresses

    async def run(self) -> None:
        """Keep the executor alive and registered until cancelled.

        Raises:
            MeshError: the executor cannot be replaced, or the scheduler refuses this worker.
        """
        await supervise(
            self.supervisor.run(),
            registration=self.registrar.run(),
            metrics=self._refresh_regularly(),
            loop_lag=self._lag.measure(),
        )

    async def stop(self, *, drain: bool) -> None:
        """Leave the mesh and end. drain: first let requests end. Call it after `run` was cancelled."""
        if drain:
            beats = asyncio.create_task(self.registrar.run(), name="heartbeats while draining")
            try:
                await self.supervisor.stop()
            finally:
                beats.cancel()
                await asyncio.gather(beats, return_exceptions=True)
        await self.registrar.deregister()
        await self.supervisor.close()
        await self._rpc.stop(STOP_GRACE_S)
        await self._http.stop()
        await self._channel.close()

    def _health(self) -> HealthReport:
        status = self.supervisor.status
        since = status.since_last_step_s
        return HealthReport(
            serving=status.state == ExecutorState.EXECUTOR_STATE_READY,
            parts={
                "process": "ok",
                "executor": f"{state_word(status.state)} {status.probe_message}".strip(),
                "last_step": "none yet" if since is None else f"{since:.1f} s ago",
                "registration": self._registration(),
                **({"last_loss": status.last_loss} if status.last_loss else {}),
            },
        )

    def _registration(self) -> str:
        if self._config.first_rank:
            return f"by the host of rank 0, which leads; this one has ranks from {self._config.first_rank}"
        return "registered" if self.registrar.registered.is_set() else "not registered"

    def _tell_ready(self, registered: RegisterRequest) -> None:
        """Say where the worker and its present executors are: at first, and again after a replacement."""
        log.info("worker is ready", worker=registered.worker_id, instance_id=registered.instance_id)
        self._write_ready(instance_id=registered.instance_id, executor_address=registered.executor_address)

    def _tell_following(self) -> None:
        """The same of ranks that another host's leader commands."""
        first = self.supervisor.executors.first.process
        self._write_ready(instance_id=first.instance_id, executor_address=first.address)

    def _write_ready(self, **executor: str) -> None:
        if self._config.ready_file is None:
            return
        pids = self.supervisor.executors.pids
        write_ready(self._config.ready_file, {
            "service": "worker",
            "pid": os.getpid(),
            "address": self._config.advertise or self._addresses.address,
            "http_address": self._addresses.http_address,
            "worker": self._config.worker_id,
            "executor_pid": pids[0],
            "executor_pids": pids,
            **executor,
        })  # fmt: skip

    def _refresh(self) -> None:
        try:
            chip = self.supervisor.ready.report.chip
        except Unavailable:
            return
        self._metrics.refresh(self.supervisor, chip=chip)

    async def _refresh_regularly(self) -> None:
        while True:
            self._refresh()
            await self._rpc.set_serving(self._health().serving)
            await asyncio.sleep(self._config.executor.probe_interval_s)


def main(config_path: str) -> int:
    """Run the worker that the file describes until SIGTERM; returns the process' exit code."""

    async def run(stop: StopSignal) -> None:
        config = load_config(WorkerConfig, Path(config_path))
        configure_logging("worker", level=config.log_level)
        log.info("configuration", config=describe(config))
        await _serve(config, stop)

    return run_service(run, name="worker")


async def _serve(config: WorkerConfig, stop: StopSignal) -> None:
    service = WorkerService(config)
    starting = asyncio.create_task(service.start(), name="worker start")
    if not await _before_stop(starting, stop):
        return
    _refusal_as_failure(starting)
    running = asyncio.create_task(service.run(), name="worker")
    stopping = asyncio.create_task(stop.wait(), name="stop signal")
    try:
        await asyncio.wait({running, stopping}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in (running, stopping):
            task.cancel()
        await asyncio.gather(running, stopping, return_exceptions=True)
        await service.stop(drain=stop.is_set())
    if not running.cancelled():
        running.result()


async def _before_stop(starting: asyncio.Task[WorkerAddresses], stop: StopSignal) -> bool:
    """Wait for the start; False where the wish to stop came first, and the start was given up."""
    stopping = asyncio.create_task(stop.wait(), name="stop signal")
    await asyncio.wait({starting, stopping}, return_when=asyncio.FIRST_COMPLETED)
    stopping.cancel()
    if not starting.done():
        starting.cancel()
        await asyncio.gather(starting, return_exceptions=True)
        return False
    return True


def _refusal_as_failure(starting: asyncio.Task[WorkerAddresses]) -> None:
    """Raise why the start failed: a refusal of the executor is exit 1, only a wrong file is exit 2."""
    try:
        starting.result()
    except InvalidArgument as error:
        raise FailedPrecondition(error.message, field=error.field, reason=error.reason) from error
