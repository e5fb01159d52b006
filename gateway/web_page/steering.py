"""What an operator does by the page, each one call of AdminService: traffic, swap, drain, flush."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Coroutine
from typing import Any, TypeVar

import grpc.aio
import orjson
from google.protobuf.duration_pb2 import Duration
from pydantic import Field

from chipmesh.scheduler.v1alpha1 import admin_pb2
from gateway.openai_http.call import Call
from gateway.web_page.admin import AdminStub
from gateway.web_page.swap_board import SwapBoard
from meshkit.config import FrozenConfig, parse_config
from meshkit.errors import FailedPrecondition, InvalidArgument, from_rpc_error
from meshkit.telemetry.logging import get_logger

log = get_logger(__name__)

MAX_BODY_BYTES = 64 * 1024
ANSWER_TIMEOUT_S = 10.0
MAX_DRAIN_S = 3600.0

T = TypeVar("T")
B = TypeVar("B", bound=FrozenConfig)


class TrafficBody(FrozenConfig):
    """weights: by group, at least 0 and not all 0; groups of the model that are left out get 0."""

    model: str = ""
    weights: dict[str, float] = Field(min_length=1)


class SwapBody(FrozenConfig):
    """As SwapChipRequest has it. backend: "" for the present one, loaded anew."""

    worker: str = Field(min_length=1)
    backend: str = ""
    device: int = Field(default=0, ge=0, lt=2**32)
    options: dict[str, str] = Field(default_factory=dict)
    model_path: str = ""
    never_pause: bool = False


class DrainBody(FrozenConfig):
    """timeout_s: how long its requests may go on before they move; None: as the scheduler has it."""

    worker: str = Field(min_length=1)
    timeout_s: float | None = Field(default=None, ge=0.0, le=MAX_DRAIN_S)


class FlushBody(FrozenConfig):
    """worker: "" for all."""

    worker: str = ""


class Steering:
    """Handlers of the calls that change the mesh. admin: None where the gateway may not; `problem`: why."""

    def __init__(self, admin: AdminStub | None, swaps: SwapBoard, *, problem: str = "") -> None:
        self._admin = admin
        self._swaps = swaps
        self._problem = problem
        self._drains: set[asyncio.Task[Any]] = set()

    async def set_traffic(self, call: Call) -> None:
        """Weights of a model's groups."""
        body, admin = await _read(call, TrafficBody), self._require_admin()
        _tell(call, "traffic", model=body.model, weights=body.weights)
        request = admin_pb2.SetTrafficRequest(model=body.model, weights=body.weights)
        await _asked(admin.SetTraffic(request, timeout=ANSWER_TIMEOUT_S))
        await call.answer(200, {})

    async def swap(self, call: Call) -> None:
        """Another chip or other weights for a worker. Answers when it has begun; the live stream tells on."""
        body, admin = await _read(call, SwapBody), self._require_admin()
        _tell(call, "swap", worker=body.worker, backend=body.backend, device=body.device)
        request = admin_pb2.SwapChipRequest(
            worker=body.worker,
            backend=body.backend,
            device=body.device,
            backend_options=body.options,
            model_path=body.model_path,
            never_pause=body.never_pause,
        )
        await self._swaps.begin(admin, request)
        await call.answer(202, {})

    async def drain(self, call: Call) -> None:
        """Nothing new for a worker; answers when it has no request any more."""
        body, admin = await _read(call, DrainBody), self._require_admin()
        _tell(call, "drain", worker=body.worker, timeout_s=body.timeout_s)
        request = admin_pb2.DrainWorkerRequest(worker=body.worker)
        wait_s = None
        if body.timeout_s is not None:
            request.timeout.CopyFrom(_duration(body.timeout_s))
            wait_s = body.timeout_s + ANSWER_TIMEOUT_S
        # A page that is closed meanwhile must not leave half of it undone: moving is at its end.
        await asyncio.shield(self._keep(_asked(admin.DrainWorker(request, timeout=wait_s))))
        await call.answer(200, {})

    async def flush(self, call: Call) -> None:
        """Cached prefixes that nobody uses go."""
        body, admin = await _read(call, FlushBody), self._require_admin()
        _tell(call, "flush", worker=body.worker)
        request = admin_pb2.FlushCacheRequest(worker=body.worker)
        answer = await _asked(admin.FlushCache(request, timeout=ANSWER_TIMEOUT_S))
        await call.answer(200, {"flushed_pages": answer.flushed_pages})

    async def close(self) -> None:
        """Wait for none any more."""
        for task in self._drains:
            task.cancel()
        await asyncio.gather(*self._drains, return_exceptions=True)

    def _keep(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        task = asyncio.create_task(work)
        self._drains.add(task)
        task.add_done_callback(self._drains.discard)
        return task

    def _require_admin(self) -> AdminStub:
        if self._admin is None:
            raise FailedPrecondition(self._problem, reason="NO_OPERATOR_CERTIFICATE")
        return self._admin


async def _read(call: Call, kind: type[B]) -> B:
    content = await call.read(limit_bytes=MAX_BODY_BYTES)
    try:
        raw = orjson.loads(content)
    except orjson.JSONDecodeError as error:
        raise InvalidArgument(f"the body is no JSON: {error}", reason="BODY_NOT_JSON") from None
    return parse_config(kind, raw, source="body")


async def _asked(answer: Awaitable[T]) -> T:
    """The scheduler's answer; its error as ours."""
    try:
        return await answer
    except grpc.aio.AioRpcError as error:
        raise from_rpc_error(error) from None


def _duration(seconds: float) -> Duration:
    duration = Duration()
    duration.FromNanoseconds(int(seconds * 1e9))
    return duration


def _tell(call: Call, action: str, **facts: Any) -> None:
    """Who commanded what, for the log."""
    log.info("asked by the page", action=action, by=call.tenant.name or "this host", **facts)
