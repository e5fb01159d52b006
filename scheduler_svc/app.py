"""Composition root of the scheduler: reads the configuration, builds every part, starts and stops them."""

from __future__ import annotations

import asyncio
import os
import secrets
from dataclasses import dataclass
from pathlib import Path

from chipmesh.scheduler.v1alpha1.admin_pb2_grpc import add_AdminServiceServicer_to_server
from chipmesh.scheduler.v1alpha1.registry_pb2_grpc import add_WorkerRegistryServiceServicer_to_server
from chipmesh.scheduler.v1alpha1.session_pb2_grpc import add_SessionServiceServicer_to_server
from meshkit.certificates.reading import check_own
from meshkit.config import describe, load_config
from meshkit.errors import Internal
from meshkit.http.observability import HealthReport, ObservabilityServer
from meshkit.rpc.exposure import check_exposure
from meshkit.rpc.policy import Role
from meshkit.rpc.server import RpcServer
from meshkit.rpc.tls import service_credentials
from meshkit.service import StopSignal, run_service, supervise, write_ready
from meshkit.telemetry.logging import configure_logging, get_logger
from meshkit.telemetry.loop_lag import LoopLag
from meshkit.telemetry.metrics import Metrics
from meshkit.telemetry.tracing import configure_tracing
from scheduler_svc.config import SchedulerConfig
from scheduler_svc.core.mesh import MeshCore
from scheduler_svc.engine import Engine
from scheduler_svc.executor_link import LinkSettings
from scheduler_svc.fleet_metrics import FleetCollector
from scheduler_svc.groups import GroupTable
from scheduler_svc.guards import GroupGuards
from scheduler_svc.mesh_view import MeshView
from scheduler_svc.metrics import MeshCollector, SchedulerMetrics
from scheduler_svc.mirror import Mirror
from scheduler_svc.servicers.admin import AdminServicer
from scheduler_svc.servicers.registry import RegistryServicer
from scheduler_svc.servicers.sessions import SessionServicer
from scheduler_svc.step_time import StepDeadline
from scheduler_svc.traffic_file import TrafficFile
from scheduler_svc.worker_pool import WorkerPool, WorkerState

log = get_logger(__name__)

_PACKAGE = "chipmesh.scheduler.v1alpha1"
_SESSION, _REGISTRY, _ADMIN = (
    f"{_PACKAGE}.{name}" for name in ("SessionService", "WorkerRegistryService", "AdminService")
)
# Long-lived streams whose requests carry their own trace context, and calls that repeat for ever.
_UNTRACED = (f"/{_SESSION}/OpenSession", f"/{_REGISTRY}/Heartbeat", f"/{_REGISTRY}/Register",
             f"/{_ADMIN}/WatchMesh", f"/{_ADMIN}/SubscribeKvEvents")  # fmt: skip


@dataclass(frozen=True)
class SchedulerAddresses:
    """Where the service listens: gRPC and HTTP."""

    address: str
    http_address: str


class SchedulerService:
    """The whole scheduler in one process; must be made inside the event loop that it runs on.

    strict_identity: `stop` raises Internal if any idle check found pages that do not add up (for tests).

    Raises:
        InvalidArgument: others would reach it in plain text, or its certificate cannot be used.
    """

    def __init__(self, config: SchedulerConfig, *, strict_identity: bool = False) -> None:
        self.scheduler_id = f"scheduler-{secrets.token_hex(6)}"
        self._config = config
        self._strict_identity = strict_identity
        metrics = Metrics()
        check_exposure(config, {"listen": config.listen}, metrics=metrics)
        scheduler_metrics = SchedulerMetrics(metrics)
        core = MeshCore(
            policy=config.schedule_policy,
            max_queued_requests=config.max_queued_requests,
            max_queued_tokens=config.max_queued_tokens,
            conservativeness=config.schedule_conservativeness,
        )
        groups = GroupTable(core, config)
        self.engine = Engine(
            core, metrics=scheduler_metrics, identity_check_delay_s=config.identity_check_delay_s
        )
        metrics.registry.register(MeshCollector(self.engine, scheduler_metrics))
        self.pool = WorkerPool(self.engine, config=config, groups=groups, links=self._link_settings(config))
        self.guards = GroupGuards(
            core, set_weights=self.engine.apply_weights, on_rollback=scheduler_metrics.group_rolled_back
        )
        for group in config.groups:
            self.guards.watch(group)
        self.mirror = Mirror(
            core,
            submit_copy=self.engine.submit_copy,
            cancel=self.engine.cancel,
            on_compared=lambda group, equal, tokens: self.guards.compared(
                group, equal_tokens=equal, tokens=tokens
            ),
        )
        self.engine.observers += [self.guards, self.mirror]
        metrics.registry.register(FleetCollector(core, self.pool, self.guards, self.mirror))
        self.engine.on_weights_set = self.guards.weights_set
        self.lag = LoopLag(metrics)
        self.traffic_file = self._make_traffic_file(config, scheduler_metrics)
        self.sessions = SessionServicer(self.engine, scheduler_id=self.scheduler_id)
        self.stopping = False
        self._rpc = self._make_rpc_server(config)
        self._http = ObservabilityServer(config.http_listen, metrics.registry, self._health)

    def __repr__(self) -> str:
        return f"<SchedulerService {self.scheduler_id} {self.engine!r} {self.pool!r}>"

    def _link_settings(self, config: SchedulerConfig) -> LinkSettings:
        return LinkSettings(
            scheduler_id=self.scheduler_id,
            depth=config.depth,
            window_s=config.step_window_s,
            attach_timeout_s=config.attach_timeout_s,
            deadline=StepDeadline(config.step_deadline_floor_s, config.step_deadline_factor),
            max_message_bytes=config.max_message_bytes,
            tls=config.tls,
        )

    def _make_traffic_file(self, config: SchedulerConfig, metrics: SchedulerMetrics) -> TrafficFile | None:
        if config.traffic_file is None:
            return None
        return TrafficFile(
            config.traffic_file,
            self.engine.set_all_weights,
            interval_s=config.traffic_file_interval_s,
            on_error=metrics.traffic_file_errors.inc,
        )

    async def watch_traffic_file(self) -> None:
        """Follow the traffic file; returns never, also where there is none."""
        if self.traffic_file is None:
            await asyncio.Event().wait()
        else:
            await self.traffic_file.watch()

    def _make_rpc_server(self, config: SchedulerConfig) -> RpcServer:
        rpc = RpcServer(
            listen=config.listen,
            reflection=config.reflection,
            max_message_bytes=config.max_message_bytes,
            untraced_methods=_UNTRACED,
            credentials=service_credentials(config.tls),
        )
        registry = RegistryServicer(self.pool, config=config, scheduler_id=self.scheduler_id)
        admin = AdminServicer(
            self.engine,
            self.pool,
            MeshView(self.engine, self.pool, self.guards, self.mirror, scheduler_id=self.scheduler_id),
            self.mirror,
            gateway_count=lambda: self.sessions.gateway_count,
            drain_timeout_s=config.drain_timeout_s,
        )
        rpc.add(add_SessionServiceServicer_to_server, self.sessions, _SESSION)
        rpc.add(add_WorkerRegistryServiceServicer_to_server, registry, _REGISTRY)
        rpc.add(add_AdminServiceServicer_to_server, admin, _ADMIN)
        return rpc

    def _health(self) -> HealthReport:
        members = list(self.pool.members)
        ready = sum(member.state is WorkerState.READY for member in members)
        return HealthReport(
            serving=not self.stopping,
            parts={
                "process": "stopping" if self.stopping else "ok",
                "loop": f"lag {self.lag.seconds * 1000:.1f} ms",
                "replicas": f"{ready} ready of {len(members)}",
            },
        )

    async def start(self) -> SchedulerAddresses:
        """Serve; returns the bound addresses.

        Raises:
            FailedPrecondition: an address cannot be bound.
            InvalidArgument: the certificate is that of another role.
        """
        await asyncio.to_thread(check_own, self._config.tls, Role.SCHEDULER)
        address = await self._rpc.start()
        try:
            http_address = await self._http.start()
        except BaseException:
            await self._rpc.stop(0)
            raise
        await self._rpc.set_serving(True)
        return SchedulerAddresses(address, http_address)

    async def stop(self, grace_s: float) -> None:
        """Serve on while there are requests, for at most `grace_s` seconds, and stop. What is not through by
        then goes on at the next scheduler: the end of a session has gateways bring their requests there.

        Raises:
            Internal: only with `strict_identity`.
        """
        self.stopping = True
        await self._rpc.set_serving(False)
        try:
            await asyncio.wait_for(self.engine.wait_until_empty(), grace_s)
        except asyncio.TimeoutError:
            log.info("requests go on at the next scheduler", count=self.engine.live_count, grace_s=grace_s)
        await self.sessions.close_all(timeout_s=1.0)
        await self.pool.close()
        await self._rpc.stop(0.1)
        await self._http.stop()
        if self._strict_identity and self.engine.violations:
            raise Internal(f"page identity was violated: {'; '.join(self.engine.violations)}")


def main(config_path: str) -> int:
    """Run the service that the file describes until SIGTERM; returns the process' exit code."""

    async def run(stop: StopSignal) -> None:
        config = load_config(SchedulerConfig, Path(config_path))
        configure_logging("scheduler", level=config.log_level)
        tracing = configure_tracing("chipmesh-scheduler", config.tracing)
        log.info("configuration", config=describe(config))
        try:
            await _serve(config, stop)
        finally:
            await asyncio.to_thread(tracing.shutdown)

    return run_service(run, name="scheduler")


async def _serve(config: SchedulerConfig, stop: StopSignal) -> None:
    service = SchedulerService(config)
    addresses = await service.start()
    if config.ready_file is not None:
        write_ready(config.ready_file, {
            "service": "scheduler",
            "pid": os.getpid(),
            "address": config.advertise or addresses.address,
            "http_address": addresses.http_address,
        })  # fmt: skip

    async def until_stopped() -> None:
        await stop.wait()
        await service.stop(config.drain_grace_s)

    await supervise(
        until_stopped(), loop_lag=service.lag.measure(), traffic_file=service.watch_traffic_file()
    )
