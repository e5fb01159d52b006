"""The page's part of a gateway, put together: routes, what runs behind them, and its end."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc.aio
from prometheus_client import CollectorRegistry
from starlette.routing import BaseRoute, Route

from gateway.config import GatewayConfig
from gateway.generation import Generations
from gateway.models import ServedModel
from gateway.openai_http.call import Call
from gateway.web_page.admin import NO_CERTIFICATE, AdminStub, open_admin
from gateway.web_page.assets import asset_routes
from gateway.web_page.feed import Feed
from gateway.web_page.figures import Figures
from gateway.web_page.guard import PageGuard
from gateway.web_page.live_stream import LivePart, LiveStream
from gateway.web_page.mesh_watch import MeshWatch
from gateway.web_page.steering import Steering
from gateway.web_page.swap_board import SwapBoard
from gateway.web_page.trace_receiver import TraceReceiver
from gateway.web_page.traces import TraceRing
from meshkit.errors import NotFound
from meshkit.telemetry.metrics import RELEASE


class WebPage:
    """`open` makes one; then `run` it. `end_streams` before its listener stops, `close` after."""

    def __init__(
        self,
        config: GatewayConfig,
        *,
        channel: grpc.aio.Channel | None,
        generations: Generations,
        registry: CollectorRegistry,
        guard: PageGuard,
    ) -> None:
        self._config = config
        self._channel = channel
        self._generations = generations
        self._guard = guard
        admin = None if channel is None else AdminStub(channel)
        problem = "" if channel is not None else NO_CERTIFICATE
        whole = Feed()
        page = config.page
        self._watch = MeshWatch(admin, problem=problem, feed=Feed(whole))
        self._figures = Figures(registry, lambda: generations.live_count, feed=Feed(whole))
        self._swaps = SwapBoard(feed=Feed(whole))
        self._traces = TraceRing(max_traces=page.max_traces, max_spans=page.max_spans, feed=Feed(whole))
        self._steering = Steering(admin, self._swaps, problem=problem)
        self._live = LiveStream(whole, self._parts(Feed(whole)))
        self._receiver: TraceReceiver | None = None
        self.traces_address: str | None = None
        """Where spans are taken; None where they are not."""

    @classmethod
    async def open(
        cls,
        config: GatewayConfig,
        *,
        generations: Generations,
        registry: CollectorRegistry,
        guard: PageGuard,
    ) -> WebPage:
        """Reach for the scheduler, and listen for spans if so configured.

        Raises:
            InvalidArgument: a field of `page` cannot be used.
            FailedPrecondition: page.traces_listen cannot be bound.
        """
        channel = await open_admin(config)
        page = cls(config, channel=channel, generations=generations, registry=registry, guard=guard)
        if config.page.traces_listen is not None:
            page._receiver = TraceReceiver(config.page.traces_listen, page._traces)
            page.traces_address = await page._receiver.start()
        return page

    async def routes(self) -> list[BaseRoute]:
        """Of the listener that shows it."""
        guarded = [
            ("GET", "live", self._show_live),
            ("GET", "traces", self._list_traces),
            ("GET", "traces/{trace_id}", self._get_trace),
            ("POST", "traffic", self._steering.set_traffic),
            ("POST", "swap", self._steering.swap),
            ("POST", "drain", self._steering.drain),
            ("POST", "flush", self._steering.flush),
        ]
        routes: list[BaseRoute] = [
            Route(f"/page/api/{path}", self._guard.guard(handler), methods=[verb])
            for verb, path, handler in guarded
        ]
        return routes + await asyncio.to_thread(asset_routes)

    async def run(self) -> None:
        """Follow the mesh while somebody looks, and the figures always; returns never."""
        await asyncio.gather(self._watch.run(), self._figures.run())

    def end_streams(self) -> None:
        """End the viewers' streams."""
        self._live.close()

    async def close(self) -> None:
        """End what else runs; the listener has stopped."""
        await self._swaps.close()
        await self._steering.close()
        if self._receiver is not None:
            await self._receiver.stop()
        if self._channel is not None:
            await self._channel.close()

    def _parts(self, facts: Feed) -> list[LivePart]:
        return [
            LivePart("hello", facts, lambda _: self._facts()),
            LivePart("mesh", self._watch.feed, lambda _: self._watch.state()),
            LivePart("figures", self._figures.feed, self._figures.beyond),
            LivePart("swaps", self._swaps.feed, lambda _: {"swaps": self._swaps.describe()}),
            LivePart("traces", self._traces.feed, lambda _: {"span_count": self._traces.span_count}),
        ]

    async def _show_live(self, call: Call) -> None:
        with self._watch.viewer():
            await self._live.serve(call)

    async def _list_traces(self, call: Call) -> None:
        await call.answer(200, {"traces": self._traces.list()})

    async def _get_trace(self, call: Call) -> None:
        trace_id = call.path_parameters["trace_id"]
        trace = self._traces.get(trace_id)
        if trace is None:
            raise NotFound(
                f"trace {trace_id[:80]!r} is not here: it was not sampled, or newer ones took its place",
                reason="TRACE_NOT_FOUND",
            )
        await call.answer(200, trace)

    def _facts(self) -> dict[str, Any]:
        return {
            "version": RELEASE,
            "scheduler_address": self._config.scheduler_address,
            "needs_key": self._guard.needs_key,
            "models": [_describe(model) for model in self._generations.models],
            "traces": self._trace_facts(),
        }

    def _trace_facts(self) -> dict[str, Any]:
        """where: "here", "elsewhere" (endpoint) or "off"."""
        tracing = self._config.tracing
        if self.traces_address is not None:
            return {"where": "here", "endpoint": self.traces_address}
        if tracing.exporter == "none":
            return {"where": "off", "endpoint": ""}
        return {"where": "elsewhere", "endpoint": tracing.endpoint or ""}


def _describe(model: ServedModel) -> dict[str, Any]:
    return {"name": model.name, "context_tokens": model.context_tokens, "has_text": model.text is not None}
