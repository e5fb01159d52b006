"""AdminService: what operators see and change."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Callable

from google.protobuf.duration_pb2 import Duration

from chipmesh.scheduler.v1alpha1 import admin_pb2, registry_pb2
from chipmesh.scheduler.v1alpha1.admin_pb2_grpc import AdminServiceServicer
from meshkit.errors import FailedPrecondition, InvalidArgument, Unavailable
from meshkit.rpc.handlers import Context
from scheduler_svc.engine import Engine
from scheduler_svc.kv_event_stream import stream_kv_events
from scheduler_svc.mesh_view import MeshView
from scheduler_svc.mirror import Mirror
from scheduler_svc.worker_pool import WorkerPool

WATCH_INTERVAL_S = 0.1
"""Shortest time between two messages of a watch: counts change with every step."""

MOST_TIMEOUT_S = 7 * 24 * 3600
"""Longest timeout that somebody can mean."""

_GROUP_SETTINGS = {
    "chunk_tokens": "chunked_prefill_size",
    "max_running_requests": "max_running_requests",
    "schedule_policy": "schedule_policy",
}
"""Fields of SetGroupRequest, and what the configuration calls them."""


class AdminServicer(AdminServiceServicer):
    """See admin.proto for the errors of each call."""

    def __init__(
        self,
        engine: Engine,
        pool: WorkerPool,
        view: MeshView,
        mirror: Mirror,
        *,
        gateway_count: Callable[[], int],
        drain_timeout_s: float,
    ) -> None:
        self._engine = engine
        self._pool = pool
        self._view = view
        self._mirror = mirror
        self._gateway_count = gateway_count
        self._drain_timeout_s = drain_timeout_s

    async def GetMesh(self, request: admin_pb2.GetMeshRequest, context: Context) -> admin_pb2.GetMeshResponse:
        return admin_pb2.GetMeshResponse(mesh=self._mesh())

    async def WatchMesh(
        self, request: admin_pb2.WatchMeshRequest, context: Context
    ) -> AsyncIterator[admin_pb2.WatchMeshResponse]:
        seen = 0
        while True:
            seen = await self._engine.changes.wait_beyond(seen)
            yield admin_pb2.WatchMeshResponse(mesh=self._mesh(), revision=seen)
            await asyncio.sleep(WATCH_INTERVAL_S)

    def _mesh(self) -> admin_pb2.Mesh:
        return self._view.mesh(gateways=self._gateway_count())

    async def SetTraffic(
        self, request: admin_pb2.SetTrafficRequest, context: Context
    ) -> admin_pb2.SetTrafficResponse:
        model = self._known_model(request.model)
        try:
            self._engine.set_weights(model, dict(request.weights))
        except ValueError as error:
            raise InvalidArgument(str(error), field="weights") from error
        return admin_pb2.SetTrafficResponse()

    def _known_model(self, name: str) -> str:
        """A model that the mesh serves: the only one for ""."""
        models = sorted({group.model for group in self._engine.core.snapshot().groups})
        if name in models:
            return name
        if name:
            raise InvalidArgument(
                f"model is {name!r}; the mesh serves: {', '.join(models) or 'none'}", field="model"
            )
        if len(models) == 1:
            return models[0]
        raise InvalidArgument(
            f"model is empty, but the mesh serves {len(models)} models; name one of: "
            f"{', '.join(models) or 'none'}",
            field="model",
        )

    async def DrainWorker(
        self, request: admin_pb2.DrainWorkerRequest, context: Context
    ) -> admin_pb2.DrainWorkerResponse:
        member = self._pool.member(request.worker)
        timeout_s = _seconds(request.timeout) if request.HasField("timeout") else self._drain_timeout_s
        await self._pool.drain(member, timeout_s=timeout_s)
        return admin_pb2.DrainWorkerResponse()

    async def FlushCache(
        self, request: admin_pb2.FlushCacheRequest, context: Context
    ) -> admin_pb2.FlushCacheResponse:
        only = self._pool.member(request.worker).worker if request.worker else None
        flushed = sum(
            batcher.flush_cache()
            for info, _, batcher in self._engine.attached()
            if only is None or info.worker == only
        )
        self._engine.changes.bump()
        return admin_pb2.FlushCacheResponse(flushed_pages=flushed)

    async def SwapChip(
        self, request: admin_pb2.SwapChipRequest, context: Context
    ) -> AsyncIterator[admin_pb2.SwapChipResponse]:
        if not request.backend and (request.device or request.devices or request.backend_options):
            raise InvalidArgument("backend is empty; name it beside devices and options", field="backend")
        if request.device and request.devices:
            raise InvalidArgument(
                f"device is {request.device} and devices is {list(request.devices)}; give one of them",
                field="devices",
            )
        member = self._pool.member(request.worker)
        if member.lost is not None:
            raise FailedPrecondition(
                f"worker {request.worker!r} is lost ({member.lost}); start it with the other backend",
                field="worker",
                reason="WORKER_LOST",
            )
        order = registry_pb2.SwapOrder(
            swap_id=f"swap-{secrets.token_hex(6)}",
            backend=request.backend,
            device=request.device,
            backend_options=request.backend_options,
            model_path=request.model_path,
            never_pause=request.never_pause,
            devices=request.devices,
            tensor_parallel_size=request.tensor_parallel_size,
            pipeline_parallel_size=request.pipeline_parallel_size,
        )
        swap = self._pool.swaps.begin(member.worker, order)
        while not swap.is_over:
            swap.changed.clear()
            yield admin_pb2.SwapChipResponse(stage=swap.stage, fraction=swap.fraction)
            await swap.changed.wait()
        if swap.error is not None:
            raise swap.error
        yield admin_pb2.SwapChipResponse(stage=swap.stage, fraction=swap.fraction)

    async def SetGroup(
        self, request: admin_pb2.SetGroupRequest, context: Context
    ) -> admin_pb2.SetGroupResponse:
        given = {
            name: getattr(request, field)
            for field, name in _GROUP_SETTINGS.items()
            if request.HasField(field)  # type: ignore[arg-type]  # the keys are its fields
        }
        ceilings = {name: value or None for name, value in given.items() if name != "schedule_policy"}
        self._pool.set_group(request.group, **{**given, **ceilings})
        return admin_pb2.SetGroupResponse()

    async def SetShadow(
        self, request: admin_pb2.SetShadowRequest, context: Context
    ) -> admin_pb2.SetShadowResponse:
        self._mirror.set_shadow(source=request.source_group, shadow=request.shadow_group, share=request.share)
        self._engine.changes.bump()
        return admin_pb2.SetShadowResponse()

    async def Profile(self, request: admin_pb2.ProfileRequest, context: Context) -> admin_pb2.ProfileResponse:
        worker = request.worker or self._only_worker()
        trace = await self._pool.profile(self._pool.member(worker), request.duration)
        return admin_pb2.ProfileResponse(worker=worker, chrome_trace=trace)

    def _only_worker(self) -> str:
        workers = sorted(member.worker for member in self._pool.members if member.lost is None)
        if len(workers) == 1:
            return workers[0]
        raise InvalidArgument(
            f"worker is empty, but the mesh has {len(workers)} workers; name one of: "
            f"{', '.join(workers) or 'none'}",
            field="worker",
        )

    async def SubscribeKvEvents(
        self, request: admin_pb2.SubscribeKvEventsRequest, context: Context
    ) -> AsyncIterator[admin_pb2.SubscribeKvEventsResponse]:
        member = self._pool.member(request.worker)
        attached = {info.replica: batcher for info, _, batcher in self._engine.attached()}
        batcher = attached.get(member.replica)
        if batcher is None:
            raise Unavailable(f"worker {request.worker!r} has no executor attached", reason="NOT_ATTACHED")

        def is_current() -> bool:
            return any(each is batcher for _, _, each in self._engine.attached())

        after_seq = request.after_seq if request.HasField("after_seq") else None
        async for message in stream_kv_events(batcher, after_seq=after_seq, is_current=is_current):
            yield message


def _seconds(timeout: Duration) -> float:
    """Raises InvalidArgument: it is negative, too long, or no proper duration."""
    seconds, nanos = timeout.seconds, timeout.nanos
    if 0 <= seconds <= MOST_TIMEOUT_S and 0 <= nanos < 10**9:
        return float(seconds + nanos * 1e-9)
    raise InvalidArgument(
        f"timeout has {seconds} seconds and {nanos} nanoseconds; from 0 to {MOST_TIMEOUT_S} seconds and from "
        "0 to 999999999 nanoseconds are allowed",
        field="timeout",
    )
