"""SglangScheduler: translation between its messages and the gateway's own types, and nothing else."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, aclosing
from importlib.metadata import version
from typing import TYPE_CHECKING, NoReturn

from chipmesh.sglang_grpc import sglang_scheduler_pb2 as sgl
from chipmesh.sglang_grpc import sglang_scheduler_pb2_grpc
from chipmesh.sglang_grpc import smg_common_pb2 as common
from gateway.generation import Generations
from gateway.generation_spec import Finish, FinishReason
from gateway.key_interceptor import current_tenant
from gateway.live_request import OutputReader
from gateway.models import ServedModel
from gateway.openai_http.bodies import MAX_CHOICES
from gateway.openai_http.choices import choice_id, end_of, open_choices, read_all
from gateway.sglang_grpc.answers import chunk_of, complete_of
from gateway.sglang_grpc.cache_feed import CacheFeed
from gateway.sglang_grpc.description import model_info, server_info
from gateway.sglang_grpc.loads import loads_of
from gateway.sglang_grpc.mesh_reader import MeshReader
from gateway.sglang_grpc.reading import in_router_words, read_request
from gateway.sglang_grpc.tokenizer_archive import TokenizerArchive, read_archive
from gateway.tenant import Tenant
from meshkit.errors import (
    Cancelled,
    FailedPrecondition,
    InvalidArgument,
    PermissionDenied,
    ResourceExhausted,
    Unimplemented,
)

if TYPE_CHECKING:
    from meshkit.rpc.handlers import Context

SERVICE_NAME = "sglang.grpc.scheduler.SglangScheduler"
UNTRACED = tuple(f"/{SERVICE_NAME}/{name}" for name in ("HealthCheck", "GetLoads", "SubscribeKvEvents"))
"""Routers poll two of them for ever, and keep the third open."""
MOST_FEEDS = 8
"""Routers that follow the caches at once; each costs a stream to every replica."""
_VERSION = f"chipmesh {version('chipmesh')}"


class SglangServicer(sglang_scheduler_pb2_grpc.SglangSchedulerServicer):
    """What routers call. Errors are `MeshError`s, which the server's interceptor turns into statuses.

    model: which of the served ones; "": the only one. is_serving: whether new requests are served.
    is_public: the listener is reached from beyond this host.
    """

    def __init__(
        self,
        generations: Generations,
        reader: MeshReader,
        *,
        model: str,
        is_serving: Callable[[], bool],
        is_public: bool,
    ) -> None:
        self._generations = generations
        self._reader = reader
        self._model_name = model
        self._is_serving = is_serving
        self._is_public = is_public
        self._archive: asyncio.Future[TokenizerArchive] | None = None
        self._feeds: set[CacheFeed] = set()
        self._started_at = asyncio.get_running_loop().time()

    def end_streams(self) -> None:
        """End what would not end by itself; for the gateway's end."""
        for feed in self._feeds:
            feed.end()

    async def Generate(
        self, request: sgl.GenerateRequest, context: Context
    ) -> AsyncIterator[sgl.GenerateResponse]:
        """See the proto."""
        model = self._model()
        async with AsyncExitStack() as stack:
            with in_router_words():
                wanted = read_request(
                    request,
                    model=model.name,
                    tenant=current_tenant(),
                    time_left_s=context.time_remaining(),
                )
                readers = await open_choices(stack, self._generations, wanted)
            answers = await stack.enter_async_context(
                aclosing(_answers(wanted.name, readers, request.stream))
            )
            async for answer in answers:
                yield answer

    async def Abort(self, request: sgl.AbortRequest, context: Context) -> sgl.AbortResponse:
        """See the proto."""
        tenant, name = current_tenant(), request.request_id
        ended = [
            self._generations.cancel(choice_id(name, number), tenant=tenant) for number in range(MAX_CHOICES)
        ]
        words = "aborted" if any(ended) else "does not run here (any more)"
        return sgl.AbortResponse(success=True, message=f"request {name[:200]!r} {words}")

    async def HealthCheck(self, request: sgl.HealthCheckRequest, context: Context) -> sgl.HealthCheckResponse:
        """See the proto. A worker's death is no news here: its requests go on at another."""
        if self._is_serving():
            return sgl.HealthCheckResponse(healthy=True, message="serving")
        why = "this gateway shuts down" if self._generations.is_draining else "no scheduler is connected"
        return sgl.HealthCheckResponse(healthy=False, message=why)

    async def GetModelInfo(
        self, request: sgl.GetModelInfoRequest, context: Context
    ) -> sgl.GetModelInfoResponse:
        """See the proto."""
        return model_info(self._model())

    async def GetServerInfo(
        self, request: sgl.GetServerInfoRequest, context: Context
    ) -> sgl.GetServerInfoResponse:
        """See the proto."""
        return server_info(
            self._model(),
            version=_VERSION,
            uptime_s=asyncio.get_running_loop().time() - self._started_at,
            active_requests=self._generations.live_count if self._shows_inside(current_tenant()) else 0,
        )

    async def GetLoads(self, request: sgl.GetLoadsRequest, context: Context) -> sgl.GetLoadsResponse:
        """See the proto."""
        self._check_shows_inside("GetLoads")
        if request.dp_rank:
            raise InvalidArgument(
                f"dp_rank is {request.dp_rank}; the mesh is one rank to a router: 0", field="dp_rank"
            )
        return loads_of(await self._reader.mesh(), self._model().name, version=_VERSION)

    async def FlushCache(
        self, request: common.FlushCacheRequest, context: Context
    ) -> common.FlushCacheResponse:
        """See the proto."""
        self._check_shows_inside("FlushCache")
        pages = await self._reader.flush_caches()
        return common.FlushCacheResponse(success=True, message=f"{pages} pages are free by it")

    async def GetTokenizer(
        self, request: common.GetTokenizerRequest, context: Context
    ) -> AsyncIterator[common.GetTokenizerChunk]:
        """See the proto."""
        model = self._model()
        model.require_text("GetTokenizer")
        current_tenant().take_request()
        for chunk in (await self._read_archive(model)).chunks():
            yield chunk

    async def SubscribeKvEvents(
        self, request: common.SubscribeKvEventsRequest, context: Context
    ) -> AsyncIterator[common.KvEventBatch]:
        """See the proto. Blocks carry tokens, so a caller that shares its cache may be shown them only where
        it may see the inside anyway.
        """
        tenant = current_tenant()
        salt = tenant.salt("")
        if not self._reader.may_ask or not (salt or self._shows_inside(tenant)):
            # Routers take this code as a final no, and route without.
            raise _not_offered(
                "SubscribeKvEvents: not to this caller; it needs a key that shares no cache, an operator's, "
                "or no key on this host, and page.operator_tls where services have certificates"
            )
        if len(self._feeds) >= MOST_FEEDS:
            raise ResourceExhausted(
                f"{len(self._feeds)} routers follow the caches through this gateway, which is the limit",
                reason="TOO_MANY_REQUESTS",
            )
        feed = CacheFeed(self._reader, model=self._model().name, salt=salt)
        self._feeds.add(feed)
        try:
            async with aclosing(feed.batches(after=request.start_sequence_number)) as batches:
                async for batch in batches:
                    yield batch
        finally:
            self._feeds.remove(feed)

    async def ListLoadedLoRAAdapters(
        self, request: sgl.ListLoadedLoRAAdaptersRequest, context: Context
    ) -> sgl.ListLoadedLoRAAdaptersResponse:
        """See the proto."""
        return sgl.ListLoadedLoRAAdaptersResponse()

    async def Embed(self, request: sgl.EmbedRequest, context: Context) -> NoReturn:
        """Refused."""
        raise _not_offered("Embed: this mesh generates only; it serves no embeddings")

    async def StartProfile(self, request: common.StartProfileRequest, context: Context) -> NoReturn:
        """Refused."""
        raise _not_offered("StartProfile: `chipmesh profile` records a worker, for operators")

    async def StopProfile(self, request: common.StopProfileRequest, context: Context) -> NoReturn:
        """Refused."""
        raise _not_offered("StopProfile: `chipmesh profile` records a worker, for operators")

    async def LoadLoRAAdapter(self, request: sgl.LoadLoRAAdapterRequest, context: Context) -> NoReturn:
        """Refused."""
        raise _not_offered("LoadLoRAAdapter: this mesh serves no adapters")

    async def UnloadLoRAAdapter(self, request: sgl.UnloadLoRAAdapterRequest, context: Context) -> NoReturn:
        """Refused."""
        raise _not_offered("UnloadLoRAAdapter: this mesh serves no adapters")

    def _model(self) -> ServedModel:
        models = self._generations.models
        if not self._model_name and len(models.names) > 1:
            raise FailedPrecondition(
                f"several models are served, and this interface has no field for which: name one of "
                f"{', '.join(models.names)} in sglang_grpc.model of the gateway's configuration",
                reason="MODEL_NOT_CHOSEN",
            )
        return models.find(self._model_name)

    async def _read_archive(self, model: ServedModel) -> TokenizerArchive:
        """Made once, however many ask for it at the same time."""
        if self._archive is None:
            assert model.folder is not None, "a model with text has a folder"
            work = self._generations.prompts.pool.run(read_archive, model.folder.tokenizer_file.parent)
            self._archive = asyncio.ensure_future(work)
        try:
            return await asyncio.shield(self._archive)
        except BaseException:
            # Not where only this caller went away.
            if self._archive.cancelled() or (self._archive.done() and self._archive.exception() is not None):
                self._archive = None
            raise

    def _shows_inside(self, tenant: Tenant) -> bool:
        """Whether a caller may see, or change, what is not its own: operators, and this host's own user."""
        return tenant.is_operator or (tenant.is_anonymous and not self._is_public)

    def _check_shows_inside(self, call: str) -> None:
        if not self._shows_inside(current_tenant()):
            raise PermissionDenied(
                f"{call} is about the whole mesh: it needs an operator's key, or no key on this host",
                reason="INSIDE_NOT_PUBLIC",
            )


async def _answers(
    request_id: str, readers: Sequence[OutputReader], stream: bool
) -> AsyncGenerator[sgl.GenerateResponse, None]:
    """A router's request that is aborted has an end like others; only the reason tells."""
    going = set(range(len(readers)))
    try:
        async with aclosing(read_all(readers)) as outputs:
            async for index, output in outputs:
                live = readers[index].request
                if output is None:
                    going.remove(index)
                    yield complete_of(request_id, index, live, end_of(readers[index]))
                elif stream and output.token_ids:
                    yield chunk_of(request_id, index, live, output)
    except Cancelled as error:
        if error.reason != "GENERATION_CANCELLED":
            raise
        for index in sorted(going):
            yield complete_of(request_id, index, readers[index].request, Finish(FinishReason.CANCELLED))


def _not_offered(words: str) -> Unimplemented:
    return Unimplemented(words, reason="UNSUPPORTED_CALL")
