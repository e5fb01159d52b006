"""A generation from request to end: admission, submission, following, and cancelling when nobody reads on."""

from __future__ import annotations

import asyncio
import secrets
import time
from array import array
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, replace

from chipmesh.inference.v1alpha1 import inference_pb2 as pb
from gateway import validation
from gateway.constraint_checks import ConstraintChecks
from gateway.deadlines import Deadlines
from gateway.generation_spec import Finish, FinishReason, GenerationSpec, Placed, RequestKey
from gateway.given_output import check_agrees, check_logprobs_from, check_same, take_in
from gateway.live_request import LiveRequest, OutputReader
from gateway.metrics import GatewayMetrics, RequestTimer
from gateway.models import ServedModel, ServedModels
from gateway.output_text import OutputText
from gateway.prompts import Conversation, PromptReader, field_of
from gateway.refusal_metrics import counted_refusals
from gateway.request_span import RequestSpan
from gateway.session_client import SessionClient
from gateway.streams import StreamTable
from gateway.tenant import Tenant
from gateway.text import IncrementalDetokenizer
from meshkit.constraints.form import Constraint
from meshkit.errors import InvalidArgument, MeshError, Unavailable

RETRY_AFTER_S = 1.0


@dataclass(frozen=True)
class GenerationBounds:
    """accept_timeout_s: for the scheduler to take a request.

    resume_window_s: for a reader to come back, where the request says nothing; max_resume_window_s: the most
    that it may say. message_interval_s: between two messages of a stream; max_messages_per_s: what all
    streams together send.
    """

    accept_timeout_s: float
    resume_window_s: float
    max_resume_window_s: float
    message_interval_s: float
    max_messages_per_s: int


@dataclass(frozen=True)
class Extension:
    """What a request may have beyond its message.

    conversation: takes the prompt's place. choice: index among the generations that one call asks for; draws
    depend on it. shown_tokens: special tokens that come out as text, where the vocabulary has them.
    constrain: the constraint of the output, given the prompt's tokens; it takes the message's place.
    """

    conversation: Conversation | None = None
    choice: int = 0
    shown_tokens: tuple[str, ...] = ()
    constrain: Callable[[Sequence[int]], Constraint] | None = None


NO_EXTENSION = Extension()


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
        constraints: ConstraintChecks,
        table: StreamTable,
        metrics: GatewayMetrics,
        bounds: GenerationBounds,
        draw_seed: Callable[[], int] = draw_seed,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.models = models
        self.prompts = prompts
        self._session = session
        self._constraints = constraints
        self._table = table
        self._metrics = metrics
        self._bounds = bounds
        self._draw_seed = draw_seed
        self._clock = clock
        self._draining = False
        self._abandonments: dict[LiveRequest, asyncio.TimerHandle] = {}
        self._deadlines = Deadlines(self._fail, clock=clock)
        self._following_count = 0
        self._idle = asyncio.Event()
        self._idle.set()

    def __repr__(self) -> str:
        return f"<Generations {self._table!r}{' draining' if self._draining else ''}>"

    @asynccontextmanager
    async def generate(
        self,
        request: pb.GenerateRequest,
        *,
        tenant: Tenant,
        time_left_s: float | None,
        extension: Extension = NO_EXTENSION,
    ) -> AsyncIterator[OutputReader]:
        """Start a generation, or follow the one of this request_id, after the output that the request brings.

        Inside the block the mesh has accepted it. tenant: whose it is.

        Leaving the block early, by an error or a cancelled task, cancels the request (after the resume
        window, where there is one).

        Raises:
            InvalidArgument, NotFound, AlreadyExists, FailedPrecondition: it cannot be served as it is.
            ResourceExhausted, Unavailable: not now. DeadlineExceeded: time_left_s has passed.
        """
        with self._following(), RequestSpan(time_left_s=time_left_s) as span:
            with counted_refusals(tenant):
                self._refuse_while_draining()
                asked = self._read(request, tenant, extension)
                reader = await self._open(asked, span, time_left_s=time_left_s)
            live = reader.request
            span.accepted(live.spec, operation=asked.operation)
            try:
                with counted_refusals(tenant):
                    await self._wait_queued(live)
                yield reader
            finally:
                self._detach(reader)
                span.ended(live)

    @asynccontextmanager
    async def resume(
        self, request_id: str, *, tenant: Tenant, next_index: int
    ) -> AsyncIterator[OutputReader]:
        """Follow a request of `tenant` again, from token `next_index` on.

        Raises:
            NotFound: it is not known here any more, or not its own.
            InvalidArgument: it has no such token yet.
        """
        live = self._table.find(RequestKey(tenant.name, request_id))
        check_logprobs_from(next_index, live, field="next_index")
        known = len(live.token_ids)
        if next_index > known:
            raise InvalidArgument(
                f"next_index is {next_index}; request {request_id!r} has {known} tokens so far, so from 0 to "
                f"{known} is allowed",
                field="next_index",
            )
        reader = self._attach(live, next_index)
        with self._following():
            try:
                await live.wait_queued()
                yield reader
            finally:
                self._detach(reader)

    def cancel(self, request_id: str, *, tenant: Tenant) -> bool:
        """End a request of `tenant`; its readers get its end. Whether it was live."""
        live = self._table.find_live(RequestKey(tenant.name, request_id))
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
            self._fail(live, error)

    def _pause_s(self) -> float:
        """How long a stream gathers tokens for its next message: a message costs the same whatever it holds,
        so those of a fast stream, and of many, are made fewer and larger.
        """
        bounds = self._bounds
        return max(bounds.message_interval_s, self._following_count / bounds.max_messages_per_s)

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

    async def _open(self, asked: _Asked, span: RequestSpan, *, time_left_s: float | None) -> OutputReader:
        """A reader after the output that the request brings, on a new generation or on that of its id."""
        deadline = None if time_left_s is None else self._clock() + time_left_s
        self._deadlines.check(deadline)
        known = await self._table.find_again(asked.key) if asked.request.request_id else None
        if known is not None:
            return await self._join(known, asked)
        live = await self._admit(asked, deadline=deadline, span=span)
        return self._attach(live, live.given_count)

    def _read(self, request: pb.GenerateRequest, tenant: Tenant, extension: Extension) -> _Asked:
        model = self.models.find(request.model)
        timer = RequestTimer(self._metrics, model.name, clock=self._clock)
        validation.check_request_id(request.request_id)
        options = validation.read_options(
            request,
            model,
            draw_seed=self._draw_seed,
            max_resume_window_s=self._bounds.max_resume_window_s,
        )
        tenant.check_priority(options.scheduling.priority)
        key = RequestKey(tenant.name, request.request_id or secrets.token_hex(16))
        return _Asked(request, key, tenant, model, _salted(options, tenant), timer, extension)

    async def _admit(self, asked: _Asked, *, deadline: float | None, span: RequestSpan) -> LiveRequest:
        tenant = asked.tenant
        self._table.reserve(asked.key)
        try:
            tenant.admit(live=self._table.busy_count_of(tenant.name) - 1)
            spec = await self._complete(asked)
            if spec.sampling.constraint is not None:
                await self._constraints.check(spec.sampling.constraint, asked.model)
            text = _output_text(spec, asked.model, asked.extension.shown_tokens)
            given = await self._take_in(asked.output_token_ids, spec, text)
            # The gateway may have begun to drain while the prompt was tokenised.
            self._refuse_while_draining()
            self._deadlines.check(deadline)
            # And its tenant's other requests may have used up the budget.
            tenant.check_tokens()
            # Output that a request brings is read by a chip as its prompt is.
            prompt_tokens = len(spec.prompt_token_ids) + len(given)
            self._table.check_prompt(asked.key.owner, prompt_tokens)
            live = LiveRequest(
                spec,
                text=text,
                observer=_Bookkeeper(asked.timer, span, tenant, prompt_tokens, self._retire),
                given=given,
                deadline=deadline,
                traceparent=span.traceparent,
            )
        except BaseException:
            self._table.release(asked.key)
            raise
        tenant.spend(prompt_tokens)
        self._table.add(live)
        self._deadlines.watch(live)
        if not live.finish_if_complete():
            self._session.submit(live)
        return live

    async def _join(self, live: LiveRequest, asked: _Asked) -> OutputReader:
        """Follow a request that is here already, from the client's place on.

        It may have to be waited for: the client may have got further with another gateway.
        """
        reader, given = self._attach(live), asked.output_token_ids
        try:
            check_same(await self._complete(asked), live)
            check_agrees(given, live)
            check_logprobs_from(len(given), live, field="output_token_ids")
            await reader.skip_to(len(given))
            check_agrees(given, live)
        except BaseException:
            self._detach(reader)
            raise
        return reader

    async def _complete(self, asked: _Asked) -> GenerationSpec:
        prompt = asked.extension.conversation or asked.request.prompt
        prompt_token_ids = await self.prompts.read(prompt, asked.model)
        return validation.complete(
            _constrained(asked, prompt_token_ids),
            asked.model,
            request_id=asked.key.request_id,
            prompt_token_ids=prompt_token_ids,
            field=field_of(prompt),
            owner=asked.tenant.name,
            choice=asked.extension.choice,
        )

    async def _take_in(self, token_ids: Sequence[int], spec: GenerationSpec, text: OutputText) -> array[int]:
        if not token_ids:
            return array("I")
        return await self.prompts.pool.run(take_in, token_ids, spec, text)

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

    def _attach(self, live: LiveRequest, next_index: int = 0) -> OutputReader:
        self._drop_abandonment(live)
        return live.attach(next_index, pause_s=self._pause_s)

    def _detach(self, reader: OutputReader) -> None:
        live = reader.request
        live.detach(reader)
        if live.has_ended or live.reader_count:
            return
        own = live.spec.scheduling.resume_window_s
        window_s = self._bounds.resume_window_s if own is None else own
        if window_s > 0 and live.is_queued:
            loop = asyncio.get_running_loop()
            self._abandonments[live] = loop.call_later(window_s, self._end, live)
        else:
            self._end(live)

    def _end(self, live: LiveRequest) -> None:
        self._session.cancel(live)
        live.finish(FinishReason.CANCELLED)

    def _fail(self, live: LiveRequest, error: MeshError) -> None:
        self._session.cancel(live)
        live.fail(error)

    def _retire(self, live: LiveRequest) -> None:
        self._drop_abandonment(live)
        self._deadlines.drop(live)
        self._table.retire(live, keep=live.is_queued)

    def _drop_abandonment(self, live: LiveRequest) -> None:
        timer = self._abandonments.pop(live, None)
        if timer is not None:
            timer.cancel()


@dataclass(frozen=True)
class _Asked:
    """A request whose fields are checked, before its prompt is tokenised."""

    request: pb.GenerateRequest
    key: RequestKey
    tenant: Tenant
    model: ServedModel
    options: validation.Options
    timer: RequestTimer
    extension: Extension

    @property
    def output_token_ids(self) -> Sequence[int]:
        """What the client has already."""
        return self.request.output_token_ids

    @property
    def operation(self) -> str:
        """gen_ai's word for it."""
        is_chat = self.extension.conversation or self.request.prompt.WhichOneof("form") == "chat"
        return "chat" if is_chat else "text_completion"


class _Bookkeeper:
    """Keeps measurements, its span, budgets and table in step with one request."""

    def __init__(
        self,
        timer: RequestTimer,
        span: RequestSpan,
        tenant: Tenant,
        prompt_tokens: int,
        retire: Callable[[LiveRequest], None],
    ) -> None:
        self._timer = timer
        self._span = span
        self._tenant = tenant
        self._prompt_tokens = prompt_tokens
        self._retire = retire

    def on_queued(self) -> None:
        self._timer.accepted()
        self._tenant.count_accepted(self._prompt_tokens)

    def on_placed(self, placement: Placed) -> None:
        self._timer.placed(placement)
        self._span.placed(placement)

    def on_tokens(self, count: int) -> None:
        if self._timer.tokens(count):
            self._span.first_token()
        self._tenant.count_output(count)

    def on_end(self, request: LiveRequest) -> None:
        end = request.end
        if isinstance(end, MeshError) and not request.is_queued:
            # Refused, so no chip read it. One that its client gave up may have been on its way to one.
            self._tenant.spend(-self._prompt_tokens)
        self._tenant.count_ended()
        self._timer.ended(aborted=not isinstance(end, Finish) or end.reason is FinishReason.CANCELLED)
        self._retire(request)


def _constrained(asked: _Asked, prompt_token_ids: Sequence[int]) -> validation.Options:
    options, constrain = asked.options, asked.extension.constrain
    if constrain is None:
        return options
    constraint = constrain(prompt_token_ids)
    validation.check_constraint(constraint, options.stop, asked.model)
    return replace(options, sampling=replace(options.sampling, constraint=constraint))


def _salted(options: validation.Options, tenant: Tenant) -> validation.Options:
    scheduling = options.scheduling
    return replace(options, scheduling=replace(scheduling, cache_salt=tenant.salt(scheduling.cache_salt)))


def _output_text(spec: GenerationSpec, model: ServedModel, shown_tokens: Sequence[str]) -> OutputText:
    detokenizer = None
    if model.text is not None:
        tokenizer = model.text.tokenizer
        ids = (tokenizer.id_of(token) for token in shown_tokens)
        shown = tuple(token_id for token_id in ids if token_id is not None)
        detokenizer = IncrementalDetokenizer(tokenizer, spec.prompt_token_ids, shown_token_ids=shown)
    return OutputText(detokenizer, stop_strings=spec.stop.stop_strings, min_tokens=spec.stop.min_tokens)
