"""A generation from request to end: admission, submission, following, and cancelling when nobody reads on."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass

from chipmesh.inference.v1alpha1 import inference_pb2 as pb
from gateway import validation
from gateway.generation_spec import Finish, FinishReason, GenerationSpec
from gateway.live_request import LiveRequest, OutputReader
from gateway.metrics import GatewayMetrics, RequestTimer
from gateway.models import ServedModel, ServedModels
from gateway.output_text import OutputText
from gateway.prompts import PromptReader, field_of
from gateway.request_span import RequestSpan
from gateway.session_client import SessionClient
from gateway.streams import StreamTable
from gateway.text import IncrementalDetokenizer
from meshkit.errors import InvalidArgument, MeshError, Unavailable

RETRY_AFTER_S = 1.0


@dataclass(frozen=True)
class GenerationBounds:
    """accept_timeout_s: for the scheduler to take a request. resume_window_s: for a reader to come back.

    max_messages_per_s: what all streams together send.
    """

    accept_timeout_s: float
    resume_window_s: float
    max_messages_per_s: int


def draw_seed() -> int:
    """A seed that a client can hold in any language's signed 64 bits."""
    return secrets.randbits(63)


class Generations:
    """All generations of this gateway, by whatever protocol they are asked for."""

    def __init__(
        self,
        *,
        models: ServedModels,
        prompts: PromptReader,
        session: SessionClient,
        table: StreamTable,
        metrics: GatewayMetrics,
        bounds: GenerationBounds,
        draw_seed: Callable[[], int] = draw_seed,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.models = models
        self.prompts = prompts
        self._session = session
        self._table = table
        self._metrics = metrics
        self._bounds = bounds
        self._draw_seed = draw_seed
        self._clock = clock
        self._draining = False
        self._abandonments: dict[LiveRequest, asyncio.TimerHandle] = {}
        self._following_count = 0
        self._idle = asyncio.Event()
        self._idle.set()

    def __repr__(self) -> str:
        return f"<Generations {self._table!r}{' draining' if self._draining else ''}>"

    @asynccontextmanager
    async def generate(
        self, request: pb.GenerateRequest, *, time_left_s: float | None
    ) -> AsyncIterator[OutputReader]:
        """Start a generation and follow it; inside the block the mesh has accepted it.

        Leaving the block early, by an error or a cancelled task, cancels the request (after the resume
        window, where there is one).

        Raises:
            InvalidArgument, NotFound, AlreadyExists, FailedPrecondition: it cannot be served as it is.
            ResourceExhausted, Unavailable: not now.
        """
        self._refuse_while_draining()
        with self._following(), RequestSpan() as span:
            live = await self._admit(request, span, time_left_s=time_left_s)
            span.accepted(live.spec)
            reader = live.attach(pause_s=self._pause_s)
            try:
                await self._wait_queued(live)
                yield reader
            finally:
                self._detach(live, reader)
                span.ended(live)

    @asynccontextmanager
    async def resume(self, request_id: str, *, next_index: int) -> AsyncIterator[OutputReader]:
        """Follow a request again, from token `next_index` on.

        Raises:
            NotFound: it is not known here any more.
            InvalidArgument: it has no such token yet.
        """
        live = self._table.find(request_id)
        known = len(live.token_ids)
        if next_index > known:
            raise InvalidArgument(
                f"next_index is {next_index}; request {request_id!r} has {known} tokens so far, so from 0 to "
                f"{known} is allowed",
                field="next_index",
            )
        reader = live.attach(next_index, pause_s=self._pause_s)
        self._drop_abandonment(live)
        with self._following():
            try:
                await live.wait_queued()
                yield reader
            finally:
                self._detach(live, reader)

    def cancel(self, request_id: str) -> bool:
        """End a request; its readers get its end. Whether it was live."""
        live = self._table.find_live(request_id)
        if live is None:
            return False
        self._end(live)
        return True

    def drain(self) -> None:
        """Refuse new generations from now on."""
        self._draining = True

    @property
    def is_draining(self) -> bool:
        """Whether new generations are refused."""
        return self._draining

    @property
    def live_count(self) -> int:
        """Generations that are being started or go on, whether or not somebody follows them."""
        return self._table.busy_count

    async def wait_idle(self) -> None:
        """Return when no client follows a generation, or waits for one to be accepted."""
        await self._idle.wait()

    def fail_all(self, error: MeshError) -> None:
        """End every live generation with `error`."""
        for live in self._table:
            self._session.cancel(live)
            live.fail(error)

    def _pause_s(self) -> float:
        """How long a stream gathers tokens for its next message: a message costs the same whatever it holds,
        so with many streams they are made fewer and larger; a lone stream waits for a fraction of a
        millisecond.
        """
        return self._following_count / self._bounds.max_messages_per_s

    @contextmanager
    def _following(self) -> Iterator[None]:
        self._following_count += 1
        self._idle.clear()
        try:
            yield
        finally:
            self._following_count -= 1
            if not self._following_count:
                self._idle.set()

    async def _admit(
        self, request: pb.GenerateRequest, span: RequestSpan, *, time_left_s: float | None
    ) -> LiveRequest:
        deadline = None if time_left_s is None else self._clock() + time_left_s
        model = self.models.find(request.model)
        timer = RequestTimer(self._metrics, model.name, clock=self._clock)
        validation.check_request_id(request.request_id)
        options = validation.read_options(request, model, draw_seed=self._draw_seed)
        request_id = request.request_id or secrets.token_hex(16)
        self._table.reserve(request_id)
        try:
            spec = await self._complete(request, model, options, request_id)
            live = LiveRequest(
                spec,
                text=_output_text(spec, model),
                observer=_Bookkeeper(timer, self._retire),
                deadline=deadline,
                traceparent=span.traceparent,
            )
        except BaseException:
            self._table.release(request_id)
            raise
        self._table.add(live)
        self._session.submit(live)
        return live

    async def _complete(
        self, request: pb.GenerateRequest, model: ServedModel, options: validation.Options, request_id: str
    ) -> GenerationSpec:
        prompt_token_ids = await self.prompts.read(request.prompt, model)
        # The gateway may have begun to drain while the prompt was tokenised.
        self._refuse_while_draining()
        return validation.complete(
            options,
            model,
            request_id=request_id,
            prompt_token_ids=prompt_token_ids,
            field=field_of(request.prompt),
        )

    async def _wait_queued(self, live: LiveRequest) -> None:
        try:
            await asyncio.wait_for(live.wait_queued(), self._bounds.accept_timeout_s)
        except asyncio.TimeoutError as error:
            raise Unavailable(
                f"no scheduler took the request within {self._bounds.accept_timeout_s:g} s; try again in "
                f"{RETRY_AFTER_S:g} s",
                reason="SCHEDULER_UNAVAILABLE",
                retry_after_s=RETRY_AFTER_S,
            ) from error

    def _refuse_while_draining(self) -> None:
        if self._draining:
            raise Unavailable(
                f"this gateway is shutting down and takes no new requests; use another one, or try again in "
                f"{RETRY_AFTER_S:g} s",
                reason="DRAINING",
                retry_after_s=RETRY_AFTER_S,
            )

    def _detach(self, live: LiveRequest, reader: OutputReader) -> None:
        live.detach(reader)
        if live.has_ended or live.reader_count:
            return
        if self._bounds.resume_window_s > 0 and live.is_queued:
            loop = asyncio.get_running_loop()
            self._abandonments[live] = loop.call_later(self._bounds.resume_window_s, self._end, live)
        else:
            self._end(live)

    def _end(self, live: LiveRequest) -> None:
        self._session.cancel(live)
        live.finish(FinishReason.CANCELLED)

    def _retire(self, live: LiveRequest) -> None:
        self._drop_abandonment(live)
        self._table.retire(live, keep=live.is_queued)

    def _drop_abandonment(self, live: LiveRequest) -> None:
        timer = self._abandonments.pop(live, None)
        if timer is not None:
            timer.cancel()


class _Bookkeeper:
    """Keeps measurements and table in step with one request."""

    def __init__(self, timer: RequestTimer, retire: Callable[[LiveRequest], None]) -> None:
        self._timer = timer
        self._retire = retire

    def on_queued(self) -> None:
        self._timer.accepted()

    def on_tokens(self, count: int) -> None:
        self._timer.tokens(count)

    def on_end(self, request: LiveRequest) -> None:
        end = request.end
        self._timer.ended(aborted=not isinstance(end, Finish) or end.reason is FinishReason.CANCELLED)
        self._retire(request)


def _output_text(spec: GenerationSpec, model: ServedModel) -> OutputText:
    detokenizer = (
        None if model.text is None else IncrementalDetokenizer(model.text.tokenizer, spec.prompt_token_ids)
    )
    return OutputText(detokenizer, stop_strings=spec.stop.stop_strings, min_tokens=spec.stop.min_tokens)
