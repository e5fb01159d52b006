"""The trace span of one generation: what it was, where it ran, what it cost, how it ended."""

from __future__ import annotations

from types import TracebackType

from opentelemetry import trace
from opentelemetry.trace import Status, StatusCode

from gateway.generation_spec import Finish, GenerationSpec
from gateway.live_request import LiveRequest
from meshkit.errors import MeshError
from meshkit.telemetry.tracing import inject_traceparent, tracer

SPAN_NAME = "chipmesh.gateway.generate"


class RequestSpan:
    """Child of the RPC's span, from receipt to the client's last event.

    It is never made current: an async generator's body may be closed in another context than it was run in.
    """

    def __init__(self) -> None:
        self._span = tracer().start_span(SPAN_NAME)

    def __enter__(self) -> RequestSpan:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if isinstance(error, MeshError):
            self._span.set_status(Status(StatusCode.ERROR, error.code.name))
        elif error is not None:
            self._span.set_status(Status(StatusCode.ERROR, type(error).__name__))
        self._span.end()

    @property
    def traceparent(self) -> str:
        """W3C context of this span, or "" where nothing is traced."""
        return inject_traceparent(trace.set_span_in_context(self._span))

    def accepted(self, spec: GenerationSpec) -> None:
        """The request is checked and submitted."""
        self._span.set_attributes(
            {
                "chipmesh.request_id": spec.request_id,
                "chipmesh.model": spec.model,
                "chipmesh.prompt_tokens": len(spec.prompt_token_ids),
            }
        )
        if spec.owner:
            self._span.set_attribute("chipmesh.key", spec.owner)

    def ended(self, request: LiveRequest) -> None:
        """The client is served, or gone."""
        placement, end = request.placement, request.end
        self._span.set_attributes(
            {
                "chipmesh.completion_tokens": len(request.token_ids),
                "chipmesh.cached_tokens": request.cached_tokens or 0,
                "chipmesh.group": placement.group,
                "chipmesh.worker": placement.worker,
                "chipmesh.chip": placement.chip,
                "chipmesh.finish_reason": end.reason.value if isinstance(end, Finish) else "error",
            }
        )
