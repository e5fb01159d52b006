"""The gateway's composition root: builds all parts by injection, starts them, and stops them in order."""

from __future__ import annotations

import asyncio
import os
import secrets
from collections.abc import Coroutine
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import grpc

from chipmesh.inference.v1alpha1 import inference_pb2_grpc
from chipmesh.sglang_grpc import sglang_scheduler_pb2_grpc
from gateway.api_keys import KeyRing
from gateway.config import GatewayConfig
from gateway.constraint_checks import ConstraintChecks
from gateway.generation import RETRY_AFTER_S, GenerationBounds, Generations
from gateway.key_files import KeyFiles, read_keys
from gateway.key_interceptor import KeyInterceptor
from gateway.key_metrics import KeyMetrics
from gateway.metrics import GatewayMetrics
from gateway.models import open_models
from gateway.openai_http.edge import Edge
from gateway.openai_http.server import OpenAiServer
from gateway.prompts import PromptReader
from gateway.refusal_metrics import RefusalMetrics
from gateway.servicer import SERVICE_NAME, InferenceServicer
from gateway.session_client import SessionClient, SessionSettings
from gateway.sglang_grpc import servicer as routers
from gateway.sglang_grpc.mesh_reader import MeshReader
from gateway.streams import StreamTable
from gateway.text import TextPool
from gateway.web_page.admin import open_admin
from gateway.web_page.guard import PageGuard
from gateway.web_page.page import WebPage
from meshkit.address import UnixAddress, is_local, parse_listen
from meshkit.certificates.reading import check_own
from meshkit.config import load_config
from meshkit.errors import Unavailable
from meshkit.http.observability import HealthReport, ObservabilityServer
from meshkit.http.tls import listener_context
from meshkit.modelstore import default_cache_dir
from meshkit.rpc.channel import open_channel
from meshkit.rpc.exposure import check_exposure
from meshkit.rpc.policy import Access, Role
from meshkit.rpc.server import RpcServer
from meshkit.rpc.tls import server_credentials
from meshkit.service import StopSignal, run_service, supervise, write_ready
from meshkit.telemetry.logging import configure_logging, get_logger
from meshkit.telemetry.loop_lag import LoopLag
from meshkit.telemetry.metrics import Metrics
from meshkit.telemetry.tracing import configure_tracing

log = get_logger(__name__)

# Seconds for last statuses and commands to leave, once nothing else is waited for.
LAST_WORDS_S = 1.0


@dataclass(frozen=True)
class GatewayAddresses:
    """Where a started gateway listens: gRPC, HTTP for health and metrics, OpenAI's interface if it is on."""

    address: str
    http_address: str
    openai_address: str | None = None
    has_page: bool = False


class GatewayService:
    """One gateway; `start` once, `stop` once. Many may run in one process, as tests do."""

    def __init__(self, config: GatewayConfig) -> None:
        self._config = config
        self._cleanup = AsyncExitStack()
        self._background: list[asyncio.Task[None]] = []
        self._session_changed = asyncio.Event()
        self._serving = asyncio.Event()
        self._stopping = False
        self._generations: Generations | None = None
        self._session: SessionClient | None = None
        self._rpc: RpcServer | None = None

    def __repr__(self) -> str:
        return f"<GatewayService {self._generations!r} {self._session!r}>"

    async def start(self) -> GatewayAddresses:
        """Open the models, listen, and begin to look for the scheduler; health says when it is found.

        Raises:
            InvalidArgument: a model, a key or an address in the configuration is wrong, or nobody said who
                may call from beyond this host.
            FailedPrecondition: an address is taken.
        """
        try:
            return await self._start()
        except BaseException:
            await self._cleanup.aclose()
            raise

    @property
    def live_count(self) -> int:
        """Requests that are being started or go on; 0 before `start`."""
        return 0 if self._generations is None else self._generations.live_count

    async def wait_serving(self) -> None:
        """Return when requests can be served: the models are open and a session is up."""
        await self._serving.wait()

    async def watch(self) -> None:
        """Raise what ends a background task while the service runs; for `meshkit.service.supervise`."""
        done, _ = await asyncio.wait(self._background, return_when=asyncio.FIRST_COMPLETED)
        if self._stopping:
            await asyncio.Event().wait()  # `stop` has ended them; it is not for this task to say so.
        for task in done:
            task.result()

    async def stop(self, grace_s: float) -> None:
        """Refuse new requests, give live ones `grace_s` seconds, end the rest as UNAVAILABLE, and close."""
        generations, session, rpc = self._generations, self._session, self._rpc
        if generations is None or session is None or rpc is None:
            return
        self._stopping = True
        generations.drain()
        self._session_changed.set()
        await _within(grace_s, generations.wait_idle())
        generations.fail_all(
            Unavailable(
                f"this gateway shuts down, and the request did not end within {grace_s:g} s; send it to "
                "another gateway, with the tokens that came in output_token_ids and sampling as in "
                "accepted.effective_sampling, and it goes on after them",
                reason="DRAINING",
                retry_after_s=RETRY_AFTER_S,
            )
        )
        await _within(LAST_WORDS_S, generations.wait_idle())
        await _within(LAST_WORDS_S, session.flush())
        await self._cleanup.aclose()

    async def _start(self) -> GatewayAddresses:
        config = self._config
        config.check_listener()
        cache_dir = config.cache_dir or default_cache_dir()
        models = await asyncio.to_thread(open_models, config.models, cache_dir=cache_dir)
        pool = TextPool(threads=config.tokenizer_threads, max_waiting=config.max_waiting_texts)
        self._cleanup.push_async_callback(pool.close)
        constraints = ConstraintChecks()
        self._cleanup.push_async_callback(constraints.close)
        registry = Metrics()
        metrics = GatewayMetrics(registry)
        metrics.declare_models(models.names)
        session = await self._build_session(registry)
        self._generations = Generations(
            models=models,
            prompts=PromptReader(pool, config.max_prompt_bytes, config.max_waiting_text_bytes),
            session=session,
            constraints=constraints,
            table=StreamTable(
                max_live=config.max_live_requests,
                max_prompt_tokens=config.max_live_prompt_tokens,
                keep_finished_s=config.keep_finished_s,
            ),
            metrics=metrics,
            bounds=GenerationBounds(
                accept_timeout_s=config.accept_timeout_s,
                resume_window_s=config.resume_window_s,
                max_resume_window_s=config.max_resume_window_s,
                message_interval_s=config.message_interval_s,
                max_messages_per_s=config.max_messages_per_s,
            ),
        )
        http = ObservabilityServer(config.http_listen, metrics.registry, self._health)
        http_address = await http.start()
        self._cleanup.push_async_callback(http.stop)
        ring, key_metrics, key_files = await self._open_keys(registry)
        keys = KeyInterceptor(
            ring, is_public=not is_local(config.listen), on_refused=key_metrics.unauthenticated.inc
        )
        address = await self._start_rpc(self._generations, keys)
        openai_address = None
        if config.openai_listen is not None:
            edge = Edge(
                ring, is_public=not is_local(config.openai_listen), on_refused=key_metrics.unauthenticated.inc
            )
            page = await self._open_page(config.openai_listen, self._generations, registry, ring, key_metrics)
            openai_address = await self._start_openai(
                config.openai_listen, self._generations, edge, registry, page
            )
        if config.watches_keys:
            self._run(key_files.watch(), "API keys")
        self._run(session.run(), "session")
        self._run(self._follow_session(), "health")
        self._run(LoopLag(registry).measure(), "loop lag")
        has_page = openai_address is not None and config.page.serve
        return GatewayAddresses(config.advertise or address, http_address, openai_address, has_page)

    async def _build_session(self, registry: Metrics) -> SessionClient:
        config = self._config
        check_exposure(config, {"scheduler_address": config.scheduler_address}, metrics=registry)
        # Untraced: it lives as long as the gateway; each request carries its own context.
        channel = open_channel(
            config.scheduler_address,
            max_message_bytes=config.max_message_bytes,
            traced=False,
            tls=config.tls,
            role=Role.SCHEDULER,
            name=config.tls.scheduler if config.tls else None,
        )
        self._cleanup.push_async_callback(channel.close)
        self._session = SessionClient(
            channel,
            gateway_id=await self._make_id(),
            settings=SessionSettings(outage_limit_s=config.outage_limit_s),
            on_change=lambda _up: self._session_changed.set(),
        )
        return self._session

    async def _make_id(self) -> str:
        """New for each process. A scheduler takes only those that begin with the certificate's name."""
        tls, unique = self._config.tls, f"{os.getpid()}-{secrets.token_hex(4)}"
        peer = await asyncio.to_thread(check_own, tls, Role.GATEWAY)
        return f"gateway-{unique}" if peer is None else f"{peer.name}/{unique}"

    async def _open_keys(self, registry: Metrics) -> tuple[KeyRing, KeyMetrics, KeyFiles]:
        """Who may call: the keys that are good now, and what follows their files when it is run."""
        config = self._config
        ring = KeyRing(checks_keys=config.checks_keys, allow_anonymous=config.allow_anonymous)
        metrics = KeyMetrics(registry, lambda: ring.tenants)
        RefusalMetrics(registry, lambda: ring.served)
        files = KeyFiles(
            partial(read_keys, config.api_keys, config.api_keys_file),
            ring.replace,
            interval_s=config.api_keys_interval_s,
            on_error=metrics.file_errors.inc,
        )
        await files.load()
        return ring, metrics, files

    async def _listener_credentials(self) -> grpc.ServerCredentials | None:
        config = self._config
        if config.listen_tls is not None:
            files = config.listen_tls
            return await asyncio.to_thread(
                server_credentials, certificate=files.certificate, key=files.key, field="listen_tls"
            )
        if config.checks_keys and not is_local(config.listen):
            log.warning("API keys travel in plain text: set listen_tls, or end TLS before this gateway")
        return None

    async def _start_rpc(self, generations: Generations, keys: KeyInterceptor) -> str:
        config = self._config
        self._rpc = RpcServer(
            listen=config.listen,
            reflection=config.reflection,
            max_message_bytes=config.max_message_bytes,
            interceptors=[keys],
            untraced_methods=routers.UNTRACED,
            credentials=await self._listener_credentials(),
            access=Access(everyone=Role.CLIENT),
        )
        self._rpc.add(
            inference_pb2_grpc.add_InferenceServiceServicer_to_server,
            InferenceServicer(generations),
            SERVICE_NAME,
        )
        for_routers = await self._make_router_servicer(generations) if config.sglang_grpc.serve else None
        if for_routers is not None:
            self._rpc.add(
                sglang_scheduler_pb2_grpc.add_SglangSchedulerServicer_to_server,
                for_routers,
                routers.SERVICE_NAME,
            )
        address = await self._rpc.start()
        self._cleanup.push_async_callback(self._rpc.stop, LAST_WORDS_S)
        if for_routers is not None:
            self._cleanup.callback(
                for_routers.end_streams
            )  # Before the listener stops: it would wait for them.
        return address

    async def _make_router_servicer(self, generations: Generations) -> routers.SglangServicer:
        config = self._config
        channel = await open_admin(config)
        if channel is not None:
            self._cleanup.push_async_callback(channel.close)
        return routers.SglangServicer(
            generations,
            MeshReader(channel),
            model=config.sglang_grpc.model or "",
            is_serving=lambda: self._health().serving,
            is_public=not is_local(config.listen),
        )

    async def _open_page(
        self,
        listen: str,
        generations: Generations,
        registry: Metrics,
        ring: KeyRing,
        key_metrics: KeyMetrics,
    ) -> WebPage | None:
        config = self._config
        if not config.page.serve:
            return None
        guard = PageGuard(
            ring,
            has_keys=config.checks_keys,
            is_public=not is_local(listen),
            over_tcp=not isinstance(parse_listen(listen, field="openai_listen"), UnixAddress),
            on_refused=key_metrics.unauthenticated.inc,
        )
        page = await WebPage.open(config, generations=generations, registry=registry.registry, guard=guard)
        self._cleanup.push_async_callback(page.close)
        self._run(page.run(), "page")
        return page

    async def _start_openai(
        self,
        listen: str,
        generations: Generations,
        edge: Edge,
        registry: Metrics,
        page: WebPage | None,
    ) -> str:
        config, tls = self._config, None
        if config.listen_tls is not None:
            files = config.listen_tls
            tls = await asyncio.to_thread(
                listener_context, certificate=files.certificate, key=files.key, field="listen_tls"
            )
        elif config.checks_keys and not is_local(listen):
            log.warning("API keys travel in plain text: set listen_tls, or end TLS before this gateway")
        server = OpenAiServer(
            listen,
            generations=generations,
            edge=edge,
            registry=registry.registry,
            health=self._health,
            tls=tls,
            further=await page.routes() if page is not None else (),
        )
        address = await server.start()
        self._cleanup.push_async_callback(server.stop)
        if page is not None:
            self._cleanup.callback(page.end_streams)  # Before the listener stops: it would wait for them.
        return address

    def _run(self, work: Coroutine[Any, Any, None], name: str) -> None:
        task = asyncio.create_task(work, name=name)
        self._background.append(task)
        self._cleanup.push_async_callback(_cancel, task)

    async def _follow_session(self) -> None:
        """Keep the gRPC health in step with what `/health` says."""
        while True:
            self._session_changed.clear()
            serving = self._health().serving
            if serving:
                self._serving.set()
            if self._rpc is not None:
                await self._rpc.set_serving(serving)
            await self._session_changed.wait()

    def _health(self) -> HealthReport:
        generations, session = self._generations, self._session
        if generations is None or session is None:
            return HealthReport(False, {"models": "not open yet"})
        is_up, draining = session.is_up, generations.is_draining
        parts = {
            "models": ", ".join(generations.models.names),
            "scheduler": session.scheduler_id or f"no session with {self._config.scheduler_address}",
            "requests": "draining" if draining else "accepted" if is_up else "wait for a scheduler",
        }
        return HealthReport(is_up and not draining, parts)


def main(config_path: str) -> int:
    """Run a gateway from its configuration file until SIGTERM or SIGINT; the process' exit code."""

    async def serve(stop: StopSignal) -> None:
        config = load_config(GatewayConfig, Path(config_path))
        configure_logging("gateway", level=config.log_level)
        log.info("configuration", config=config.model_dump(mode="json"))
        tracing = configure_tracing("chipmesh-gateway", config.tracing, bounds_callers=True)
        try:
            service = GatewayService(config)
            addresses = await service.start()
            await supervise(_serve(service, config, addresses, stop), gateway=service.watch())
        finally:
            await asyncio.to_thread(tracing.shutdown)

    return run_service(serve, name="gateway")


async def _serve(
    service: GatewayService, config: GatewayConfig, addresses: GatewayAddresses, stop: StopSignal
) -> None:
    serving = asyncio.create_task(service.wait_serving())
    stopping = asyncio.create_task(stop.wait())
    try:
        await asyncio.wait({serving, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if config.ready_file is not None and serving.done():
            write_ready(
                config.ready_file,
                {
                    "service": "gateway",
                    "pid": os.getpid(),
                    "address": addresses.address,
                    "http_address": addresses.http_address,
                    **({"openai_address": addresses.openai_address} if addresses.openai_address else {}),
                    **({"page": True} if addresses.has_page else {}),
                },
            )
        await stopping
    finally:
        serving.cancel()
        stopping.cancel()
        await service.stop(config.drain_grace_s)


async def _within(seconds: float, work: Coroutine[Any, Any, None]) -> bool:
    """Run `work` for at most `seconds`; whether it ended."""
    try:
        await asyncio.wait_for(work, seconds)
    except asyncio.TimeoutError:
        return False
    return True


async def _cancel(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
