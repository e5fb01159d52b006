"""The trace span of one generation: what it was, where it ran, what it cost, how it ended."""

from __future__ import annotations

import asyncio
import time
from types import TracebackType

from opentelemetry import trace
from opentelemetry.trace import Status, StatusCode
from opentelemetry.util.types import AttributeValue

from gateway.generation_spec import Finish, FinishReason, GenerationSpec, Placed
from gateway.live_request import LiveRequest
from meshkit.errors import MeshError
from meshkit.telemetry.tracing import inject_traceparent, tracer

SPAN_NAME = "chipmesh.gateway.generate"
PROVIDER = "chipmesh"


class RequestSpan:
    """Child of the call's span, from receipt to the client's last event. Its gen_ai attributes are those of
    OpenTelemetry's conventions; prompts and answers are never among them.

    It is never made current: an async generator's body may be closed in another context than it was run in.

    time_left_s: what the client allows from now on, or None.
    """

    def __init__(self, *, time_left_s: float | None = None) -> None:
        self._span = tracer().start_span(SPAN_NAME)
        self._began_at = time.monotonic()
        self._time_left_s = time_left_s
        self._was_cancelled = False
        self._first_token_at: float | None = None

    def __enter__(self) -> RequestSpan:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        status = self._status_of(error)
        if status:
            self._span.set_attribute("error.type", status)
            self._span.set_status(Status(StatusCode.ERROR, status))
        self._span.end()

    @property
    def traceparent(self) -> str:
        """W3C context of this span, or "" where nothing is traced."""
        return inject_traceparent(trace.set_span_in_context(self._span))

    def accepted(self, spec: GenerationSpec, *, operation: str) -> None:
        """The request is checked and submitted. operation: gen_ai's word for what it is."""
        if self._span.is_recording():
            self._span.set_attributes(_asked(spec, operation))

    def placed(self, placement: Placed) -> None:
        """It runs on a replica, the first time or again."""
        if self._span.is_recording():
            self._span.add_event(
                "placed", {"chipmesh.worker": placement.worker, "chipmesh.chip": placement.chip}
            )

    def first_token(self) -> None:
        """The first token that this gateway has seen of it."""
        if self._span.is_recording() and self._first_token_at is None:
            self._first_token_at = time.monotonic()
            self._span.add_event("first token")

    def ended(self, request: LiveRequest) -> None:
        """The client is served, or gone."""
        end = request.end
        self._was_cancelled = isinstance(end, Finish) and end.reason is FinishReason.CANCELLED
        if self._span.is_recording():
            self._span.set_attributes(_answered(request))
            if self._first_token_at is not None:
                waited_s = self._first_token_at - self._began_at
                self._span.set_attribute("gen_ai.response.time_to_first_chunk", waited_s)

    def _status_of(self, error: BaseException | None) -> str:
        """How it ended, "" for well."""
        if isinstance(error, MeshError):
            return error.code.name
        gone = self._was_cancelled or isinstance(error, (asyncio.CancelledError, GeneratorExit))
        if gone and self._is_late():
            return "DEADLINE_EXCEEDED"
        if gone:
            return "CANCELLED"
        return "" if error is None else type(error).__name__

    def _is_late(self) -> bool:
        left_s = self._time_left_s
        return left_s is not None and time.monotonic() - self._began_at >= left_s


def _asked(spec: GenerationSpec, operation: str) -> dict[str, AttributeValue]:
    sampling, stop = spec.sampling, spec.stop
    attributes: dict[str, AttributeValue] = {
        "gen_ai.operation.name": operation,
        "gen_ai.provider.name": PROVIDER,
        "gen_ai.request.model": spec.model,
        "gen_ai.request.max_tokens": stop.max_tokens,
        "gen_ai.request.temperature": sampling.temperature,
        "gen_ai.request.top_p": sampling.top_p,
        "gen_ai.request.frequency_penalty": sampling.frequency_penalty,
        "gen_ai.request.presence_penalty": sampling.presence_penalty,
        "gen_ai.response.model": spec.model,
        "gen_ai.response.id": spec.request_id,
        "gen_ai.usage.input_tokens": len(spec.prompt_token_ids),
        "chipmesh.request_id": spec.request_id,
    }
    if sampling.top_k:
        attributes["gen_ai.request.top_k"] = sampling.top_k
    if not spec.seed_is_drawn:
        attributes["gen_ai.request.seed"] = sampling.seed
    if spec.choice:
        attributes["chipmesh.choice"] = spec.choice
    if spec.owner:
        attributes["chipmesh.key"] = spec.owner
    return attributes


def _answered(request: LiveRequest) -> dict[str, AttributeValue]:
    placement, end = request.placement, request.end
    reason = end.reason.value if isinstance(end, Finish) else "error"
    return {
        "gen_ai.usage.output_tokens": len(request.token_ids),
        "gen_ai.usage.cache_read.input_tokens": request.cached_tokens or 0,
        "gen_ai.response.finish_reasons": [reason],
        "chipmesh.group": placement.group,
        "chipmesh.worker": placement.worker,
        "chipmesh.chip": placement.chip,
    }
