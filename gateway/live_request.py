"""The state of one generation: its tokens and text so far, its end, and the readers that wait for more."""

from __future__ import annotations

import asyncio
import math
from array import array
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from gateway.generation_spec import Finish, FinishReason, GenerationSpec, Placed
from gateway.output_text import OutputText
from meshkit.errors import Internal, MeshError


class LiveRequestObserver(Protocol):
    """Told what happens to a request, in order; must not raise."""

    def on_queued(self) -> None:
        """The scheduler has it. Once."""

    def on_placed(self, placement: Placed) -> None:
        """It runs on a replica; again after each move."""

    def on_tokens(self, count: int) -> None:
        """`count` new tokens came at once."""

    def on_end(self, request: LiveRequest) -> None:
        """`request.end` is set. Once."""


class Output(NamedTuple):
    """New tokens of a request, the text that became certain with them, and logprobs where asked for."""

    first_index: int
    token_ids: Sequence[int]
    text: str
    logprobs: Sequence[float]


class LiveRequest:
    """One generation. Events are applied in order; applying one wakes all readers.

    given: output tokens that the client brought; `text` has them already. They count as made, but have no
        logprobs.
    deadline: monotonic seconds after which the client no longer waits, or None.
    traceparent: W3C context of its span, or "".
    """

    def __init__(
        self,
        spec: GenerationSpec,
        *,
        text: OutputText,
        observer: LiveRequestObserver,
        given: Sequence[int] = (),
        deadline: float | None = None,
        traceparent: str = "",
    ) -> None:
        self.spec = spec
        self.text = text
        self.deadline = deadline
        self.traceparent = traceparent
        self.token_ids = array("I", given)
        self.given_count = len(given)
        # One for each token where they are asked for, so that both are cut alike.
        self.logprobs = array("f", [math.nan] * len(given) if spec.logprobs else ())
        self.placement = Placed()
        self.cached_tokens: int | None = None
        self.end: Finish | MeshError | None = None
        self._observer = observer
        self._queued = False
        self._settled = asyncio.Event()
        self._readers: set[OutputReader] = set()

    def __repr__(self) -> str:
        return f"<LiveRequest {self.spec.request_id} {len(self.token_ids)} tokens {self._phase()}>"

    def _phase(self) -> str:
        if isinstance(self.end, MeshError):
            return f"failed {self.end.reason}"
        if self.end is not None:
            return f"finished {self.end.reason.value}"
        return "streaming" if self._queued else "waiting"

    @property
    def prompt_tokens(self) -> int:
        """What the mesh reads before the first new token: output that the client brought counts, too."""
        return len(self.spec.prompt_token_ids) + self.given_count

    @property
    def has_ended(self) -> bool:
        """Nothing more will happen to it."""
        return self.end is not None

    @property
    def ended_well(self) -> bool:
        """It came to its own end: neither failed nor cancelled."""
        return isinstance(self.end, Finish) and self.end.reason is not FinishReason.CANCELLED

    @property
    def is_queued(self) -> bool:
        """The scheduler has it, or had it before the session broke."""
        return self._queued

    @property
    def reader_count(self) -> int:
        """Readers that are attached."""
        return len(self._readers)

    async def wait_queued(self) -> None:
        """Return when the scheduler has it, or had it before it ended.

        Raises:
            MeshError: it was refused, or failed before that.
        """
        await self._settled.wait()
        if isinstance(self.end, MeshError) and not self._queued:
            raise self.end

    # What the scheduler tells. All of it is ignored after the end: such events were under way already.

    def on_queued(self) -> None:
        """The scheduler has it; said again after each resubmission."""
        if not self.has_ended and not self._queued:
            self._queued = True
            self._settled.set()
            self._observer.on_queued()

    def on_placed(self, placement: Placed, *, cached_tokens: int) -> None:
        """It was put on a replica. The first cached_tokens count, as far as the prompt goes: others come from
        its own replay.
        """
        if self.has_ended:
            return
        self.placement = placement
        if self.cached_tokens is None:
            self.cached_tokens = min(cached_tokens, len(self.spec.prompt_token_ids))
        self._observer.on_placed(placement)

    def on_tokens(self, first_index: int, token_ids: Sequence[int], logprobs: Sequence[float] = ()) -> None:
        """New tokens, from `first_index` of the output on. Those that are here already are dropped.

        A gap ends the request with an error: nothing after it would be what the model said.
        """
        if self.has_ended:
            return
        known = len(self.token_ids)
        if first_index > known:
            self.fail(_tokens_lost(self, first_index))
            return
        fresh = token_ids[known - first_index :]
        if not fresh:
            return
        count = self.text.add(fresh)
        self.token_ids.extend(fresh[:count])
        if self.spec.logprobs:
            self.logprobs.extend(logprobs[known - first_index :][:count])
        self._observer.on_tokens(count)
        if (matched := self.text.matched) is not None:
            self._end_with(Finish(FinishReason.STOP, matched))
        else:
            self._wake_readers()

    def finish(self, reason: FinishReason) -> None:
        """It ended well, or was cancelled. Does nothing after the end."""
        if self.has_ended:
            return
        matched = self.text.flush()
        self._end_with(Finish(reason) if matched is None else Finish(FinishReason.STOP, matched))

    def fail(self, error: MeshError) -> None:
        """It was refused or failed. Does nothing after the end."""
        if not self.has_ended:
            self._end_with(error)

    def finish_if_complete(self) -> bool:
        """End it where its own tokens say that it has ended: the news of that was lost on the way."""
        reason = self.spec.ending_of(self.token_ids, matched_stop=self.text.matched)
        if reason is not None:
            self.finish(reason)
        return self.has_ended

    # Reading

    def attach(self, next_index: int = 0, *, pause_s: Callable[[], float] = lambda: 0.0) -> OutputReader:
        """A reader from token `next_index` (0 to the number of tokens so far) on; detach it at the end.

        pause_s: asked after each piece for the seconds before which the next one does not come: so long its
        tokens gather.
        """
        reader = OutputReader(self, next_index, pause_s)
        self._readers.add(reader)
        return reader

    def detach(self, reader: OutputReader) -> None:
        """Forget a reader."""
        reader.close()
        self._readers.discard(reader)

    def _end_with(self, end: Finish | MeshError) -> None:
        self.end = end
        self._settled.set()
        self._wake_readers()
        self._observer.on_end(self)

    def _wake_readers(self) -> None:
        for reader in self._readers:
            reader.wake()


class OutputReader:
    """One client's place in a request's output.

    It takes all that has come since it last looked, so a slow client gets fewer and larger pieces and costs
    no memory of its own. `async for output in reader` ends at the request's end.
    """

    def __init__(self, request: LiveRequest, next_index: int, pause_s: Callable[[], float]) -> None:
        self.request = request
        self._pause_s = pause_s
        self._loop = asyncio.get_running_loop()
        self._not_before = 0.0
        """Loop time of the next piece, but for the end."""
        self._gathering: asyncio.TimerHandle | None = None
        """Set while something is there to take, but not yet due."""
        self._next_index = next_index
        self._text_place = request.text.end_after(next_index)
        self._news = asyncio.Event()

    def __repr__(self) -> str:
        return f"<OutputReader at token {self._next_index} of {self.request!r}>"

    def __aiter__(self) -> OutputReader:
        return self

    async def __anext__(self) -> Output:
        """The next piece, waiting for it.

        Raises:
            StopAsyncIteration: the request ended well and all of it was taken.
            MeshError: it failed; all that came before was taken.
        """
        while True:
            if self._is_due():
                output = self.take()
                if output is not None:
                    self._not_before = self._loop.time() + self._pause_s()
                    return output
                if isinstance(self.request.end, MeshError):
                    raise self.request.end
                if self.request.has_ended:
                    raise StopAsyncIteration
            else:
                self._come_back_when_due()
            await self._next_news()

    async def wait_readable(self) -> None:
        """Return when there is something to take, or the request has ended well.

        Raises:
            MeshError: it failed, and there is nothing to take before that.
        """
        request = self.request
        while len(request.token_ids) <= self._next_index and not request.has_ended:
            await self._next_news()
        if isinstance(request.end, MeshError) and len(request.token_ids) <= self._next_index:
            raise request.end

    async def skip_to(self, index: int) -> None:
        """Read on from token `index`, once the request has so many or has ended."""
        request = self.request
        while len(request.token_ids) < index and not request.has_ended:
            await self._next_news()
        self._next_index = min(index, len(request.token_ids))
        self._text_place = request.text.end_after(self._next_index)

    def take(self) -> Output | None:
        """All that has come since the last call, or None.

        Text that was held back to the end comes alone, after all tokens: so the text that a client has is
        known from its number of tokens, wherever it lost the stream.
        """
        request, start, text_start = self.request, self._next_index, self._text_place
        end = len(request.token_ids)
        text_end = request.text.end_after(end) if end > start else request.text.end
        if start == end and text_start == text_end:
            return None
        self._next_index, self._text_place = end, text_end
        return Output(
            first_index=start,
            token_ids=request.token_ids[start:end],
            text=request.text.between(text_start, text_end),
            logprobs=request.logprobs[start:end],
        )

    def wake(self) -> None:
        """There is something to take, or the end."""
        if self._is_due():
            self._news.set()
        else:
            self._come_back_when_due()

    def close(self) -> None:
        """Nobody reads on."""
        if self._gathering is not None:
            self._gathering.cancel()
            self._gathering = None

    def _is_due(self) -> bool:
        """Whether a piece may be taken now."""
        return self.request.has_ended or self._loop.time() >= self._not_before

    def _come_back_when_due(self) -> None:
        """Where a piece is there too early: look again in time."""
        if self._gathering is None and len(self.request.token_ids) > self._next_index:
            self._gathering = self._loop.call_at(self._not_before, self._stop_gathering)

    def _stop_gathering(self) -> None:
        self._gathering = None
        self._news.set()

    async def _next_news(self) -> None:
        self._news.clear()
        await self._news.wait()


def _tokens_lost(request: LiveRequest, first_index: int) -> Internal:
    return Internal(
        f"request {request.spec.request_id}: the scheduler sent token {first_index} where token "
        f"{len(request.token_ids)} is the next one; the generation cannot go on, send it again",
        reason="TOKENS_LOST",
        next_index=len(request.token_ids),
        sent_index=first_index,
    )
