"""A worker's membership in the mesh: registers, keeps the lease alive, and begins again where it was lost."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import grpc.aio

from chipmesh.scheduler.v1alpha1.registry_pb2 import (
    DeregisterRequest,
    HeartbeatRequest,
    RegisterRequest,
    SwapOrder,
    SwapProgress,
)
from chipmesh.scheduler.v1alpha1.registry_pb2_grpc import WorkerRegistryServiceStub
from meshkit.errors import (
    AlreadyExists,
    FailedPrecondition,
    InvalidArgument,
    MeshError,
    NotFound,
    PermissionDenied,
    Unimplemented,
    from_rpc_error,
)
from meshkit.telemetry.logging import get_logger

if TYPE_CHECKING:  # generated for type checkers only
    from chipmesh.scheduler.v1alpha1.registry_pb2_grpc import WorkerRegistryServiceAsyncStub

log = get_logger(__name__)

ExecutorState = HeartbeatRequest.ExecutorState

_LASTING = (InvalidArgument, FailedPrecondition, AlreadyExists, Unimplemented, PermissionDenied)
"""Refusals: the same call would meet them again."""


@dataclass(frozen=True)
class RegistrationTimes:
    """Seconds. patience_s: how long another live holder of the id is waited for; its lease may be ending."""

    backoff_s: float = 0.1
    backoff_max_s: float = 2.0
    call_timeout_s: float = 5.0
    patience_s: float = 5.0


@dataclass(slots=True)
class _Lease:
    id: str
    instance_id: str
    interval_s: float


class Registrar:
    """Keeps what was last announced registered.

    `run` is a background task; the rest may be called at any time.
    """

    def __init__(
        self,
        channel: grpc.aio.Channel,
        *,
        times: RegistrationTimes | None = None,
        on_registered: Callable[[RegisterRequest], None] | None = None,
        on_swap: Callable[[SwapOrder], None] | None = None,
    ) -> None:
        """on_swap: called with every order that a heartbeat brings, the same one again and again."""
        self._stub: WorkerRegistryServiceAsyncStub = WorkerRegistryServiceStub(channel)
        self._times = times or RegistrationTimes()
        self._on_registered = on_registered
        self.on_swap = on_swap
        self._swap: SwapProgress | None = None
        self._announced: RegisterRequest | None = None
        self._instance_id = ""
        self._state = ExecutorState.EXECUTOR_STATE_STARTING
        self._why = ""
        self._lease: _Lease | None = None
        self._news = asyncio.Event()
        self.registered = asyncio.Event()
        """Set while the scheduler has what was announced last."""

    def __repr__(self) -> str:
        return f"<Registrar instance={self._instance_id!r} registered={self.registered.is_set()}>"

    def announce(self, request: RegisterRequest) -> None:
        """A ready executor: register it, and again whenever the scheduler has forgotten it."""
        self._announced = request
        self.registered.clear()
        self.set_state(ExecutorState.EXECUTOR_STATE_READY, instance_id=request.instance_id)

    def set_state(
        self, state: ExecutorState.ValueType, *, instance_id: str | None = None, why: str = ""
    ) -> None:
        """What the next heartbeat says; it is sent at once. why: for people."""
        self._state, self._why = state, why
        if instance_id is not None:
            self._instance_id = instance_id
        self._news.set()

    def tell_swap(self, progress: SwapProgress) -> None:
        """How far a swap is; the next heartbeat says so, at once."""
        self._swap = progress
        self._news.set()

    async def run(self) -> None:
        """Register and send heartbeats until cancelled.

        Raises:
            MeshError: the scheduler refuses this worker for good.
        """
        while True:
            self._news.clear()
            wait_s = await self._advance()
            try:
                await asyncio.wait_for(self._news.wait(), wait_s)
            except asyncio.TimeoutError:
                continue

    async def deregister(self) -> None:
        """Leave the mesh; a scheduler that is not there ends the lease by itself.

        Call it after `run` has ended.
        """
        if self._lease is None or self._announced is None:
            return
        request = DeregisterRequest(worker_id=self._announced.worker_id, lease_id=self._lease.id)
        self._lease = None
        self.registered.clear()
        try:
            await self._stub.Deregister(request, timeout=self._times.call_timeout_s)
        except grpc.aio.AioRpcError as error:
            log.warning("could not deregister", error=from_rpc_error(error).message)

    async def _advance(self) -> float | None:
        """One call, whichever is due; seconds until the next, None: only on news."""
        wanted = self._announced
        if wanted is None:
            return None
        ready = self._state == ExecutorState.EXECUTOR_STATE_READY
        new_executor = self._lease is None or self._lease.instance_id != wanted.instance_id
        if new_executor and ready and wanted.instance_id == self._instance_id:
            self._lease = await self._register(wanted)
        elif self._lease is None:
            return None
        else:
            await self._heartbeat(self._lease, wanted)
        return self._lease.interval_s if self._lease is not None else 0.0

    async def _register(self, request: RegisterRequest) -> _Lease | None:
        """The new lease; None where something else was announced meanwhile."""
        loop = asyncio.get_running_loop()
        give_up_at = loop.time() + self._times.patience_s
        backoff_s = self._times.backoff_s
        while self._announced is request and self._state == ExecutorState.EXECUTOR_STATE_READY:
            try:
                response = await self._stub.Register(request, timeout=self._times.call_timeout_s)
            except grpc.aio.AioRpcError as raw:
                error = from_rpc_error(raw)
                if not _may_pass(error, patient=loop.time() < give_up_at):
                    raise error from raw
                log.warning("could not register, trying again", error=error.message, backoff_s=backoff_s)
                await asyncio.sleep(backoff_s)
                backoff_s = min(backoff_s * 2, self._times.backoff_max_s)
                continue
            log.info("registered", scheduler_id=response.scheduler_id, instance_id=request.instance_id)
            self.registered.set()
            if self._on_registered is not None:
                self._on_registered(request)
            interval_s = response.heartbeat_interval.ToNanoseconds() / 1e9
            return _Lease(response.lease_id, request.instance_id, max(interval_s, 0.01))
        return None

    async def _heartbeat(self, lease: _Lease, announced: RegisterRequest) -> None:
        request = HeartbeatRequest(
            worker_id=announced.worker_id,
            lease_id=lease.id,
            instance_id=self._instance_id,
            executor_state=self._state,
            swap=self._swap,
            message=self._why,
        )
        try:
            answer = await self._stub.Heartbeat(request, timeout=max(2 * lease.interval_s, 0.5))
        except grpc.aio.AioRpcError as raw:
            error = from_rpc_error(raw)
            if isinstance(error, NotFound):
                log.warning("the scheduler does not know the lease, registering again", error=error.message)
                self._lease = None
                self.registered.clear()
            elif isinstance(error, _LASTING):
                raise error from raw
            else:
                log.warning("heartbeat failed", error=error.message)
            return
        if answer.HasField("swap") and self.on_swap is not None:
            self.on_swap(answer.swap)


def _may_pass(error: MeshError, *, patient: bool) -> bool:
    return not isinstance(error, _LASTING) or (patient and isinstance(error, AlreadyExists))
